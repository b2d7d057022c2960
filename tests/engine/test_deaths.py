"""Workers are killed: each sample is delivered once and in order, or the error names the sample that kills (P1, P4)."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.testing import CrashingDataset
from infeed.workers.process_tools import memory_use
from tests.helpers import (
    KILLED_TEXT,
    Blocking,
    Journal,
    Pids,
    Tree,
    assert_faster_than,
    close_fork_server,
    collected,
    flat,
    fork_server,
    kill_process,
    plain,
    wait_until,
)
from tests.helpers import worker_processes as live_workers

pytestmark = pytest.mark.process


# With several workers, another may load the dead worker's samples before the death is noticed.
ALONE: dict[str, Any] = {"num_workers": 1}


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("options", [{}, {"collate_fn": list}, {"batch_size": None}], ids=["rows", "collated", "single"])
def test_a_worker_that_dies_once_is_replaced(
    process_engine: dict[str, Any], tmp_path: Path, how: Any, options: dict[str, Any]
) -> None:
    """It is killed while it loads a sample: another worker loads the sample again, and every sample is delivered once, in
    order.
    """
    dataset = CrashingDataset(40, [13], tmp_path / "deaths", how=how)
    with infeed.DataLoader(dataset, **{"batch_size": 4, **options}, **process_engine) as loader:
        for _ in range(2):
            got = collected(loader)
            assert (flat(got) if "batch_size" not in options else got) == list(range(40))
    assert dataset.deaths == 1


def test_a_death_is_logged_with_worker_and_cause(
    process_engine: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = CrashingDataset(40, [13], tmp_path / "deaths")
    with infeed.DataLoader(dataset, 4, **{**process_engine, **ALONE}) as loader:
        assert flat(collected(loader)) == list(range(40))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("infeed", "WARNING")
    how = rf"(was killed by|exited with) {KILLED_TEXT}"
    assert re.fullmatch(
        rf"worker \d \(pid \d+\) {how}; it was assigned \d+ samples?: indices .*; infeed replaces it", record.getMessage()
    )


def test_many_deaths_are_logged_in_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first deaths one by one, later ones now and then with their number."""
    monkeypatch.setattr("infeed.engine.faults.LOGGED_DEATHS", 2)
    monkeypatch.setattr("infeed.engine.faults.LOGGED_EVERY", 4)
    dataset = CrashingDataset(200, range(5, 200, 20), tmp_path / "deaths")
    with infeed.DataLoader(dataset, 4, **ALONE, timeout=60) as loader:
        assert flat(collected(loader)) == list(range(200))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 4
    assert [text.partition(" workers died within a minute; last death: worker ")[0] for text in said[2:]] == ["4", "8"]


def test_a_log_handler_that_raises_does_not_stop_loading(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """Its exception interrupts the engine while it handles messages of workers."""

    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("no warnings here")

    log, handler = logging.getLogger("infeed"), Strict()
    log.addHandler(handler)
    try:
        with infeed.DataLoader(CrashingDataset(40, [13], tmp_path / "deaths"), 4, **{**process_engine, **ALONE}) as loader:
            assert flat(collected(loader)) == list(range(40))
    finally:
        log.removeHandler(handler)


@pytest.mark.linux("needs os.fork")
def test_a_death_is_noticed_if_a_child_of_the_worker_lives(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """The child inherits all descriptors of its parent except the pipe whose end signals the death."""
    (tmp_path / "stay").touch()

    def load(index: int) -> int:
        if index == 5 and not (tmp_path / "forked").exists():
            (tmp_path / "forked").touch()
            if not os.fork():
                while (tmp_path / "stay").exists():
                    time.sleep(0.01)
                os._exit(0)
            kill_process(os.getpid())
        return index

    with infeed.DataLoader(Tree(12, load), 4, **{**process_engine, **ALONE}) as loader:
        try:
            assert flat(collected(loader)) == list(range(12))
        finally:
            (tmp_path / "stay").unlink()


def test_a_death_is_noticed_although_a_program_that_the_worker_started_runs(
    process_engine: dict[str, Any], tmp_path: Path
) -> None:
    """A program inherits all inheritable descriptors or handles if user code asks for it; the pipe's are not among them."""
    (tmp_path / "stay").touch()
    stay = "import os, sys, time\nwhile os.path.exists(sys.argv[1]): time.sleep(0.05)"

    def load(index: int) -> int:
        if index == 5 and not (tmp_path / "started").exists():
            (tmp_path / "started").touch()
            subprocess.Popen([sys.executable, "-S", "-c", stay, str(tmp_path / "stay")], close_fds=False)
            kill_process(os.getpid())
        return index

    with infeed.DataLoader(Tree(12, load), 4, **{**process_engine, **ALONE}) as loader:
        try:
            assert flat(collected(loader)) == list(range(12))
        finally:
            (tmp_path / "stay").unlink()


class Piped:
    """Holds one end of a pipe. Each sample tells whether programs that its process starts could inherit that end."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bool:
        return is_inheritable(self.end.fileno())


def is_inheritable(fd: int) -> bool:
    if sys.platform == "win32":
        return os.get_handle_inheritable(fd)
    return os.get_inheritable(fd)


def test_other_programs_inherit_no_pipe_of_the_dataset(process_engine: dict[str, Any]) -> None:
    """Neither those of the main process nor those of a worker: its reader would wait for the end of all of them."""
    reader, end = multiprocessing.Pipe(duplex=False)
    with reader, end, infeed.DataLoader(Piped(end), 4, **process_engine) as loader:
        assert collected(loader) == [[False] * 4]
        assert not is_inheritable(end.fileno())


def test_a_worker_killed_for_its_sample_is_reported_with_that_sample(
    forkserver: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def load(index: int) -> int:
        if index == 5:
            threading.Event().wait(60)
        return index

    with (
        caplog.at_level("INFO", "infeed"),
        infeed.DataLoader(Tree(12, load), 4, sample_timeout=0.5, on_error="skip", **{**forkserver, **ALONE}) as loader,
    ):
        assert len(flat(collected(loader))) == 11
    assert {record.levelname for record in caplog.records if record.getMessage().startswith("worker ")} == {"INFO"}


def test_many_deaths_lose_no_sample(tmp_path: Path) -> None:
    """Different samples kill different workers repeatedly; the epoch is as without deaths."""
    dataset = CrashingDataset(200, range(5, 200, 20), tmp_path / "deaths")
    with infeed.DataLoader(dataset, batch_size=4, num_workers=3, shuffle=True, seed=6, timeout=60) as loader:
        got = collected(loader)
    assert got == collected(infeed.DataLoader(range(200), batch_size=4, shuffle=True, seed=6))
    assert dataset.deaths == 10


def test_random_draws_are_the_same_after_a_death(tmp_path: Path) -> None:
    """A grain that is loaded again draws the same numbers (P2)."""
    import random

    class Drawing(CrashingDataset):
        def __getitem__(self, index: int) -> float:  # type: ignore[override]  # a sample of another kind
            return super().__getitem__(index) + random.random() / 2

    deadly = Drawing(40, [7, 21], tmp_path / "deaths")
    harmless = Drawing(40, [], tmp_path / "none")
    with infeed.DataLoader(deadly, batch_size=8, num_workers=3, seed=1, timeout=60) as loader:
        got = collected(loader)
    assert got == collected(infeed.DataLoader(harmless, batch_size=8, seed=1))
    assert deadly.deaths == 2


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_sample_that_always_kills_is_named(process_engine: dict[str, Any], tmp_path: Path, how: Any) -> None:
    """The batch fails after some tries with an error that has the index and how the worker died; the rest is delivered."""
    dataset = CrashingDataset(24, [9], tmp_path / "deaths", times=None, how=how)
    got: list[Any] = []
    with infeed.DataLoader(dataset, batch_size=4, **process_engine) as loader:
        batches = iter(loader)
        with assert_faster_than(20):
            while len(got) < 6:
                try:
                    got.append(plain(next(batches)))
                except infeed.WorkerDiedError as error:
                    got.append("\n".join([str(error), *error.__notes__]))
        assert list(batches) == []
    assert [part for part in got if isinstance(part, list)] == [[i, i + 1, i + 2, i + 3] for i in (0, 4, 12, 16, 20)]
    text = got[2]
    assert "index=9 (position 9 of epoch 0, worker" in text
    assert re.search(r"it was assigned \d samples?: indices \[[^]]*9[],]", text)
    # The stand-in for Windows cannot tell.
    assert ("its memory at the last measurement" in text) == bool(memory_use().resident_bytes)
    assert re.search(KILLED_TEXT if how == "kill" else "exited with code 86", text)
    assert "num_workers=0" in text


def test_all_workers_killed_between_epochs_are_replaced(process_engine: dict[str, Any]) -> None:
    """They die while no epoch is active: the next epoch starts with new workers."""
    with infeed.DataLoader(Pids(16), batch_size=2, **process_engine) as loader:
        first = set(flat(collected(loader)))
        victims = live_workers()
        assert first <= {process.pid for process in victims}
        for process in victims:
            kill_process(process.pid)
        second = flat(collected(loader))
        assert len(second) == 16
        for _ in range(3):
            third = flat(collected(loader))
        assert first.isdisjoint(third)


def test_all_workers_killed_in_an_epoch_are_replaced(process_engine: dict[str, Any]) -> None:
    """They die with batches in flight: each sample is still delivered once."""
    with infeed.DataLoader(Tree(400, lambda i: i), batch_size=2, **process_engine) as loader:
        batches = iter(loader)
        got = [plain(next(batches)) for _ in range(20)]
        for process in live_workers():
            kill_process(process.pid)
        got += collected(batches)
    assert flat(got) == list(range(400))


def test_a_batch_that_is_kept_survives_the_death_of_its_worker(process_engine: dict[str, Any]) -> None:
    """A delivered batch stays valid, whatever dies (P3)."""
    with infeed.DataLoader(Tree(100, lambda i: np.full(1000, i)), batch_size=2, **process_engine) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(5)]
        for process in live_workers():
            kill_process(process.pid)
        rest = [batch[:, 0].tolist() for batch in batches]
    assert rest == [[2 * i, 2 * i + 1] for i in range(5, 50)]
    for number, batch in enumerate(kept):
        assert (batch[0] == 2 * number).all()
        assert (batch[1] == 2 * number + 1).all()


@pytest.mark.linux("is about the fork server")
def test_the_fork_server_killed_between_loaders_is_replaced() -> None:
    """The next loader starts another fork server."""
    for _ in range(2):
        with infeed.DataLoader(Tree(8, lambda i: i), batch_size=4, num_workers=2, timeout=30) as loader:
            assert flat(collected(loader)) == list(range(8))
        kill_process(fork_server().pid)
    close_fork_server()


@pytest.mark.linux("is about the fork server")
def test_the_fork_server_killed_in_an_epoch_is_replaced() -> None:
    """Its workers die with it; new ones come from a new server, and each sample is delivered once."""
    # More than is loaded ahead: otherwise no worker is needed, and none is started.
    with infeed.DataLoader(Tree(4000, lambda i: i), batch_size=2, num_workers=2, timeout=30) as loader:
        for _ in range(3):
            batches = iter(loader)
            got = [plain(next(batches)) for _ in range(20)]
            kill_process(fork_server().pid)
            got += collected(batches)
            assert flat(got) == list(range(4000))
    close_fork_server()


@pytest.mark.linux("is about the fork server")
def test_the_fork_server_killed_while_all_workers_load_one_batch_is_replaced(tmp_path: Path) -> None:
    """Six workers that load the first batch die with the server: that is one failure, not a batch that kills six times."""
    journal = Journal(tmp_path / "begun")

    def load(index: int) -> int:
        journal.write(index)
        wait_until((tmp_path / "go").exists, "the test's permission to go on")
        return index

    def kill_server() -> None:
        wait_until(lambda: len(journal.lines()) >= 6, "six workers at a sample each")
        kill_process(fork_server().pid)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_server)
    killer.start()
    with infeed.DataLoader(Tree(12, load), batch_size=6, num_workers=6, grain_size=1, timeout=30) as loader:
        assert flat(collected(loader)) == list(range(12))
    killer.join()
    close_fork_server()


@pytest.mark.linux("is about the fork server")
@pytest.mark.parametrize("kills", [3, 100])
def test_the_fork_server_killed_repeatedly_while_a_worker_starts(
    forkserver: dict[str, Any], kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new server replaces it each time, but not forever: repeated deaths are an error."""
    from infeed.workers.forkserver import ForkServer

    real = ForkServer.fork
    killed: list[int] = []

    def fork(self: ForkServer, fds: list[int]) -> int:
        if len(killed) < kills:
            killed.append(self.pid)
            kill_process(self.pid)
            wait_until(lambda: not self.is_alive, "its end")
        return real(self, fds)

    monkeypatch.setattr(ForkServer, "fork", fork)
    with infeed.DataLoader(range(20), 2, **forkserver) as loader:
        if kills < 100:
            assert flat(collected(loader)) == list(range(20))
        else:
            with pytest.raises(infeed.WorkerStartError):
                collected(loader)
    assert len(set(killed)) == len(killed) < 10
    close_fork_server()


def test_a_collate_fn_that_kills_is_not_blamed_on_a_sample(forkserver: dict[str, Any]) -> None:
    """The batch fails; none of its samples counts as bad."""

    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            os._exit(3)
        return samples

    loader = infeed.DataLoader(range(12), batch_size=4, collate_fn=collate, on_error="skip", **forkserver)
    with loader:
        batches = iter(loader)
        assert plain(next(batches)) == [0, 1, 2, 3]
        with pytest.raises(infeed.WorkerDiedError, match="while loading the batch at position 4"):
            next(batches)
        assert plain(next(batches)) == [8, 9, 10, 11]
        assert loader.bad_samples == []


@pytest.mark.linux("is about the fork server")
def test_close_is_quiet_after_the_fork_server_of_an_idle_loader_was_killed() -> None:
    """close() of a loader whose workers are gone is quick and logs nothing."""
    loader = infeed.DataLoader(Tree(8, lambda i: i), batch_size=4, num_workers=2, timeout=30)
    collected(loader)
    kill_process(fork_server().pid)
    with assert_faster_than(5):
        loader.close()
    close_fork_server()


def test_workers_that_always_die_at_start_are_an_error_soon(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """After a few tries an error says how the last worker died; processes are not started forever."""
    journal = Journal(tmp_path / "starts")

    def die(number: int) -> None:
        journal.write(number)
        os._exit(3)

    loader = infeed.DataLoader(range(100), worker_init_fn=die, **process_engine)
    with loader, assert_faster_than(60), pytest.raises(infeed.WorkerDiedError, match="exited with code 3"):
        list(loader)
    assert 2 <= len(journal.lines()) <= 12


def test_ready_batches_are_delivered_while_idle_workers_are_killed(
    forkserver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more deaths than the limit: nothing was lost, and the epoch continues when the kills end."""
    monkeypatch.setattr("infeed.engine.engine.POLL_NS", 0)  # As if each step took long enough.
    journal = Journal(tmp_path / "loaded")

    def load(index: int) -> int:
        journal.write(index)
        return index

    with infeed.DataLoader(Tree(40, load), 1, prefetch=20, **{**forkserver, **ALONE}) as loader:
        batches = iter(loader)
        got = [plain(next(batches))]
        wait_until(lambda: len(journal.lines()) >= 16, "batches that are ready")
        for _ in range(10):
            for process in live_workers():
                kill_process(process.pid)
            wait_until(lambda: not live_workers(), "the end of the worker")
            got.append(plain(next(batches)))
        got += map(plain, batches)
    assert flat(got) == list(range(40))


def test_workers_that_cannot_start_any_more_fail_the_epoch_after_its_ready_batches(
    forkserver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is about workers, not about a closed loader."""
    monkeypatch.setattr("infeed.engine.engine.POLL_NS", 0)  # As if each step took long enough.
    journal = Journal(tmp_path / "loaded")

    def load(index: int) -> int:
        journal.write(index)
        return index

    def die(worker: int) -> None:
        if (tmp_path / "no more").exists():
            os._exit(3)

    options: dict[str, Any] = {"prefetch": 8, "worker_init_fn": die, **forkserver, **ALONE}
    with infeed.DataLoader(Tree(40, load), 1, **options) as loader:
        batches = iter(loader)
        got = [plain(next(batches))]
        wait_until(lambda: len(journal.lines()) >= 6, "batches that are ready")
        (tmp_path / "no more").touch()
        for process in live_workers():
            kill_process(process.pid)
        with pytest.raises(infeed.WorkerDiedError, match="exited with code 3"):
            got.extend(map(plain, batches))
        assert len(got) >= 6
        assert flat(got) == list(range(len(got)))
        assert loader.state_dict()["step"] == len(got)


def test_a_hanging_worker_that_is_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    """Users may kill a worker after a time-out: the epoch continues, and each sample is delivered once."""
    dataset = Blocking(16, 0, tmp_path)
    got: list[Any] = []
    with infeed.DataLoader(dataset, batch_size=1, num_workers=2, timeout=0.5) as loader:
        batches = iter(loader)
        for _ in range(100):
            try:
                got += plain(next(batches))
            except StopIteration:
                break
            except infeed.LoadTimeoutError:
                if dataset.is_blocked and not dataset.may_go:
                    dataset.let_go()
                    for process in live_workers():
                        kill_process(process.pid)
    assert got == list(range(16))


def test_a_crash_in_native_code_is_a_death_like_any_other(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """A crash in a library ends the worker, not the user's process; the error names the signal."""

    def load(index: int) -> int:
        if index == 3:
            faulthandler._read_null()  # type: ignore[attr-defined]
        return index

    loader = infeed.DataLoader(Tree(4, load), batch_size=4, **process_engine)
    with loader, pytest.raises(infeed.WorkerDiedError, match=r"SIGSEGV|access violation"):
        next(iter(loader))


def test_a_worker_killed_while_it_starts_is_replaced(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """It dies once, before it has loaded anything: the loader continues."""
    journal = Journal(tmp_path / "starts")

    def die_once(number: int) -> None:
        journal.write(os.getpid())
        if journal.lines()[0] == str(os.getpid()):
            kill_process(os.getpid())

    with infeed.DataLoader(range(20), batch_size=2, worker_init_fn=die_once, **process_engine) as loader:
        assert flat(collected(loader)) == list(range(20))
        wait_until(lambda: len(journal.lines()) >= 3, "a third start")


@pytest.mark.parametrize("in_order", [True, False])
def test_deaths_with_many_workers_and_both_orders(tmp_path: Path, in_order: bool) -> None:
    """Every sample is delivered once with six workers, in order and out of order (P1)."""
    dataset = CrashingDataset(120, [3, 50, 90], tmp_path / "deaths")
    with infeed.DataLoader(dataset, batch_size=3, num_workers=6, in_order=in_order, timeout=60) as loader:
        got = flat(collected(loader))
    assert (got if in_order else sorted(got)) == list(range(120))
    assert dataset.deaths == 3
