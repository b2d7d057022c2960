"""Optional packages stay optional, and names are unambiguous. import-linter checks the layers: see pyproject.toml."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.fresh import SOURCE

HEAVY = {"torch", "jax", "ray", "cv2", "tqdm", "rich", "PIL", "pandas", "pyarrow", "psutil", "matplotlib", "plotly"}
ALLOWED = {
    "cli/demo_images.py": {"PIL"},
    "delivery/jax.py": {"jax"},
    "delivery/cuda.py": {"torch"},
    "delivery/plain.py": {"torch"},
}


# The public pair: infeed.DataLoader, and infeed.torch.DataLoader with torch's signature.
SHARED_MODULES = {"__init__", "loader"}
SHARED_CLASSES = {"DataLoader"}


def top_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.If | ast.Try):
            yield from top_level([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
        elif isinstance(node, ast.ClassDef):
            yield from top_level(node.body)
        else:
            yield node


def imported(path: Path) -> Iterator[str]:
    """Returns the packages that a module imports at import time."""
    for node in top_level(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]


def test_optional_packages_are_not_imported_at_import_time() -> None:
    """torch and others take seconds to import, or are not installed: only modules that need them import them."""
    names = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    allowed = {name: ALLOWED.get(name, {"torch"} if name.startswith("torch/") else set()) for name in names}
    found = {name: set(imported(path)) & HEAVY - allowed[name] for name, path in names.items()}

    assert {name: packages for name, packages in found.items() if packages} == {}


def test_modules_have_distinct_names() -> None:
    names = Counter(path.stem for path in SOURCE.rglob("*.py"))

    assert {name for name, count in names.items() if count > 1} == SHARED_MODULES


def test_classes_have_distinct_names() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))

    assert {name for name, count in names.items() if count > 1} == SHARED_CLASSES
