"""Ctrl+C and errors at awkward moments: undelivered batches do not count, and nothing continues in the background."""

from __future__ import annotations

import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import infeed
from infeed.metrics.collector import EngineMetrics
from infeed.scheduler.messages import Action, TaskLoaded
from infeed.scheduler.scheduler import Scheduler
from tests.helpers import Squares, Tree, close_fork_server, collected, flat, plain, wait_until, worker_processes


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_undelivered_batch_does_not_count(
    engine: dict[str, Any], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ready, but ``next`` was interrupted before it returned: a resumed run begins with it."""
    real = EngineMetrics.delivered

    def delivered(self: EngineMetrics, asked_ns: int, left_ns: int) -> bool:
        if self.batch_count == 2:
            raise error
        return real(self, asked_ns, left_ns)

    monkeypatch.setattr(EngineMetrics, "delivered", delivered)
    with infeed.DataLoader(range(20), batch_size=2, seed=1, **engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(error):
            next(batches)
        state = loader.state_dict()
    assert (state["step"], state["position"]) == (2, 4)
    monkeypatch.undo()
    with infeed.DataLoader(range(20), batch_size=2, seed=1, **engine) as loader:
        loader.load_state_dict(state)
        assert flat(collected(loader)) == list(range(4, 20))


def test_an_error_while_messages_are_handled_ends_the_epoch(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining messages are lost, so nothing may wait for them."""
    real = Scheduler.handle
    received: list[object] = []

    def handle(self: Scheduler, event: Any) -> list[Action]:
        if isinstance(event, TaskLoaded):
            received.append(event)
        if len(received) == 8:
            received.append(None)
            raise ValueError("in the middle")
        return real(self, event)

    monkeypatch.setattr(Scheduler, "handle", handle)
    with infeed.DataLoader(range(200), batch_size=2, **{**engine, "timeout": 30}) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="in the middle"):
            deque(batches, maxlen=0)
        with pytest.raises(StopIteration):
            next(batches)
        assert flat(collected(loader)) == list(range(200))


class Unmeasured:
    """A sampler whose length raises an exception."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def __len__(self) -> int:
        raise NotImplementedError("no length")


def test_a_sampler_whose_length_raises_has_no_length(engine: dict[str, Any]) -> None:
    with infeed.DataLoader(range(20), 2, sampler=Unmeasured(), on_error="skip", **{**engine, "timeout": 30}) as loader:
        assert flat(collected(loader)) == list(range(20))


@pytest.mark.linux("is about the fork server")
def test_ctrl_c_while_a_worker_is_forked_is_raised(forkserver: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's late reply is not taken for the reply to another request. Other loaders continue."""
    from infeed.workers import forkserver as module

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    real = module.send
    asked: list[object] = []

    def send(sock: Any, message: Any, fds: Any = ()) -> None:
        real(sock, message, fds)
        if isinstance(message, module.Fork):
            asked.append(message)
            if len(asked) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    try:
        with infeed.DataLoader(range(40), 2, **{**forkserver, "num_workers": 1}) as other:
            others = iter(other)
            got = plain(next(others))
            monkeypatch.setattr(module, "send", send)
            with infeed.DataLoader(range(20), 2, **forkserver) as loader, pytest.raises(KeyboardInterrupt):
                next(iter(loader))
            monkeypatch.undo()
            got += flat([plain(batch) for batch in others])
            assert got == list(range(40))
    finally:
        signal.signal(signal.SIGINT, before)
    with infeed.DataLoader(range(20), 2, **forkserver) as loader:
        assert flat(collected(loader)) == list(range(20))


def test_ctrl_c_while_a_thread_is_started_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        real(self)
        if self.name.startswith("infeed:worker"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with infeed.DataLoader(range(20), 2, num_workers=2, worker="thread") as loader, pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("infeed")], "threads to end")


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_during_the_transfer_to_a_device_ends_the_epoch(workers: int) -> None:
    """The batch is lost, so later ones must not be delivered as if nothing had happened."""
    pytest.importorskip("torch")
    calls: list[object] = []

    def convert(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return batch

    with infeed.DataLoader(
        range(40), 2, num_workers=workers, worker="thread", device=infeed.Device("cpu", convert=convert)
    ) as loader:
        batches = iter(loader)
        got: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            got.extend(int(number) for batch in batches for number in batch)
        assert list(batches) == []
        assert got == list(range(len(got)))
        assert loader.state_dict()["position"] == len(got)


def test_a_reentrant_next_raises() -> None:
    """As in a generator; it would wait for itself."""
    iterators: list[Iterator[Any]] = []
    with infeed.DataLoader(Tree(4, lambda _: next(iterators[0])), 1) as loader:
        iterators.append(iter(loader))
        with pytest.raises(RuntimeError, match=r"next\(\) was called inside next\(\)"):
            next(iterators[0])
        iterators.clear()
    with infeed.DataLoader(Squares(4), 1) as loader:
        assert len(list(loader)) == 4


# Points where a start may be interrupted: after these calls, before the caller has their result.
STARTS = {
    "forkserver": [
        "subprocess.Popen.__init__", "workers.forkserver.ForkServer.start", "workers.forkserver.ForkServer.preload",
        "workers.forkserver.ForkServer.fork", "workers.transport_pipes.PipeLink.open",
        "workers.transport_pipes.PipeLink.close_inherited",
        "workers.process.Starter.start", "workers.process.Birth", "workers.process._LiveWorker",
    ],
    "spawn": ["subprocess.Popen.__init__", "workers.transport_pipes.PipeLink.close_inherited", "workers.process.Birth"],
    "portable": [
        "subprocess.Popen.__init__", "workers.transport_portable.ConnectionLink.open",
        "workers.transport_portable.ConnectionLink.close_inherited", "workers.process.Birth",
        "workers.launcher.IdleWorker.is_usable",
    ],
}  # fmt: skip


def marks_of(engine: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.process, *([] if engine == "portable" else [pytest.mark.linux("tests another way to start")])]


@pytest.mark.parametrize(
    ("process_engine", "point"),
    [
        pytest.param(engine, point, id=f"{engine}-{point}", marks=marks_of(engine))
        for engine, points in STARTS.items()
        for point in points
    ],
    indirect=["process_engine"],
)
def test_ctrl_c_while_a_worker_starts_leaves_no_process_and_no_descriptor(
    process_engine: dict[str, Any], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the interrupt arrives, the worker already has an owner. (The leak guard checks descriptors.)"""
    path = point if point.startswith("subprocess") else f"infeed.{point}"
    real = pkgutil.resolve_name(path)
    options = {**process_engine, "num_workers": 1}
    if "Idle" in point:
        monkeypatch.setattr("infeed.workers.process.RESET_S", 20.0)  # a busy machine may need longer than users wait
        collected(infeed.DataLoader(range(20), 2, **options))  # Its worker stays idle for the next loader.
    calls: list[object] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        value = real(*args, **options)
        calls.append(value)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return value

    with infeed.DataLoader(range(20), 2, **options) as loader:
        if sys.platform == "linux":
            close_fork_server()
        monkeypatch.setattr(path, interrupted)
        with pytest.raises(KeyboardInterrupt):
            collected(loader)
        wait_until(lambda: not worker_processes(), "the end of the workers")
        assert flat(collected(loader)) == list(range(20))


@pytest.mark.process
@pytest.mark.linux("is about the fork server")
def test_ctrl_c_while_a_loader_is_created_is_raised(forkserver: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of the fork server that it starts."""
    close_fork_server()
    real = subprocess.Popen.__init__

    def interrupted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            infeed.DataLoader(range(20), 2, **forkserver)
    wait_until(lambda: not psutil.Process().children(), "the end of the server")
    assert flat(collected(infeed.DataLoader(range(20), 2, **forkserver))) == list(range(20))


@pytest.mark.process
@pytest.mark.linux("is about the fork server")
def test_ctrl_c_while_the_fork_server_is_locked_leaves_it_unlocked() -> None:
    """The interrupted server may have an unread reply, so it is not used again."""
    from infeed.workers.forkserver import ForkServer

    class Lock:
        """Raises KeyboardInterrupt in ``acquire`` when it already has the lock."""

        def __init__(self) -> None:
            self.inner: Any = threading.RLock()

        def acquire(self, timeout: float) -> bool:
            self.inner.acquire(timeout=timeout)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    lock: Any = Lock()
    server = ForkServer(lambda: lock)
    try:
        server.start()
        assert server.is_alive
        with pytest.raises(KeyboardInterrupt):
            server.preload([])
        assert not server.is_alive
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lock.inner.acquire, blocking=False).result()
    finally:
        server.close()
