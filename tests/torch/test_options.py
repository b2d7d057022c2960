"""Options of infeed's own: declared once, in the signature of ``infeed.torch.DataLoader``."""

from typing import Any

import pytest
from torch.utils import data

import infeed
from infeed.torch import DataLoader
from infeed.torch.accelerate import _like
from infeed.torch.loader import OWN_OPTIONS

pytestmark = [pytest.mark.torch]

OTHERS: dict[str, Any] = {
    "seed": 7, "worker": "process", "memory_limit": "1GB", "grain_size": 3, "device": "cpu", "device_prefetch": 5,
    "convert": list, "on_error": "skip", "error_budget": 9, "retries": 2, "sample_timeout": 11.0, "hang_warning": 12.0,
    "threads_per_worker": 2, "cpu_limit": 1.0, "observe": "counters", "progress": False, "on_statistics": print,
    "statistics_every": 3.0,
}  # fmt: skip


def test_a_loader_that_accelerate_rebuilds_keeps_all_options() -> None:
    assert OTHERS.keys() == OWN_OPTIONS.keys()
    source = DataLoader(list(range(8)), num_workers="auto", **OTHERS)
    made = _like(source, source.dataset, batch_size=2, num_workers="auto")
    assert {name: getattr(made, name) for name in OWN_OPTIONS} == OTHERS


def test_every_option_is_an_attribute_and_documented() -> None:
    loader = DataLoader(list(range(8)))
    assert {name: getattr(loader, name) for name in OWN_OPTIONS} == OWN_OPTIONS
    text = DataLoader.__doc__ or ""
    assert [name for name in OWN_OPTIONS if f"{name}:" not in text and f"``{name}``" not in text] == []


def test_both_loaders_have_the_same_options() -> None:
    """infeed.torch has torch's names besides; infeed.DataLoader has orders that torch leaves to samplers."""
    both = set(OWN_OPTIONS) - {"convert", "device", "device_prefetch"}
    assert both <= set(infeed.DataLoader.__init__.__annotations__)
    assert not set(OWN_OPTIONS) & set(data.DataLoader.__init__.__annotations__)
