"""Consecutive epochs, abandoned epochs, and several iterations at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import infeed
from tests.helpers import Journal, Pids, Tree, close_fork_server, collected, flat, plain, wait_until, worker_processes

NUMBERS = list(range(40))


def numbers(engine: dict[str, Any], **options: Any) -> infeed.DataLoader:
    return infeed.DataLoader(Tree(40, lambda i: i), **{"batch_size": 4, **options}, **engine)


def test_a_loader_in_a_for_statement_lives_as_long_as_the_loop(engine: dict[str, Any]) -> None:
    """``for batch in DataLoader(...)`` works although nothing else references the loader."""
    got = []
    for batch in infeed.DataLoader(Tree(40, lambda i: i), batch_size=4, **engine):
        got += plain(batch)
    assert got == NUMBERS
    assert plain(next(iter(numbers(engine)))) == [0, 1, 2, 3]


def test_a_loader_can_be_iterated_repeatedly(every_engine: dict[str, Any]) -> None:
    """Each iteration is a whole epoch."""
    with numbers(every_engine) as loader:
        for _ in range(10):
            assert flat(collected(loader)) == NUMBERS


@pytest.mark.process
def test_workers_stay_from_epoch_to_epoch(process_engine: dict[str, Any]) -> None:
    """The same processes load all epochs, also after an abandoned one, so start-up is paid once."""
    seen: set[int] = set()
    with infeed.DataLoader(Pids(40), batch_size=4, **process_engine) as loader:
        for epoch in range(6):
            for batch in loader:
                seen.update(plain(batch))
                if epoch == 3:
                    break
    assert 1 <= len(seen) <= 2


@pytest.mark.process
def test_slow_samples_are_loaded_during_the_first_step_although_a_worker_is_late(
    forkserver: dict[str, Any], tmp_path: Path
) -> None:
    """During a long training step nothing is sent to workers: the tasks that they have suffice."""
    journal = Journal(tmp_path / "journal")

    def come(worker: int) -> None:
        if worker:
            wait_until((tmp_path / "come").exists, "the test's permission to come")

    def load(index: int) -> int:
        time.sleep(0.005)  # A slow sample.
        journal.write(index)
        return index

    with infeed.DataLoader(Tree(20, load), batch_size=1, worker_init_fn=come, **forkserver) as loader:
        iterator = iter(loader)
        next(iterator)
        wait_until(lambda: {"1", "2"} <= set(journal.lines()), "more than one batch of the only worker there is")
        (tmp_path / "come").touch()
        assert flat(map(plain, iterator)) == list(range(1, 20))


def test_workers_receive_tasks_while_the_loop_takes_ready_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that never waits still reads messages of workers, or they would run out of tasks."""
    monkeypatch.setattr("infeed.engine.engine.POLL_NS", 0)  # As if each step took long enough.
    loaded: list[int] = []

    def load(index: int) -> int:
        if index == 30:  # The following batches are ready before it.
            wait_until(lambda: 40 in loaded, "the other worker")
        time.sleep(0.003)  # More than what is sent ahead.
        loaded.append(index)
        return index

    with infeed.DataLoader(Tree(80, load), batch_size=1, worker="thread", num_workers=2, prefetch=16) as loader:
        iterator = iter(loader)
        got = [plain(next(iterator)) for _ in range(31)]
        for taken in range(31, 41):
            wait_until(lambda ahead=taken + 8: len(loaded) >= ahead, "half of what may be in flight, at least")
            got.append(plain(next(iterator)))
    assert flat(got) == list(range(41))


def test_threads_leave_the_gil_to_the_loop_during_an_epoch() -> None:
    """Near its end they load the first samples of the next epoch, and more of it only after the last batch."""
    loaded: list[int] = []

    def load(index: int) -> int:
        loaded.append(index)
        return index

    with infeed.DataLoader(Tree(20, load), 1, worker="thread", num_workers=1, prefetch=40) as loader:
        iterator = iter(loader)
        got = [plain(next(iterator)) for _ in range(20)]
        wait_until(lambda: len(loaded) >= 22, "a beginning of the next epoch")
        assert len(loaded) == 22
        assert next(iterator, None) is None
        wait_until(lambda: len(loaded) > 22, "more of the next epoch")
    assert flat(got) == list(range(20))


@pytest.mark.process
def test_the_next_epoch_is_loaded_between_epochs(process_engine: dict[str, Any], tmp_path: Any) -> None:
    """After the last batch of an epoch, workers start with the first samples of the next."""
    journal = Journal(tmp_path / "journal")

    def load(index: int) -> int:
        journal.write(index)
        return index

    with infeed.DataLoader(Tree(8, load), batch_size=2, **process_engine) as loader:
        assert flat(collected(loader)) == list(range(8))
        wait_until(lambda: journal.lines().count("0") >= 2, "the first sample of the next epoch")
        assert flat(collected(loader)) == list(range(8))


@pytest.mark.process
def test_a_shuffled_next_epoch_is_loaded_ahead_in_its_own_order() -> None:
    """The order of the next epoch equals that without workers."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 8}
    inline = infeed.DataLoader(Tree(20, lambda i: i), **options)
    with infeed.DataLoader(Tree(20, lambda i: i), num_workers=2, timeout=30, **options) as loader:
        for epoch in range(5):
            if epoch == 2:  # Abandons the epoch that was loaded ahead.
                assert plain(next(iter(loader))) == plain(next(iter(inline)))
            else:
                assert collected(loader) == collected(inline)


def test_an_abandoned_epoch_can_be_restarted(engine: dict[str, Any]) -> None:
    """break in the middle, then a whole epoch from the start; many times."""
    with numbers(engine) as loader:
        for leave_after in (1, 3, 9, 1):
            for number, batch in enumerate(loader, start=1):
                assert plain(batch) == NUMBERS[4 * number - 4 : 4 * number]
                if number == leave_after:
                    break
            assert flat(collected(loader)) == NUMBERS


def test_an_exception_in_the_loop_leaves_the_loader_usable(engine: dict[str, Any]) -> None:
    """The exception propagates, and the loader is ready for the next epoch."""
    with numbers(engine) as loader:
        with pytest.raises(ZeroDivisionError):
            any(1 / int(batch[0]) < 0 for batch in loader)
        assert flat(collected(loader)) == NUMBERS


def test_an_exhausted_iterator_stays_exhausted(engine: dict[str, Any]) -> None:
    """`next` keeps raising StopIteration."""
    with numbers(engine) as loader:
        batches = iter(loader)
        assert len(list(batches)) == 10
        assert next(batches, "end") == "end"
        assert next(batches, "end") == "end"


def test_iterating_an_iterator_continues_it(engine: dict[str, Any]) -> None:
    """iter() of an epoch returns itself, as for every iterator."""
    with numbers(engine) as loader:
        batches = iter(loader)
        assert plain(next(batches)) == [0, 1, 2, 3]
        assert flat(collected(batches)) == NUMBERS[4:]


def test_iterations_of_one_loader_can_be_nested(engine: dict[str, Any]) -> None:
    """An inner loop over the same loader is an epoch of its own and does not disturb the outer one."""
    with numbers(engine, batch_size=20) as loader:
        outer = []
        for batch in loader:
            outer += plain(batch)
            assert flat(collected(loader)) == NUMBERS
        assert outer == NUMBERS


def test_a_loader_can_be_zipped_with_itself(engine: dict[str, Any]) -> None:
    """Two iterations in parallel are two epochs."""
    with numbers(engine) as loader:
        for _ in range(2):
            pairs = [(plain(left), plain(right)) for left, right in zip(loader, loader, strict=True)]
            assert flat([left for left, _ in pairs]) == flat([right for _, right in pairs]) == NUMBERS


def test_unused_iterators_start_nothing(engine: dict[str, Any]) -> None:
    """Frameworks call iter() only to check whether it works."""
    with numbers(engine) as loader:
        before = len(worker_processes()), threading.active_count()
        kept = [iter(loader) for _ in range(50)]
        assert (len(worker_processes()), threading.active_count()) == before
        del kept
        assert flat(collected(loader)) == NUMBERS


def test_several_loaders_run_at_once(engine: dict[str, Any]) -> None:
    """Interleaved training and validation loaders deliver their own data."""
    with numbers(engine) as train, infeed.DataLoader(Tree(12, lambda i: -i), batch_size=2, **engine) as valid:
        for batch in train:
            assert flat(collected(valid)) == [-i for i in range(12)]
            if batch[0] >= 8:
                break
        assert flat(collected(train)) == NUMBERS


def test_loaders_can_be_used_in_threads(engine: dict[str, Any]) -> None:
    """Several threads start, use and close one loader each, at the same time."""

    def run(number: int) -> list[Any]:
        with infeed.DataLoader(Tree(20, lambda i: i + number), batch_size=3, **engine) as loader:
            return [flat(collected(loader)) for _ in range(2)]

    with ThreadPoolExecutor(3) as pool:
        for number, got in enumerate(pool.map(run, range(3))):
            assert got == [list(range(number, number + 20))] * 2


def test_threads_can_share_one_iterator(engine: dict[str, Any]) -> None:
    """Each batch is delivered to one of them, none is lost or repeated."""
    with infeed.DataLoader(Tree(200, lambda i: i), batch_size=2, **engine) as loader:
        batches = iter(loader)
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda _: [plain(batch) for batch in batches], range(4)))
    assert sorted(flat([batch for part in parts for batch in part])) == list(range(200))


def test_threads_can_iterate_one_loader_at_once(engine: dict[str, Any]) -> None:
    """Each thread gets an epoch of its own."""
    with numbers(engine) as loader, ThreadPoolExecutor(3) as pool:
        for got in pool.map(lambda _: flat(collected(loader)), range(3)):
            assert got == NUMBERS


def test_a_dropped_generator_over_a_loader_is_collected(engine: dict[str, Any]) -> None:
    """A generator that is suspended in a loop and dropped frees the iterator with it."""

    def forever(loader: infeed.DataLoader) -> Iterator[Any]:
        while True:
            yield from loader

    with numbers(engine) as loader:
        endless = forever(loader)
        got = flat([plain(next(endless)) for _ in range(25)])
        assert got == (NUMBERS * 3)[:100]
        del endless
        assert flat(collected(loader)) == NUMBERS


@pytest.mark.process
@pytest.mark.slow
def test_a_dataset_may_have_its_own_loader_with_workers() -> None:
    """A loader in a worker process starts its own workers, and they end with it."""

    class Nested:
        inner: Any = None

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if self.inner is None:
                self.inner = infeed.DataLoader(Tree(10, lambda i: i), batch_size=5, num_workers=2, timeout=30)
            return int(sum(batch.sum() for batch in self.inner)) + index

    with infeed.DataLoader(Nested(), batch_size=1, num_workers=2, timeout=30) as loader:
        for _ in range(2):
            assert flat(collected(loader)) == [45, 46, 47, 48]


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
def test_a_forked_child_sees_a_closed_iterator_and_the_parent_goes_on(forkserver: dict[str, Any]) -> None:
    """After os.fork() the workers belong to the parent: the child gets an error, and can start an epoch of its own."""
    import os
    import warnings

    with numbers(forkserver) as loader:
        batches = iter(loader)
        assert plain(next(batches)) == [0, 1, 2, 3]
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Users fork processes that have threads.
            child = os.fork()
        if child == 0:
            try:
                try:
                    outcome = plain(next(batches))
                except infeed.LoaderClosedError:
                    outcome = "closed"
                own = flat(collected(loader))
                loader.close()
                os.write(write, f"{outcome} {own == NUMBERS}".encode())
            finally:
                close_fork_server()
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            assert said.read() == "closed True"
        os.waitpid(child, 0)
        assert flat(collected(batches)) == NUMBERS[4:]
