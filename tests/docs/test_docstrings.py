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
    roots = [(f"infeed.{name}", getattr(infeed, name)) for name in infeed.__all__]
    roots += [(f"infeed.testing.{name}", getattr(infeed.testing, name)) for name in infeed.testing.__all__]
    for name, value in roots:
        yield name, value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


PUBLIC = dict(public())


def documented(value: Any) -> set[str]:
    return set(re.findall(r"^    (\w+): \S", inspect.getdoc(value) or "", re.MULTILINE))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_and_field_of_a_public_name_is_documented(name: str) -> None:
    value = PUBLIC[name]
    if inspect.isclass(value) and issubclass(value, BaseException):
        assert value.__doc__
        return
    given = [one for one in inspect.signature(value).parameters if one != "self"]
    assert [one for one in given if one not in documented(value)] == []


# Results that users do not create, and methods whose effect an example cannot show.
EXAMPLES = [
    "infeed.DataLoader", "infeed.DataLoader.explain", "infeed.DataLoader.state_dict", "infeed.DataLoader.statistics",
    "infeed.Device", "infeed.ErrorPolicy", "infeed.InfeedError", "infeed.RandomSampler", "infeed.RayWorkers",
    "infeed.StatisticsCallback",
    "infeed.get_rng", "infeed.get_worker_info", "infeed.share", *(f"infeed.testing.{name}" for name in infeed.testing.__all__),
]  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_users_call_has_an_example(name: str) -> None:
    assert ">>>" in (PUBLIC[name].__doc__ or "")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["DataLoader", "ImageConvert", "install"])
def test_what_users_call_in_infeed_torch_has_an_example(name: str) -> None:
    module = pytest.importorskip("infeed.torch")
    assert ">>>" in (getattr(module, name).__doc__ or "")
