"""What the tuner is told, what it sees between two tellings, and what it answers."""

from __future__ import annotations

from math import exp, log
from statistics import fmean, median, pstdev
from typing import Final, Literal, NamedTuple, TypeAlias

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
