"""Pools whose workers are in the main process: the training loop's thread (``num_workers=0``), or threads.

Neither copies the dataset or transfers batches. Threads are fast if loading releases the GIL.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import thread_time_ns
from typing import Any, Final, final

from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.epoch_hooks import Recalls
from infeed.workers.exceptions import Failure
from infeed.workers.interpreter import explaining_limits
from infeed.workers.loop import Runner, serve
from infeed.workers.pool import News, WorkerPool
from infeed.workers.process_tools import queued_ns
from infeed.workers.protocol import (
    FromWorker,
    LoadGrains,
    LoadNext,
    OpenStream,
    Started,
    StartFailed,
    ToWorker,
    UnmapSegment,
)
from infeed.workers.rng import generator_states
from infeed.workers.status import thread_stack

_LOG: Final = logging.getLogger("infeed")
# How long close() waits for threads in user code. A longer wait gains nothing, because they cannot be stopped and are daemons.
# With a shorter one, close() could return before a worker that is about to end.
_CLOSE_S: Final = 1.0

_STOP: Final = None
_Inbox = queue.SimpleQueue[ToWorker | None]
_News = queue.SimpleQueue[tuple[_Inbox, News] | None]  # paired with the inbox of the sender


@final
class InlinePool(WorkerPool):
    """The pool for ``num_workers=0``: tasks run in the training loop's thread when it requests a batch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._todo: deque[ToWorker] = deque()
        self._news: list[News] = []
        self.gather = runner.gather

    def start(self, worker: WorkerId) -> None:
        self._news.append((worker, Started()))

    def stop(self, worker: WorkerId) -> None:
        self._news = [news for news in self._news if news[0] != worker]

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        del worker
        self._todo.append(message)

    def flush(self) -> None:
        """Open an iterable dataset now. Otherwise its first batch would open it."""
        while self._todo and isinstance(message := self._todo[0], OpenStream):
            self._todo.popleft()
            self._runner.open_now(message)

    def receive(self, timeout_s: float | None) -> list[News]:
        del timeout_s
        while self._todo and not self._news:
            self._add(self._runner.handle(self._todo.popleft()))
        # No frame below user code may hold an answer: from Python 3.12 on, the traceback of an exception holds these frames and
        # their variables, so an exception in an answer would hold itself.
        try:
            return self._news
        finally:
            self._news = []

    def _add(self, answer: FromWorker | None) -> None:
        if answer is not None:
            self._news.append((WorkerId(0), answer))

    def add_segment(self, handle: SegmentHandle) -> None:
        del handle

    def remove_segment(self, number: int) -> None:
        self._runner.handle(UnmapSegment(number))

    def wake(self) -> None:
        return

    def close(self, *, keeps_workers: bool = False) -> None:
        del keeps_workers
        self._todo.clear()
        self._runner.finish()


@final
class ThreadPool(WorkerPool):
    """One thread per worker."""

    def __init__(self, make_runner: Callable[[WorkerId, Recalls], Runner]) -> None:
        self._recalls = Recalls()
        self._make_runner = lambda worker: make_runner(worker, self._recalls)
        self._inboxes: dict[WorkerId, _Inbox] = {}
        self._threads: list[threading.Thread] = []
        self._idents: dict[WorkerId, int | None] = {}
        self._news: _News = queue.SimpleQueue()

    def start(self, worker: WorkerId) -> None:
        inbox: _Inbox = queue.SimpleQueue()
        arguments = (worker, self._make_runner, inbox, self._news)
        thread = threading.Thread(target=_work, args=arguments, name=f"infeed:worker:{worker}", daemon=True)
        # Register the inbox first: if an interrupt hits thread.start(), close() must still stop the thread.
        self._inboxes[worker] = inbox
        try:
            with explaining_limits():
                thread.start()
        except Exception:
            del self._inboxes[worker]
            raise
        finally:
            if thread.ident is not None:
                self._threads.append(thread)
                self._idents[worker] = thread.ident

    def stop(self, worker: WorkerId) -> None:
        inbox = self._inboxes.pop(worker, None)
        self._idents.pop(worker, None)
        if inbox is not None:
            inbox.put(_STOP)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        inbox = self._inboxes.get(worker)
        if inbox is not None:
            inbox.put(message)

    def flush(self) -> None:
        return

    def recall(self, tasks: Iterable[TaskId]) -> None:
        self._recalls.recall(tasks)

    def stack_of(self, worker: WorkerId, stack_fd: int, *, kills: bool = False) -> str | None:
        del stack_fd, kills
        return thread_stack(self._idents.get(worker))

    def receive(self, timeout_s: float | None) -> list[News]:
        try:
            first = self._news.get(timeout=timeout_s) if timeout_s != 0 else self._news.get_nowait()
        except queue.Empty:
            return []
        received = [first]
        while not self._news.empty():
            received.append(self._news.get())
        # Drop messages from stopped workers: a new worker may have the same number by now.
        return [one[1] for one in received if one is not None and one[0] is self._inboxes.get(one[1][0])]

    def add_segment(self, handle: SegmentHandle) -> None:
        del handle

    def remove_segment(self, number: int) -> None:
        for inbox in self._inboxes.values():
            inbox.put(UnmapSegment(number))

    def wake(self) -> None:
        self._news.put(None)

    def close(self, *, keeps_workers: bool = False) -> None:
        del keeps_workers
        for inbox in self._inboxes.values():
            inbox.put(_STOP)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _LOG.debug("%s is still running user code and ends when it returns", thread.name)


def _work(worker: WorkerId, make_runner: Callable[[WorkerId], Runner], inbox: _Inbox, news: _News) -> None:
    def send(answer: FromWorker) -> None:
        news.put((inbox, (worker, answer)))

    try:
        runner = make_runner(worker)
        runner.start()
    except BaseException as error:  # report whatever worker_init_fn raises
        send(StartFailed(Failure.of(error, "running worker_init_fn")))
        return
    send(Started())
    # The training loop blocks on the first task, so any draw during it comes from the dataset.
    before: dict[str, Any] | None = None
    is_first = worker == 0

    def receive(timeout_s: float | None) -> ToWorker:
        nonlocal before, is_first
        try:
            message = inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if message is _STOP:
            inbox.put(_STOP)  # for the next call: the first one may come from the thread that places samples
            raise EOFError
        if is_first and isinstance(message, LoadGrains | LoadNext):
            is_first, before = False, generator_states()
        return message

    def send_loaded(answer: FromWorker) -> None:
        nonlocal before
        if before is not None:
            _warn_of_draws(before)
            before = None
        send(answer)

    with suppress(EOFError):
        serve(runner, receive, send_loaded, send, lambda: runner.note_usage(thread_time_ns(), queued_ns()))
    runner.finish()


def _warn_of_draws(before: dict[str, Any]) -> None:
    after = generator_states()
    drawn = [name for name, state in after.items() if name in before and pickle.dumps(before[name]) != pickle.dumps(state)]
    if drawn:
        _LOG.warning(
            "worker='thread': the dataset draws from %s, which all threads share, so its random numbers differ from run to "
            "run; use infeed.get_rng() in the dataset, or worker='process'",
            " and ".join(drawn),
        )
