"""Lineage: `explain` shows where a batch came from, and `replay` loads it again."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed import RandomSampler
from infeed.testing import CrashingDataset, FaultyDataset, RandomDataset
from infeed.testing.datasets import RandomSource
from tests.helpers import Pids, Squares, Stream, Tree, assert_same, collected, plain

SOURCES: list[RandomSource] = ["python", "numpy", "infeed"]


class Fetching(RandomDataset):
    """Has `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, float]]:
        return [self[index] for index in indices]


def collate_with_noise(samples: list[dict[str, float]]) -> dict[str, Any]:
    """A collate_fn that draws random numbers."""
    noise = (random.random(), float(np.random.random()), float(infeed.get_rng().random()))
    return {"samples": samples, "noise": noise, "index": [sample["index"] for sample in samples]}


OPTIONS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": 8},
    "shuffled": {"batch_size": 8, "shuffle": True},
    "drop_last": {"batch_size": 8, "shuffle": True, "drop_last": True},
    "smallest grains": {"batch_size": 8, "shuffle": True, "grain_size": 1},
    "odd grains": {"batch_size": 8, "shuffle": True, "grain_size": 3},
    "single": {"batch_size": None, "sampler": RandomSampler(num_samples=12)},
    "collated": {"batch_size": 8, "shuffle": True, "collate_fn": collate_with_noise},
    "single, collated": {"batch_size": None, "collate_fn": dict, "sampler": RandomSampler(num_samples=6)},
    "replacement": {"batch_size": 8, "sampler": RandomSampler(replacement=True)},
    "weights": {"batch_size": 8, "sampler": RandomSampler(np.arange(50))},
    "sampler": {"batch_size": 8, "sampler": list(range(49, -1, -1))},
    "batch_sampler": {"batch_sampler": [[1, 2, 3], [4], list(range(10, 20)), [7, 7]]},
    "rank": {"batch_size": 4, "shuffle": True, "shard": (1, 3)},
    "exact rank": {"batch_size": 4, "shuffle": True, "shard": (0, 3), "pad": False},
    "out of order": {"batch_size": 8, "shuffle": True, "in_order": False},
}
SEEDED = {name: options for name, options in OPTIONS.items() if name != "single, collated"}


def made(dataset: Any = None, **options: Any) -> infeed.DataLoader:
    dataset = RandomDataset(50, SOURCES) if dataset is None else dataset
    return infeed.DataLoader(dataset, **{"seed": 3, **options})


def assert_replayed(loader: infeed.DataLoader, *, in_order: bool = True) -> None:
    """Checks that every batch of an epoch can be loaded again, bit-identical."""
    batches = list(loader)
    again = [loader.replay(step) for step in range(len(batches))]
    if in_order:
        for one, other in zip(again, batches, strict=True):
            assert_same(one, other)
    else:
        assert sorted(map(repr, map(plain, again))) == sorted(map(repr, map(plain, batches)))


# --- replay


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_batch_can_be_loaded_again(options: dict[str, Any]) -> None:
    """With random numbers in the dataset and in collate_fn, in every epoch."""
    with made(**options) as loader:
        for _ in range(2):
            assert_replayed(loader, in_order=options.get("in_order", True))


@pytest.mark.process
@pytest.mark.parametrize("name", ["shuffled", "collated", "single", "batch_sampler", "rank", "out of order"])
def test_a_batch_of_processes_can_be_replayed_here(name: str, forkserver: dict[str, Any]) -> None:
    """The same batch, in this process."""
    with made(**OPTIONS[name], **forkserver) as loader:
        assert_replayed(loader, in_order=name != "out of order")


QUESTIONS: dict[str, Callable[[Any], object]] = {
    "statistics": lambda loader: loader.statistics(),
    "explain": lambda loader: loader.explain(2),
    "state_dict": lambda loader: loader.state_dict(),
    "bad_samples": lambda loader: loader.bad_samples,
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_another_thread_may_ask_while_an_epoch_runs(ask: Callable[[Any], object]) -> None:
    """It gets an answer at any time: what it reads may be changing."""
    before = sys.getswitchinterval()
    is_over = threading.Event()
    errors: list[BaseException] = []

    def ask_on() -> None:
        try:
            while not is_over.is_set():
                ask(loader)
        except BaseException as error:
            errors.append(error)

    options: dict[str, Any] = {"num_workers": 1, "worker": "thread", "on_error": "skip", "timeout": 30}
    with made(Tree(1500, lambda index: 1 // (index % 50)), batch_size=1, **options) as loader:
        thread = threading.Thread(target=ask_on)
        thread.start()
        sys.setswitchinterval(1e-5)  # switch threads within a call
        try:
            count = sum(1 for _ in loader)
        finally:
            sys.setswitchinterval(before)
            is_over.set()
            thread.join()

    assert errors == []
    assert count == 1470


def test_a_batch_of_threads_can_be_replayed_here() -> None:
    """With the generator of the sample."""
    dataset = RandomDataset(50, ["infeed"])
    with made(dataset, batch_size=8, shuffle=True, num_workers=2, worker="thread", timeout=30) as loader:
        assert_replayed(loader)


@pytest.mark.parametrize(
    "options", [{"batch_size": 8}, {"batch_size": 8, "grain_size": 2}, {"batch_size": 8, "collate_fn": list}]
)
def test_a_batch_of_getitems_can_be_replayed(options: dict[str, Any]) -> None:
    """``__getitems__`` receives the same indices under the same seed."""
    with made(Fetching(50, SOURCES), shuffle=True, **options) as loader:
        assert_replayed(loader)


class LargeTogether:
    """Large samples; each contains the number of indices of its call, and a number drawn for them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = float(infeed.get_rng().random())
        return [(np.zeros(200_000), len(indices), drawn) for _ in indices]


def test_large_samples_are_fetched_in_the_same_groups() -> None:
    """The size of a call, and its generator, must not depend on what is known of the layout."""
    with made(LargeTogether(), batch_size=8) as loader:
        assert [plain(batch[1]) for batch in loader] == [[8] * 8] * 2
        loader.set_epoch(0)
        assert_replayed(loader)


TABLES: dict[str, Any] = {
    "array": np.arange(50),
    "tuple": (np.arange(50), np.random.default_rng(1).random((50, 3))),
    "dict": {"x": np.arange(50), "y": np.arange(50.0)},
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_batches_of_arrays_can_be_loaded_again(table: Any) -> None:
    """They are gathered as before."""
    for options in ({"shuffle": True}, {"sampler": [5, 4, 3, 2, 1]}, {"sampler": RandomSampler(np.ones(50))}):
        with made(table, batch_size=4, **options) as loader:
            assert_replayed(loader)
            indices = loader.explain(0).indices
            assert indices is not None
            assert len(indices) == 4


def test_future_batches_and_other_epochs_can_be_replayed() -> None:
    """Without iterating; a later iteration delivers the same."""
    with made(batch_size=8, shuffle=True) as loader:
        early = [loader.replay(step, epoch=epoch) for epoch in range(2) for step in range(7)]
        assert loader.state_dict()["step"] == 0
        late = list(loader) + list(loader)
        for one, other in zip(early, late, strict=True):
            assert_same(one, other)
        assert_same(loader.replay(2, epoch=0), late[2])
        assert_same(loader.replay(2), late[9])


def test_after_a_resume_with_another_batch_size_batches_can_be_loaded_again() -> None:
    """They begin where the resumed epoch began."""
    with made(batch_size=5, shuffle=True) as first, made(batch_size=8, shuffle=True) as loader:
        iterator = iter(first)
        for _ in range(4):
            next(iterator)
        loader.load_state_dict(first.state_dict())
        step = loader.state_dict()["step"]
        for number, batch in enumerate(loader, start=step):
            assert_same(loader.replay(number), batch)
            assert loader.explain(number).indices == plain(batch["index"])


def test_after_a_resume_the_first_batch_can_be_explained_in_advance() -> None:
    """`explain` uses the resumed plan."""
    with made(batch_size=5, shuffle=True) as first, made(batch_size=8, shuffle=True) as loader:
        iterator = iter(first)
        for _ in range(4):
            next(iterator)
        loader.load_state_dict(first.state_dict())
        step = loader.state_dict()["step"]
        expected = loader.explain(step).indices
        assert plain(next(iter(loader))["index"]) == expected


@pytest.mark.process
def test_replay_runs_in_this_process_and_thread(forkserver: dict[str, Any]) -> None:
    """So that a debugger works."""
    with made(Pids(8), batch_size=4, **forkserver) as loader:
        assert os.getpid() not in set(plain(next(iter(loader))))
        assert set(plain(loader.replay(0))) == {os.getpid()}
    with made(Tree(8, lambda _: threading.get_ident()), batch_size=4, num_workers=2, worker="thread", timeout=30) as loader:
        assert threading.get_ident() not in set(plain(next(iter(loader))))
        assert set(plain(loader.replay(0))) == {threading.get_ident()}


def test_replay_of_a_bad_sample_raises_its_exception(light_engine: dict[str, Any]) -> None:
    """The user's own exception, from the user's code."""
    with made(FaultyDataset(16, [5]), batch_size=4, **light_engine) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="sample 5 is bad"):
            next(iterator)
        with pytest.raises(ValueError, match="sample 5 is bad"):
            loader.replay(1)
        assert loader.explain(1).indices == [4, 5, 6, 7]
        assert plain(next(iterator)) == [8, 9, 10, 11]


def test_replay_does_not_disturb_an_active_iteration(light_engine: dict[str, Any]) -> None:
    """It changes neither its batches nor its state."""
    dataset = RandomDataset(50, ["infeed"])
    with made(dataset, batch_size=8, shuffle=True) as untouched:
        expected = collected(untouched) + collected(untouched)
    with made(dataset, batch_size=8, shuffle=True, **light_engine) as loader:
        got = []
        for _ in range(2):
            for batch in loader:
                got.append(plain(batch))
                state = loader.state_dict()
                loader.replay(3)
                loader.replay(0, epoch=7)
                assert loader.state_dict() == state
    assert got == expected


class Epochs:
    """Sample ``i`` is the epoch that was set last."""

    epoch = -1

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "worker": "thread", "prefetch": 1, "timeout": 30}], ids=["inline", "thread"]
)
def test_replay_of_another_epoch_keeps_the_epoch_of_the_dataset(options: dict[str, Any]) -> None:
    """`replay` restores the epoch."""
    with made(Epochs(), batch_size=4, **options) as loader:
        collected(loader)
        iterator = iter(loader)
        assert set(plain(next(iterator))) == {1}
        assert set(plain(loader.replay(0, epoch=0))) == {0}
        assert {value for batch in iterator for value in plain(batch)} == {1}


def test_replay_does_not_change_the_users_generators() -> None:
    """Also if a sample raises (P8)."""
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with made(batch_size=8, shuffle=True) as loader:
        loader.replay(2)
    with made(FaultyDataset(16, [5]), batch_size=4) as loader, pytest.raises(ValueError, match="5"):
        loader.replay(1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_replay_has_no_timeout() -> None:
    """``timeout`` is for hung workers, not for a debugger."""
    with made(Squares(8), batch_size=4, timeout=1e-9) as loader:
        assert plain(loader.replay(0))[1] == [0, 1, 4, 9]


class Drawing:
    """An iterable dataset that draws a number for each element, and optionally shards itself."""

    def __init__(self, *, shares: bool) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        info = infeed.get_worker_info() if self.shares else None
        for number in range(20):
            if info is None or number % info.num_workers == info.id:
                yield number, random.random(), float(infeed.get_rng().random())


@pytest.mark.process
def test_an_iterable_dataset_is_read_again_for_replay(forkserver: dict[str, Any]) -> None:
    """From its beginning, in this process, under the same seeds; an active iteration is not affected."""
    with made(Drawing(shares=False), batch_size=4, **forkserver) as loader:
        iterator = iter(loader)
        batches = [plain(next(iterator)) for _ in range(3)]
        assert [plain(loader.replay(step)) for step in (2, 0, 1)] == [batches[2], batches[0], batches[1]]
        assert len(list(iterator)) == 2


@pytest.mark.process
def test_an_iterable_dataset_that_shards_itself_cannot_be_replayed(forkserver: dict[str, Any]) -> None:
    """The error gives the reason and the fix."""
    with made(Drawing(shares=True), batch_size=4, **forkserver) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(infeed.ConfigError, match=r"several workers share; use num_workers=1"):
            loader.replay(0)


# --- explain: indices and seeds


def drawn_under(seeds: list[int], grain_size: int, count: int) -> list[float]:
    """Returns what a dataset draws from ``random`` after seeding with these seeds."""
    state = random.getstate()
    drawn = []
    for row in range(count):
        if row % grain_size == 0:
            random.seed(seeds[row // grain_size])
        drawn.append(random.random())
    random.setstate(state)
    return drawn


@pytest.mark.parametrize("name", [name for name in SEEDED if name != "out of order"])
def test_the_seeds_reproduce_the_draws_of_the_dataset(name: str) -> None:
    """Seeding ``random`` with them gives the numbers that the dataset drew, grain by grain."""
    with made(RandomDataset(50, ["python"]), **SEEDED[name]) as loader:
        for step, batch in enumerate(loader):
            lineage = loader.explain(step)
            assert lineage.indices is not None
            count = len(lineage.indices)
            assert len(lineage.seeds) == -(-count // lineage.grain_size)
            values = plain(batch)
            if name == "collated":
                numbers = [sample["python"] for sample in values["samples"]]
            else:
                numbers = values["python"] if isinstance(values["python"], list) else [values["python"]]
            assert numbers == drawn_under(lineage.seeds, lineage.grain_size, count)


@pytest.mark.process
def test_the_seeds_reproduce_the_draws_of_processes(forkserver: dict[str, Any]) -> None:
    """The same for workers."""
    with made(RandomDataset(50, ["python"]), batch_size=8, shuffle=True, **forkserver) as loader:
        for step, batch in enumerate(loader):
            lineage = loader.explain(step)
            drawn = drawn_under(lineage.seeds, lineage.grain_size, len(plain(batch["python"])))
            assert plain(batch["python"]) == drawn


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("out of order",)])
def test_the_indices_are_those_passed_to_the_dataset(name: str) -> None:
    """Including those that a rank repeats."""
    with made(RandomDataset(50, ["python"]), **OPTIONS[name]) as loader:
        for step, batch in enumerate(loader):
            lineage = loader.explain(step)
            indices = plain(batch)["index"]
            assert lineage.indices == (indices if isinstance(indices, list) else [indices])
            assert (lineage.epoch, lineage.step) == (0, step)
            assert all(type(index) is int for index in lineage.indices)


def test_positions_are_those_of_all_ranks() -> None:
    """The position of a batch's first sample in the order that the ranks share."""
    for rank in range(3):
        with made(batch_size=4, shuffle=True, shard=(rank, 3)) as loader:
            assert [loader.explain(step).first_position for step in range(4)] == [12 * step + 4 * rank for step in range(4)]
            assert loader.explain(4).first_position == 48 + (0, 0, 1)[rank]


def test_a_lineage_has_workers_and_times(light_engine: dict[str, Any]) -> None:
    """All rows have a worker and a time; nothing is known about future batches."""
    with made(Squares(48), batch_size=8, shuffle=True, **light_engine) as loader:
        for step, _ in enumerate(loader):
            lineage = loader.explain(step)
            assert lineage.attempts == 1
            assert all(loading.seconds > 0 for loading in lineage.loadings)
            assert {loading.worker for loading in lineage.loadings} <= {0, 1}
            rows = sorted((loading.first_row, loading.row_count) for loading in lineage.loadings)
            assert [first for first, _ in rows] == [sum(count for _, count in rows[:number]) for number in range(len(rows))]
            assert sum(count for _, count in rows) == 8
        assert loader.explain(0, epoch=1).attempts == 0
        assert loader.explain(0, epoch=1).loadings == ()


@pytest.mark.process
def test_attempts_are_counted(tmp_path: Path, forkserver: dict[str, Any]) -> None:
    """The death of a worker adds an attempt; neighboring batches have one attempt."""
    dataset = CrashingDataset(24, [13], tmp_path / "count", times=2)
    with made(dataset, batch_size=4, prefetch=1, **{**forkserver, "num_workers": 1}) as loader:
        assert len(collected(loader)) == 6
        lineages = [loader.explain(step) for step in range(6)]
    assert [lineage.attempts for lineage in lineages] == [1, 1, 1, 3, 1, 1]
    assert "3 attempts" in str(lineages[3])
    assert sum(loading.row_count for loading in lineages[3].loadings) == 4


class Mixed:
    """Samples of two layouts, which can be stacked only together."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.zeros(3, dtype=np.float64 if index % 16 == 15 else np.float32)


@pytest.mark.process
def test_rows_that_were_loaded_twice_count_once(forkserver: dict[str, Any]) -> None:
    """A batch that one worker had to collate as a whole belongs to that worker."""
    with made(Mixed(), batch_size=16, **forkserver) as loader:
        for step, _ in enumerate(loader):
            assert sum(loading.row_count for loading in loader.explain(step).loadings) == 16


def test_a_lineage_has_a_short_repr() -> None:
    """A few lines, whatever the size of the batch."""
    with made(Squares(10_000), batch_size=1000, shuffle=True) as loader:
        planned = str(loader.explain(1))
        next(iter(loader))
        loaded = str(loader.explain(0))
    assert planned.startswith("batch 1 of epoch 0, from position 1000: indices [")
    assert "not loaded yet" in planned
    assert "rows 0 to 999 by worker 0 in " in loaded
    assert loaded.count("\n") <= 4
    assert len(loaded) < 500
    with made(Stream(8), batch_size=4) as loader:
        next(iter(loader))
        assert "elements of an iterable dataset" in str(loader.explain(0))


# --- available and missing information


def test_past_epochs_are_known_from_the_plan() -> None:
    """Their indices and seeds are known, but not which workers loaded them."""
    with made(batch_size=8, shuffle=True) as loader:
        first = collected(loader)
        known = loader.explain(3)
        collected(loader)
        again = loader.explain(3, epoch=0)
    assert again.indices == known.indices == first[3]["index"]
    assert again.seeds == known.seeds
    assert (known.attempts, again.attempts) == (1, 0)


def test_the_default_epoch_is_the_one_started_last() -> None:
    """Before the first epoch, it is the first."""
    with made(batch_size=8, shuffle=True) as loader:
        assert loader.explain(0).epoch == 0
        next(iter(loader))
        assert loader.explain(0).epoch == 0
        collected(loader)
        assert loader.explain(0).epoch == 1
        loader.set_epoch(5)
        assert loader.explain(0).epoch == 5


@pytest.mark.parametrize("options", [{"sampler": list(range(40))}, {"batch_sampler": [[number] for number in range(40)]}])
def test_the_latest_batches_of_a_sampler_are_remembered(options: dict[str, Any]) -> None:
    """Only the sampler knows the others."""
    with made(Squares(40), **options) as loader:
        iterator = iter(loader)
        for step in range(3):
            next(iterator)
            assert loader.explain(step).indices == [step]
        with pytest.raises(IndexError, match="batch 3 of epoch 0 is no longer stored"):
            loader.explain(3)
        with pytest.raises(IndexError, match="no longer stored"):
            loader.replay(0, epoch=1)
        for _ in iterator:
            pass
        assert loader.explain(0).indices == [0]


def test_the_oldest_batches_of_a_long_sampler_are_dropped() -> None:
    """Memory does not grow with the epoch."""
    with made(Squares(10), sampler=[1] * 1000) as loader:
        collected(loader)
        assert loader.explain(999).indices == [1]
        with pytest.raises(IndexError, match="batch 0 of epoch 0 is no longer stored"):
            loader.explain(0)


@pytest.mark.parametrize("step", [-1, 7, 10**30])
def test_a_batch_outside_of_the_epoch_is_an_index_error(step: int) -> None:
    """The error shows how many batches there are."""
    with made(batch_size=8) as loader:
        for ask in (loader.explain, loader.replay):
            with pytest.raises(IndexError, match=rf"epoch 0 has no batch {step}; it has 7 batches"):
                ask(step)


class DrawingStream:
    """Draws a number for each element."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(20):
            yield random.random()


def test_a_batch_of_an_iterable_dataset_has_seeds_and_a_worker() -> None:
    """It has no indices; its seeds reproduce its draws."""
    with made(DrawingStream(), batch_size=8) as loader:
        for step, batch in enumerate(loader):
            lineage = loader.explain(step)
            count = len(plain(batch))
            assert lineage.indices is None
            assert lineage.first_position == 8 * step
            assert [loading.row_count for loading in lineage.loadings] == [count]
            assert plain(batch) == drawn_under(lineage.seeds, lineage.grain_size, count)
        with pytest.raises(IndexError, match="no longer stored"):
            loader.explain(7)


@pytest.mark.process
def test_shards_of_an_iterable_dataset_have_their_own_seeds(forkserver: dict[str, Any]) -> None:
    """Two workers at the same position draw different numbers."""

    class Shared:
        def __iter__(self) -> Iterator[float]:
            infeed.get_worker_info()
            for _ in range(8):
                yield random.random()

    with made(Shared(), batch_size=4, **forkserver) as loader:
        for step, batch in enumerate(loader):
            lineage = loader.explain(step)
            drawn = drawn_under(lineage.seeds, lineage.grain_size, 4)
            assert plain(batch) == drawn
        assert loader.explain(0).seeds != loader.explain(1).seeds


def test_a_closed_loader_can_be_explained_and_replayed() -> None:
    """`replay` starts nothing that would have to be closed."""
    with made(batch_size=8, shuffle=True) as loader:
        batch = next(iter(loader))
    assert loader.explain(0).indices == plain(batch["index"])
    assert_same(loader.replay(0), batch)
