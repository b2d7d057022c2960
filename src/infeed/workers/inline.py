"""The pool for ``num_workers=0``: tasks run in the training loop's thread when it requests a batch."""

from __future__ import annotations

from collections import deque
from typing import final

from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import WorkerId
from infeed.workers.loop import Runner
from infeed.workers.pool import News, WorkerPool
from infeed.workers.protocol import FromWorker, OpenStream, Started, ToWorker, UnmapSegment


@final
class InlinePool(WorkerPool):
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._todo: deque[ToWorker] = deque()
        self._news: list[News] = []
        self._worker = WorkerId(0)

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
            self._handle_next()
        # No frame below user code may hold an answer: from Python 3.12 on, the traceback of an exception holds these frames and
        # their variables, so an exception in an answer would hold itself.
        try:
            return self._news
        finally:
            self._news = []

    def _handle_next(self) -> None:
        message = self._todo.popleft()
        self._add(self._runner.handle(message))

    def _add(self, answer: FromWorker | None) -> None:
        if answer is not None:
            self._news.append((self._worker, answer))

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
