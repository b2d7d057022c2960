"""Faults while loading: samples that raise, workers that die or hang, and the errors raised for them.

The engine passes faults to ``Faults``, which sends events to the scheduler. An exception for the training loop stays in the
record of its batch until the batch is due.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, final

from infeed.engine.bad_samples import BadRows
from infeed.engine.records import EngineSetup, Loss, Record, Task
from infeed.engine.watchdog import Overdue
from infeed.errors import LoadTimeoutError, MemoryLimitError, WorkerDiedError, WorkerStartError
from infeed.formatting import format_bytes, format_count
from infeed.plan.batches import grain_count
from infeed.plan.order import plain_indices
from infeed.scheduler.messages import BatchHasBadSamples, BatchId, Event, TaskFailed, TaskId, WorkerDied, WorkerId
from infeed.workers.exceptions import BUILDING, Failure
from infeed.workers.pool import Death
from infeed.workers.protocol import LoadFailed
from infeed.workers.status import Doing


def batch_error(record: Record, task: TaskId | None, name_worker: Callable[[WorkerId], str]) -> BaseException:
    """Return the exception for a batch: the error of user code in ``task``, or the deaths of its workers."""
    plan = record.plan
    if record.doom is not None:
        return record.doom
    if task is None:
        assert record.deaths is not None
        listed = "" if plan.indices is None else f", indices {reprlib.repr(plain_indices(plan.indices))}"
        return WorkerDiedError(
            f"workers died {len(record.deaths)} times while loading the batch at position {plan.first_position} of "
            f"epoch {plan.epoch}{listed}; the last was {record.deaths[-1].text}\n"
            "  a sample of it seems to kill its worker; load it with num_workers=0 to see how"
        )
    assert record.failures is not None
    worker, failure = record.failures[task]
    position = failure.position if failure.position is not None else plan.first_position
    return failure.exception(f"position {position} of epoch {plan.epoch}, {name_worker(worker)}")


def start_error(worker: WorkerId, failure: Failure) -> BaseException:
    """Return the error of a worker that failed before its first task. Errors of ``worker_init_fn`` keep their type."""
    error = failure.exception(f"worker {worker}")
    if failure.doing != BUILDING:
        return error
    cure = "what the dataset needs must be importable in a fresh process, or be defined in the script itself"
    if isinstance(error, MemoryError):
        cure = "every worker builds one of its own: use fewer workers, let it map its files, or use worker='thread'"
    start = WorkerStartError(f"worker {worker} could not build the dataset: {failure.kind}: {failure.text}; {cure}")
    start.__cause__ = error
    return start


def workers_error(last_death: str) -> WorkerDiedError:
    """Return the error for workers that die as fast as they start."""
    return WorkerDiedError(
        f"workers die faster than they load; the last was {last_death}\n"
        "  run with num_workers=0 to see the dataset's own error, or look above for what it printed"
    )


def memory_error(shortage: MemoryLimitError, held_count: int, batch_bytes: int) -> MemoryLimitError:
    """Return the error when no slot is free because user code holds batches, or memory is short."""
    if not held_count:
        return MemoryLimitError(str(shortage))  # a new one: a raised exception references frames
    held, are = format_count(held_count, "batch", "batches"), "is" if held_count == 1 else "are"
    return MemoryLimitError(f"{shortage}\n  {held} of some {format_bytes(batch_bytes)} {are} still looked into")


def timeout_error(timeout_s: float, busy: list[str], stack: str | None) -> LoadTimeoutError:
    """Return the error for ``timeout``, with the busy workers and the stack of the one that blocks the next batch."""
    listed = "; ".join(busy) or "no worker has a task"
    where = "" if stack is None else f"\n  the first of them is here:\n{stack}"
    return LoadTimeoutError(
        f"timeout={timeout_s} seconds passed without a batch; raise timeout, or look at what is slow\n  busy: {listed}{where}"
    )


def death_text(death: Death, doing: Doing | None, held: list[list[Any]]) -> str:
    """Describe a death: exit status, pending samples, memory and, if known, the cause."""
    text = death.text
    indices = [index for part in held for index in part]
    if indices:
        text += f"; it had {format_count(len(indices), 'sample')} to load, indices {reprlib.repr(indices)}"
    if doing is not None and doing.rss_bytes:
        text += f"; its memory was {format_bytes(doing.rss_bytes)} when last looked at"
    if death.cause is not None:
        text += f"; {death.cause}: use fewer workers, or smaller samples and batches"
    return text


def lost_sample_text(count: int, last: str) -> str:
    return (
        f"{count} workers died while loading this sample, the last was {last}\n"
        "  load it with num_workers=0 to see how, or leave such samples out with on_error='skip'"
    )


def overdue_text(limit_s: float, overdue: Overdue) -> str:
    stack = f"; it was here:\n{overdue.stack}" if overdue.stack else ""
    return f"sample_timeout={limit_s:g} seconds passed; worker {overdue.worker} was killed after {overdue.for_s:.1f} s{stack}"


_LOG: Final = logging.getLogger("infeed")

# Give up a sample after this many worker deaths: the sample is the cause.
_SAMPLE_DEATHS: Final = 3
# Worker deaths allowed per minute: a base, plus 64 per worker. Beyond that the machine is broken, and restarts would only keep
# it busy.
_DEATHS: Final = 256
_DEATHS_PER_WORKER: Final = 64
_MINUTE_S: Final = 60.0
# Warn of the first 10 deaths per minute, then of every 50th.
_LOGGED_DEATHS: Final = 10
_LOGGED_EVERY: Final = 50


@final
class Faults:
    """Handles the faults of one engine; ``records`` and ``tasks`` are shared with it."""

    def __init__(
        self, setup: EngineSetup, records: dict[BatchId, Record], tasks: dict[TaskId, Task], handle: Callable[[Event], None]
    ) -> None:
        self._setup = setup
        self._records, self._tasks = records, tasks
        self._handle = handle
        self._ended: dict[WorkerId, Overdue] = {}  # workers killed for exceeding sample_timeout
        self._death_times: deque[float] = deque(maxlen=_DEATHS + _DEATHS_PER_WORKER * len(setup.workers))
        self.last_death = ""

    @property
    def is_storm(self) -> bool:
        """Whether workers die so often that restarting them is useless."""
        times = self._death_times
        return len(times) == times.maxlen and times[-1] - times[0] < _MINUTE_S

    # --- samples that raise

    def load_failed(self, worker: WorkerId, message: LoadFailed) -> None:
        """Handle a task that ended with an exception."""
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is None or record is None:
            self._handle(TaskFailed(worker, message.task))
            return
        if message.bad:
            self._spoil(entry.batch, record, dict(message.bad), worker, message.task)
            return
        record.failures = (record.failures or {}) | {message.task: (worker, message.failure)}
        self._handle(TaskFailed(worker, message.task))

    def left_out(self, worker: WorkerId, record: Record, task: TaskId, bad: tuple[tuple[int, Failure], ...]) -> bool:
        """Handle elements that a worker skipped in an iterable dataset. Return whether its batch can be delivered."""
        bad_rows = record.bad_rows = record.bad_rows or BadRows(None)
        for element, failure in bad:
            place = f"position {element} of epoch {record.plan.epoch}, {self.name(worker)}"
            outcome = self._setup.bad_sample_handler.decide_element(record.plan.epoch, element, failure, place)
            if isinstance(outcome, BaseException):
                record.failures = (record.failures or {}) | {task: (worker, Failure.of(outcome, "reading the stream"))}
                self._handle(TaskFailed(worker, task))
                return False
            bad_rows.done.append(outcome)
        return True

    def _spoil(
        self,
        batch: BatchId,
        record: Record,
        bad: dict[int, Failure],
        worker: WorkerId,
        task: TaskId | None,
    ) -> None:
        """Decide about bad rows; the scheduler then reloads the batch or gives it up."""
        plan = record.plan
        bad_rows = record.bad_rows = record.bad_rows or BadRows(plan.indices)
        for row, failure in sorted(bad.items()):
            if bad_rows.knows(row):
                continue
            position = plan.first_position + bad_rows.first_row(row)
            place = f"position {position} of epoch {plan.epoch}, {self.name(worker)}"
            record.doom = record.doom or self._setup.bad_sample_handler.decide(plan, bad_rows, row, failure, place)
        grains = None if record.doom is not None else grain_count(bad_rows.row_count, self._setup.grain_size)
        self._handle(BatchHasBadSamples(batch, grains, worker, task))

    # --- workers that die

    def forget(self, worker: WorkerId) -> None:
        """Forget a stopped worker, whose death may be unreported: another worker may get its number."""
        self._ended.pop(worker, None)

    def died(self, worker: WorkerId, death: Death) -> None:
        self._death_times.append(time.monotonic())
        doing = self._setup.watchdog.doing(worker) if self._setup.watchdog is not None else None
        held = sorted(task for task, entry in self._tasks.items() if entry.worker == worker)
        entries = {task: self._tasks.pop(task) for task in held}
        overdue = self._ended.pop(worker, None)
        # Race: the worker finished the sample just before it was killed, so the sample is not to blame.
        is_late = overdue is not None and doing is not None and doing[:4] != overdue.doing[:4]
        is_blamed = death.is_blamed and not is_late
        indices = [self._indices(entry) for entry in entries.values()]
        self.last_death = f"worker {worker} " + death_text(death, doing, indices)
        # Loaded but unreported tasks are lost with the worker, but did not kill it.
        culprit = next((task for task in held if doing is not None and task == doing.task), None)
        first = entries[held[0] if culprit is None else culprit] if held else None
        record = None if first is None else self._records.get(first.batch)
        failure: Failure | None = None
        if first is not None and record is not None and is_blamed:
            row = doing.exact_row if culprit is not None and doing is not None else None
            record.deaths = [
                *(record.deaths or ()),
                Loss(self.last_death, self._sample(record, row) if row is not None else None),
            ]
            failure = self._cause(record, row, overdue)
            if failure is not None:
                # Before WorkerDied, so that the scheduler does not send the same sample to another worker in between.
                self._blame(first.batch, record, row, failure, worker)
        self._handle(WorkerDied(worker, culprit, is_blamed, self._death_times[-1]))
        # If the worker was killed for a sample, the sample's error reports it. Log handlers are user code: their exceptions
        # must not interrupt the handling of worker messages.
        with suppress(Exception):
            self._log_death(is_told=overdue is not None and failure is not None)

    def _log_death(self, *, is_told: bool) -> None:
        times = self._death_times
        count = sum(times[-1] - at < _MINUTE_S for at in times)
        text = self.last_death if self.is_storm else f"{self.last_death}; another goes on in its place"
        if count > _LOGGED_DEATHS:
            text = f"{count} workers have died in a minute, the last was {text}"
        is_many = count > _LOGGED_DEATHS and count % _LOGGED_EVERY
        _LOG.log(logging.INFO if is_told or is_many else logging.WARNING, "%s", text)

    def _cause(self, record: Record, row: int | None, overdue: Overdue | None) -> Failure | None:
        """Return why a sample, or the batch if the row is unknown, is given up; ``None`` if it may be retried."""
        index, position = self._sample(record, row)
        if overdue is not None:
            limit_s = self._setup.sample_timeout_s
            error: Exception = LoadTimeoutError(overdue_text(limit_s, overdue))
            return Failure.of(error, "loading sample" if row is not None else "loading samples", index=index, position=position)
        losses = [] if row is None else [loss for loss in record.deaths or () if loss.sample == (index, position)]
        if len(losses) < _SAMPLE_DEATHS:
            return None
        error = WorkerDiedError(lost_sample_text(len(losses), losses[-1].text))
        return Failure.of(error, "loading sample", index=index, position=position)

    def _blame(self, batch: BatchId, record: Record, row: int | None, failure: Failure, worker: WorkerId) -> None:
        if row is not None and record.plan.indices is not None:
            self._spoil(batch, record, {row: failure}, worker, None)
            return
        position = failure.position if failure.position is not None else record.plan.first_position
        record.doom = failure.exception(f"position {position} of epoch {record.plan.epoch}, {self.name(worker)}")
        self._handle(BatchHasBadSamples(batch, None, worker))

    # --- workers that hang

    def look(self, usual_s: float) -> None:
        """Warn of hanging workers, and kill those over ``sample_timeout``."""
        watchdog = self._setup.watchdog
        if watchdog is None:
            return
        for overdue in watchdog.look(usual_s, self._rows_of, self.describe):
            if overdue.worker not in self._ended:
                self._ended[overdue.worker] = overdue
                self._setup.pool.kill(overdue.worker)

    def timeout_error(self) -> LoadTimeoutError:
        """Return the error for ``timeout``, listing busy workers by task, the oldest first."""
        watchdog = self._setup.watchdog
        doing = {} if watchdog is None else {worker: watchdog.doing(worker) for worker in self._setup.workers}
        at = {worker: one for worker, one in doing.items() if one.since_ns}
        oldest = sorted(at, key=lambda worker: (at[worker].task is None, at[worker].task))
        now_ns = time.perf_counter_ns()
        busy = [
            f"worker {worker} {self.describe(at[worker])} for {(now_ns - at[worker].since_ns) / 1e9:.1f} s" for worker in oldest
        ]
        # These workers have tasks but are idle: they are stopped, or the machine is too busy to run them.
        idle = sorted({entry.worker for entry in self._tasks.values()} - at.keys())
        busy += [f"worker {worker} has not begun with what it was sent" for worker in idle]
        stack = watchdog.stack_of(oldest[0]) if watchdog is not None and oldest else None
        return timeout_error(self._setup.timeout_s, busy, stack)

    def describe(self, doing: Doing) -> str:
        """Describe the activity of a worker, in words that follow "has been"."""
        if doing.task is None:
            return "starting (building the dataset, or in worker_init_fn)"
        entry = self._tasks.get(doing.task)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is None or record is None:
            return "loading a batch that nobody wants any more"
        plan = record.plan
        if doing.exact_row is not None:
            index, position = self._sample(record, doing.row)
            return f"loading index={index!r} (position {position} of epoch {plan.epoch})"
        if doing.row >= 0 and plan.indices is not None:
            among = plain_indices(plan.indices)[doing.row : doing.row + doing.row_count]
            first = plan.first_position + doing.row
            return f"loading one of index={reprlib.repr(among)} (position {first} of epoch {plan.epoch} and following)"
        first = plan.first_position + entry.first_row
        return f"loading samples from position {first} of epoch {plan.epoch} on"

    def _rows_of(self, doing: Doing) -> int:
        entry = None if doing.task is None else self._tasks.get(doing.task)
        record = None if entry is None else self._records.get(entry.batch)
        return 1 if record is None else record.plan.row_count

    def _sample(self, record: Record, row: int | None) -> tuple[Any, int | None]:
        """Return index and position of a row; for an iterable dataset, the element number."""
        plan = record.plan
        if plan.indices is None:
            return (f"element {row}", row) if row is not None else (None, None)
        if row is None or row >= len(plan.indices):
            return plain_indices(plan.indices), None
        first_row = row if record.bad_rows is None else record.bad_rows.first_row(row)
        return plain_indices(plan.indices)[row], plan.first_position + first_row

    def _indices(self, entry: Task) -> list[Any]:
        """Return the indices of a task; empty for an iterable dataset."""
        record = self._records.get(entry.batch)
        if record is None or record.plan.indices is None:
            return []
        return plain_indices(record.plan.indices)[entry.first_row : entry.first_row + entry.row_count]

    def name(self, worker: WorkerId) -> str:
        return "inline" if self._setup.is_lazy else f"worker {worker}"
