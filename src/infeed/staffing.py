"""How many workers an engine has, and which: they are started, started again, and let go of here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from infeed.errors import WorkerStartError
from infeed.feeds import Feed, StreamFeed
from infeed.records import EngineSetup
from infeed.scheduler.machine import Scheduler
from infeed.scheduler.messages import Event, WorkerAdded, WorkerId, WorkerReleased

_LOG: Final = logging.getLogger("infeed")


@final
class Staffing:
    """Belongs to one engine. The scheduler knows who is there; this one makes it so."""

    def __init__(self, setup: EngineSetup, scheduler: Scheduler, tell: Callable[[Event], None]) -> None:
        self._setup, self._crew, self._scheduler = setup, setup.crew, scheduler
        self._tell = tell
        self._started: set[WorkerId] = set()
        self._starting: set[WorkerId] = set()  # not ready yet
        self._wanted_count = len(setup.first_workers)
        self._is_unsettled = False

    def begin(self) -> None:
        """Start those that there are at first; of a stream the first alone, until it is known whether others read too."""
        for worker in self._setup.first_workers[: None if self._setup.stream is None else 1]:
            self._start(worker)

    @property
    def awaits_init(self) -> bool:
        """Whether ``worker_init_fn`` may still raise in a worker."""
        return self._setup.has_init and bool(self._starting)

    def stop_awaiting(self) -> None:
        """Those that are starting take too long."""
        self._starting.clear()

    def note_started(self, worker: WorkerId) -> None:
        """It is ready."""
        self._starting.discard(worker)

    def aim(self, count: int) -> None:
        """Let there be so many, within what there may be. A stream keeps its workers: its batches are theirs."""
        if self._setup.stream is None and not self._setup.is_lazy:
            self._wanted_count = min(max(1, count), len(self._setup.workers))
            self._is_unsettled = True

    def settle(self) -> bool:
        """Come as near to what is wanted as can be: a number that somebody is still leaving is not free.

        Returns:
            Whether there may be others than before.
        """
        if not self._is_unsettled:
            return False
        self._is_unsettled = False
        hired = sorted(self._scheduler.hired_workers)
        for worker in reversed(hired[self._wanted_count :]):
            self._tell(WorkerReleased(worker))
        missing = self._wanted_count - len(hired)
        if missing <= 0:
            return True
        taken = {*hired, *self._scheduler.leaving_workers}
        for worker in [worker for worker in self._setup.workers if worker not in taken][:missing]:
            try:
                self._start_while_waited(worker)
            except WorkerStartError as error:
                self._wanted_count = len(self._scheduler.hired_workers)
                _LOG.warning(
                    "there are %d workers and no more, because another cannot be started: %s", self._wanted_count, error
                )
                return True
            self._tell(WorkerAdded(worker))
        return True

    def replace(self, worker: WorkerId, feed: Feed | None) -> None:
        """Start one again that died."""
        self._start_while_waited(worker)
        if isinstance(feed, StreamFeed):
            self.open_share(worker, feed)

    def stop(self, worker: WorkerId) -> None:
        """Let one end that was released and has nothing left to do."""
        self._crew.stop(worker)
        self._starting.discard(worker)
        self.note_gone()

    def note_gone(self) -> None:
        """Somebody is gone, and their number may be free."""
        self._is_unsettled = True  # not at once: the scheduler is in the middle of something

    def open_share(self, worker: WorkerId, feed: StreamFeed) -> None:
        if worker not in self._started:
            self._start(worker)
        self._crew.send(worker, feed.open_message(worker))

    def _start_while_waited(self, worker: WorkerId) -> None:
        """The loop waits meanwhile, in the middle of an epoch."""
        began_ns = time.perf_counter_ns()
        self._start(worker)
        self._setup.gauge.waited_for_workers(time.perf_counter_ns() - began_ns)

    def _start(self, worker: WorkerId) -> None:
        self._started.add(worker)
        self._starting.add(worker)
        self._crew.start(worker)
