"""Samples that were bad: counted, listed, and held against the budget."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, final

from infeed.errors import SampleError

_LOG: Final = logging.getLogger("infeed")
# Bad samples that are remembered one by one; of others only the number is.
_LISTED: Final = 1000
# How many are named in the line at the end of an epoch.
_SHOWN: Final = 5
# Where nobody knows how long an epoch is, a fraction is one of what has come, and of no less than this.
_LEAST_SEEN: Final = 100
_ROUNDING: Final = 1e-9  # 0.29 * 100 is a little less than 29


@final
@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be loaded, and what was done about it."""

    __module__ = "infeed"

    epoch: int
    position: int
    index: str  # as it is shown; the index itself may be anything
    error: str
    outcome: Literal["skipped", "replaced"]
    replacement: str | None = None  # the index that came in its place

    def __str__(self) -> str:
        done = self.outcome if self.replacement is None else f"replaced by index={self.replacement}"
        return f"index={self.index} (position {self.position} of epoch {self.epoch}) {done}: {self.error}"


def new_list() -> deque[BadSample]:
    """For the latest bad samples of a loader."""
    return deque(maxlen=_LISTED)


@final
class Ledger:
    """Belongs to one iteration of a loader."""

    def __init__(self, budget: int | float | None = None, listed: deque[BadSample] | None = None) -> None:
        """``listed`` is the loader's own list, of all its epochs."""
        self._budget = budget
        self._listed = new_list() if listed is None else listed
        self._epoch = -1
        self._bad_count = 0  # of this epoch
        self._seen_count = 0
        self._of_epoch: list[BadSample] = []  # the first of this epoch
        self._last: BadSample | None = None

    @property
    def bad_count(self) -> int:
        """Of the epoch that was begun last, also those of an earlier run that it goes on from."""
        return self._bad_count

    def begin_epoch(self, epoch: int, bad_count: int) -> None:
        self._epoch, self._bad_count, self._seen_count = epoch, bad_count, 0
        self._of_epoch = []

    def note(self, samples: list[BadSample], row_count: int) -> None:
        """A batch of ``row_count`` rows is the user's, from which, or in which, these were left out or replaced."""
        self._seen_count += row_count
        for sample in samples:
            self._seen_count += sample.outcome == "skipped"
            self._bad_count += 1
            self._listed.append(sample)
            self._last = sample
            if len(self._of_epoch) < _SHOWN:
                self._of_epoch.append(sample)

    def excess(self, length: int | None) -> SampleError | None:
        """What to raise if there are more than the budget allows, in an epoch of this length, if that is known."""
        budget = self._budget
        if budget is None:
            return None
        if isinstance(budget, float):
            allowed = int(budget * (max(self._seen_count, _LEAST_SEEN) if length is None else length) + _ROUNDING)
            shown = f"error_budget={budget}, which is {allowed} samples here,"
        else:
            allowed = budget
            shown = f"error_budget={budget}"
        if self._bad_count <= allowed:
            return None
        last = "" if self._last is None else f"; the last was {self._last}"
        return SampleError(
            f"{self._bad_count} samples of epoch {self._epoch} were bad, and {shown} is exceeded{last}; mend the dataset, or "
            "raise error_budget"
        )

    def emptiness(self) -> SampleError | None:
        """What to raise at the end of an epoch that gave nothing at all because of bad samples."""
        if not self._bad_count or self._last is None:
            return None
        return SampleError(
            f"none of the {self._bad_count} samples of epoch {self._epoch} could be loaded; the last was {self._last}; look at "
            "it with num_workers=0 and on_error='raise'"
        )

    def end_epoch(self) -> None:
        """Say what was left out."""
        if not self._of_epoch:
            return
        lines = "".join(f"\n  {sample}" for sample in self._of_epoch)
        more = self._bad_count - len(self._of_epoch)
        rest = f"\n  and {more} more; see bad_samples" if more > 0 else ""
        noun = "sample" if self._bad_count == 1 else "samples"
        _LOG.warning("epoch %d had %d bad %s:%s%s", self._epoch, self._bad_count, noun, lines, rest)
        self._of_epoch = []
