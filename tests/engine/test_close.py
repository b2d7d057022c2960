"""Closing a loader explicitly, twice, in mid-epoch, from another thread or by garbage collection leaves nothing (P5)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import infeed
from infeed.testing import SlowDataset
from infeed.workers.launcher import IDLE_WORKERS
from tests.helpers import Blocking, Tree, assert_faster_than, collected, plain, wait_until, worker_processes

# close() lets workers finish for 0.5 s and threads for 1 s; the rest is a reserve for a busy machine.
CLOSE_S = 5.0


def infeed_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("infeed")]


def assert_nothing_runs() -> None:
    IDLE_WORKERS.clear()  # Spawned workers stay idle for a minute, for the next loader.
    wait_until(lambda: not worker_processes() and not infeed_threads(), "the end of all workers", 10)


def test_a_with_block_ends_the_workers(every_engine: dict[str, Any]) -> None:
    """After the block there is no worker, whether or not the epoch was finished."""
    with infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **every_engine) as loader:
        next(iter(loader))
    assert not worker_processes()
    assert not infeed_threads()


def test_a_closed_loader_raises(engine: dict[str, Any]) -> None:
    """Iterating it, or continuing any of its iterators, raises LoaderClosedError."""
    loader = infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **engine)
    unused, begun = iter(loader), iter(loader)
    next(begun)
    loader.close()
    for batches in (begun, unused):
        with pytest.raises(infeed.LoaderClosedError, match="closed"):
            next(batches)
    with pytest.raises(infeed.LoaderClosedError, match="this loader is closed"):
        iter(loader)


def test_close_may_be_called_again_and_before_any_use(engine: dict[str, Any]) -> None:
    """close() is idempotent and needs no prior iteration."""
    loader = infeed.DataLoader(Tree(20, lambda i: i), **engine)
    loader.close()
    loader.close()
    used = infeed.DataLoader(Tree(20, lambda i: i), **engine)
    collected(used)
    for _ in range(3):
        used.close()


def test_an_exhausted_iterator_stays_exhausted_after_close(engine: dict[str, Any]) -> None:
    """Closing does not turn a finished epoch into an error."""
    loader = infeed.DataLoader(Tree(4, lambda i: i), **engine)
    batches = iter(loader)
    assert len(list(batches)) == 4
    loader.close()
    assert next(batches, "end") == "end"


def drive_until_blocked(loader: infeed.DataLoader, dataset: Blocking) -> Iterator[Any]:
    """Requests the first batch, which does not arrive, until a worker is loading it."""
    batches = iter(loader)

    def is_blocked() -> bool:
        with pytest.raises(infeed.LoadTimeoutError):
            next(batches)
        return dataset.is_blocked

    wait_until(is_blocked, "a worker at the blocking sample")
    return batches


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.process
def test_close_during_a_slow_sample_is_quick_and_leaves_no_process(workers: int, tmp_path: Path) -> None:
    """close() kills a worker that runs user code instead of waiting for it."""
    dataset = Blocking(8, 0, tmp_path)
    loader = infeed.DataLoader(dataset, batch_size=1, num_workers=workers, timeout=0.2)
    batches = drive_until_blocked(loader, dataset)
    with assert_faster_than(CLOSE_S):
        loader.close()
    with pytest.raises(infeed.LoaderClosedError):
        next(batches)
    assert not worker_processes()


def test_close_during_a_slow_sample_of_a_thread_is_quick(tmp_path: Path) -> None:
    """A thread in user code cannot be killed: close() does not wait for it, and it ends when its sample returns."""
    dataset = Blocking(8, 0, tmp_path)
    loader = infeed.DataLoader(dataset, batch_size=1, num_workers=2, worker="thread", timeout=0.2)
    batches = drive_until_blocked(loader, dataset)
    with assert_faster_than(CLOSE_S):
        loader.close()
    with pytest.raises(infeed.LoaderClosedError):
        next(batches)
    dataset.let_go()
    assert_nothing_runs()


def wait_for_a_batch(loader: infeed.DataLoader, errors: list[BaseException]) -> None:
    """Records the exception that ends the wait."""
    try:
        next(iter(loader))
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])
def test_close_from_another_thread_ends_the_wait(kind: Any, tmp_path: Path) -> None:
    """A wait for a batch raises LoaderClosedError (P4), every time."""
    for turn in range(2):
        folder = tmp_path / str(turn)
        folder.mkdir()
        dataset = Blocking(4, 0, folder)
        loader = infeed.DataLoader(dataset, batch_size=1, num_workers=2, worker=kind, timeout=30)
        errors: list[BaseException] = []

        waiting = threading.Thread(target=wait_for_a_batch, args=(loader, errors))
        waiting.start()
        dataset.wait_blocked()
        with assert_faster_than(CLOSE_S):
            loader.close()
            waiting.join()
        dataset.let_go()
        assert [type(error) for error in errors] == [infeed.LoaderClosedError], errors
        del errors[:]
    assert_nothing_runs()


def test_an_unreferenced_loader_ends_its_workers(every_engine: dict[str, Any]) -> None:
    """Without close(), workers end when the loader and its iterators are garbage collected."""
    loader = infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **every_engine)
    batches = iter(loader)
    kept = next(batches)
    del loader, batches
    gc.collect()
    assert_nothing_runs()
    assert plain(kept) == [0, 1]


def test_an_iterator_keeps_its_loader_alive(engine: dict[str, Any]) -> None:
    """A loader whose only reference is its iterator keeps running."""
    batches = iter(infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **engine))
    gc.collect()
    assert len(list(batches)) == 10
    del batches
    assert_nothing_runs()


def test_loaders_in_reference_cycles_are_collected(engine: dict[str, Any]) -> None:
    """A loader in an object with a cycle (a trainer) ends when the garbage collector finds it."""

    class Trainer:
        def __init__(self) -> None:
            self.loader = infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **engine)
            self.batches = iter(self.loader)
            self.me = self

    trainer = Trainer()
    next(trainer.batches)
    del trainer
    gc.collect()
    assert_nothing_runs()


def test_an_exception_in_the_training_loop_leaves_no_worker(engine: dict[str, Any]) -> None:
    """After the exception and its traceback are gone, no worker is left."""

    def train() -> None:
        for _ in infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **engine):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
    gc.collect()
    assert_nothing_runs()


def test_a_loader_is_freed_with_the_error_that_it_raised(light_engine: dict[str, Any]) -> None:
    """The error is in no reference cycle with the loader, so the workers end without the garbage collector."""

    def fail(index: int) -> int:
        raise ArithmeticError(index)

    def use() -> weakref.ref[infeed.DataLoader]:
        loader = infeed.DataLoader(Tree(8, fail), **light_engine)
        try:
            next(iter(loader))
        except ArithmeticError:
            return weakref.ref(loader)
        raise AssertionError("it does not raise")

    gc.collect()
    gc.disable()
    try:
        gone = use()
        wait_until(lambda: gone() is None, "the end of the loader")  # A thread may reference its exception for a moment.
    finally:
        gc.enable()


@pytest.mark.process
def test_many_loaders_in_sequence_leave_nothing_behind(forkserver: dict[str, Any]) -> None:
    """As with a notebook cell that runs repeatedly: each loader ends with its cell."""
    for number in range(12):
        loader = infeed.DataLoader(Tree(8, lambda i: i), batch_size=2, **forkserver)
        for batch in loader:
            assert len(batch) == 2
            if number % 2:
                break
    del loader, batch
    assert_nothing_runs()


@pytest.mark.process
@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_close_while_workers_start_is_quick(method: Literal["auto", "spawn"]) -> None:
    """Workers that are still starting are ended as well."""
    loader = infeed.DataLoader(SlowDataset(100, 0.05), batch_size=1, num_workers=4, start_method=method)
    next(iter(loader))
    with assert_faster_than(CLOSE_S):
        loader.close()
    assert not worker_processes()


def test_close_does_not_affect_other_loaders(engine: dict[str, Any]) -> None:
    """Closing one loader does not affect another that is running."""
    first = infeed.DataLoader(Tree(40, lambda i: i), batch_size=4, **engine)
    second = infeed.DataLoader(Tree(40, lambda i: i), batch_size=4, **engine)
    one, other = iter(first), iter(second)
    next(one)
    next(other)
    first.close()
    assert len(list(other)) == 9
    second.close()


def test_closing_a_generator_ends_its_loader(engine: dict[str, Any]) -> None:
    """generator.close() in the middle of a loop ends the loader with the generator."""

    def batches() -> Iterator[Any]:
        with infeed.DataLoader(Tree(20, lambda i: i), batch_size=2, **engine) as loader:
            yield from loader

    generator = batches()
    next(generator)
    generator.close()
    assert not worker_processes()
    assert not infeed_threads()
