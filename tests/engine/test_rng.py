"""``infeed.get_rng()`` returns a generator for each sample, the same in every worker."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.testing import CrashingDataset, RandomDataset
from infeed.testing.datasets import RandomSource
from tests.helpers import Squares, Stream, Tree, collected, flat, plain


def drawn(index: int) -> tuple[int, float]:
    return index, float(infeed.get_rng().random())


DRAWING = Tree(30, drawn)


def by_index(dataset: Any = DRAWING, epoch: int = 0, **options: Any) -> dict[int, float]:
    """Returns what each sample drew in one epoch."""
    with infeed.DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 3, **options}) as loader:
        loader.set_epoch(epoch)
        pairs = []
        for batch in loader:
            numbers, values = plain(batch)
            pairs += list(zip(numbers, values, strict=True)) if isinstance(numbers, list) else [(numbers, values)]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


@pytest.fixture(scope="module")
def alone() -> dict[int, float]:
    return by_index()


# --- equal for all workers


def test_draws_are_the_same_in_every_kind_of_worker(alone: dict[int, float], every_engine: dict[str, Any]) -> None:
    """In the main process, in threads and in processes with each start method (P2)."""
    assert by_index(**every_engine) == alone


@pytest.mark.process
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 5}, {"num_workers": 5, "worker": "thread"}], ids=str)
def test_draws_do_not_depend_on_the_number_of_workers(alone: dict[int, float], options: dict[str, Any]) -> None:
    """One or five workers (P2)."""
    assert by_index(timeout=30, **options) == alone


@pytest.mark.parametrize("size", [1, 3, 7, 30, 100, None])
def test_draws_do_not_depend_on_the_batch_size(alone: dict[int, float], size: int | None) -> None:
    """Nor on whether there are batches at all."""
    assert by_index(batch_size=size) == alone


@pytest.mark.parametrize("grain_size", [1, 2, 5, 100])
def test_draws_do_not_depend_on_the_grains(alone: dict[int, float], grain_size: int) -> None:
    """The seeding of the global generators has no influence."""
    assert by_index(grain_size=grain_size) == alone


@pytest.mark.parametrize("world", [2, 3])
def test_draws_do_not_depend_on_the_ranks(alone: dict[int, float], world: int) -> None:
    """Several ranks draw what one rank draws."""
    together: dict[int, float] = {}
    for rank in range(world):
        together |= by_index(shard=(rank, world), pad=False)
    assert together == alone


def test_draws_do_not_depend_on_how_a_batch_is_collated(alone: dict[int, float]) -> None:
    """With a collate_fn, large samples, samples of different layouts."""

    def collate(samples: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
        infeed.get_rng().random(100)
        return [index for index, _ in samples], [value for _, value in samples]

    assert by_index(collate_fn=collate) == alone

    def large(index: int) -> tuple[int, float, Any]:
        return (*drawn(index), np.zeros(100_000))

    with infeed.DataLoader(Tree(30, large), batch_size=4, shuffle=True, seed=3) as loader:
        pairs = [pair for batch in loader for pair in zip(plain(batch[0]), plain(batch[1]), strict=True)]
    assert dict(pairs) == alone

    def mixed(index: int) -> tuple[int, float, Any]:
        return (*drawn(index), "text" if index % 5 else index)

    with infeed.DataLoader(Tree(30, mixed), batch_size=4, shuffle=True, seed=3) as loader:
        pairs = [pair for batch in loader for pair in zip(plain(batch[0]), plain(batch[1]), strict=True)]
    assert dict(pairs) == alone


def test_draws_do_not_depend_on_the_users_generators(alone: dict[int, float]) -> None:
    """The user's global generators have no influence, and are not changed."""
    random.seed(99)
    np.random.seed(99)
    before = random.getstate()
    assert by_index() == alone
    assert random.getstate() == before


@pytest.mark.process
def test_a_sample_that_is_loaded_again_draws_the_same_numbers(tmp_path: Path, forkserver: dict[str, Any]) -> None:
    """After its worker has died."""

    class Dying(CrashingDataset):
        def __getitem__(self, index: int) -> Any:
            return drawn(super().__getitem__(index))

    dataset = Dying(30, [7, 21], tmp_path / "count")
    assert by_index(dataset, **forkserver) == by_index(Tree(30, drawn))
    assert dataset.deaths == 2


# --- distinct generators


def test_samples_epochs_and_seeds_draw_differently(alone: dict[int, float]) -> None:
    """No two are equal."""
    others = [by_index(epoch=1), by_index(epoch=2), by_index(seed=4), by_index(seed=-3)]
    values = [value for draws in (alone, *others) for value in draws.values()]
    assert len(set(values)) == 5 * 30
    assert len(set(alone.values())) == 30


def test_draws_of_all_samples_are_uniform() -> None:
    """First draws at neighboring positions are unrelated: chi-squared over 20 bins is in its usual range."""
    values = np.array(list(by_index(Tree(4000, drawn), batch_size=1000).values()))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert np.sum((counts - 200) ** 2 / 200) < 65  # 19 expected.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08


def test_a_repeated_sample_draws_different_numbers() -> None:
    """The position in the epoch counts, not the index."""
    with infeed.DataLoader(DRAWING, batch_size=4, sampler=[5] * 12, seed=3) as loader:
        values = flat([batch[1] for batch in collected(loader)])
    assert len(set(values)) == 12


# --- the generator object


def test_get_rng_returns_the_same_object_within_a_sample(light_engine: dict[str, Any]) -> None:
    """Further calls continue it; the next sample has another generator."""

    def draw(index: int) -> tuple[bool, float, float]:
        first, second = infeed.get_rng(), infeed.get_rng()
        return first is second, float(first.random()), float(second.random())

    with infeed.DataLoader(Tree(12, draw), batch_size=4, **light_engine) as loader:
        batches = collected(loader)
    assert all(flat([batch[0] for batch in batches]))
    values = flat([batch[1] + batch[2] for batch in batches])
    assert len(set(values)) == 24


def test_it_is_a_numpy_generator() -> None:
    """With its full API."""
    with infeed.DataLoader(Tree(2, lambda _: infeed.get_rng().normal(size=3)), batch_size=2) as loader:
        assert next(iter(loader)).shape == (2, 3)
    assert isinstance(infeed.get_rng(), np.random.Generator)


def test_outside_of_a_loader_it_is_unseeded() -> None:
    """Also after an iteration in this thread, and while one is active."""
    np.random.seed(1)
    first = infeed.get_rng().random()
    np.random.seed(1)
    assert infeed.get_rng().random() != first
    with infeed.DataLoader(DRAWING, batch_size=4, seed=3) as loader:
        values = set()
        for _ in loader:
            values.add(infeed.get_rng().random())
        assert len(values) == len(loader)
        loader.set_epoch(0)
        for _ in loader:
            values.add(infeed.get_rng().random())
        assert len(values) == 2 * len(loader)


def test_after_a_sample_that_raised_it_is_unseeded_again() -> None:
    """The sample's context is left in any case."""

    def fail(index: int) -> float:
        infeed.get_rng()
        raise ValueError(index)

    values = set()
    for _ in range(2):
        with infeed.DataLoader(Tree(4, fail), seed=3) as loader, pytest.raises(ValueError, match="0"):
            next(iter(loader))
        values.add(infeed.get_rng().random())
    assert len(values) == 2


# --- several samples at once


class Together:
    """Has `__getitems__`; each call draws once."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return drawn(index)

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        rng = infeed.get_rng()
        assert rng is infeed.get_rng()
        number = float(rng.random())
        return [(index, number) for index in indices]


def test_in_getitems_each_call_has_a_generator(light_engine: dict[str, Any]) -> None:
    """One for each batch, the same in every kind of worker."""
    values = by_index(Together(), **light_engine)
    assert len(set(values.values())) == 6
    assert values == by_index(Together())


def collate(samples: list[Any]) -> tuple[float, float, bool]:
    rng = infeed.get_rng()
    return float(rng.random()), samples[0][1], rng is infeed.get_rng()


@pytest.mark.parametrize("size", [4, None])
def test_in_collate_fn_each_batch_has_a_generator(size: int | None, light_engine: dict[str, Any]) -> None:
    """It differs from those of its samples, is the same in every kind of worker, and changes with the epoch."""

    def collated(samples: Any) -> Any:
        return collate(samples if size else [samples])

    def epochs(**options: Any) -> list[Any]:
        with infeed.DataLoader(DRAWING, batch_size=size, collate_fn=collated, seed=3, **options) as loader:
            return [list(loader), list(loader)]

    first, second = epochs(**light_engine)
    assert [first, second] == epochs()
    of_batches = [batch[0] for batch in first + second]
    of_samples = [batch[1] for batch in first + second]
    assert len({*of_batches, *of_samples}) == len(of_batches) + len(of_samples)
    assert all(batch[2] for batch in first + second)


class DrawingStream:
    """Draws twice for each element."""

    def __init__(self, count: int, *, shares: bool = False) -> None:
        self.count, self.shares = count, shares

    def __iter__(self) -> Iterator[tuple[int, float, bool]]:
        info = infeed.get_worker_info() if self.shares else None
        for number in range(self.count):
            if info is None or number % info.num_workers == info.id:
                rng = infeed.get_rng()
                yield number, float(rng.random()), rng is infeed.get_rng()


def stream_draws(**options: Any) -> dict[int, float]:
    with infeed.DataLoader(DrawingStream(20), **{"batch_size": 4, "seed": 3, **options}) as loader:
        rows = (
            [row for batch in loader for row in zip(*plain(batch), strict=True)]
            if options.get("batch_size", 4)
            else list(loader)
        )
    assert all(is_same for _, _, is_same in rows)
    return {number: value for number, value, _ in rows}


def test_each_element_of_an_iterable_dataset_has_a_generator(light_engine: dict[str, Any]) -> None:
    """The same in every kind of worker, for any batch size."""
    expected = stream_draws()
    assert len(set(expected.values())) == 20
    assert stream_draws(**light_engine) == expected
    assert stream_draws(batch_size=3, **light_engine) == expected
    assert stream_draws(batch_size=None, **light_engine) == expected


@pytest.mark.process
def test_shards_of_an_iterable_dataset_draw_differently(forkserver: dict[str, Any]) -> None:
    """Two workers at the same position of their shards have different generators, the same in every run."""

    def draws() -> list[Any]:
        with infeed.DataLoader(DrawingStream(20, shares=True), batch_size=4, seed=3, **forkserver) as loader:
            return flat([batch[1] for batch in collected(loader)])

    first = draws()
    assert len(set(first)) == 20
    assert draws() == first


def test_ranks_that_share_an_iterable_dataset_draw_differently() -> None:
    """Each rank reads all of it; its own elements have their own numbers."""
    values = []
    for rank in range(2):
        values += list(stream_draws(shard=(rank, 2), pad=False).values())
    assert len(set(values)) == 20


# --- loaders in datasets


def test_a_loader_inside_a_dataset_has_separate_generators() -> None:
    """The outer sample continues with its generator, inner samples have theirs; so do the global generators."""

    def outer(index: int) -> tuple[float, float, float, float]:
        rng = infeed.get_rng()
        first, before = float(rng.random()), random.random()
        with infeed.DataLoader(DRAWING, batch_size=8, seed=5) as inner:
            inner_sum = sum(flat([batch[1] for batch in collected(inner)]))
        assert infeed.get_rng() is rng
        return first, float(rng.random()), inner_sum, random.random() + before

    def bare(index: int) -> tuple[float, float, float, float]:
        rng = infeed.get_rng()
        first, before = float(rng.random()), random.random()
        return first, float(rng.random()), inner_total, random.random() + before

    with infeed.DataLoader(DRAWING, batch_size=8, seed=5) as inner:
        inner_total = sum(flat([batch[1] for batch in collected(inner)]))
    with infeed.DataLoader(Tree(8, outer), batch_size=4, seed=3) as nested:
        got = collected(nested)
    with infeed.DataLoader(Tree(8, bare), batch_size=4, seed=3) as loader:
        assert got == collected(loader)


# --- thread workers and the global generators


def logged(caplog: pytest.LogCaptureFixture, dataset: Any, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="infeed"):
        options = {"num_workers": 2, "worker": "thread", "timeout": 30, "batch_size": 4, **options}
        with infeed.DataLoader(dataset, **options) as loader:
            for _ in range(2):
                collected(loader)
    return [record.getMessage() for record in caplog.records if record.name == "infeed"]


@pytest.mark.parametrize(("source", "name"), [("python", "random"), ("numpy", "numpy.random")])
def test_threads_that_draw_from_the_global_generators_get_a_warning(
    caplog: pytest.LogCaptureFixture, source: RandomSource, name: str
) -> None:
    """Once, with the names of the generators and two fixes."""
    [message] = logged(caplog, RandomDataset(40, [source]))
    assert f"draws from {name}, " in message
    assert "infeed.get_rng()" in message
    assert "worker='process'" in message


@pytest.mark.torch
def test_threads_that_draw_from_torch_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The same for torch's default generator; several generators are named together."""
    pytest.importorskip("torch")
    [message] = logged(caplog, RandomDataset(40, ["torch"]))
    assert "draws from torch, " in message
    [message] = logged(caplog, RandomDataset(40, ["python", "torch"]))
    assert "draws from random and torch, " in message


@pytest.mark.parametrize(
    "dataset",
    [RandomDataset(40, ["infeed"]), Squares(40), Stream(40), DrawingStream(40), np.arange(40)],
    ids=lambda d: type(d).__name__,
)
def test_threads_that_do_not_draw_from_global_generators_get_no_warning(caplog: pytest.LogCaptureFixture, dataset: Any) -> None:
    """Drawing from ``get_rng``, or not at all."""
    assert logged(caplog, dataset) == []


class GlobalStream:
    """An iterable dataset that draws from a global generator."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(20):
            yield random.random()


def test_iterable_datasets_and_collate_functions_in_threads_get_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    """Draws in any user code count."""
    assert len(logged(caplog, GlobalStream())) == 1
    assert len(logged(caplog, Squares(40), collate_fn=lambda samples: random.random())) == 1


@pytest.mark.process
def test_other_loaders_get_no_warning(caplog: pytest.LogCaptureFixture, forkserver: dict[str, Any]) -> None:
    """In the main process and in worker processes the global generators are seeded."""
    assert logged(caplog, RandomDataset(40), num_workers=0, worker="process") == []
    assert logged(caplog, RandomDataset(40), **{**forkserver, "worker": "process"}) == []


# --- skipped samples


def drawn_unless_bad(index: int) -> tuple[int, float]:
    if index % 5 == 1:
        raise ValueError("bad")
    return drawn(index)


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("indices", [None, [str(number) for number in range(30)]], ids=["numbers", "objects"])
def test_draws_do_not_depend_on_skipped_samples(
    alone: dict[int, float], light_engine: dict[str, Any], size: int, indices: list[str] | None
) -> None:
    """A sample draws by its position in the epoch, whatever its row in a batch without bad samples."""
    options: dict[str, Any] = {"batch_size": size, "on_error": "skip", **light_engine}
    if indices is None:
        got = by_index(Tree(30, drawn_unless_bad), **options)
        assert got == {index: value for index, value in alone.items() if index % 5 != 1}
        return
    # Indices that are not integers are sent to a worker differently.
    dataset = Tree(30, lambda index: drawn_unless_bad(int(index)))
    got = by_index(dataset, shuffle=False, sampler=indices, **options)
    assert got == {index: value for index, value in by_index(shuffle=False).items() if index % 5 != 1}


def test_a_batch_without_its_bad_samples_is_replayed_with_the_same_draws() -> None:
    with infeed.DataLoader(Tree(30, drawn_unless_bad), batch_size=8, seed=3, on_error="skip") as loader:
        assert collected(loader)[1] == plain(loader.replay(1, epoch=0))
