"""Docstrings of everything public: Google form, every argument, and examples, which ``test_prose.py`` runs."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import infeed
import infeed.testing


def public() -> Iterator[tuple[str, Any]]:
    """Public classes, functions and methods, by name."""
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
    """A name without a docstring is not in the reference."""
    value = PUBLIC[name]
    assert value.__doc__
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    given = [one for one in inspect.signature(value).parameters if one != "self"]
    assert [one for one in given if one not in documented(value)] == []


# Users read these, but do not create them.
RESULTS = ["BadSample", "Diagnosis", "Lineage", "SlowSample", "Statistics", "WorkerInfo", "WorkerStatistics"]
# What users call, except for methods whose effect an example cannot show.
EXAMPLES = [
    *(f"infeed.{name}" for name in (*infeed.__all__, "open") if name not in RESULTS and not name.endswith("Error")),
    *(f"infeed.DataLoader.{name}" for name in ("explain", "state_dict", "statistics")),
    *(f"infeed.testing.{name}" for name in infeed.testing.__all__),
    "infeed.InfeedError",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_users_call_has_an_example(name: str) -> None:
    assert ">>>" in (PUBLIC[name].__doc__ or "")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["DataLoader", "ImageConvert", "install", "uninstall"])
def test_what_users_call_in_infeed_torch_has_an_example(name: str) -> None:
    module = pytest.importorskip("infeed.torch")
    assert ">>>" in (getattr(module, name).__doc__ or "")
