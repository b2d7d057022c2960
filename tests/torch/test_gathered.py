"""Arrays in memory are gathered by a cached engine: it must notice the user's changes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from infeed.torch import DataLoader


def _values(loader: DataLoader[Any]) -> list[Any]:
    return torch.cat([batch[0] if isinstance(batch, list) else batch for batch in loader]).tolist()


def _replace(dataset: TensorDataset) -> None:
    dataset.tensors = (torch.arange(5) * 10,)


def _swap_data(dataset: TensorDataset) -> None:
    dataset.tensors[0].data = torch.arange(8) * 10


def _change_in_place(dataset: TensorDataset) -> None:
    dataset.tensors[0].mul_(10)


def _shorten(dataset: TensorDataset) -> None:
    dataset.tensors[0].resize_(4)


def _lengthen(dataset: TensorDataset) -> None:
    dataset.tensors = (torch.arange(30),)


def _restride(dataset: TensorDataset) -> None:
    dataset.tensors = (dataset.tensors[0][::2],)


def _add_column(dataset: TensorDataset) -> None:
    dataset.tensors = (*dataset.tensors, torch.zeros(8))


def _as_other_type(dataset: TensorDataset) -> None:
    dataset.tensors = (dataset.tensors[0].view(torch.float64),)


@pytest.mark.parametrize(
    "change",
    [_replace, _swap_data, _change_in_place, _shorten, _lengthen, _restride, _add_column, _as_other_type],
)
def test_changes_to_the_tensors_are_in_the_next_epoch(change: Callable[[TensorDataset], None]) -> None:
    ours, theirs = TensorDataset(torch.arange(8)), TensorDataset(torch.arange(8))
    loader = DataLoader(ours, batch_size=3)
    reference: Any = torch.utils.data.DataLoader(theirs, batch_size=3)
    assert _values(loader) == _values(reference)
    change(ours)
    change(theirs)
    assert _values(loader) == _values(reference)
    assert [len(batch) for batch in loader] == [len(batch) for batch in reference]


def test_changes_to_the_array_are_in_the_next_epoch() -> None:
    array = np.arange(8)
    loader = DataLoader(array, batch_size=3)  # type: ignore[arg-type]
    assert _values(loader) == list(range(8))
    array.resize(5, refcheck=False)
    array *= 10
    assert _values(loader) == [0, 10, 20, 30, 40]


def test_another_collate_fn_is_used_from_the_next_epoch_on() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    assert _values(loader) == list(range(8))
    loader.collate_fn = len
    assert list(loader) == [4, 4]


def test_the_engine_is_cached_only_if_it_runs_no_user_code() -> None:
    gathered = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=2)
    one, other = iter(gathered), None
    assert next(one)[0].tolist() == [0, 1, 2, 3]
    del one
    other = iter(gathered)
    assert not other._workers  # type: ignore[attr-defined]
    assert _values(gathered) == list(range(8))
    with_workers = DataLoader(list(range(8)), batch_size=4, num_workers=1)  # type: ignore[arg-type]
    pids = []
    for _ in range(2):
        it: Any = iter(with_workers)
        next(it)
        pids += [worker.pid for worker in it._workers]
        del it
    assert len(set(pids)) == 2


def test_two_parallel_epochs() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    pairs = [(a.tolist(), b.tolist()) for (a,) in loader for (b,) in loader]
    assert len(pairs) == 9
    assert pairs[1] == ([0, 1], [2, 3])
