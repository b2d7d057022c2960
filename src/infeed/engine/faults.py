"""Faults while loading: samples that raise, workers that die, and the errors raised for them.

``Faults`` decides what a fault means and returns the events for the scheduler. An exception for the training loop stays in the
record of its batch until the batch is due.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, final

from infeed.engine.bad_samples import BadSampleHandler
from infeed.engine.progress import Loss, Record, SentTask
from infeed.engine.watchdog import Overdue, Watchdog
from infeed.errors import LoadTimeoutError, WorkerDiedError, WorkerStartError
from infeed.formatting import format_bytes, format_count
from infeed.memory.pickling import dumps_by_value
from infeed.plan.batches import grain_count
from infeed.plan.order import plain_indices
from infeed.scheduler.messages import BatchHasBadSamples, Event, TaskFailed, TaskId, WorkerDied, WorkerId
from infeed.workers.exceptions import BUILDING, Failure, kept
from infeed.workers.pool import Death, WorkerPool
from infeed.workers.protocol import LoadFailed
from infeed.workers.status import Doing, StatusBoard

_LOG: Final = logging.getLogger("infeed")

# Give up a sample after this many worker deaths: the sample is the cause.
_SAMPLE_DEATHS: Final = 3
# Worker deaths allowed per minute: a base, plus 64 per worker. Beyond that the machine is broken, and restarts would only keep
# it busy.
_DEATHS: Final = 256
_DEATHS_PER_WORKER: Final = 64
_MINUTE_S: Final = 60.0
# Warn of the first 10 deaths per minute, then of every 50th.
LOGGED_DEATHS: Final = 10
LOGGED_EVERY: Final = 50


@final
class Faults:
    """Decides about the faults of one engine: counts and logs deaths, blames samples, applies ``on_error``."""

    def __init__(
        self,
        handler: BadSampleHandler,
        pool: WorkerPool,
        status_board: StatusBoard,
        watchdog: Watchdog,
        *,
        worker_count: int,
        grain_size: int,
        sample_timeout_s: float,
        is_inline: bool,
    ) -> None:
        self._handler, self._watchdog = handler, watchdog
        self._pool, self._status_board = pool, status_board
        self._grain_size, self._sample_timeout_s = grain_size, sample_timeout_s
        self._is_inline = is_inline
        self._death_times: deque[float] = deque(maxlen=_DEATHS + _DEATHS_PER_WORKER * worker_count)
        self.last_death = ""

    @property
    def is_storm(self) -> bool:
        """Whether workers die so often that restarting them is useless."""
        times = self._death_times
        return len(times) == times.maxlen and times[-1] - times[0] < _MINUTE_S

    # --- samples that raise

    def failed(self, worker: WorkerId, task: SentTask, message: LoadFailed) -> Event:
        """Decide about a task that ended with an exception."""
        if message.bad:
            return self._bad_rows(task, dict(message.bad), worker, message.task)
        task.record.add_failure(message.task, worker, message.failure)
        return TaskFailed(worker, message.task)

    def left_out(
        self, worker: WorkerId, record: Record, task: TaskId, bad: tuple[tuple[int, Failure], ...]
    ) -> TaskFailed | None:
        """Decide about elements that a worker skipped in an iterable dataset; return an event if the batch has failed."""
        bad_rows = record.begin_bad_rows()
        for element, failure in bad:
            place = f"position {element} of epoch {record.plan.epoch}, {self._name(worker)}"
            outcome = self._handler.decide_element(record.plan.epoch, element, failure, place)
            if isinstance(outcome, BaseException):
                record.add_failure(task, worker, Failure.of(outcome, "reading the iterable dataset"))
                return TaskFailed(worker, task)
            bad_rows.done.append(outcome)
        return None

    def _bad_rows(self, entry: SentTask, bad: dict[int, Failure], worker: WorkerId, task: TaskId | None) -> Event:
        """Decide about bad rows; the scheduler then reloads the batch or gives it up."""
        record, plan = entry.record, entry.record.plan
        bad_rows = record.begin_bad_rows()
        for row, failure in sorted(bad.items()):
            if bad_rows.knows(row):
                continue
            position = plan.first_position + bad_rows.first_row(row)
            place = f"position {position} of epoch {plan.epoch}, {self._name(worker)}"
            if record.doom is None:
                record.give_up(self._handler.decide(plan, bad_rows, row, failure, place))
        grains = None if record.doom is not None else grain_count(bad_rows.row_count, self._grain_size)
        return BatchHasBadSamples(entry.batch, grains, worker, task)

    def batch_error(self, record: Record, task: TaskId | None) -> BaseException:
        """Return the exception for a batch: the error of user code in ``task``, or the deaths of its workers."""
        plan = record.plan
        if record.doom is not None:
            return record.doom
        if task is None:
            assert record.deaths is not None
            listed = "" if plan.indices is None else f", indices {reprlib.repr(plain_indices(plan.indices))}"
            return WorkerDiedError(
                f"{len(record.deaths)} workers died while loading the batch at position {plan.first_position} of epoch "
                f"{plan.epoch}{listed}; last death: {record.deaths[-1].text}\n"
                "  one of its samples probably kills the worker; load the batch with num_workers=0 to debug"
            )
        assert record.failures is not None
        worker, failure = record.failures[task]
        position = failure.position if failure.position is not None else plan.first_position
        return failure.exception(f"position {position} of epoch {plan.epoch}, {self._name(worker)}")

    # --- workers that die

    def died(self, worker: WorkerId, death: Death, tasks: Mapping[TaskId, SentTask]) -> list[Event]:
        """Record the death of a worker that had these tasks, and decide which sample or batch is to blame."""
        self._death_times.append(time.monotonic())
        doing = self._status_board.doing(worker)
        overdue = self._watchdog.forget(worker)
        # Race: the worker finished the sample just before it was killed, so the sample is not to blame.
        is_late = overdue is not None and doing[:4] != overdue.doing[:4]
        is_blamed = death.is_blamed and not is_late
        held = sorted(tasks)
        self.last_death = f"worker {worker} " + _death_text(death, doing, [tasks[task].indices for task in held])
        # Loaded but unreported tasks are lost with the worker, but did not kill it.
        culprit = next((task for task in held if task == doing.task), None)
        entry = tasks[held[0] if culprit is None else culprit] if held else None
        events: list[Event] = []
        if entry is not None and not entry.record.is_forgotten and is_blamed:
            record = entry.record
            row = None if culprit is None else doing.exact_row
            record.add_death(Loss(self.last_death, None if row is None else record.sample(row)))
            failure = self._cause(record, row, overdue)
            if failure is not None:
                # Before WorkerDied, so that the scheduler does not send the same sample to another worker in between.
                events.append(self._blame(entry, row, failure, worker))
        # Log handlers are user code: their exceptions must not interrupt the handling of worker messages.
        with suppress(Exception):
            # If the worker was killed for a sample, the sample's error reports it.
            self._log_death(is_reported=overdue is not None and bool(events))
        return [*events, WorkerDied(worker, culprit, is_blamed, self._death_times[-1])]

    def _log_death(self, *, is_reported: bool) -> None:
        times = self._death_times
        count = sum(times[-1] - at < _MINUTE_S for at in times)
        text = self.last_death if self.is_storm else f"{self.last_death}; infeed replaces it"
        if count > LOGGED_DEATHS:
            text = f"{count} workers died within a minute; last death: {text}"
        is_many = count > LOGGED_DEATHS and count % LOGGED_EVERY
        _LOG.log(logging.INFO if is_reported or is_many else logging.WARNING, "%s", text)

    def _cause(self, record: Record, row: int | None, overdue: Overdue | None) -> Failure | None:
        """Return why a sample, or the batch if the row is unknown, is given up; ``None`` if it may be retried."""
        index, position = record.sample(row)
        if overdue is not None:
            stack = f"; the worker's stack:\n{overdue.stack}" if overdue.stack else ""
            error: Exception = LoadTimeoutError(
                f"sample_timeout={self._sample_timeout_s:g} s exceeded; worker {overdue.worker} was killed after "
                f"{overdue.for_s:.1f} s; fix the sample, or raise sample_timeout{stack}"
            )
            return Failure.of(error, "loading sample" if row is not None else "loading samples", index=index, position=position)
        losses = [] if row is None else [loss for loss in record.deaths or () if loss.sample == (index, position)]
        if len(losses) < _SAMPLE_DEATHS:
            return None
        error = WorkerDiedError(
            f"{len(losses)} workers died while loading this sample; last death: {losses[-1].text}\n"
            "  load it with num_workers=0 to debug, or skip such samples with on_error='skip'"
        )
        return Failure.of(error, "loading sample", index=index, position=position)

    def _blame(self, entry: SentTask, row: int | None, failure: Failure, worker: WorkerId) -> Event:
        record = entry.record
        if row is not None and record.plan.indices is not None:
            return self._bad_rows(entry, {row: failure}, worker, None)
        position = failure.position if failure.position is not None else record.plan.first_position
        record.give_up(failure.exception(f"position {position} of epoch {record.plan.epoch}, {self._name(worker)}"))
        return BatchHasBadSamples(entry.batch, None, worker)

    def _name(self, worker: WorkerId) -> str:
        return "main process" if self._is_inline else f"worker {worker}{self._pool.place_of(worker)}"


def not_sent(task: TaskId, entry: SentTask, error: Exception, *, reports_bad: bool) -> LoadFailed:
    """Return the failure of a task that cannot be sent to a worker, usually because an index cannot be pickled.

    Args:
        reports_bad: Whether to report all indices that cannot be pickled, because bad samples are handled.
    """
    bad: list[tuple[int, Failure]] = []
    for row, index in enumerate(entry.indices, entry.first_row):
        try:
            dumps_by_value(index)
        except Exception as cause:  # from a user class
            position = entry.record.plan.first_position + row
            bad.append((row, Failure.of(kept(cause), "pickling", index=index, position=position)))
    if not bad:
        return LoadFailed(task, Failure.of(kept(error), "sending a task"))
    return LoadFailed(task, bad[0][1], bad=tuple(bad) if reports_bad else ())


def start_error(worker: WorkerId, failure: Failure) -> BaseException:
    """Return the error of a worker that failed before its first task. Errors of ``worker_init_fn`` keep their type."""
    error = failure.exception(f"worker {worker}")
    if failure.doing != BUILDING:
        return error
    fix = "make everything that the dataset needs importable in a new process, or define it in the script"
    if isinstance(error, MemoryError):
        fix = "every worker builds its own copy; use fewer workers, memory-map its files, or use worker='thread'"
    start = WorkerStartError(f"worker {worker} could not build the dataset: {failure.kind}: {failure.text}; {fix}")
    start.__cause__ = error
    if not isinstance(error, MemoryError):
        start.unpicklable = f"the dataset cannot be unpickled in a worker: {failure.line}"
    return start


def workers_error(last_death: str) -> WorkerDiedError:
    """Return the error for workers that die as fast as they start."""
    return WorkerDiedError(
        f"workers died before loading a sample; last death: {last_death}\n"
        "  run with num_workers=0 to debug, or see the output of the workers above"
    )


def _death_text(death: Death, doing: Doing, held: list[list[Any]]) -> str:
    """Describe a death: exit status, pending samples, memory and, if known, the cause."""
    text = death.text
    indices = [index for part in held for index in part]
    if indices:
        text += f"; it was assigned {format_count(len(indices), 'sample')}: indices {reprlib.repr(indices)}"
    if doing.rss_bytes:
        text += f"; its memory at the last measurement: {format_bytes(doing.rss_bytes)}"
    if death.cause is not None:
        text += f"; {death.cause}; use fewer workers, or smaller samples and batches"
    return text
