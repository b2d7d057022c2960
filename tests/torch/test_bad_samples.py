"""Bad samples, dead and hung workers through ``infeed.torch.DataLoader``: options, attributes, batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import infeed
from infeed.torch import DataLoader


class Patchy(Dataset[Any]):
    def __init__(self, length: int, bad: set[int], *, hangs: bool = False) -> None:
        self.length, self.bad, self.hangs = length, bad, hangs

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            if self.hangs:
                threading.Event().wait(60)
            raise ValueError(f"sample {index} is broken")
        return torch.full((2,), float(index)), index


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_and_replace(workers: int) -> None:
    """Batches are tensors, with as many rows as are left."""
    loader = DataLoader(Patchy(8, {1, 6}), batch_size=4, num_workers=workers, on_error="skip")
    got = list(loader)
    assert [batch[1].tolist() for batch in got] == [[0, 2, 3], [4, 5, 7]]
    assert [batch[0].shape for batch in got] == [(3, 2), (3, 2)]
    assert [one.index for one in loader.bad_samples] == ["1", "6"]
    replacing = DataLoader(Patchy(8, {1, 6}), batch_size=4, num_workers=workers, seed=1, on_error="replace")
    assert [len(batch[1]) for batch in replacing] == [4, 4]


def test_replacements_come_from_a_torch_sampler() -> None:
    """A split by sampler stays a split."""
    sampler = torch.utils.data.SubsetRandomSampler(range(0, 100, 2))
    loader = DataLoader(Patchy(100, {10, 20}), batch_size=10, sampler=sampler, on_error="replace")
    seen = torch.cat([batch[1] for batch in loader])
    assert len(seen) == 50
    assert set(seen.tolist()) == set(range(0, 100, 2)) - {10, 20}


def test_a_sample_that_exceeds_its_timeout_is_skipped() -> None:
    loader = DataLoader(Patchy(8, {1}, hangs=True), batch_size=4, num_workers=2, sample_timeout=0.5, on_error="skip")
    assert [batch[1].tolist() for batch in loader] == [[0, 2, 3], [4, 5, 6, 7]]


def test_options_are_attributes_and_are_checked() -> None:
    """Frameworks re-create a loader from its attributes."""
    loader = DataLoader(Patchy(8, set()), on_error="skip", sample_timeout=3, hang_warning=0)
    names = ("on_error", "sample_timeout", "hang_warning")
    assert [getattr(loader, name) for name in names] == ["skip", 3, 0]
    with pytest.raises(infeed.ConfigError, match="on_error='drop' is not supported"):
        DataLoader(Patchy(8, set()), on_error="drop")  # type: ignore[arg-type]


def test_the_budget_and_the_state() -> None:
    loader = DataLoader(Patchy(8, {1, 3, 6}), batch_size=2, on_error=infeed.ErrorPolicy("skip", budget=2))
    batches = iter(loader)
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0], [2]]
    state = loader.state_dict()
    assert state["bad_count"] == 2
    again = DataLoader(Patchy(8, {1, 3, 6}), batch_size=2, on_error=infeed.ErrorPolicy("skip", budget=2))
    again.load_state_dict(state)
    batches = iter(again)
    assert next(batches)[1].tolist() == [4, 5]
    with pytest.raises(infeed.SampleError, match="budget=2 exceeded"):
        next(batches)
