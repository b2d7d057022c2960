"""``"auto"`` as an option: what it means for each kind of dataset, and the number that stands for it."""

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
def test_what_is_left_to_infeed(options: dict[str, Any], is_auto: bool, most: int, kind: str, is_kind_auto: bool) -> None:
    """Numbers of the user's stay the most that there may be."""
    made = config(**options)

    assert (made.is_auto, made.most_workers, made.kind, made.is_kind_auto) == (is_auto, most, kind, is_kind_auto)


@pytest.mark.parametrize(
    ("options", "most"), [({"num_workers": "auto"}, 1), ({"num_workers": 3, "worker": "auto"}, 3)], ids=str
)
def test_a_stream_has_a_number_of_workers_that_does_not_change(options: dict[str, Any], most: int) -> None:
    """Its order depends on it: one, or as many as the user says."""
    made = config(Stream(10), **options)

    assert (made.is_auto, made.most_workers) == (False, most)


def test_the_cores_are_held_to_the_limit() -> None:
    """What the tuner may use: no more than there is, and no more than is allowed."""
    assert config(num_workers="auto", cpu_limit=2.5).core_limit == 2.5
    assert config(num_workers="auto", cpu_limit=100).core_limit == 8
    for cpu_limit, is_limited in ((2.5, True), (8, False), (100, False), (None, False)):
        assert config(num_workers="auto", cpu_limit=cpu_limit).is_cpu_limited is is_limited
    assert config(num_workers="auto").core_limit == 8


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda count: pickle.loads(pickle.dumps(count))])
def test_the_number_that_stands_for_auto_stays_what_it_is(again: Any) -> None:
    """Frameworks copy loaders, pickle them, and build others from their attributes."""
    count = again(AutoCount(MOST_WORKERS))

    assert type(count) is AutoCount
    assert count == 64
    assert (repr(count), f"{count}") == ("'auto'", "auto")
    assert config(num_workers=count).is_auto


def test_an_option_that_was_checked_can_be_checked_again() -> None:
    """Loaders are made from the options of others."""
    made = config(num_workers="auto", cpu_limit=2)
    again = Options(**{name: getattr(made, name) for name in Options.__slots__})

    assert (again.is_auto, again.most_workers, again.cpu_limit) == (True, 64, 2)
