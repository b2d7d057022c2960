"""How many workers there should be: tried out, by what it brings.

Pure: readings in, changes out, no clock. Two facts decide. How long the loop waits says whether more is to be had; how busy
workers are says how many are needed for it. Everything else that may hold a loader back (a disk, the bus, memory bandwidth, the
loop's own need of processors) is not modelled but measured: a step that brings too little is taken back, and remembered.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import Final, NamedTuple, final

from infeed.tuning.readings import Bound, Change, Limits, Reading, Spell, Summary

# A loop that waits less has nothing to gain worth a process...
_GROW_WAIT: Final = 0.04
# ...and one that waits more may need all its workers, however idle they look.
_SHRINK_WAIT: Final = 0.015
# Workers that are less busy are not what the loop waits for.
_GROW_BUSY: Final = 0.6
# Spells to look at before a step: few at first, because epochs may be short, and more once it has come to rest, because what
# looks like a change then is mostly a burst.
_FEW_SPELLS: Final = 3
_SOME_SPELLS: Final = 12
_MANY_SPELLS: Final = 14
# Spells to judge a step by: at least, and at most, if they leave it in doubt.
_LEAST_PROOF: Final = 4
_MOST_PROOF: Final = 20
# How many times the doubt a gain has to be: to be hoped for, and to be believed.
_CERTAINTY: Final = 4.0
_PROOF: Final = 1.5
# Room above what is needed on average: samples are uneven.
_GROW_ROOM: Final = 1.15
_SHRINK_ROOM: Final = 1.3
# A smaller crew must be smaller by this, or it is not worth anyone's time.
_SHRINK_LEAST: Final = 0.8
# Workers that compute for this much of their time gain nothing from being more than the processors.
_COMPUTES: Final = 0.9
# Workers that mostly wait are made so many times as many at once, if the processors can bear it: else twice as many.
_LEAP: Final = 4
_LEAP_ROOM: Final = 1.3  # above what a leap has shown to be enough
_ROUNDING: Final = 0.1  # of a worker: shares are measured
# A step has to bring this much, or half of what it could have brought if that is less.
_GAIN: Final = 0.04
# One that has cost as much went too far; between there and where it came from there may be a better number.
_LOSS: Final = 0.03


class _Trial(NamedTuple):
    """A step up that has to prove itself."""

    origin: int
    before: Summary
    least_gain: float


@final
class Tuner:
    """For one engine. ``consider`` is to be told often, some ten times a second, while the loop is there."""

    def __init__(self, limits: Limits, first_count: int | None = None) -> None:
        """``first_count``: how many to begin with, if something is known."""
        self._limits = limits
        # As it was asked for last.
        self._count = self.first_count if first_count is None else max(1, min(first_count, limits.most_workers))
        self._since: Reading | None = None
        self._spells: list[Spell] = []  # since the last change
        self._is_moved = True  # the next spell is still under what was before
        self._trial: _Trial | None = None
        self._has_rested = False
        self._cpu_share: float | None = None  # the most that was seen: with many workers some of it is waiting for a processor
        self._ceiling = inf  # this many brought nothing
        self._floor = 1  # fewer were too few
        self._shrunk_to = 0
        self._known: Summary | None = None  # what ceiling and floor were learned from
        self._is_learning = False
        self.bound: Bound = ""  # what allows no more, if it is not that more bring nothing
        self._refused: tuple[int, Summary] | None = None  # a step that was taken back, and how it was

    @property
    def first_count(self) -> int:
        """How many to begin with: one is enough to measure, a second is rarely wrong."""
        return max(1, min(2, self._limits.most_workers, ceil(self._limits.cores)))

    @property
    def count(self) -> int:
        """How many there should be, as far as is known."""
        return self._count

    @property
    def is_settled(self) -> bool:
        """Whether it has found what is best, as long as the work stays what it is; or tries nothing, because it cannot tell."""
        return self._trial is None and (self._has_rested or len(self._spells) >= _SOME_SPELLS)

    @property
    def reserve_bytes(self) -> int:
        """Of the memory that it is told of, what it leaves free."""
        return self._limits.reserve_bytes

    def begin(self) -> None:
        """Sums begin anew, or there was a pause: what comes next is not compared with what was before."""
        self._since = None

    def consider(self, reading: Reading) -> Change | None:
        """Take in how things stand; whether there should be another number of workers."""
        since = self._since
        if since is None or reading.worker_count != since.worker_count or reading.ready_count < reading.worker_count:
            self._since = reading  # not before all have started
            return None
        spell = Spell.between(since, reading)
        if spell is None:
            return None
        self._since = reading
        if self._is_moved:
            self._is_moved = False
            return None
        self._spells = [*self._spells, spell][-_MOST_PROOF:]
        self._learn(reading)
        return self._relieve(reading) or (self._judge(reading) if self._trial else self._regret() or self._decide(reading))

    # --- what is known

    def _learn(self, reading: Reading) -> None:
        """Note what the work is like; forget what was learned if it has become another."""
        if reading.worker_count < self._count and self._trial is not None:
            self._ceiling, self._trial = min(self._ceiling, reading.worker_count + 1), None  # others could not be started
        self._count = reading.worker_count
        if len(self._spells) < _FEW_SPELLS:
            return
        now = Summary.of(self._spells[-_MANY_SPELLS:])
        if now.cpu_share is not None:
            self._cpu_share = max(self._cpu_share or 0.0, now.cpu_share)
        if len(self._spells) < _MANY_SPELLS or self._trial is not None:
            return
        if self._is_learning:
            self._known, self._is_learning = now, False
        elif self._known is not None and now.differs(self._known):
            self._ceiling, self._floor, self._shrunk_to, self._known = inf, 1, 0, None
            self._cpu_share, self._has_rested = now.cpu_share, False

    def _rest(self) -> None:
        """There is nothing to be done: from here on a clear change is waited for."""
        self._has_rested = True
        self._is_learning |= self._known is None

    @property
    def _most(self) -> int:
        return max(1, min(self._limits.most_workers, _whole(self._ceiling - 1), self._budget_most))

    @property
    def _budget_most(self) -> int:
        """How many workers a budget of cores allows."""
        if not self._limits.is_strict or not self._cpu_share:
            return self._limits.most_workers
        return floor(self._limits.cores / self._cpu_share + _ROUNDING)

    def _memory_most(self, reading: Reading) -> int:
        """How many workers there is memory for."""
        if not reading.worker_bytes or reading.free_bytes is None:
            return self._limits.most_workers
        return reading.worker_count + floor((reading.free_bytes - self._limits.reserve_bytes) / reading.worker_bytes)

    def _bound_now(self, reading: Reading, wanted: int) -> Bound:
        """What allows no more than there are, where the loop waits for busy workers."""
        count = reading.worker_count
        if min(self._limits.most_workers, self._ceiling - 1) <= count:
            return self.bound  # more were tried, or taken back: what was said of that holds
        if count < wanted and self._memory_most(reading) <= count:
            return "memory_limit" if reading.is_budget else "memory"
        return "cores" if self._limits.has_more and self._budget_most <= count else ""

    # --- decisions

    def _relieve(self, reading: Reading) -> Change | None:
        """Memory is running out: fewer, whatever it costs."""
        most = max(1, self._memory_most(reading))
        if most >= reading.worker_count or len(self._spells) < _FEW_SPELLS:
            return None
        self._ceiling = most + 1
        self._trial, self._is_learning = None, True
        change = self._change(most, f"there is memory for no more, at {reading.worker_bytes >> 20} MiB each")
        self.bound = "memory_limit" if reading.is_budget else "memory"
        return change

    def _decide(self, reading: Reading) -> Change | None:
        patience = _SOME_SPELLS if self._has_rested else _FEW_SPELLS
        if len(self._spells) < patience:
            return None
        recent = self._spells[-patience:]
        if all(spell.wait_share > _GROW_WAIT for spell in recent):
            return self._grow(reading, Summary.of(self._spells[-_SOME_SPELLS:]))
        if any(spell.wait_share > _GROW_WAIT for spell in recent[-_FEW_SPELLS:]):
            return None
        self._rest()
        if len(self._spells) >= _MANY_SPELLS:
            return self._shrink(Summary.of(self._spells[-_MANY_SPELLS:]))
        return None

    def _grow(self, reading: Reading, seen: Summary) -> Change | None:
        count = reading.worker_count
        if seen.wait_share <= _GROW_WAIT:
            return None  # it began to wait only now
        busy_share = seen.busy_count / count
        wanted = self._wanted(count, seen)
        target = min(wanted, self._most, max(count, self._memory_most(reading)))
        if busy_share < _GROW_BUSY or target <= count:
            self.bound = self._bound_now(reading, wanted) if busy_share >= _GROW_BUSY else ""
            self._rest()
            return None
        could_gain = min(target / count, 1 / max(1e-9, 1 - seen.wait_share)) - 1
        if could_gain < _CERTAINTY * seen.doubt and len(self._spells) < _SOME_SPELLS:
            return None  # it could not be told from chance
        self._trial = _Trial(count, seen, min(_GAIN, could_gain / 2))
        if count == self._shrunk_to:
            self._floor, self._is_learning = count + 1, True
        return self._change(
            target,
            f"the loop waited {seen.wait_share:.0%} of the time and workers were busy {min(1.0, busy_share):.0%} of theirs"
            + (f"; {self._limits.cores - count:.3g} more cores are there" if target <= self._limits.cores else "")
            + ("; they mostly wait themselves" if target > self._limits.cores else ""),
        )

    def _wanted(self, count: int, seen: Summary) -> int:
        """How many would do, as far as can be known from so many."""
        needed = _GROW_ROOM * count / max(1e-9, 1 - seen.wait_share)
        cores = max(1, ceil(self._limits.cores - 0.25))
        if self._ceiling < inf:  # there is a better number below it, perhaps, if it is far enough away
            step = (count + self._ceiling) // 2 if self._ceiling - count >= max(2, count / 4) else count
        elif self._cpu_share is not None and self._cpu_share >= _COMPUTES:
            step = cores
        elif self._cpu_share is not None and count * self._cpu_share >= self._limits.cores:
            step = ceil(1.5 * count)
        elif self._cpu_share is not None and _LEAP * count * self._cpu_share <= self._limits.cores:
            step = max(_LEAP * count, cores)
        else:
            step = max(2 * count, cores)
        return ceil(min(needed, step))

    def _judge(self, reading: Reading) -> Change | None:
        """Whether a step up was worth it; when in doubt, look on."""
        trial = self._trial
        assert trial is not None
        if len(self._spells) < _LEAST_PROOF:
            return None
        after = Summary.of(self._spells)
        if after.is_of_another_loop(trial.before):
            self._trial, self._spells = None, []  # what came of the step cannot be told from what came of that
            return None
        gain = after.rate / trial.before.rate - 1 if trial.before.rate else inf
        doubt = (after.doubt**2 + trial.before.doubt**2) ** 0.5
        if abs(gain - trial.least_gain) < _PROOF * doubt and len(self._spells) < _MOST_PROOF:
            return None
        self._trial = None
        if gain >= trial.least_gain:
            return self._moderate(reading.worker_count, trial.origin, gain + doubt)
        if after.wait_share < trial.before.wait_share / 2:
            return None
        self._ceiling, self._has_rested, self._is_learning = reading.worker_count, True, True
        if not (gain < -_LOSS and reading.worker_count >= 2 * trial.origin):
            self._ceiling = trial.origin + 1  # it is flat there: nothing in between is better
        self._refused = (reading.worker_count, after)
        more = "a gain of" if gain >= 0 else "a loss of"
        return self._change(trial.origin, f"the step to {reading.worker_count} brought {more} {abs(gain):.0%}")

    def _moderate(self, count: int, origin: int, gain: float) -> Change | None:
        """After a leap that brought something, but less than so many workers could have: no more than that takes."""
        enough = ceil(_LEAP_ROOM * origin * (1 + gain))
        if count <= 2 * origin or enough > _SHRINK_LEAST * count:
            return None
        self._ceiling, self._has_rested, self._is_learning = enough + 1, True, True
        return self._change(enough, f"the step from {origin} to {count} brought a gain of {gain:.0%}; these are enough for it")

    def _regret(self) -> Change | None:
        """Whether a step was taken back wrongly: what it was held against was known from few spells, which may have been
        lucky ones."""
        if self._refused is None or len(self._spells) < _MANY_SPELLS:
            return None
        (count, then), self._refused = self._refused, None
        now = Summary.of(self._spells)
        gain = then.rate / now.rate - 1 if now.rate else 0.0
        if gain < _GAIN + _PROOF * (now.doubt**2 + then.doubt**2) ** 0.5:
            return None
        self._ceiling, self._has_rested = inf, False
        return self._change(count, f"with these it was {gain:.0%} faster after all")

    def _shrink(self, seen: Summary) -> Change | None:
        count = self._count
        target = max(self._floor, ceil(_SHRINK_ROOM * seen.most_busy + 0.25))
        if seen.wait_share > _SHRINK_WAIT or target > _SHRINK_LEAST * count:
            return None
        self._shrunk_to, self._is_learning = target, True
        return self._change(
            target,
            f"the loop waited {seen.wait_share:.0%} of the time and workers were busy {seen.busy_count / count:.0%} of theirs",
        )

    def _change(self, count: int, reason: str) -> Change | None:
        before, self._count = self._count, count
        self._spells, self._is_moved, self.bound = [], True, ""
        if count == before:
            return None
        noun = "worker" if count == 1 else "workers"
        return Change(count, f"{count} {noun} instead of {before}: {reason}")


def _whole(count: float) -> int:
    return int(min(count, 1 << 30))
