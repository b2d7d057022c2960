"""Choose the number and the kind of workers from measurements.

Pure logic: readings in, changes out, no clock. The training loop's wait time shows whether more throughput is possible. The
busy time of workers shows how many it takes.

Other limits (a disk, the bus, memory bandwidth, CPU use of the training loop) are measured, not modelled. The tuner reverts a
step that gains too little, and remembers it.
"""

from __future__ import annotations

from math import ceil, exp, floor, inf, log
from statistics import fmean, median, pstdev
from typing import Final, Literal, NamedTuple, TypeAlias, final

from infeed.autotune.capacity import BUSY, ParallelKind, WorkerKind, workers_needed, workers_useful
from infeed.formatting import format_bytes, format_count

# Minimum length of a spell (a measurement interval): the clock is coarse, and batches differ...
_LEAST_S: Final = 0.1
_LEAST_BATCHES: Final = 2
# ...but one batch is enough after _LONG_S, and none is needed after _ENDLESS_S.
_LONG_S: Final = 2.0
_ENDLESS_S: Final = 10.0
# The workload has changed if its time per sample changes by this factor, and by more than this multiple of the uncertainty (as
# an exponent of e, capped)...
_CLEARLY: Final = 1.6
_SURELY: Final = 6.0
_MOST_DOUBT: Final = 5.0
# ...or if the CPU share changes by this much.
_CLEARLY_OTHER_SHARE: Final = 0.3
# A training loop that waits this share of its time has no significant work.
_MOSTLY: Final = 0.95


class WorkerLimits(NamedTuple):
    """Limits that the number of workers must respect."""

    cores: float  # CPU cores that this loader may use
    most_workers: int
    reserve_bytes: int = 0  # memory to leave free
    is_strict: bool = False  # the cores are a budget: do not exceed it even for a gain
    has_more: bool = False  # the machine has more CPU cores than that


class Reading(NamedTuple):
    """Counters at one point in time, all cumulative from the start."""

    at_ns: int  # on a clock that stops between epochs, because a single epoch may be too short to measure
    batch_count: int
    sample_count: int
    waited_ns: int  # the training loop's wait time for batches
    away_ns: int  # the training loop's own work
    busy_ns: int  # time of all workers on samples, whether CPU-bound or I/O-bound
    cpu_ns: int  # CPU time of all workers; 0 where it is not available
    worker_count: int
    ready_count: int  # workers that have started
    worker_bytes: int = 0  # memory per worker; 0 if unknown
    free_bytes: int | None = None  # memory available now
    is_budget: bool = False  # free_bytes is what the user's limit leaves; the machine has more


# The limit that prevents more workers, although more might help: memory (the user's limit, or free memory) or CPU cores.
Bound: TypeAlias = Literal["", "memory_limit", "memory", "cores"]


class Change(NamedTuple):
    """A request for another number of workers."""

    worker_count: int
    why: str  # a sentence for the log


class Spell(NamedTuple):
    """Measurements between two readings, with a constant number of workers."""

    rate: float  # samples per second of the training loop's time
    wait_share: float  # of the training loop's time
    busy_count: float  # average number of busy workers
    cpu_share: float | None  # of the workers' busy time; None if unknown
    work_s: float  # a worker's time per sample
    away_s: float  # the training loop's own time per sample

    @staticmethod
    def between(first: Reading, last: Reading) -> Spell | None:
        """Return the spell between two readings; ``None`` if it is too short to be meaningful."""
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
    """Medians of several spells, robust against a single outlier."""

    rate: float
    doubt: float  # uncertainty of the rate, relative
    wait_share: float
    busy_count: float
    most_busy: float
    cpu_share: float | None
    work_s: float
    away_s: float
    unevenness: float  # uncertainty of work_s and away_s, as an exponent of e

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
        """Whether the workload has clearly changed."""
        if self._is_far(other, self.work_s, other.work_s) or self.is_of_another_loop(other):
            return True
        shares = (self.cpu_share, other.cpu_share)
        return None not in shares and abs((shares[0] or 0.0) - (shares[1] or 0.0)) > _CLEARLY_OTHER_SHARE

    def is_of_another_loop(self, other: Summary) -> bool:
        """Whether the training loop's own time per sample has clearly changed."""
        # Compare only if the training loop works for part of its time; otherwise its own time is close to 0.
        return min(self.wait_share, other.wait_share) < _MOSTLY and self._is_far(other, self.away_s, other.away_s)

    def _is_far(self, other: Summary, one: float, two: float) -> bool:
        doubt = (self.unevenness**2 + other.unevenness**2) ** 0.5
        clearly = max(_CLEARLY, exp(min(_SURELY * doubt, _MOST_DOUBT)))
        return not one <= clearly * two or not two <= clearly * one


# Only one thread at a time can hold the GIL, and the training loop needs it too. So all workers together, one per CPU core, may
# hold it for at most _TOGETHER of the time. A single worker may hold it for at most _ALONE, however few the cores.
_TOGETHER: Final = 0.4
_ALONE: Final = 0.15


class Work(NamedTuple):
    """Measurements of the workers of an engine."""

    kind: WorkerKind
    busy_ns: int  # excludes waiting for a CPU core
    sample_count: int
    gil_share: float | None  # share of the loading time that holds the GIL; None if unknown
    is_drawing: bool  # draws from random generators that threads would share

    @property
    def sample_ns(self) -> float:
        return self.busy_ns / self.sample_count if self.sample_count else 0.0


class KindAdvice(NamedTuple):
    kind: ParallelKind
    why: str  # a sentence for the log


def better_kind(gil_share: float, *, is_drawing: bool, cores: float) -> KindAdvice:
    """Choose threads or processes from measurements taken while loading samples.

    Args:
        gil_share: share of the loading time that holds the GIL.
        is_drawing: whether samples draw from ``random``, ``numpy.random`` or torch's generator, which threads share. Then only
            processes produce the same numbers regardless of the workers.
        cores: number of CPU cores that may be used.
    """
    held = f"loading holds the GIL {gil_share:.0%} of the time"
    if is_drawing:
        return KindAdvice(
            "process", f"using processes: the dataset draws from global random generators, which threads would share; {held}"
        )
    if gil_share > min(_ALONE, _TOGETHER / max(1.0, cores)):
        return KindAdvice("process", f"using processes: {held}, so threads would wait for each other")
    return KindAdvice("thread", f"using threads: {held}, so they are as fast as processes and share the dataset")


# Below this wait share, the possible gain is not worth another process...
_GROW_WAIT: Final = 0.04
# ...and above this one, the training loop may need all its workers, however idle they look.
_SHRINK_WAIT: Final = 0.015
# Spells to evaluate before a step: few at first, because epochs may be short. More after the tuner has settled, because an
# apparent change is then mostly a burst.
_FEW_SPELLS: Final = 3
_SOME_SPELLS: Final = 12
_MANY_SPELLS: Final = 14
# Minimum and maximum number of spells to judge a step; the maximum applies if the result is uncertain.
_LEAST_PROOF: Final = 4
_MOST_PROOF: Final = 20
# Multiples of the uncertainty: the possible gain that justifies a step, and the measured difference that decides about it.
_CERTAINTY: Final = 4.0
_PROOF: Final = 1.5
# Headroom above the most that were busy.
_SHRINK_ROOM: Final = 1.3
# Shrink only to this share of the current count or less; smaller savings are not worth a change.
_SHRINK_LEAST: Final = 0.8
# Workers with this CPU share are CPU-bound: more workers than CPU cores gain nothing.
_COMPUTES: Final = 0.9
# Multiply I/O-bound workers by this factor in one step if the CPU cores can take it; otherwise double them.
_LEAP: Final = 4
_LEAP_ROOM: Final = 1.3  # headroom above the count that a leap has shown to be enough
# A step must gain this much, or half of its possible gain if that is less.
_GAIN: Final = 0.04
# A step that loses this much went too far; a better count may lie between the old and the new one.
_LOSS: Final = 0.03


class _Trial(NamedTuple):
    """A step up under evaluation."""

    origin: int
    before: Summary
    least_gain: float


@final
class Tuner:
    """Chooses the number of workers of one engine. Call ``consider`` about ten times a second while the training loop runs."""

    def __init__(self, limits: WorkerLimits, first_count: int | None = None) -> None:
        """Start with ``first_count`` workers if a good count is already known."""
        self._limits = limits
        # The count requested last.
        self._count = self.first_count if first_count is None else max(1, min(first_count, limits.most_workers))
        self._since: Reading | None = None
        self._spells: list[Spell] = []  # since the last change
        self._is_moved = True  # skip the next spell: it still includes the old count
        self._trial: _Trial | None = None
        self._has_rested = False
        self._cpu_share: float | None = None  # the maximum seen: with many workers, some of their time is waiting for a core
        self._ceiling = inf  # this count brought no gain
        self._floor = 1  # fewer were too few
        self._shrunk_to = 0
        self._known: Summary | None = None  # the workload that ceiling and floor were learned from
        self._is_learning = False
        self.bound: Bound = ""  # the limit that prevents more workers, unless more simply gain nothing
        self._refused: tuple[int, Summary] | None = None  # a reverted step: its count and measurements

    @property
    def first_count(self) -> int:
        """Number of workers to start with: one is enough to measure, and a second is rarely wrong."""
        return max(1, min(2, self._limits.most_workers, ceil(self._limits.cores)))

    @property
    def count(self) -> int:
        """The best number of workers known so far."""
        return self._count

    @property
    def is_settled(self) -> bool:
        """Whether the tuner has found the best count for the current workload, or cannot decide and tries nothing."""
        return self._trial is None and (self._has_rested or len(self._spells) >= _SOME_SPELLS)

    @property
    def reserve_bytes(self) -> int:
        """Part of the free memory that the tuner leaves unused."""
        return self._limits.reserve_bytes

    def begin(self) -> None:
        """Do not compare the next reading with earlier ones: the counters were reset, or there was a pause."""
        self._since = None

    def consider(self, reading: Reading) -> Change | None:
        """Process a reading; return a change if another number of workers is better."""
        since = self._since
        if since is None or reading.worker_count != since.worker_count or reading.ready_count < reading.worker_count:
            self._since = reading  # wait until all workers have started
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
        """Record the workload; discard learned limits if it has changed."""
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
        """Settle: from now on, act only on a clear change."""
        self._has_rested = True
        self._is_learning |= self._known is None

    @property
    def _most(self) -> int:
        return max(1, min(self._limits.most_workers, _whole(self._ceiling - 1), self._budget_most))

    @property
    def _budget_most(self) -> int:
        """Maximum number of workers within the CPU core budget."""
        if not self._limits.is_strict or not self._cpu_share:
            return self._limits.most_workers
        return workers_useful(self._limits.cores, self._cpu_share)

    def _memory_most(self, reading: Reading) -> int:
        """Return the maximum number of workers that fit into memory."""
        if not reading.worker_bytes or reading.free_bytes is None:
            return self._limits.most_workers
        return reading.worker_count + floor((reading.free_bytes - self._limits.reserve_bytes) / reading.worker_bytes)

    def _bound_now(self, reading: Reading, wanted: int) -> Bound:
        """Return the limit that prevents more workers while the training loop waits for busy ones."""
        count = reading.worker_count
        if min(self._limits.most_workers, self._ceiling - 1) <= count:
            return self.bound  # more workers were tried or reverted: the recorded limit still applies
        if count < wanted and self._memory_most(reading) <= count:
            return "memory_limit" if reading.is_budget else "memory"
        return "cores" if self._limits.has_more and self._budget_most <= count else ""

    # --- decisions

    def _relieve(self, reading: Reading) -> Change | None:
        """Reduce the number of workers, at any cost in throughput, if memory runs out."""
        most = max(1, self._memory_most(reading))
        if most >= reading.worker_count or len(self._spells) < _FEW_SPELLS:
            return None
        self._ceiling = most + 1
        self._trial, self._is_learning = None, True
        change = self._change(most, f"no memory for more, at {format_bytes(reading.worker_bytes)} per worker")
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
            return None  # it has only just begun to wait
        busy_share = seen.busy_count / count
        wanted = self._wanted(count, seen)
        target = min(wanted, self._most, max(count, self._memory_most(reading)))
        if busy_share < BUSY or target <= count:
            self.bound = self._bound_now(reading, wanted) if busy_share >= BUSY else ""
            self._rest()
            return None
        could_gain = min(target / count, 1 / max(1e-9, 1 - seen.wait_share)) - 1
        if could_gain < _CERTAINTY * seen.doubt and len(self._spells) < _SOME_SPELLS:
            return None  # the gain would be indistinguishable from noise
        self._trial = _Trial(count, seen, min(_GAIN, could_gain / 2))
        if count == self._shrunk_to:
            self._floor, self._is_learning = count + 1, True
        return self._change(
            target,
            f"the training loop waited {seen.wait_share:.0%}, workers were busy {min(1.0, busy_share):.0%} of the time"
            + (_free_text(self._limits.cores - count) if target <= self._limits.cores else "")
            + ("; they are I/O-bound" if target > self._limits.cores else ""),
        )

    def _wanted(self, count: int, seen: Summary) -> int:
        """Return the number of workers that should be enough, estimated from the measurements with ``count`` workers."""
        needed = workers_needed(count, max(1e-9, 1 - seen.wait_share))  # each is busy all the time
        cores = max(1, ceil(self._limits.cores - 0.25))
        if self._ceiling < inf:  # a better count may lie in between, if the gap is large enough
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
        """Revert a step up if it gained too little; wait for more spells if the result is uncertain."""
        trial = self._trial
        assert trial is not None
        if len(self._spells) < _LEAST_PROOF:
            return None
        after = Summary.of(self._spells)
        if after.is_of_another_loop(trial.before):
            self._trial, self._spells = None, []  # the effect of the step cannot be separated from that change
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
            self._ceiling = trial.origin + 1  # throughput is flat: no count in between is better
        self._refused = (reading.worker_count, after)
        change = f"raised throughput by only {gain:.0%}" if gain >= 0 else f"lowered throughput by {-gain:.0%}"
        return self._change(trial.origin, f"{reading.worker_count} workers {change}")

    def _moderate(self, count: int, origin: int, gain: float) -> Change | None:
        """After a leap that gained less than its workers could have, reduce the count to what the gain needs."""
        if gain == inf:  # no sample arrived before the leap
            return None
        enough = ceil(_LEAP_ROOM * origin * (1 + gain))
        if count <= 2 * origin or enough > _SHRINK_LEAST * count:
            return None
        self._ceiling, self._has_rested, self._is_learning = enough + 1, True, True
        return self._change(enough, f"{count} workers raised throughput by only {gain:.0%} over {origin}; fewer are enough")

    def _regret(self) -> Change | None:
        """Repeat a step that was reverted wrongly: its baseline came from few spells, which may have been unusually fast."""
        if self._refused is None or len(self._spells) < _MANY_SPELLS:
            return None
        (count, then), self._refused = self._refused, None
        now = Summary.of(self._spells)
        gain = then.rate / now.rate - 1 if now.rate else 0.0
        if gain < _GAIN + _PROOF * (now.doubt**2 + then.doubt**2) ** 0.5:
            return None
        self._ceiling, self._has_rested = inf, False
        return self._change(count, f"throughput was {gain:.0%} higher with {count} workers after all")

    def _shrink(self, seen: Summary) -> Change | None:
        count = self._count
        target = max(self._floor, ceil(_SHRINK_ROOM * seen.most_busy + 0.25))
        if seen.wait_share > _SHRINK_WAIT or target > _SHRINK_LEAST * count:
            return None
        self._shrunk_to, self._is_learning = target, True
        return self._change(
            target,
            f"the training loop waited {seen.wait_share:.0%}, workers were busy {seen.busy_count / count:.0%} of the time",
        )

    def _change(self, count: int, reason: str) -> Change | None:
        before, self._count = self._count, count
        self._spells, self._is_moved, self.bound = [], True, ""
        if count == before:
            return None
        return Change(count, f"{format_count(count, 'worker')} instead of {before}: {reason}")


def _free_text(cores: float) -> str:
    free = format_count(cores, "core")
    return f"; {free} {'is' if free == '1 core' else 'are'} free"


def _whole(count: float) -> int:
    return int(min(count, 1 << 30))
