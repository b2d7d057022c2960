"""Hung workers: detected, logged with their stack, and killed if the user requests it (P4)."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.workers import status as stacks
from tests.helpers import Blocking, Tree, assert_faster_than, collected, flat, patient_next, plain, wait_until

# The tasks of one worker fill its pipe.
ALONE: dict[str, Any] = {"num_workers": 1}


def hang_in_native_code(index: int) -> int:
    """Sleeps in C with the GIL held: no Python code of this process runs meanwhile."""
    while index == 3:
        sleep_in_native_code(60)  # A signal ends it early.
    return index


def sleep_in_native_code(seconds: int) -> None:
    if sys.platform == "win32":
        ctypes.PyDLL("kernel32").Sleep(seconds * 1000)
    else:
        ctypes.PyDLL(None).sleep(seconds)


def hang_in_python(index: int) -> int:
    if index == 3:
        threading.Event().wait(60)
    return index


def is_about_sample(text: str) -> bool:
    """Returns whether a warning shows where the sample hangs, not the next epoch or an import before ``__getitem__``."""
    return "of epoch 0" in text and "in __getitem__" in text


@contextmanager
def letting_go(dataset: Blocking, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Releases the blocking sample once it has been logged."""

    def let_go() -> None:
        wait_until(lambda: any(is_about_sample(text) for text in caplog.messages), "the warning")
        dataset.let_go()

    waiter = threading.Thread(target=let_go)
    waiter.start()
    yield
    waiter.join()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_hang_is_logged_with_worker_index_and_stack(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training loop waits, and continues when the sample is loaded after all."""
    dataset = Blocking(8, 2, tmp_path)
    caplog.set_level(logging.WARNING, "infeed")
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "worker": kind, "hang_warning": 0.1, "timeout": 60}
    with infeed.DataLoader(dataset, **options) as loader, letting_go(dataset, caplog):
        assert flat(collected(loader)) == list(range(8))
    text = next(text for text in caplog.messages if is_about_sample(text))
    assert re.match(r"worker \d( \(pid \d+\))? has been loading (index=2|one of index=\[2.*\]) \(position 2 of epoch 0", text)
    assert re.search(r'helpers\.py", line \d+ in __getitem__', text)
    assert "infeed/workers" not in text  # Frames of infeed are always the same.


@pytest.mark.linux("elsewhere the stack of native code cannot be read")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("hang", [hang_in_native_code, hang_in_python])
def test_sample_timeout_kills_the_worker_and_the_error_shows_its_stack(start_method: Any, hang: Any) -> None:
    """Also in native code that holds the GIL."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "sample_timeout": 0.5, "start_method": start_method}
    with assert_faster_than(25), infeed.DataLoader(Tree(12, hang), **options) as loader:
        batches = iter(loader)
        with pytest.raises(infeed.LoadTimeoutError, match=r"sample_timeout=0\.5 s exceeded; worker . was killed") as caught:
            next(batches)
        assert flat(collected(batches)) == list(range(4, 12))
    assert f"in {hang.__name__}" in str(caught.value)
    assert any("index=3 (position 3 of epoch 0, worker" in note for note in caught.value.__notes__)


@pytest.mark.linux("elsewhere the stack of native code cannot be read")
def test_sample_timeout_kills_native_code_that_a_signal_interrupts(forkserver: dict[str, Any]) -> None:
    """The call returns early when its stack is taken: the sample has still exceeded its time."""

    def load(index: int) -> int:
        if index == 3:
            sleep_in_native_code(60)
        return index

    with infeed.DataLoader(Tree(6, load), batch_size=1, sample_timeout=0.5, on_error="skip", **forkserver) as loader:
        with assert_faster_than(25):
            assert flat(collected(loader)) == [0, 1, 2, 4, 5]
        (bad,) = loader.bad_samples
    assert bad.error.startswith("LoadTimeoutError: sample_timeout=0.5 s exceeded")


class Named:
    """Indices are long names, so that a few of them fill a pipe. The fourth sample hangs in native code."""

    names = tuple(f"{number}".zfill(1_000_000) for number in range(6))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> int:
        return hang_in_native_code(int(name[-2:]))


def test_a_worker_that_does_not_read_does_not_block_the_loader(process_engine: dict[str, Any]) -> None:
    """Its tasks fill the pipe while native code holds the GIL: `sample_timeout` and ``close`` still end it."""
    options: dict[str, Any] = {"batch_size": 1, "sampler": Named.names, **process_engine, **ALONE}
    with assert_faster_than(25), infeed.DataLoader(Named(), sample_timeout=0.5, on_error="skip", **options) as loader:
        assert flat(collected(loader)) == [0, 1, 2, 4, 5]
    with infeed.DataLoader(Named(), **{**options, "timeout": 0.5}) as loader:
        batches = iter(loader)
        assert [int(patient_next(batches)[0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(infeed.LoadTimeoutError, match=r"timeout=0\.5"):
            next(batches)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_sample_that_exceeds_its_timeout_is_bad(process_engine: dict[str, Any], on_error: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "seed": 1, "sample_timeout": 0.5, "on_error": on_error}
    with infeed.DataLoader(Tree(12, hang_in_python), **options, **process_engine) as loader:
        got = collected(loader)
        (bad,) = loader.bad_samples
    assert [len(batch) for batch in got] == [3 if on_error == "skip" else 4, 4, 4]
    assert 3 not in flat(got)
    assert bad.error.startswith("LoadTimeoutError: sample_timeout=0.5 s exceeded")


def test_samples_within_the_timeout_are_not_affected(forkserver: dict[str, Any]) -> None:
    """Many samples that together take longer than the timeout."""

    def load(index: int) -> int:
        time.sleep(0.05)
        return index

    with infeed.DataLoader(Tree(40, load), batch_size=20, sample_timeout=0.5, **forkserver) as loader:
        assert flat(collected(loader)) == list(range(40))


def test_a_hanging_collate_fn_is_killed_too(forkserver: dict[str, Any]) -> None:
    """Its limit is that of all samples of the batch together."""

    def collate(samples: list[int]) -> list[int]:
        if 0 in samples:
            threading.Event().wait(60)
        return samples

    with infeed.DataLoader(range(6), batch_size=3, collate_fn=collate, sample_timeout=0.2, **forkserver) as loader:
        batches = iter(loader)
        with assert_faster_than(25), pytest.raises(infeed.LoadTimeoutError, match="sample_timeout"):
            next(batches)
        assert plain(next(batches)) == [3, 4, 5]


def test_a_hanging_iterable_dataset_is_killed_too(forkserver: dict[str, Any]) -> None:
    class Stuck:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            threading.Event().wait(60)

    with infeed.DataLoader(Stuck(), batch_size=2, sample_timeout=0.3, **forkserver) as loader:
        batches = iter(loader)
        assert [plain(next(batches)), plain(next(batches))] == [[0, 1], [2, 3]]
        with assert_faster_than(25), pytest.raises(infeed.LoadTimeoutError, match="sample_timeout"):
            next(batches)


def test_a_worker_that_does_not_start_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """It hangs in worker_init_fn: the log says so, with the stack where it is available."""
    # Windows has no signals, and a worker that is starting does not read its pipe.
    # Elsewhere the first stack may be in an import.
    shown = "in init" if sys.platform != "win32" else "its stack is not available"

    def init(_worker: int) -> None:
        wait_until((tmp_path / "go").exists, "the test's permission to go on")

    def let_go() -> None:
        wait_until(lambda: any(shown in text for text in caplog.messages), "the warning")
        (tmp_path / "go").touch()

    waiter = threading.Thread(target=let_go)
    waiter.start()
    caplog.set_level(logging.WARNING, "infeed")
    with infeed.DataLoader(range(4), num_workers=1, worker_init_fn=init, hang_warning=0.1, timeout=60) as loader:
        assert flat(collected(loader)) == [0, 1, 2, 3]
    waiter.join()
    text = next(text for text in caplog.messages if shown in text)
    assert re.match(r"worker 0 \(pid \d+\) has been starting \(building the dataset, or in worker_init_fn\) for", text)


def test_a_worker_without_signals_is_asked_for_its_stack_through_its_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Windows: the thread that reads the pipe answers."""
    from infeed.workers.status import UNKNOWN, StatusBoard

    real = StatusBoard.doing
    monkeypatch.setattr(StatusBoard, "doing", lambda self, worker: real(self, worker)._replace(stack_fd=UNKNOWN))
    dataset = Blocking(8, 2, tmp_path)
    caplog.set_level(logging.WARNING, "infeed")
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "start_method": "spawn", "hang_warning": 0.1, "timeout": 60}
    with infeed.DataLoader(dataset, **options) as loader, letting_go(dataset, caplog):
        assert flat(collected(loader)) == list(range(8))
    text = next(text for text in caplog.messages if is_about_sample(text))
    assert re.search(r'helpers\.py", line \d+ in __getitem__', text)


class Answering:
    """Every tenth sample blocks until the training loop has the one before it, whose size may exceed all earlier ones."""

    def __init__(self, folder: Path, *, grows: bool) -> None:
        self.folder, self.grows = folder, grows

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> np.ndarray:
        if index and index % 10 == 0:
            wait_until((self.folder / f"{index - 1}").exists, f"sample {index - 1} in the loop", 10)
        return np.full(1000 * index if self.grows and index % 10 == 9 else 1, index)

    def got(self, index: int) -> None:
        if index % 10 == 9:
            (self.folder / f"{index}").touch()


class AnsweringStream:
    """The same as an iterable dataset."""

    def __init__(self, dataset: Answering) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.dataset.__getitem__, range(len(self.dataset)))


@pytest.mark.parametrize(
    ("kind", "is_stream", "grows"),
    [*product(["thread", "auto"], [False, True], [False, True]), ("spawn", True, True), ("spawn", False, False)],
)
def test_loaded_samples_are_delivered_while_their_worker_loads_a_slow_one(
    kind: str, is_stream: bool, grows: bool, tmp_path: Path
) -> None:
    """Also if they need a larger slot. An iterable dataset may wait for what the training loop does with them."""
    answering = Answering(tmp_path, grows=grows)
    dataset: Any = AnsweringStream(answering) if is_stream else answering
    options: dict[str, Any] = {"worker": "thread"} if kind == "thread" else {"start_method": kind}
    with infeed.DataLoader(dataset, batch_size=1, num_workers=1, timeout=60, **options) as loader:
        got = []
        for batch in loader:
            got.append(int(batch[0, 0]))
            answering.got(got[-1])
        assert got == list(range(200))


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])
def test_a_slow_first_batch_does_not_delay_the_others(kind: Any, tmp_path: Path) -> None:
    """With in_order=False they are delivered, and the slow one when it is loaded."""
    dataset = Blocking(20, 0, tmp_path)
    with infeed.DataLoader(dataset, batch_size=1, num_workers=2, worker=kind, in_order=False, timeout=60) as loader:
        batches = iter(loader)
        got = plain(next(batches))
        assert got != [0]
        dataset.let_go()
        assert sorted(got + flat([plain(batch) for batch in batches])) == list(range(20))


def test_later_batches_are_loaded_during_a_slow_first_batch(tmp_path: Path) -> None:
    """In order, as many as there are slots."""
    loaded: list[int] = []

    def load(index: int) -> int:
        if index == 0:
            wait_until(lambda: len(loaded) >= 5, "five others")
        loaded.append(index)
        return index

    with infeed.DataLoader(Tree(20, load), batch_size=1, num_workers=2, worker="thread", timeout=60) as loader:
        assert flat(collected(loader)) == list(range(20))


def test_hang_warning_can_be_disabled(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    dataset = Blocking(4, 2, tmp_path)
    caplog.set_level(logging.WARNING, "infeed")
    with infeed.DataLoader(dataset, batch_size=2, num_workers=1, hang_warning=0, timeout=0.5) as loader:
        batches = iter(loader)
        patient_next(batches)
        with pytest.raises(infeed.LoadTimeoutError):
            next(batches)
        dataset.let_go()
    assert caplog.messages == []


@pytest.mark.linux("stacks are asked for by a signal")
def test_no_signal_is_sent_to_a_process_without_a_handler() -> None:
    """The process id may belong to another process by now, which the signal would kill."""
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert stacks.take(stranger.pid, 0) is None
        assert stranger.poll() is None
        assert stacks.take(stranger.pid, 99) is None
        stranger.kill()


def test_a_sample_that_returns_while_its_stack_is_taken_is_not_blamed_on_the_next(forkserver: dict[str, Any]) -> None:
    """Slightly over the limit: it is loaded by the time its worker would be killed, so no sample is blamed."""

    def load(index: int) -> int:
        time.sleep(0.57 if index == 5 else 0.02)
        return index

    options: dict[str, Any] = {"batch_size": 12, "sample_timeout": 0.5, "on_error": "skip"}
    with infeed.DataLoader(Tree(12, load), **options, **{**forkserver, "num_workers": 1}) as loader:
        for _ in range(2):
            got = flat(collected(loader))
            assert set(range(12)) - set(got) <= {5}
