"""Names, files, notes and examples in the docs match the code."""

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import infeed
from tools.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(infeed.__file__).resolve().parent
PROSE = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- names


def dotted_names() -> list[tuple[Path, str]]:
    return sorted(
        {
            (path, match[1])
            for path in PROSE
            for match in re.finditer(r"`(infeed(?:\.\w+)+)(?:\([^`]*\))?`", path.read_text(encoding="utf-8"))
        }
    )


def resolve(name: str) -> object:
    """Returns the module or attribute with this dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("infeed"):
            raise
        parent, _, last = name.rpartition(".")
        return getattr(resolve(parent), last)


@pytest.mark.parametrize(
    ("path", "name"), dotted_names(), ids=lambda value: value if isinstance(value, str) else relative(value)
)
def test_a_name_in_prose_exists(path: Path, name: str) -> None:
    """Every name in backquotes that starts with `infeed.` can be imported or looked up."""
    if name.startswith("infeed.torch"):
        pytest.importorskip("torch")
    assert resolve(name) is not None


def test_a_missing_name_is_detected() -> None:
    """The check above can fail."""
    with pytest.raises(AttributeError):
        resolve("infeed.workers.telepathy")


def paths_in_prose() -> list[tuple[Path, str]]:
    pattern = re.compile(
        r"`((?:tests|benchmarks|docs|src|engine|plan|scheduler|autotune|memory|collate|workers|delivery|metrics|torch|doctor|cli|programs|testing)/[\w/.*-]+)`"
    )
    return sorted({(path, match[1]) for path in PROSE for match in pattern.finditer(path.read_text(encoding="utf-8"))})


@pytest.mark.parametrize(
    ("path", "named"), paths_in_prose(), ids=lambda value: value if isinstance(value, str) else relative(value)
)
def test_a_file_in_prose_exists(path: Path, named: str) -> None:
    """Files and folders mentioned in the docs exist, in the repository or in the package."""
    found = [root / named for root in (ROOT, SOURCE, path.parent) if (root / named).exists() or list(root.glob(named))]

    assert found, f"{relative(path)} names {named}"


# --- notes

CITED = re.compile(r"NOTE \[([^\]]+)\]")
# A definition is alone on its line, in a comment or a docstring; its text follows on the next lines.
DEFINED = re.compile(r"^\s*(?:#\s*)?NOTE \[([^\]]+)\]\s*$", re.MULTILINE)


def notes() -> tuple[list[str], list[str]]:
    """Returns the names of notes: their definitions and their citations."""
    defined, cited = [], []
    for path in [*SOURCE.rglob("*.py"), *PROSE]:
        text = path.read_text(encoding="utf-8")
        here = DEFINED.findall(text) if path.suffix == ".py" else []
        defined += here
        rest = CITED.findall(text)
        for name in here:
            rest.remove(name)
        cited += [name for name in rest if path.name != "CONTRIBUTING.md"]  # It shows the format of a note.
    return defined, cited


def test_a_note_is_defined_once() -> None:
    """Every note has one definition."""
    defined, _ = notes()

    assert defined
    assert sorted(defined) == sorted(set(defined))


def test_every_cited_note_is_defined_and_every_defined_note_is_cited() -> None:
    """Citations and definitions match."""
    defined, cited = notes()

    assert set(defined) == set(cited)


# --- examples


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_all_python_blocks_in_the_docs_parse() -> None:
    """Code blocks that no test runs have at least valid syntax."""
    for path in PROSE:
        for block in python_blocks(path):
            ast.parse(block, filename=relative(path))


# --- the tree

ARCHITECTURE = ROOT / "ARCHITECTURE.md"


def tree_lines() -> list[str]:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    block = re.search(r"^```\n(src/infeed/\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^  ([\w./]+)", block[1], re.MULTILINE) if block else []


def test_the_tree_in_architecture_is_complete() -> None:
    """A folder or module is in the tree if and only if it exists."""
    there = {f"{path.name}/" for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    there |= {path.name for path in SOURCE.glob("*.py")} - {"__main__.py"}

    assert set(tree_lines()) - {"__main__.py"} == there


def test_each_word_in_architecture_is_defined_once() -> None:
    """The table of words has no duplicates."""
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## 1. Words")[2].partition("\n## ")[0]
    words = re.findall(r"^\| (\w+) \|", section, re.MULTILINE)

    assert len(words) > 10
    assert sorted(words) == sorted(set(words))


# --- doctests

LINUX_ONLY = {"infeed.memory.memfd", "infeed.workers.forkserver", "infeed.workers.server"}


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(SOURCE)], "infeed.")]
    return ["infeed", *(name for name in names if not name.endswith("__main__"))]


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except AssertionError:
        pytest.skip(f"{name} is for another platform")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("infeed"):
            raise
        pytest.skip(f"{name} needs {error.name}")


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module can be imported, and the examples in its docstrings produce the documented output.

    ``test_docstrings.py`` runs the examples of the public API.
    """
    if name == "infeed.torch.loader":
        pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)  # some examples write files
    assert doctest.testmod(load(name)).failed == 0


def test_there_are_examples_in_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is not vacuous."""
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(infeed).attempted > 0


# --- libraries


@pytest.mark.parametrize("library", [library.name for library in LIBRARIES])
def test_every_tested_library_has_a_row(library: str) -> None:
    """Each tested library has a row with its version in docs/libraries.md."""
    text = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")

    assert re.search(rf"^\| {re.escape(library)} \| \d[\w.]* \|", text, re.MULTILINE)
