"""What the user is told when something went wrong: the exceptions that the engine raises, with place and cure."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from infeed.errors import LoadTimeoutError, MemoryLimitError, WorkerDiedError, WorkerStartError
from infeed.plan.order import plain_indices
from infeed.records import Record
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.units import format_bytes, format_count
from infeed.watching import Overdue
from infeed.workers.board import Doing
from infeed.workers.crew import Death
from infeed.workers.failures import BUILDING, Failure


def batch_error(record: Record, task: TaskId | None, name_worker: Callable[[WorkerId], str]) -> BaseException:
    """What is raised in place of a batch: what the user's code raised in ``task``, or that its workers died."""
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
    """A worker did not get as far as its first task. What ``worker_init_fn`` raised stays what it is."""
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
    """Workers die as fast as they are started."""
    return WorkerDiedError(
        f"workers die faster than they load; the last was {last_death}\n"
        "  run with num_workers=0 to see the dataset's own error, or look above for what it printed"
    )


def memory_error(shortage: MemoryLimitError, held_count: int, batch_bytes: int) -> MemoryLimitError:
    """There is no slot to load into; what there is the user holds."""
    if not held_count:
        return MemoryLimitError(str(shortage))  # a new one: what is raised holds on to frames
    held, are = format_count(held_count, "batch", "batches"), "is" if held_count == 1 else "are"
    return MemoryLimitError(f"{shortage}\n  {held} of some {format_bytes(batch_bytes)} {are} still looked into")


def timeout_error(timeout_s: float, busy: list[str], stack: str | None) -> LoadTimeoutError:
    """No batch within ``timeout``: who is busy with what, and where the one is that is waited for."""
    listed = "; ".join(busy) or "no worker has a task"
    where = "" if stack is None else f"\n  the first of them is here:\n{stack}"
    return LoadTimeoutError(
        f"timeout={timeout_s} seconds passed without a batch; raise timeout, or look at what is slow\n  busy: {listed}{where}"
    )


def death_text(death: Death, doing: Doing | None, held: list[list[Any]]) -> str:
    """How a worker ended, what it had, how large it was, and who did it, as far as is known."""
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
