"""Datasets and samplers of torch in `infeed.DataLoader`, which does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import infeed
from tests.helpers import collected, flat

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

pytestmark = pytest.mark.torch


class Indexed(data.Dataset):  # type: ignore[misc]  # torch is imported only if it is there
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.full((2,), float(index)), index


class Streamed(data.IterableDataset):  # type: ignore[misc]  # likewise
    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(number) for number in range(7))


def test_a_dataset_of_torch_gives_tensors(every_engine: dict[str, Any]) -> None:
    """Tensors in samples become tensors in batches, numbers become arrays."""
    with infeed.DataLoader(Indexed(), batch_size=4, **every_engine) as loader:
        batches = list(loader)
    assert [type(part).__name__ for part in batches[0]] == ["Tensor", "ndarray"]
    assert [tensor[:, 0].tolist() for tensor, _ in batches] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_an_iterable_dataset_of_torch_is_iterated(light_engine: dict[str, Any]) -> None:
    """It inherits an unusable __getitem__: it is read with __iter__, every element once."""
    with infeed.DataLoader(Streamed(), batch_size=3, **light_engine) as loader:
        for _ in range(2):
            assert collected(loader) == [[0, 1, 2], [3, 4, 5], [6]]
        with pytest.raises(TypeError, match="has no len"):
            len(loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_tensor_dataset_is_gathered(shuffle: bool) -> None:
    """Its rows form the same batches as loading samples one by one, without a worker."""
    tensors = torch.arange(20).view(10, 2), torch.arange(10, dtype=torch.bfloat16)
    dataset = data.TensorDataset(*tensors)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "seed": 2}
    singly = infeed.DataLoader(
        dataset, collate_fn=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))), **options
    )
    for got, expected in zip(infeed.DataLoader(dataset, num_workers=2, **options), singly, strict=True):
        for part, other in zip(got, expected, strict=True):
            assert part.dtype == other.dtype
            assert torch.equal(part, other)


@pytest.mark.parametrize("kind", ["Subset", "ConcatDataset"])
def test_wrapped_datasets_work(light_engine: dict[str, Any], kind: str) -> None:
    """Subset (which has __getitems__) and ConcatDataset are datasets like any other."""
    made = data.Subset(Indexed(), [5, 3, 1]) if kind == "Subset" else data.ConcatDataset([Indexed(), Indexed()])
    expected = [5, 3, 1] if kind == "Subset" else [*range(7), *range(7)]
    with infeed.DataLoader(made, batch_size=4, **light_engine) as loader:
        assert flat([batch[1] for batch in collected(loader)]) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: {"sampler": data.SequentialSampler(range(7))}, [0, 1, 2, 3, 4, 5, 6], id="SequentialSampler"),
        pytest.param(lambda: {"sampler": data.SubsetRandomSampler([4, 4, 4])}, [4, 4, 4], id="SubsetRandomSampler"),
        pytest.param(
            lambda: {"batch_sampler": data.BatchSampler(data.SequentialSampler(range(7)), 3, True)}, [0, 1, 2, 3, 4, 5],
            id="BatchSampler",
        ),
        pytest.param(lambda: {"sampler": data.DistributedSampler(range(7), 2, 1, shuffle=False)}, [1, 3, 5, 0], id="Ranks"),
    ],
)  # fmt: skip
def test_samplers_of_torch_decide_the_order(light_engine: dict[str, Any], make: Any, expected: list[int]) -> None:
    """They are iterables of indices, and nothing else is required."""
    options = {"batch_size": 2} if "sampler" in make() else {}
    with infeed.DataLoader(range(7), **options, **make(), **light_engine) as loader:
        assert flat(collected(loader)) == expected


def test_a_random_sampler_of_torch_follows_torchs_seed(light_engine: dict[str, Any]) -> None:
    """It draws in this process from torch's generator, as with torch's loader."""
    loader = infeed.DataLoader(range(20), batch_size=20, sampler=data.RandomSampler(range(20)), **light_engine)
    with loader, torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = list(data.RandomSampler(range(20)))
        torch.manual_seed(5)
        got = flat(collected(loader))
    assert got == expected


def test_default_collate_of_torch_can_be_passed(light_engine: dict[str, Any]) -> None:
    """It makes torch's own batches."""
    with infeed.DataLoader(range(4), batch_size=2, collate_fn=data.default_collate, **light_engine) as loader:
        batches = list(loader)
    assert all(torch.is_tensor(batch) for batch in batches)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
