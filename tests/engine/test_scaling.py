"""Scaling during an epoch: batches do not change, and stopped workers leave nothing behind (P1, P2, P5)."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.errors import WorkerStartError
from infeed.scheduler.messages import WorkerId
from infeed.workers.in_process import ThreadPool
from infeed.workers.process import ProcessPool
from infeed.workers.protocol import Started
from tests.helpers import Stream, Tree, collected, engine_of, kill_process, plain, wait_until, worker_processes

MOST = 4
LENGTH = 240
# Two kills per epoch, none at its end, where the next epoch is already loading: on a busy machine both can hit a worker that
# loads the same batch, and a batch whose workers die too often fails.
KILL_STEPS = (15, 39)


class Draws:
    """Sample ``i`` is ``i`` and a number from a generator that all kinds of workers have."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        rng = infeed.get_rng()
        return index, rng.random(50)


def pids_of(loader: infeed.DataLoader) -> list[int]:
    return [process.pid for process in engine_of(loader).worker_processes()]


@pytest.fixture(params=[pytest.param("thread"), pytest.param("process", marks=pytest.mark.process)])
def pool(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"num_workers": MOST, "worker": request.param, "timeout": 30}


def epoch_with_changes(loader: infeed.DataLoader, rng: random.Random, *, kills: bool = False) -> Iterator[Any]:
    """Loads one epoch, with another number of workers every few batches, and sometimes kills a worker."""
    for step, batch in enumerate(loader):
        yield plain(batch)
        if rng.random() < 0.5:
            engine_of(loader).scaling.aim(rng.randint(1, MOST))
        pids = pids_of(loader)
        if kills and step in KILL_STEPS and pids:
            with suppress(OSError):
                kill_process(rng.choice(pids))


@pytest.mark.parametrize("collate_fn", [None, list], ids=["rows", "collated"])
def test_batches_do_not_depend_on_added_and_removed_workers(pool: dict[str, Any], collate_fn: Any) -> None:
    """Bit-identical to a loader without workers: every sample once, in order, with the same random numbers."""
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3, "collate_fn": collate_fn}
    alone = infeed.DataLoader(Draws(), **options)
    rng = random.Random(5)
    with closing(infeed.DataLoader(Draws(), **options, **pool)) as loader:
        for _ in range(4):
            assert list(epoch_with_changes(loader, rng)) == collected(alone)


@pytest.mark.process
def test_batches_do_not_depend_on_workers_killed_during_scaling() -> None:
    """The death of a starting, running or stopping worker is handled like any other."""
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3}
    alone = infeed.DataLoader(Draws(), **options)
    rng = random.Random(6)
    with closing(infeed.DataLoader(Draws(), **options, num_workers=MOST, timeout=30)) as loader:
        for _ in range(6):
            assert list(epoch_with_changes(loader, rng, kills=True)) == collected(alone)


def test_removed_workers_exit_and_added_workers_load(process_engine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A smaller pool has fewer processes, and their exit does not count as a death; a larger pool has more."""
    with (
        caplog.at_level(logging.DEBUG, "infeed"),
        closing(infeed.DataLoader(Tree(10_000, lambda i: i), batch_size=2, **process_engine)) as loader,
    ):
        batches = iter(loader)

        def has(count: int) -> bool:
            next(batches)
            return len(pids_of(loader)) == count == len(worker_processes())

        wait_until(lambda: has(2), "two workers")
        engine_of(loader).scaling.aim(1)
        wait_until(lambda: has(1), "one worker")
        engine_of(loader).scaling.aim(2)
        wait_until(lambda: has(2), "two workers again")
    assert "kill" not in caplog.text
    assert "died" not in caplog.text


def test_the_number_of_workers_stays_within_its_limits(forkserver: dict[str, Any]) -> None:
    """Requests beyond the limits are clamped."""
    with closing(infeed.DataLoader(Tree(10_000, lambda i: i), batch_size=2, **forkserver)) as loader:
        batches = iter(loader)
        next(batches)
        for asked, had in ((0, 1), (100, 2)):
            engine_of(loader).scaling.aim(asked)
            wait_until(lambda had=had: next(batches) is not None and len(pids_of(loader)) == had, f"{had} workers")


def test_an_iterable_dataset_keeps_its_workers(forkserver: dict[str, Any]) -> None:
    """Its order depends on the number of workers."""
    with closing(infeed.DataLoader(Stream(200), batch_size=2, **forkserver)) as loader:
        batches = iter(loader)
        first = plain(next(batches))
        pids = pids_of(loader)
        engine_of(loader).scaling.aim(1)

        assert [first, *map(plain, batches)] == collected(infeed.DataLoader(Stream(200), batch_size=2))
        assert pids


def skip(batches: Iterator[Any]) -> bool:
    """Skips many batches at a time: the engine reads messages only when no batch is ready, and listing processes is slow."""
    return all(next(batches) is not None for _ in range(300))


class StartsSlowly:
    """A ``worker_init_fn`` that blocks in the second worker, if it starts after a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        if worker and (self.folder / "slow").exists():
            (self.folder / "starting").touch()
            wait_until(lambda: (self.folder / "never").exists(), "nothing", 60)


@pytest.mark.parametrize("ends_by", ["looking", "closing"])
def test_a_worker_that_never_starts_can_be_removed(process_engine: dict[str, Any], tmp_path: Path, ends_by: str) -> None:
    """It is killed after a moment, when the training loop requests a batch or at close, without a wait."""
    options: dict[str, Any] = {"batch_size": 2, "worker_init_fn": StartsSlowly(tmp_path), **process_engine}
    with closing(infeed.DataLoader(Tree(100_000, lambda i: i), **options)) as loader:
        batches = iter(loader)
        next(batches)
        engine_of(loader).scaling.aim(1)
        wait_until(lambda: skip(batches) and len(worker_processes()) == 1, "one worker")
        (tmp_path / "slow").touch()
        engine_of(loader).scaling.aim(2)
        next(batches)
        wait_until((tmp_path / "starting").exists, "a worker that is starting")
        engine_of(loader).scaling.aim(1)
        wait_until(lambda: next(batches) is not None and len(pids_of(loader)) == 1, "one worker again")
        if ends_by == "looking":
            wait_until(lambda: skip(batches) and len(worker_processes()) == 1, "its end")
    assert not worker_processes()


def test_a_pool_that_cannot_grow_keeps_its_workers(
    forkserver: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system's limit prevents more workers, the existing ones continue and the log gives the reason."""

    def refuse(pool: ProcessPool, worker: WorkerId) -> None:
        raise WorkerStartError("no processes left")

    with closing(infeed.DataLoader(Tree(10_000, lambda i: i), batch_size=2, **forkserver)) as loader:
        batches = iter(loader)
        next(batches)
        engine = engine_of(loader)
        engine.scaling.aim(1)
        wait_until(lambda: next(batches) is not None and len(pids_of(loader)) == 1, "one worker")
        monkeypatch.setattr(ProcessPool, "start", refuse)
        engine.scaling.aim(2)

        assert plain(next(batches))
        assert len(pids_of(loader)) == 1
        assert "staying at 1 worker: " in caplog.text


def test_removed_threads_end() -> None:
    """Their number may be used again while the old thread is still ending."""
    with closing(infeed.DataLoader(Tree(10_000, lambda i: i), batch_size=2, num_workers=MOST, worker="thread")) as loader:
        batches = iter(loader)
        next(batches)
        for count in (1, 3, 2, MOST, 1):
            engine_of(loader).scaling.aim(count)
            next(batches)

        def count_threads() -> int:
            next(batches)
            return sum(thread.name.startswith("infeed:worker") for thread in threading.enumerate())

        wait_until(lambda: count_threads() == 1, "one thread")


class SlowStart:
    """A runner whose start blocks until it is released."""

    def __init__(self, may_start: threading.Event) -> None:
        self._may_start = may_start

    def start(self) -> None:
        assert self._may_start.wait(30)

    def held_count(self) -> int:
        return 0

    def finish(self) -> None:
        pass


def test_messages_of_a_stopped_thread_are_dropped() -> None:
    """The number belongs to another thread by then, which would look ready."""
    first, second = threading.Event(), threading.Event()
    gates = [first, second]
    pool = ThreadPool(lambda worker, recalls: SlowStart(gates.pop(0)))  # type: ignore[arg-type, return-value]
    with closing(pool):
        pool.start(WorkerId(0))
        wait_until(lambda: gates == [second], "the first thread at its start")
        pool.stop(WorkerId(0))
        pool.start(WorkerId(0))
        first.set()
        wait_until(lambda: not pool._news.empty(), "what the first thread has to say")
        assert pool.receive(0) == []
        second.set()
        assert pool.receive(30) == [(WorkerId(0), Started())]
