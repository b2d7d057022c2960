"""What is done when there is no memory for the batch that the user's loop waits for."""

from __future__ import annotations

from infeed.scheduler.messages import FailMemory, Place, Send
from infeed.scheduler.records import Batch
from infeed.scheduler.serving import Serving


class Shortage(Serving):
    """Notices that nothing will move by itself, and makes it move or says so."""

    @property
    def _is_stuck(self) -> bool:
        """Whether the user's loop waits and nothing will happen by itself."""
        if len(self._tasks) != len(self._unplaced) or self._is_moving or self._wanted is None:
            return False
        if not self.has_undelivered(self._wanted) or self._next_finished(self._wanted) is not None:
            return False
        # A worker that is being started takes what waits for it, and then this is asked again.
        bound = [batch.worker for batch in self._batches.values() if batch.worker is not None and batch.waiting]
        awaited = bound or (self.hired_workers if not any(batch.worker is not None for batch in self._batches.values()) else ())
        return all(self._workers[worker].is_ready for worker in awaited)

    @property
    def _is_moving(self) -> bool:
        return self._slots.asks_for_growth or any(isinstance(action, Send | Place) for action in self._actions)

    def _unstick(self) -> None:
        """There is no memory for what the loop waits for: ask once more, take it from younger batches, or say so."""
        for worker, record in self._workers.items():
            if record.is_ready:  # and has nothing to do, because nobody has
                self._roomy.setdefault(worker)
        if not self._has_asked_again:
            self._has_asked_again = True
            self._slots.is_growth_refused = False
            self._serve_oldest()
            self._slots.is_growth_refused = True
        else:
            self._send_oldest()  # it may have a slot, and have lost a worker that is not replaced
        for batch in reversed(tuple(self._batches.values())):
            if self._is_moving:
                return
            if self._evict(batch):
                self._serve_oldest()
        if not self._is_moving:
            self._wanted = None
            self._actions.append(FailMemory())

    def _serve_oldest(self) -> None:
        # And nobody else: whatever is begun now would take what was just gained, and be evicted in turn.
        self._place(only_oldest=True)
        self._send_oldest()

    def _send_oldest(self) -> None:
        if self._waiting and self._waiting[0] == next(iter(self._batches)):
            self._assign(only_oldest=True)

    def _evict(self, batch: Batch) -> bool:
        """Take back what a batch has, if anything, unless it is the oldest; it will be loaded again.

        A share of a stream cannot be, so it is left alone.
        """
        if batch.is_share or batch.slot is None or batch.task_count or batch.batch == next(iter(self._batches)):
            return False
        self._slots.release(batch.slot)
        self._slots.is_growth_refused = True
        batch.slot = None
        if not batch.is_failed:
            self._finished.pop(batch.batch, None)
            self._begin_again(batch)
        return True
