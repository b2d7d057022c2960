"""Bad-sample handling: raise, skip or replace a sample that cannot be loaded.

The engine decides in the main process, for every kind of worker. It plans a batch with a bad sample again, without the sample
or with a replacement, and reloads it with the same seeds. So the outcome depends only on the seed, the position and the set of
bad samples, never on timing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

import numpy as np

from infeed.engine.planning import Plan, PlannedBatch
from infeed.errors import ConfigError, SampleError
from infeed.formatting import format_count
from infeed.options import BadSampleAction, BadSampleFunction
from infeed.plan.batches import grain_count
from infeed.plan.order import Indices, plain_indices
from infeed.plan.seeds import derive
from infeed.workers.exceptions import Failure

_LOG: Final = logging.getLogger("infeed")
# Keep the latest 1000 bad samples; older ones are only counted.
_LISTED: Final = 1000
# Bad samples listed in the warning at the end of an epoch.
_SHOWN: Final = 5
# If the epoch length is unknown, a fractional budget applies to the samples seen so far, but at least to this many.
_LEAST_SEEN: Final = 100
_ROUNDING: Final = 1e-9  # 0.29 * 100 is slightly less than 29


@final
@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be loaded, and how it was handled.

    Attributes:
        epoch: epoch in which it was requested.
        position: position in the order of the epoch.
        index: index in the dataset, as text, because it may be any object.
        error: the exception, as text.
        outcome: ``"skipped"`` or ``"replaced"``.
        replacement: index of the sample that replaced it, as text.

    Examples:
        >>> import infeed
        >>> from infeed.testing import FaultyDataset
        >>> loader = infeed.DataLoader(FaultyDataset(6, [2]), batch_size=3, on_error="skip")
        >>> batches = list(loader)
        >>> [(bad.index, bad.outcome) for bad in loader.bad_samples]
        [('2', 'skipped')]
    """

    __module__ = "infeed"

    epoch: int
    position: int
    index: str
    error: str
    outcome: Literal["skipped", "replaced"]
    replacement: str | None = None

    def __str__(self) -> str:
        done = self.outcome if self.replacement is None else f"replaced by index={self.replacement}"
        # An element of an iterable dataset has no index.
        sample = self.index if self.index == f"element {self.position}" else f"index={self.index}"
        return f"{sample} (position {self.position} of epoch {self.epoch}) {done}: {self.error}"


def new_list() -> deque[BadSample]:
    """Return an empty list for the latest bad samples of a loader."""
    return deque(maxlen=_LISTED)


@final
class ErrorBudget:
    """Counts the bad samples of one iteration and compares them with the ``budget`` of ``ErrorPolicy``."""

    def __init__(
        self,
        budget: int | float | None = None,
        listed: deque[BadSample] | None = None,
        epoch_length: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Create a budget.

        Args:
            listed: The loader's list of bad samples, shared by all its epochs.
            epoch_length: Returns the number of samples per epoch, if known.
        """
        self._budget, self._epoch_length = budget, epoch_length
        self._listed = new_list() if listed is None else listed
        self._epoch = -1
        self._bad_count = 0  # in this epoch
        self._seen_count = 0
        self._of_epoch: list[BadSample] = []  # the first few of this epoch
        self._last: BadSample | None = None

    @property
    def bad_count(self) -> int:
        """Bad samples in the latest epoch, including those counted before it was resumed from a state."""
        return self._bad_count

    def begin_epoch(self, epoch: int, bad_count: int) -> None:
        self._epoch, self._bad_count, self._seen_count = epoch, bad_count, 0
        self._of_epoch = []

    def note(self, samples: list[BadSample], row_count: int) -> None:
        """Count a batch of ``row_count`` rows and the ``samples`` that were skipped or replaced in it."""
        self._seen_count += row_count
        for sample in samples:
            self._seen_count += sample.outcome == "skipped"
            self._bad_count += 1
            self._listed.append(sample)
            self._last = sample
            if len(self._of_epoch) < _SHOWN:
                self._of_epoch.append(sample)

    def excess(self) -> SampleError | None:
        """Return the error to raise if the budget is exceeded."""
        budget = self._budget
        if budget is None:
            return None
        if isinstance(budget, float):
            length = self._epoch_length()
            allowed = int(budget * (max(self._seen_count, _LEAST_SEEN) if length is None else length) + _ROUNDING)
            shown = f"budget={budget} ({allowed} samples)"
        else:
            allowed = budget
            shown = f"budget={budget}"
        if self._bad_count <= allowed:
            return None
        last = "" if self._last is None else f", the last: {self._last}"
        return SampleError(
            f"{shown} exceeded: epoch {self._epoch} had {format_count(self._bad_count, 'bad sample')}{last}; fix the dataset, "
            "or raise the budget of ErrorPolicy"
        )

    def emptiness(self) -> SampleError | None:
        """Return the error for an epoch that yielded no batch because of bad samples."""
        if not self._bad_count or self._last is None:
            return None
        return SampleError(
            f"epoch {self._epoch} delivered no batch: it had {format_count(self._bad_count, 'bad sample')}, the last: "
            f"{self._last}; debug with num_workers=0 and on_error='raise'"
        )

    def end_epoch(self) -> None:
        """Log the bad samples of the epoch."""
        if not self._of_epoch:
            return
        lines = "".join(f"\n  {sample}" for sample in self._of_epoch)
        more = self._bad_count - len(self._of_epoch)
        rest = f"\n  and {more} more; see loader.bad_samples" if more > 0 else ""
        _LOG.warning("epoch %d had %s:%s%s", self._epoch, format_count(self._bad_count, "bad sample"), lines, rest)
        self._of_epoch = []


_ACTIONS: Final = get_args(BadSampleAction)
# Separates the draw of a replacement from other numbers derived from seed, epoch and position.
_SALT: Final = 0x5245504C
# Replacements tried per row; each may be bad as well.
_TRIES: Final = 16
_LEFT_OUT: Final = object()


@final
class BadRows:
    """The bad rows of one batch, across all its reloads."""

    __slots__ = ("_changes", "_rows", "_tries", "done", "first_indices")

    def __init__(self, indices: Indices | list[Any] | None) -> None:
        """Start from the indices of the original plan; ``None`` for an iterable dataset."""
        self.first_indices: list[Any] = [] if indices is None else plain_indices(indices)
        self._rows = list(range(len(self.first_indices)))  # for each remaining row, its row in the original plan
        self._changes: dict[int, Any] = {}  # by row of the current plan: the replacement index or _LEFT_OUT
        self._tries: dict[int, int] = {}  # replacements tried, by row of the original plan
        self.done: list[BadSample] = []

    def first_row(self, row: int) -> int:
        """Return the row number in the original plan."""
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
        """Rows that remain after the pending changes."""
        return len(self._rows) - sum(change is _LEFT_OUT for change in self._changes.values())

    def apply(self, planned: PlannedBatch, grain_size: int) -> PlannedBatch:
        """Return the batch with the pending changes applied."""
        assert planned.indices is not None
        indices = [self._changes.get(row, index) for row, index in enumerate(plain_indices(planned.indices))]
        self._rows = [first for first, index in zip(self._rows, indices, strict=True) if index is not _LEFT_OUT]
        kept: Any = [index for index in indices if index is not _LEFT_OUT]
        self._changes = {}
        if isinstance(planned.indices, np.ndarray):
            kept = np.array(kept, dtype=np.int64)  # the fastest form to send to workers
        rows = None if len(self._rows) == len(self.first_indices) else self._rows
        return planned._replace(indices=kept, row_count=len(kept), grain_count=grain_count(len(kept), grain_size), rows=rows)


@final
class BadSampleHandler:
    """Applies ``on_error`` to the bad samples of one engine."""

    def __init__(self, on_error: BadSampleAction | BadSampleFunction, plan: Plan) -> None:
        self._on_error = on_error
        self._plan = plan

    def decide(self, planned: PlannedBatch, bad_rows: BadRows, row: int, failure: Failure, place: str) -> BaseException | None:
        """Decide how to handle a bad row and record it in ``bad_rows``, or return the exception to raise for the batch."""
        assert planned.indices is not None
        index = plain_indices(planned.indices)[row]
        action = self._judge(failure, place, index)
        if isinstance(action, BaseException):
            return action
        position = planned.first_position + bad_rows.first_row(row)
        shown, error = failure.index or repr(index), failure.line
        if action == "skip":
            bad_rows.leave_out(row)
            bad_rows.done.append(BadSample(planned.epoch, position, shown, error, "skipped"))
            return None
        replacement = self._replacement(planned, bad_rows, row, position)
        if isinstance(replacement, str):
            no_replacement = SampleError(
                f"on_error='replace' failed for index={shown} at position {position} ({error}): {replacement}"
            )
            no_replacement.__cause__ = failure.exception(place)
            return no_replacement
        bad_rows.replace(row, replacement[0])
        bad_rows.done.append(BadSample(planned.epoch, position, shown, error, "replaced", repr(replacement[0])))
        return None

    def decide_element(self, epoch: int, element: int, failure: Failure, place: str) -> BadSample | BaseException:
        """Decide about an element of an iterable dataset, which the worker has already skipped."""
        action = self._judge(failure, place, element)
        if action == "replace":
            return ConfigError("on_error returned 'replace' for an element of an iterable dataset; return 'raise' or 'skip'")
        if isinstance(action, BaseException):
            return action
        return BadSample(epoch, element, f"element {element}", failure.line, "skipped")

    def _judge(self, failure: Failure, place: str, index: Any) -> BadSampleAction | BaseException:
        """Return the action, or the exception to raise: the failure itself, or the error of the user's ``on_error``."""
        action = self._on_error
        if callable(action):
            try:
                action = action(failure.exception(place), index)
            except Exception as error:
                return error
            if action not in _ACTIONS:
                return ConfigError(f"on_error returned {action!r}; return 'raise', 'skip' or 'replace'")
        return failure.exception(place) if action == "raise" else action

    def _replacement(self, planned: PlannedBatch, bad_rows: BadRows, row: int, position: int) -> tuple[Any] | str:
        """Return a replacement index in a tuple, because it may be any object, or the reason why there is none."""
        tries = bad_rows.next_try(row)
        if tries > _TRIES:
            return f"{_TRIES} replacements were bad too; fix the dataset, or use 'skip'"
        drawn = derive(self._plan.seed, planned.epoch, position, _SALT, tries)
        index = self._plan.substitute(planned.epoch, drawn)
        if index is not None:
            return (index,)
        # Only the sampler knows its order, and samples that it excludes must not appear, so draw from the same batch. Known bad
        # samples are not excluded: which ones are known at this point depends on timing.
        first = bad_rows.first_row(row)
        others = [*bad_rows.first_indices[:first], *bad_rows.first_indices[first + 1 :]]
        return (others[drawn % len(others)],) if others else "its batch has no other sample; use a larger batch, or 'skip'"
