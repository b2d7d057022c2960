"""Signals to infeed's processes from any sender: stopped, continued, killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import infeed
from tests.helpers import (
    Blocking,
    Journal,
    Tree,
    assert_faster_than,
    close_fork_server,
    collected,
    flat,
    fork_server,
    plain,
    wait_until,
    worker_processes,
)
from tests.stopping.watching import GONE_S, Program

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.linux("signals of POSIX and the fork server")]


def test_a_stopped_worker_is_reported_and_continues(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """While it is stopped the time-out names it; afterwards each sample is delivered once, in order."""
    process_engine["timeout"] = 0.3
    starts = Journal(tmp_path / "starts")

    def load(index: int) -> tuple[int, int]:
        if index == 0:  # A single worker would finish before the other has started.
            wait_until(lambda: len(starts.lines()) == 2, "both workers")
        return index, os.getpid()

    seen: set[int] = set()  # Workers that have loaded something.
    got: list[int] = []
    stopped = None
    message = ""
    with infeed.DataLoader(Tree(4000, load), batch_size=2, worker_init_fn=starts.write, **process_engine) as loader:
        batches = iter(loader)
        while len(got) < 4000:
            try:
                indices, pids = plain(next(batches))
            except infeed.LoadTimeoutError as error:
                if stopped is not None:
                    message = str(error)
                    stopped.resume()
                continue
            got += indices
            seen.update(pids)
            if len(seen) == 2 and stopped is None:
                stopped = psutil.Process(seen.pop())
                stopped.suspend()
    assert "timeout=0.3 s exceeded without a batch" in message
    assert re.search(r"worker \d has ", message)  # What each worker does.
    assert got == list(range(4000))


def test_close_does_not_wait_for_a_stopped_worker(process_engine: dict[str, Any]) -> None:
    """It is killed like a worker in user code."""
    loader = infeed.DataLoader(Tree(4000, lambda i: i), batch_size=2, **process_engine)
    next(iter(loader))
    for process in worker_processes():
        process.suspend()
    with assert_faster_than(GONE_S):
        loader.close()
    assert not worker_processes()


def test_close_does_not_wait_for_a_stopped_fork_server() -> None:
    """It is killed with its workers; the next loader starts another."""
    loader = infeed.DataLoader(Tree(4000, lambda i: i), batch_size=2, num_workers=4, timeout=30)
    next(iter(loader))
    server = fork_server()
    server.suspend()
    with assert_faster_than(GONE_S):
        loader.close()
        close_fork_server()
    wait_until(lambda: not worker_processes(), "the end of the workers")
    with infeed.DataLoader(Tree(8, lambda i: i), batch_size=2, num_workers=2, timeout=30) as another:
        assert flat(collected(another)) == list(range(8))


@pytest.mark.parametrize("kind", ["forkserver", "spawn"])
def test_stopped_workers_do_not_outlive_the_users_process(tmp_path: Path, kind: str) -> None:
    """The process gets SIGKILL while its workers are stopped."""
    program = Program(tmp_path, kind, "slow", "loop")
    wait_until(lambda: program.journal.lines().count("blocked") == 2, "two workers in a sample")
    below = psutil.Process(program.pid).children(recursive=True)
    workers = [process for process in below if process.name().startswith("infeed:worker")]
    assert len(workers) == 2
    for process in workers:
        process.suspend()
    wait_until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in workers), "stopped workers")
    ended = program.ended(lambda: os.kill(program.pid, signal.SIGKILL))
    assert (ended.code, ended.err) == (-signal.SIGKILL, "")


def test_all_processes_killed_at_once_are_replaced(tmp_path: Path) -> None:
    """Fork server and workers, in the middle of a sample: the epoch continues, each sample once."""
    dataset = Blocking(40, 10, tmp_path)
    got = []
    with infeed.DataLoader(dataset, batch_size=2, num_workers=2, timeout=0.3) as loader:
        batches = iter(loader)
        while len(got) < 20:
            try:
                got.append(plain(next(batches)))
            except infeed.LoadTimeoutError:
                if dataset.is_blocked and not (tmp_path / "go").exists():
                    dataset.let_go()
                    # Not all children: multiprocessing's resource tracker serves later tests too.
                    for process in (fork_server(), *worker_processes()):
                        process.kill()
    assert flat(got) == list(range(40))
    close_fork_server()
