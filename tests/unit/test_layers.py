"""Imports point down only, and pure folders stay pure."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.fresh import SOURCE

# What each part of the package may import of the package. A part is a folder, or a module at the top.
PURE = {"errors", "plan", "scheduler", "tuning"}
MEMORY = PURE | {"memory", "units"}
BATCH = MEMORY | {"batch"}
WORKERS = BATCH | {"children", "cores", "importing", "workers"}
DELIVERY = WORKERS | {"delivery"}
CONFIG = {"autocount", "checks", "cores", "errors", "memory", "plan", "ranks"}
MENDING = DELIVERY | {"config", "feeds", "ledger", "planning"}
RECORDS = MENDING | {"mending", "observe", "watching"}
EXCHANGE = RECORDS | {"handout", "intake", "records", "rooms", "troubles"}
ORDERS = EXCHANGE | {"exchange", "reports", "staffing"}
ENGINE = ORDERS | {"orders", "steering", "trail"}
ASSEMBLY = ENGINE | {"autocount", "engine", "ranks"}
CORE = ASSEMBLY | {"assembly", "garage", "lineage", "staff"}
EPOCH = CORE | {"core"}
LOADER = EPOCH | {"epoch"}
ALLOWED: dict[str, set[str]] = {
    "__init__": {
        "errors",
        "ledger",
        "lineage",
        "loader",
        "memory",
        "observe",
        "workers",
    },  # for type checkers: see test_import_is_light
    "errors": set(),
    "units": set(),
    "plan": {"errors", "plan"},
    "scheduler": {"errors", "scheduler"},
    "tuning": {"errors", "tuning"},
    "memory": MEMORY - {"plan"},
    "batch": BATCH,
    "workers": WORKERS,
    "delivery": DELIVERY,
    "observe": DELIVERY | {"observe"},
    "ranks": {"errors", "plan"},
    "checks": {"errors", "plan", "ranks"},
    "config": CONFIG,
    "cores": {"errors", "memory"},
    "autocount": {"cores"},
    "planning": BATCH | {"config"},
    "feeds": WORKERS,
    "ledger": {"errors"},
    "mending": MENDING,
    "watching": WORKERS,
    "records": RECORDS,
    "reports": RECORDS | {"records"},
    "rooms": RECORDS | {"records", "reports"},
    "staffing": RECORDS | {"records"},
    "trail": RECORDS | {"records"},
    "troubles": RECORDS | {"records", "reports"},
    "lineage": RECORDS | {"records", "trail"},
    "steering": RECORDS | {"records", "rooms", "staffing"},
    "intake": RECORDS | {"records", "rooms", "staffing"},
    "handout": RECORDS | {"records", "reports", "trail"},
    "exchange": EXCHANGE,
    "orders": ORDERS,
    "engine": ENGINE,
    "garage": {"errors", "engine"},
    "assembly": ASSEMBLY,
    "staff": {"config", "memory", "tuning"},
    "core": CORE,
    "epoch": EPOCH,
    "importing": set(),
    "loader": LOADER,
    "torch": LOADER | {"checks", "importing", "torch", "infeed"},
    "testing": {"testing", "infeed"},
    "children": {"importing"},
    "startup": {"children"},
    "programs": set(),
    "doctor": {
        "children",
        "cores",
        "doctor",
        "errors",
        "importing",
        "memory",
        "observe",
        "programs",
        "units",
        "workers",
        "infeed",
    },
    "cli": {
        "children",
        "cli",
        "cores",
        "doctor",
        "errors",
        "importing",
        "memory",
        "programs",
        "testing",
        "units",
        "workers",
        "infeed",
    },
    "__main__": {"cli"},
}

# The pure folders decide; they must not be able to wait, to start, to open or to measure anything.
PURE_IMPORTS = {
    "plan": {
        "abc",
        "collections",
        "copy",
        "inspect",
        "itertools",
        "math",
        "numpy",
        "operator",
        "reprlib",
        "typing",
        "dataclasses",
        "enum",
        "functools",
    },
    "tuning": {"math", "statistics", "typing"},
    "scheduler": {"abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "re", "typing"},
}

MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Names of modules that a file imports, anywhere in it or where it runs at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _top_level(tree.body) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point to"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if node.module == "infeed" else node.module


def _top_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
        elif isinstance(node, ast.ClassDef):
            yield from _top_level(node.body)
        else:
            yield node


def identify(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def part_named(module: str) -> str:
    """The part of the package that ``infeed.x.y`` is in; ``infeed`` for its public names."""
    _, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return first if first and ((SOURCE / first).is_dir() or (SOURCE / f"{first}.py").is_file()) else "infeed"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_imports_point_down_only(path: Path) -> None:
    """A module imports from its own layer and from those below, so that each can be read without those above."""
    used = {part_named(name) for name in imported(path) if name.partition(".")[0] == "infeed"}

    assert used <= ALLOWED[part_of(path)]


def test_the_table_of_layers_has_no_cycle() -> None:
    """The table itself points down: no part reaches itself through another."""
    TopologicalSorter(
        {part: below - {part} for part, below in ALLOWED.items()}
    ).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in PURE_IMPORTS], ids=identify)
def test_pure_folders_know_no_clock_thread_process_file_or_torch(path: Path) -> None:
    """The decisions can be tested without any of them, because they cannot reach any of them."""
    outside = {name.partition(".")[0] for name in imported(path)} - {"infeed", "__future__"}

    assert outside <= PURE_IMPORTS[part_of(path)]


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_optional_packages_are_not_imported_at_import_time(path: Path) -> None:
    """torch and its like cost seconds, or are not installed: only who needs them imports them."""
    heavy = {"torch", "jax", "ray", "cv2", "tqdm", "rich", "PIL", "pandas", "pyarrow", "psutil", "matplotlib", "plotly"}
    allowed = {"cli/pictures.py": {"PIL"}}.get(identify(path), set())
    if identify(path) == "delivery/jax.py":
        allowed = {"jax"}
    if part_of(path) == "torch" or identify(path) in ("delivery/cuda.py", "delivery/plain.py"):
        allowed = {"torch"}

    assert {name.partition(".")[0] for name in imported(path, top_level_only=True)} & heavy <= allowed


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_module_is_short_enough_to_be_read_at_once(path: Path) -> None:
    """Six hundred lines are the end."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600
