"""Docstrings of the public API: Google format, every argument, and examples that run."""

import doctest
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infeed
import infeed.testing


def public() -> Iterator[tuple[str, Any]]:
    """Public classes, functions and methods by name."""
    roots = [(f"infeed.{name}", getattr(infeed, name)) for name in (*infeed.__all__, "open")]
    roots += [(f"infeed.testing.{name}", getattr(infeed.testing, name)) for name in infeed.testing.__all__]
    for name, value in roots:
        yield name, value
        if inspect.isclass(value):
            for member, function in vars(value).items():
                if not member.startswith("_") and (isinstance(function, property) or inspect.isfunction(function)):
                    yield f"{name}.{member}", function


PUBLIC = dict(public())


def documented(value: Any) -> set[str]:
    return set(re.findall(r"^    (\w+): \S", inspect.getdoc(value) or "", re.MULTILINE))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_and_field_of_a_public_name_is_documented(name: str) -> None:
    """A name without a docstring is missing from the reference."""
    value = PUBLIC[name]
    assert value.__doc__
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    given = [one for one in inspect.signature(value).parameters if one != "self"]
    assert [one for one in given if one not in documented(value)] == []


# No example can show a bug.
WITHOUT_EXAMPLE = ["infeed.InternalError"]
NEEDS_PLOTLY = ["report"]
METHODS = ["close", "explain", "load_state_dict", "replay", "report", "set_epoch", "state_dict", "statistics", "timeline"]
EXAMPLES = [
    *(f"infeed.{name}" for name in (*infeed.__all__, "open")),
    *(f"infeed.DataLoader.{name}" for name in METHODS),
    *(f"infeed.testing.{name}" for name in infeed.testing.__all__),
    "infeed.Statistics.numbers",
]


def run_example(value: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the examples of a docstring in an empty folder. There must be one."""
    if name.rpartition(".")[2] in NEEDS_PLOTLY and importlib.util.find_spec("plotly") is None:
        pytest.skip("needs plotly")
    monkeypatch.chdir(folder)
    # Not `testmod`: it leaves out classes whose `__module__` is the public package, and their methods.
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", {}, name, None, None)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in WITHOUT_EXAMPLE])
def test_public_names_have_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example(PUBLIC[name], name, tmp_path, monkeypatch)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["DataLoader", "ImageConvert", "install", "uninstall", *(f"DataLoader.{name}" for name in METHODS)]
)
def test_public_names_of_infeed_torch_have_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value: Any = pytest.importorskip("infeed.torch")
    for part in name.split("."):
        value = getattr(value, part)
    run_example(value, name, tmp_path, monkeypatch)
