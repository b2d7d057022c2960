"""The option ``"auto"`` for each kind of dataset, and the number that represents it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from infeed import options
from infeed.autotune.capacity import MOST_WORKERS
from infeed.options import AutoCount, Options
from tests.helpers import Stream
from tests.unit.test_options import config


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "available_cores", lambda: 8.0)


@pytest.mark.parametrize(
    ("options", "is_auto", "most", "kind", "is_kind_auto"),
    [
        ({"num_workers": "auto"}, True, 64, "process", False),
        ({"num_workers": "auto", "cpu_limit": 2}, True, 64, "process", False),
        ({"num_workers": "auto", "cpu_limit": np.float64(0.5)}, True, 64, "process", False),
        ({"num_workers": "auto", "cpu_limit": 100}, True, 64, "process", False),
        ({"num_workers": "auto", "worker": "thread"}, True, 64, "thread", False),
        ({"num_workers": "auto", "worker": "auto"}, True, 64, "process", True),
        ({"num_workers": 8, "worker": "auto"}, True, 8, "process", True),
        ({"num_workers": 8}, False, 8, "process", False),
        ({"num_workers": 0, "worker": "auto"}, False, 0, "inline", False),
        ({"num_workers": AutoCount(7)}, True, 7, "process", False),
    ],
    ids=str,
)
def test_auto_options_are_resolved(options: dict[str, Any], is_auto: bool, most: int, kind: str, is_kind_auto: bool) -> None:
    """The user's numbers remain maxima."""
    made = config(**options)

    assert (made.is_auto, made.most_workers, made.kind, made.is_kind_auto) == (is_auto, most, kind, is_kind_auto)


@pytest.mark.parametrize(
    ("options", "most"), [({"num_workers": "auto"}, 1), ({"num_workers": 3, "worker": "auto"}, 3)], ids=str
)
def test_an_iterable_dataset_has_a_fixed_number_of_workers(options: dict[str, Any], most: int) -> None:
    """Its order depends on the number: 1, or the user's number."""
    made = config(Stream(10), **options)

    assert (made.is_auto, made.most_workers) == (False, most)


def test_the_cores_of_the_tuner_are_limited() -> None:
    """Neither more than exist nor more than allowed."""
    assert config(num_workers="auto", cpu_limit=2.5).core_limit == 2.5
    assert config(num_workers="auto", cpu_limit=100).core_limit == 8
    for cpu_limit, is_limited in ((2.5, True), (8, False), (100, False), (None, False)):
        assert config(num_workers="auto", cpu_limit=cpu_limit).is_cpu_limited is is_limited
    assert config(num_workers="auto").core_limit == 8


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda count: pickle.loads(pickle.dumps(count))])
def test_the_number_that_represents_auto_is_kept(again: Any) -> None:
    """Frameworks copy loaders, pickle them, and create others from their attributes."""
    count = again(AutoCount(MOST_WORKERS))

    assert type(count) is AutoCount
    assert count == 64
    assert (repr(count), f"{count}") == ("'auto'", "auto")
    assert config(num_workers=count).is_auto


def test_a_checked_option_can_be_checked_again() -> None:
    """Loaders are created from the options of others."""
    made = config(num_workers="auto", cpu_limit=2)
    again = Options(**{name: getattr(made, name) for name in Options.__slots__})

    assert (again.is_auto, again.most_workers, again.cpu_limit) == (True, 64, 2)
