"""A crew that grows and shrinks while it loads: the batches are the same, and who left leaves nothing behind (P1, P2, P5)."""

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
# has the same batch, and a batch whose workers die too often is given up.
KILL_STEPS = (15, 39)


class Draws:
    """Sample ``i`` is ``i`` and what is drawn for it, from a generator that all kinds of workers have."""

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
    """One epoch, with another number of workers before every few batches, and now and then a worker killed."""
    for step, batch in enumerate(loader):
        yield plain(batch)
        if rng.random() < 0.5:
            engine_of(loader).scaling.aim(rng.randint(1, MOST))
        pids = pids_of(loader)
        if kills and step in KILL_STEPS and pids:
            with suppress(OSError):
                kill_process(rng.choice(pids))


@pytest.mark.parametrize("collate_fn", [None, list], ids=["rows", "collated"])
def test_batches_do_not_depend_on_how_many_workers_come_and_go(pool: dict[str, Any], collate_fn: Any) -> None:
    """Bit for bit those of a loader without workers: every sample once, in order, with the same random numbers."""
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3, "collate_fn": collate_fn}
    alone = infeed.DataLoader(Draws(), **options)
    rng = random.Random(5)
    with closing(infeed.DataLoader(Draws(), **options, **pool)) as loader:
        for _ in range(4):
            assert list(epoch_with_changes(loader, rng)) == collected(alone)


@pytest.mark.process
def test_batches_do_not_depend_on_workers_that_are_killed_while_others_leave() -> None:
    """A death among those that leave, that come and that stay is as any other."""
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3}
    alone = infeed.DataLoader(Draws(), **options)
    rng = random.Random(6)
    with closing(infeed.DataLoader(Draws(), **options, num_workers=MOST, timeout=30)) as loader:
        for _ in range(6):
            assert list(epoch_with_changes(loader, rng, kills=True)) == collected(alone)


def test_who_leaves_is_gone_and_who_comes_works(process_engine: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A smaller pool has fewer processes, and their end is not taken for a death; a larger one has more."""
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


def test_there_is_always_a_worker_and_never_more_than_there_may_be(forkserver: dict[str, Any]) -> None:
    """What is asked for beyond is held to that."""
    with closing(infeed.DataLoader(Tree(10_000, lambda i: i), batch_size=2, **forkserver)) as loader:
        batches = iter(loader)
        next(batches)
        for asked, had in ((0, 1), (100, 2)):
            engine_of(loader).scaling.aim(asked)
            wait_until(lambda had=had: next(batches) is not None and len(pids_of(loader)) == had, f"{had} workers")


def test_a_stream_keeps_its_workers(forkserver: dict[str, Any]) -> None:
    """Its order depends on how many read it."""
    with closing(infeed.DataLoader(Stream(200), batch_size=2, **forkserver)) as loader:
        batches = iter(loader)
        first = plain(next(batches))
        pids = pids_of(loader)
        engine_of(loader).scaling.aim(1)

        assert [first, *map(plain, batches)] == collected(infeed.DataLoader(Stream(200), batch_size=2))
        assert pids


def skip(batches: Iterator[Any]) -> bool:
    """Many at a time: the engine reads messages only when no batch is ready, and looking at processes is slow."""
    return all(next(batches) is not None for _ in range(300))


class StartsSlowly:
    """A ``worker_init_fn`` that does not return in the second worker, if that is started after a file appeared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        if worker and (self.folder / "slow").exists():
            (self.folder / "starting").touch()
            wait_until(lambda: (self.folder / "never").exists(), "nothing", 60)


@pytest.mark.parametrize("ends_by", ["looking", "closing"])
def test_a_worker_that_never_starts_can_be_let_go_of(process_engine: dict[str, Any], tmp_path: Path, ends_by: str) -> None:
    """It is killed after a moment, when the loop asks for a batch or at close, without a wait."""
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


def test_a_pool_that_cannot_grow_goes_on_as_it_is(
    forkserver: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of the system is no reason to lose what works: the log says why there are no more."""

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


def test_threads_that_left_are_gone() -> None:
    """Their number may be used again while the old one is still about to end."""
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
    """A runner whose start takes until it is let."""

    def __init__(self, may_start: threading.Event) -> None:
        self._may_start = may_start

    def start(self) -> None:
        assert self._may_start.wait(30)

    def held_count(self) -> int:
        return 0

    def finish(self) -> None:
        pass


def test_messages_of_a_stopped_thread_are_dropped() -> None:
    """Another has its number by then, and would be taken for ready."""
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
