"""One sentence about a run: does the loop wait for data, for what, and what would help."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from infeed.observe.records import Statistics

# The loop waits so little that nobody would notice.
_LITTLE: Final = 0.05
# Before this much is known, a sentence would be a guess.
_LEAST_BATCHES: Final = 4
_LEAST_S: Final = 0.02
# Workers that are busy for less than this do not hold the loop up by their number.
_IDLE: Final = 0.7
# Work that uses the processor for less than this waits: for a disk, a network, another process.
_COMPUTES: Final = 0.6
# A sample that takes so many times the usual holds others up.
_SLOW_TIMES: Final = 20
_MOST_SUGGESTED: Final = 64
# What takes up more of the wait than this is what it is about.
_MOSTLY: Final = 0.5


def verdict_of(statistics: Statistics) -> str:
    if not statistics.batch_count:
        return "nothing was loaded yet"
    if statistics.batch_count < _LEAST_BATCHES or statistics.elapsed_s < _LEAST_S:
        return f"too early to tell: {statistics.batch_count} batches in {statistics.elapsed_s:.2f} s"
    share = statistics.wait_share
    if share < _LITTLE:
        return f"keeping up: the loop waited {share:.1%} of the time{_spare(statistics)}"
    anew = statistics.changeover_s / statistics.waited_s
    if anew > _MOSTLY and not statistics.keeps_workers and statistics.kind != "inline":
        return (
            f"input-bound: the loop waited {share:.0%} of the time, {anew:.0%} of it for workers that are started anew for "
            "every epoch; persistent_workers=True keeps them"
        )
    what, part = _largest(statistics)
    waited = "loaded by itself for" if statistics.kind == "inline" else "waited"
    return f"input-bound: the loop {waited} {share:.0%} of the time, {part:.0%} of it for {what}; {_cure(statistics, what)}"


def _largest(statistics: Statistics) -> tuple[str, float]:
    """What most of the wait was for, and which part of it that is."""
    phases = {
        statistics.loads_by: sum(one.load_s for one in statistics.workers),
        "collate_fn" if statistics.has_collate_fn else "stacking samples": sum(one.collate_s for one in statistics.workers),
        "writing into shared memory": sum(one.write_s for one in statistics.workers),
    }
    name = max(phases, key=lambda name: phases[name])
    worked_s = sum(phases.values())
    waited_s = statistics.waited_s + statistics.started_s
    deliver_share = min(1.0, statistics.deliver_s / waited_s) if waited_s else 0.0
    of_workers = (1 - deliver_share) * (phases[name] / worked_s if worked_s else 0.0)
    if deliver_share > of_workers:
        return "infeed's own work in the loop's thread", deliver_share
    return name, of_workers


def _cure(statistics: Statistics, what: str) -> str:
    if what.startswith("infeed"):
        return "larger batches cost less of it"
    if statistics.kind == "inline":
        needed, cores = _needed(statistics), max(1, int(statistics.core_count))
        if needed <= cores:
            return f"num_workers={needed} would hide it"
        return f"num_workers={cores}, one for each core, would help; more if it waits and does not compute"
    slow = _slow_sample(statistics)
    if statistics.busy_share < _IDLE:
        if slow:
            return f"workers were busy only {statistics.busy_share:.0%} of their time: {slow}"
        return (
            f"workers were busy only {statistics.busy_share:.0%} of their time: allow more in flight (prefetch, memory_limit)"
        )
    if statistics.is_auto:
        return "there are as many workers as bring something, so make it cheaper, or give it more cores"
    more = _needed(statistics) - statistics.worker_count
    computing = _computing(statistics)
    if computing < _COMPUTES:
        return f"it waits and does not compute (processor {computing:.0%}), so {_more(more)} would help, beyond the cores too"
    free = statistics.core_count - statistics.worker_count * computing
    if free < 0.5:
        return f"all {_cores(statistics.core_count)} are busy, so make it cheaper, or give it more cores"
    return (
        f"{_more(min(more, max(1, round(free))))} would help, {_cores(round(free))} {'is' if round(free) == 1 else 'are'} free"
    )


def _spare(statistics: Statistics) -> str:
    """Which workers are too many."""
    enough = _needed(statistics)
    if statistics.kind == "inline" or statistics.busy_share > _IDLE / 2 or enough >= statistics.worker_count:
        return ""
    workers = "1 worker" if enough == 1 else f"{enough} workers"
    return f"; {workers} would do, they were busy {statistics.busy_share:.0%} of their time"


def _needed(statistics: Statistics) -> int:
    """Workers that load as fast as the loop works."""
    worked_s = statistics.work_s
    cores = max(1, int(statistics.core_count))
    if statistics.away_s * _MOST_SUGGESTED < worked_s:
        return max(statistics.worker_count, cores)  # the loop does next to nothing: there is never enough
    return max(1, ceil(1.1 * worked_s / statistics.away_s))


def _computing(statistics: Statistics) -> float:
    """Of workers' working time, how much they used a core or would have liked to; 1 where that is not known."""
    busy_s = sum(one.busy_s for one in statistics.workers)
    cpu_s = sum(one.cpu_s + one.queued_s for one in statistics.workers)
    return min(1.0, cpu_s / busy_s) if busy_s and cpu_s else 1.0


def _slow_sample(statistics: Statistics) -> str:
    median = statistics.sample_times.get("median", 0.0)
    if not statistics.slowest or statistics.slowest[0].seconds < _SLOW_TIMES * median:
        return ""
    worst = statistics.slowest[0]
    name = f"position {worst.position}" if worst.index is None else f"index={worst.index}"
    return (
        f"single slow samples hold up the rest ({name} took {worst.seconds * 1e3:.0f} ms, the median is {median * 1e3:.2g} ms)"
    )


def _more(count: int) -> str:
    count = max(1, count)
    return "1 more worker" if count == 1 else f"{count} more workers"


def _cores(count: float) -> str:
    return "1 core" if count == 1 else f"{count:g} cores"
