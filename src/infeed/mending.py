"""What becomes of a sample that cannot be loaded: raised, left out, or replaced.

Decided here, in the user's process, whatever the worker was. A batch with a bad sample is planned anew, without it or with
another in its place, and loaded again under the same seeds. So the outcome is a function of seed, position and which samples
are bad, and of no timing.
"""

from __future__ import annotations

from typing import Any, Final, final, get_args

import numpy as np

from infeed.config import OnError, Verdict
from infeed.errors import ConfigError, SampleError
from infeed.feeds import PlannedBatch
from infeed.ledger import BadSample
from infeed.plan.batches import grain_count
from infeed.plan.order import Indices, plain_indices
from infeed.plan.seeds import derive
from infeed.planning import Plan
from infeed.workers.failures import Failure

_VERDICTS: Final = get_args(Verdict)
# Keeps the draw of a replacement apart from other numbers that are made of seed, epoch and position.
_SALT: Final = 0x5245504C
# Replacements that may be bad in their turn, for one row.
_TRIES: Final = 16
_LEFT_OUT: Final = object()


@final
class Mend:
    """What is known of the bad samples of one batch, over all the times it was planned anew."""

    __slots__ = ("_changes", "_rows", "_tries", "done", "first_indices")

    def __init__(self, indices: Indices | list[Any] | None) -> None:
        """``indices`` are those of the batch as it was first planned; ``None`` for a stream."""
        self.first_indices: list[Any] = [] if indices is None else plain_indices(indices)
        self._rows = list(range(len(self.first_indices)))  # of the batch as first planned, for each row that is left
        self._changes: dict[int, Any] = {}  # by row, as planned now: another index, or that it is left out
        self._tries: dict[int, int] = {}  # replacements, by row as first planned
        self.done: list[BadSample] = []

    def first_row(self, row: int) -> int:
        """The number that a row had in the batch as it was first planned."""
        return self._rows[row]

    def knows(self, row: int) -> bool:
        return row in self._changes

    def leave_out(self, row: int) -> None:
        self._changes[row] = _LEFT_OUT

    def replace(self, row: int, index: Any) -> None:
        self._changes[row] = index

    def next_try(self, row: int) -> int:
        first = self._rows[row]
        self._tries[first] = self._tries.get(first, 0) + 1
        return self._tries[first]

    @property
    def row_count(self) -> int:
        """How many rows there will be."""
        return len(self._rows) - sum(change is _LEFT_OUT for change in self._changes.values())

    def apply(self, planned: PlannedBatch, grain_size: int) -> PlannedBatch:
        """The batch planned anew."""
        assert planned.indices is not None
        indices = [self._changes.get(row, index) for row, index in enumerate(plain_indices(planned.indices))]
        self._rows = [first for first, index in zip(self._rows, indices, strict=True) if index is not _LEFT_OUT]
        kept: Any = [index for index in indices if index is not _LEFT_OUT]
        self._changes = {}
        if isinstance(planned.indices, np.ndarray):
            kept = np.array(kept, dtype=np.int64)  # that is how indices travel fastest
        rows = None if len(self._rows) == len(self.first_indices) else self._rows
        return planned._replace(indices=kept, row_count=len(kept), grain_count=grain_count(len(kept), grain_size), rows=rows)


@final
class Mender:
    """Belongs to one engine."""

    def __init__(self, on_error: OnError, plan: Plan) -> None:
        self._on_error = on_error
        self._plan = plan

    @property
    def is_active(self) -> bool:
        return self._on_error != "raise"

    def decide(self, planned: PlannedBatch, mend: Mend, row: int, failure: Failure, place: str) -> BaseException | None:
        """Find out what becomes of a row, and note it in ``mend``; or what is to be raised instead of the batch."""
        assert planned.indices is not None
        index = plain_indices(planned.indices)[row]
        verdict = self._judge(failure, place, index)
        if isinstance(verdict, BaseException):
            return verdict
        position = planned.first_position + mend.first_row(row)
        shown, error = failure.index or repr(index), failure.line
        if verdict == "skip":
            mend.leave_out(row)
            mend.done.append(BadSample(planned.epoch, position, shown, error, "skipped"))
            return None
        replacement = self._replacement(planned, mend, row, position)
        if isinstance(replacement, str):
            unmended = SampleError(f"nothing can replace index={shown} at position {position}: {replacement}; it had {error}")
            unmended.__cause__ = failure.exception(place)
            return unmended
        mend.replace(row, replacement[0])
        mend.done.append(BadSample(planned.epoch, position, shown, error, "replaced", repr(replacement[0])))
        return None

    def decide_element(self, epoch: int, element: int, failure: Failure, place: str) -> BadSample | BaseException:
        """The same for an element of a stream, which the worker has left out already."""
        verdict = self._judge(failure, place, element)
        if verdict == "replace":
            return ConfigError(
                "on_error returned 'replace' for an element of a stream; only 'raise' and 'skip' can be done there"
            )
        if isinstance(verdict, BaseException):
            return verdict
        return BadSample(epoch, element, f"element {element}", failure.line, "skipped")

    def _judge(self, failure: Failure, place: str, index: Any) -> Verdict | BaseException:
        """What to do, or what to raise: the failure itself, or what the user's function raised."""
        verdict = self._on_error
        if callable(verdict):
            try:
                verdict = verdict(failure.exception(place), index)
            except Exception as error:
                return error
            if verdict not in _VERDICTS:
                return ConfigError(f"on_error returned {verdict!r}; it must return one of 'raise', 'skip', 'replace'")
        return failure.exception(place) if verdict == "raise" else verdict

    def _replacement(self, planned: PlannedBatch, mend: Mend, row: int, position: int) -> tuple[Any] | str:
        """Another index, in a tuple because it may be anything; or why there is none."""
        tries = mend.next_try(row)
        if tries > _TRIES:
            return f"{_TRIES} others were bad as well"
        drawn = derive(self._plan.seed, planned.epoch, position, _SALT, tries)
        index = self._plan.substitute(planned.epoch, drawn)
        if index is not None:
            return (index,)
        # A sampler's order is known to nobody else, and what it leaves out must not come: one of this very batch. It may be bad
        # as well; which are known to be, by now, is a matter of timing.
        first = mend.first_row(row)
        others = [*mend.first_indices[:first], *mend.first_indices[first + 1 :]]
        return (others[drawn % len(others)],) if others else "there is no other sample in its batch"
