"""How many workers there should be: tried out, by what it brings.

Pure: readings in, changes out, no clock. Two facts decide. How long the loop waits says whether more is to be had; how busy
workers are says how many are needed for it. Everything else that may hold a loader back (a disk, the bus, memory bandwidth, the
loop's own need of processors) is not modelled but measured: a step that brings too little is taken back, and remembered.
"""

from __future__ import annotations

from math import ceil, exp, floor, inf, log
from statistics import fmean, median, pstdev
from typing import Final, Literal, NamedTuple, TypeAlias, final

# Shorter spells say nothing: the clock is coarse, and one batch is not like another...
_LEAST_S: Final = 0.1
_LEAST_BATCHES: Final = 2
# ...but of slow batches one has to do, and of workers that give nothing at all for so long even that is not waited for.
_LONG_S: Final = 2.0
_ENDLESS_S: Final = 10.0
# Work is clearly other work if it takes so many times as long, and that is beyond so many times the doubt...
_CLEARLY: Final = 1.6
_SURELY: Final = 6.0
_MOST_DOUBT: Final = 5.0
# ...or if so much more, or less, of it is computing.
_CLEARLY_OTHER_SHARE: Final = 0.3
# A loop that waits so much has no work of its own to speak of.
_MOSTLY: Final = 0.95


class Limits(NamedTuple):
    """What must not be exceeded."""

    cores: float  # that this loader may use
    most_workers: int
    reserve_bytes: int = 0  # of memory, to be left free
    is_strict: bool = False  # cores are a budget: not even a gain may take more
    has_more: bool = False  # the machine has more cores than that


class Reading(NamedTuple):
    """How far everything had come at a time. All sums are from the beginning."""

    at_ns: int  # by a clock that stands still between epochs: these may be too short to tell anything by themselves
    batch_count: int
    sample_count: int
    waited_ns: int  # by the loop, for batches
    away_ns: int  # by the loop, with its own work
    busy_ns: int  # by all workers together: at samples, be it computing or waiting for a disk
    cpu_ns: int  # processor time of all workers together; 0 where it cannot be had
    worker_count: int
    ready_count: int  # of them, those that have started
    worker_bytes: int = 0  # memory that one worker takes; 0 if it is not known
    free_bytes: int | None = None  # memory that could be taken now
    is_budget: bool = False  # that is what the user's own limit leaves, and the machine has more


# What allows no more workers, though more might bring something: memory (the user's limit, or what is free), or cores.
Bound: TypeAlias = Literal["", "memory_limit", "memory", "cores"]


class Change(NamedTuple):
    """Let there be another number of workers."""

    worker_count: int
    why: str  # a sentence for the log


class Spell(NamedTuple):
    """What went on between two readings, with one number of workers."""

    rate: float  # samples per second that the loop was there
    wait_share: float  # of the loop's time
    busy_count: float  # workers that were busy, on average
    cpu_share: float | None  # of the time that workers were busy; None if it is not known
    work_s: float  # that one sample takes a worker
    away_s: float  # that one sample takes the loop

    @staticmethod
    def between(first: Reading, last: Reading) -> Spell | None:
        """``None`` if it is too short to tell anything."""
        loop_s = (last.waited_ns - first.waited_ns + last.away_ns - first.away_ns) / 1e9
        batches = last.batch_count - first.batch_count
        if loop_s < _LEAST_S or (batches < _LEAST_BATCHES and loop_s < (_LONG_S if batches else _ENDLESS_S)):
            return None
        samples = last.sample_count - first.sample_count
        busy_s = (last.busy_ns - first.busy_ns) / 1e9
        cpu_s = (last.cpu_ns - first.cpu_ns) / 1e9
        away_s = (last.away_ns - first.away_ns) / 1e9
        return Spell(
            rate=samples / loop_s,
            wait_share=1 - away_s / loop_s,
            busy_count=busy_s * 1e9 / max(1, last.at_ns - first.at_ns),
            cpu_share=min(1.0, cpu_s / busy_s) if last.cpu_ns and busy_s > 0 else None,
            work_s=busy_s / max(1, samples),
            away_s=away_s / max(1, samples),
        )


class Summary(NamedTuple):
    """Several spells in the middle: one that stands out does not count."""

    rate: float
    doubt: float  # how far that may be off, as a share of it
    wait_share: float
    busy_count: float
    most_busy: float
    cpu_share: float | None
    work_s: float
    away_s: float
    unevenness: float  # how far work and away may be off, as a power of e

    @staticmethod
    def of(spells: list[Spell]) -> Summary:
        rates = [spell.rate for spell in spells]
        mean = fmean(rates)
        shares = [spell.cpu_share for spell in spells if spell.cpu_share is not None]
        return Summary(
            rate=median(rates),
            doubt=pstdev(rates) / mean / max(1, len(rates) - 1) ** 0.5 if mean else 1.0,
            wait_share=median(spell.wait_share for spell in spells),
            busy_count=median(spell.busy_count for spell in spells),
            most_busy=max(spell.busy_count for spell in spells),
            cpu_share=median(shares) if shares else None,
            work_s=median(spell.work_s for spell in spells),
            away_s=median(spell.away_s for spell in spells),
            unevenness=pstdev(log(max(spell.work_s, 1e-9)) for spell in spells) / max(1, len(spells) - 1) ** 0.5,
        )

    def differs(self, other: Summary) -> bool:
        """Whether this is clearly other work than that."""
        if self._is_far(other, self.work_s, other.work_s) or self.is_of_another_loop(other):
            return True
        shares = (self.cpu_share, other.cpu_share)
        return None not in shares and abs((shares[0] or 0.0) - (shares[1] or 0.0)) > _CLEARLY_OTHER_SHARE

    def is_of_another_loop(self, other: Summary) -> bool:
        """Whether the loop takes clearly longer for a sample, or less long, than it did."""
        # That counts only where it takes part of its time: else it is nothing, in other words.
        return min(self.wait_share, other.wait_share) < _MOSTLY and self._is_far(other, self.away_s, other.away_s)

    def _is_far(self, other: Summary, one: float, two: float) -> bool:
        doubt = (self.unevenness**2 + other.unevenness**2) ** 0.5
        clearly = max(_CLEARLY, exp(min(_SURELY * doubt, _MOST_DOUBT)))
        return not one <= clearly * two or not two <= clearly * one


# Only one thread at a time can hold the GIL, and the user's own loop wants it too. So all workers together may hold it for no
# more than this part of the time, with one worker on each core; and none for more than that, however few the cores.
_TOGETHER: Final = 0.4
_ALONE: Final = 0.15


class Work(NamedTuple):
    """What the workers of an engine have done and found."""

    kind: Literal["inline", "thread", "process"]
    busy_ns: int  # without waiting for a core
    sample_count: int
    gil_share: float | None  # how much of the time loading holds the GIL, if that is known
    is_drawing: bool  # from generators that threads would share

    @property
    def sample_ns(self) -> float:
        return self.busy_ns / self.sample_count if self.sample_count else 0.0


class KindAdvice(NamedTuple):
    kind: Literal["thread", "process"]
    why: str  # a sentence for the log


def better_kind(gil_share: float, *, is_drawing: bool, cores: float) -> KindAdvice:
    """Decide by what was measured while samples were loaded.

    Args:
        gil_share: of the time of loading, how much the GIL was held.
        is_drawing: whether samples draw from ``random``, ``numpy.random`` or torch's generator, which threads share: then only
            processes give the same numbers whatever the workers.
        cores: that may be used.
    """
    held = f"loading a sample holds the GIL for {gil_share:.0%} of its time"
    if is_drawing:
        return KindAdvice(
            "process", f"processes: the dataset draws from global random generators, which threads would share; {held}"
        )
    if gil_share > min(_ALONE, _TOGETHER / max(1.0, cores)):
        return KindAdvice("process", f"processes: {held}, and threads would wait for each other")
    return KindAdvice("thread", f"threads: {held}, so they do as well as processes, and share the dataset")


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
