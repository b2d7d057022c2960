"""Diagnose a run in one sentence: whether the training loop waits for data, the bottleneck, and the fix.

The diagnosis covers the recent part of the run (see ``recent.py``). It never gives advice that may make things worse: if the
measurements allow two explanations, the advice states its condition.
"""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from infeed.formatting import format_count, format_seconds
from infeed.metrics.recent import Amounts

if TYPE_CHECKING:
    from infeed.metrics.statistics import SlowSample, Statistics

# A smaller wait share counts as keeping up.
_LITTLE: Final = 0.05
# With fewer batches or less time a diagnosis would be a guess.
_LEAST_BATCHES: Final = 4
_LEAST_S: Final = 0.02
# If workers are busy for a smaller share of their time, their number is not the bottleneck.
_IDLE: Final = 0.7
# Work with a smaller CPU share is I/O-bound: it waits for a disk, a network or another process.
_COMPUTES: Final = 0.6
# Fewer free CPU cores than this count as none.
_FREE: Final = 0.5
# If workers queue for a larger share of the time in which they want a CPU core, no core is free.
_CROWDED: Final = 0.25
# The diagnosis mentions the CPU use of the training loop from this number of cores on.
_NOTABLE: Final = 0.3
# Threads that together use more than _GIL_CORES cores release the GIL. If they use less than _GIL_TAKEN, the GIL is free
# much of the time. The GIL can be the bottleneck only with at least _SEVERAL busy threads on average.
_GIL_CORES: Final = 1.2
_GIL_TAKEN: Final = 0.75
_SEVERAL: Final = 1.3
# A sample is slow if it takes _SLOW_TIMES the median and at least _SLOW_S. Slow samples are reported if they make up at least
# _SLOW_SHARE of the wait.
_SLOW_TIMES: Final = 20
_SLOW_S: Final = 0.005
_SLOW_SHARE: Final = 0.1
_MOST_SUGGESTED: Final = 64
# A cause of more than this share of the wait is the bottleneck.
_MOSTLY: Final = 0.5
_SHARE: Final = "let __iter__ choose its share by infeed.get_worker_info()"


class _Run(NamedTuple):
    """The statistics and the recent amounts that the diagnosis uses, with derived figures."""

    statistics: Statistics
    amounts: Amounts
    since_ns: int
    is_all: bool
    peak_rate: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.statistics.loads_by == "__iter__"

    @property
    def worker_count(self) -> int:
        return self.statistics.worker_count

    @property
    def cores(self) -> float:
        return self.statistics.core_count

    @property
    def wall_ns(self) -> int:
        return max(1, self.amounts.elapsed_ns + self.amounts.started_ns)

    @property
    def computing(self) -> float:
        """Return the share of busy time in which workers used a CPU core or queued for one; 1 if unknown."""
        busy_ns, cpu_ns = self.amounts.busy_ns, self.amounts.cpu_ns + self.amounts.queued_ns
        return min(1.0, cpu_ns / busy_ns) if busy_ns and cpu_ns else 1.0

    @property
    def wanted_cores(self) -> float:
        """Return the number of CPU cores that workers used or queued for."""
        return (self.amounts.cpu_ns + self.amounts.queued_ns) / self.wall_ns

    @property
    def waits(self) -> bool:
        """Whether workers are I/O-bound: they wait for something other than a CPU core."""
        return self.computing < _COMPUTES and self.wanted_cores < self.cores

    @property
    def own_cores(self) -> float:
        """Return the number of CPU cores that this process used with all its threads, which include thread workers."""
        return max(self.amounts.own_cpu_ns, self.amounts.cpu_ns) / self.wall_ns

    @property
    def loop_cores(self) -> float:
        """Return the number of CPU cores that the training loop and its libraries used or queued for."""
        amounts = self.amounts
        if self.statistics.kind == "inline":
            # Loading runs in one thread, which computes, queues or waits, so its CPU and queued time is at most the wait.
            # The remainder belongs to the training loop.
            own_ns = max(0, amounts.own_cpu_ns + amounts.loop_queued_ns - amounts.waited_ns - amounts.started_ns)
            return 0.0 if self.has_no_step else own_ns / max(1, amounts.away_ns)
        of_workers = amounts.cpu_ns if self.statistics.kind == "thread" else 0
        return (max(0, amounts.own_cpu_ns - of_workers) + amounts.loop_queued_ns) / self.wall_ns

    @property
    def free_cores(self) -> float:
        if self.queueing > _CROWDED:
            return 0.0  # other processes use them
        return self.cores - self.worker_count * self.computing - self.loop_cores

    @property
    def queueing(self) -> float:
        """Return the share of the time in which workers wanted a CPU core but had none."""
        wanted_ns = self.amounts.cpu_ns + self.amounts.queued_ns
        return self.amounts.queued_ns / wanted_ns if wanted_ns else 0.0

    @property
    def needed(self) -> int:
        """Return the number of workers that load as fast as the training loop consumes."""
        if self.has_no_step:
            return max(self.worker_count, max(1, int(self.cores)))
        return max(1, ceil(1.1 * self.amounts.work_ns / max(1, self.amounts.away_ns)))

    @property
    def has_no_step(self) -> bool:
        """Whether the training loop does almost nothing: then no number of workers can hide the loading time."""
        return self.amounts.away_ns * _MOST_SUGGESTED < self.amounts.work_ns


def diagnose(statistics: Statistics) -> str:
    if not statistics.batch_count:
        ended_count = statistics.ended_count
        return (
            f"nothing was loaded: {format_count(ended_count, 'epoch')} had no batch"
            if ended_count
            else "nothing was loaded yet"
        )
    if statistics.batch_count < _LEAST_BATCHES or statistics.elapsed_s < _LEAST_S:
        return f"too early to tell: {format_count(statistics.batch_count, 'batch', 'batches')} in {statistics.elapsed_s:.2f} s"
    recent = statistics.recent
    run = _Run(statistics, *((_amounts(statistics), 0, True) if recent is None else recent))
    share = run.amounts.wait_share
    when = "the time" if run.is_all else f"the last {format_seconds(run.amounts.elapsed_ns / 1e9)}"
    if share < _LITTLE:
        return f"keeping up: the loop waited {share:.1%} of {when}{_spare(run)}"
    anew = min(1.0, run.amounts.changeover_ns / run.amounts.waited_ns)
    if anew > _MOSTLY and statistics.kind != "inline":
        return f"input-bound: the loop waited {share:.0%} of {when}, {anew:.0%} of it for {_started(run)}"
    waited = "loaded by itself for" if statistics.kind == "inline" else "waited"
    pending = _pending(run)
    if pending:
        return f"input-bound: the loop {waited} {share:.0%} of {when}; {pending}"
    what, part = _largest(run)
    return f"input-bound: the loop {waited} {share:.0%} of {when}, {part:.0%} of it for {what}; {_cure(run, what)}"


def _started(run: _Run) -> str:
    """Return which workers started while the training loop waited, and the fix."""
    if 2 * run.amounts.added_worker_ns > run.amounts.changeover_ns:
        died = f" in the place of {run.statistics.restart_count} that died; the log says how"
        return "the start of workers" + (died if run.statistics.restart_count else "; these stay")
    if not run.statistics.keeps_workers:
        return "workers that are started anew for every epoch; persistent_workers=True keeps them"
    return "the start of workers; these stay"


def _amounts(statistics: Statistics) -> Amounts:
    """Return the amounts of the whole run."""

    def of_workers(name: str) -> int:
        seconds: float = sum(getattr(one, name) for one in statistics.workers)
        return round(1e9 * seconds)

    waited_ns, started_ns = round(1e9 * statistics.waited_s), round(1e9 * statistics.started_s)
    return Amounts(
        batch_count=statistics.batch_count,
        sample_count=statistics.sample_count,
        loaded_count=sum(one.sample_count for one in statistics.workers),
        waited_ns=waited_ns,
        started_ns=started_ns,
        away_ns=round(1e9 * statistics.away_s),
        changeover_ns=round(1e9 * statistics.changeover_s),
        blocked_ns=waited_ns + started_ns - round(1e9 * statistics.deliver_s),
        load_ns=of_workers("load_s"),
        collate_ns=of_workers("collate_s"),
        write_ns=of_workers("write_s"),
        alive_ns=of_workers("alive_s"),
        cpu_ns=of_workers("cpu_s"),
        queued_ns=of_workers("queued_s"),
    )


def _largest(run: _Run) -> tuple[str, float]:
    """Return the largest cause of the wait, and its share of the wait."""
    amounts = run.amounts
    phases = {
        run.statistics.loads_by: amounts.load_ns,
        "collate_fn" if run.statistics.has_collate_fn else "stacking samples": amounts.collate_ns,
        "writing into shared memory": amounts.write_ns,
    }
    name = max(phases, key=lambda name: phases[name])
    worked_ns = sum(phases.values())
    waited_ns = amounts.waited_ns + amounts.started_ns
    deliver_share = min(1.0, max(0.0, 1 - amounts.blocked_ns / waited_ns))
    of_workers = (1 - deliver_share) * (phases[name] / worked_ns if worked_ns else 0.0)
    if deliver_share > of_workers:
        return "infeed's own work in the loop's thread", deliver_share
    return name, of_workers


def _cure(run: _Run, what: str) -> str:
    if what.startswith("infeed"):
        return "larger batches cost less of it"
    if run.statistics.kind == "inline":
        return _cure_of_inline(run)
    held = _held_by_gil(run)
    if held:
        return held
    if not run.statistics.is_settled:
        return f"infeed is still finding out how many workers are best, and tries {run.worker_count}"
    busy_share = run.amounts.busy_share
    if busy_share < _IDLE and run.amounts.needed_share < _IDLE:
        idle = f"workers were busy only {busy_share:.0%} of their time"
        return f"{idle}: {_slow_samples(run) or _deaths(run) or _fallback(run)}"
    worst = _worst(run)
    if worst is not None and _recent_s(worst) > _MOSTLY * run.amounts.waited_ns / 1e9:  # even if other workers are busy
        return _blame(run, worst)
    if 0 < run.statistics.prefetch < run.worker_count:
        return f"allow more in flight than prefetch={run.statistics.prefetch}: there is not enough for all workers"
    if run.is_stream and run.worker_count == 1:
        if run.statistics.most_workers > 1 and not run.statistics.is_auto:
            return f"one worker reads this stream, whatever num_workers is; {_SHARE} to use more"
        return f"one worker reads this stream; {_SHARE}, with num_workers=2 or more, to use them"
    if busy_share < _IDLE:
        return f"{_cure_by_number(run, in_bursts=True)}; they idle (busy {busy_share:.0%}) mostly while the loop works"
    return _cure_by_number(run, in_bursts=False)


def _cure_by_number(run: _Run, *, in_bursts: bool) -> str:
    """Return advice about the number of workers.

    Args:
        in_bursts: The training loop asks for batches quickly after long steps, at an unknown rate, so give no number.
    """
    if run.statistics.is_auto:
        return _cure_of_auto(run)
    more = 0 if in_bursts else run.needed - run.worker_count
    if run.waits:
        # With more workers than this, they would queue for CPU cores.
        more = min(more, max(1, int(run.cores / run.computing) - run.worker_count))
        if run.statistics.kind == "thread":  # more threads than this would wait for the GIL
            more = min(more, max(1, int(run.worker_count * (1 / max(run.own_cores, 0.01) - 1))))
        many = _more(more) if more > 0 else "more workers"
        return f"it waits and does not compute (processor {run.computing:.0%}), so {many} would help, beyond the cores too"
    if run.free_cores < _FREE:
        return _all_busy(run) + _if_python(run)
    free = round(run.free_cores) or 1
    are = "is" if free == 1 else "are"
    many = "more workers" if in_bursts else _more(min(more, free))
    return f"{many} would help, {format_count(free, 'core')} {are} free{_if_python(run)}"


def _cure_of_inline(run: _Run) -> str:
    if run.statistics.loads_by == "gathering rows":
        return "rows of arrays are gathered without workers, whatever num_workers is; larger batches cost less of it"
    if run.is_stream:
        more = "num_workers=2 or more" if run.has_no_step else "num_workers=1 would load while the loop works; more"
        return f"{more} help if __iter__ asks infeed.get_worker_info() for its share"
    needed, cores = run.needed, max(1, int(run.cores - run.loop_cores + _FREE))
    if run.has_no_step and cores == 1:  # one worker would only take the place of the training loop
        return "num_workers=2 or more would help if it waits and does not compute"
    if needed <= cores and not run.has_no_step:
        return f"num_workers={needed} would hide it"
    each = "one for each core" if run.loop_cores < _FREE else "one for each core that the loop leaves free"
    return f"num_workers={cores}, {each}, would help; more if it waits and does not compute"


def _cure_of_auto(run: _Run) -> str:
    most = run.statistics.most_workers
    if 0 < most <= run.worker_count and (run.waits or run.free_cores >= _FREE):
        workers = format_count(run.worker_count, "worker")
        return f"there are {workers}, the most that num_workers allows, so a larger number would help"
    if run.statistics.bound:
        return _allowed(run)
    if run.waits:
        return "there are as many workers as bring something, so make faster what it waits for: it does not compute"
    return "there are as many workers as bring something, so make it cheaper, or give it more cores"


def _allowed(run: _Run) -> str:
    """Return which limit prevents more workers."""
    workers, bound = format_count(run.worker_count, "worker"), run.statistics.bound
    if bound == "memory":
        return f"there is memory for no more than {workers}"
    name = bound if bound == "memory_limit" else f"cpu_limit={run.statistics.cpu_limit:g}"
    return f"{name} allows no more than {workers}: a larger one may help"


def _all_busy(run: _Run) -> str:
    loop = f" (the loop itself uses {run.loop_cores:.1f})" if run.loop_cores >= _NOTABLE else ""
    return f"all {format_count(run.cores, 'core')} are busy{loop}, so make it cheaper, or give it more cores"


def _held_by_gil(run: _Run) -> str:
    """Return advice if the threads together use about one CPU core, the most that the GIL allows; else ``""``.

    Threads that wait for a disk and run native code in between may use one core by chance, so the advice is conditional.
    """
    # A thread that holds the GIL may queue for a CPU core, so queued time counts too.
    wanted_cores = max(run.own_cores, run.wanted_cores)
    if not _may_queue_for_gil(run) or run.amounts.busy_ns < _SEVERAL * run.wall_ns or wanted_cores < _GIL_TAKEN:
        return ""
    cores = format_count(run.cores, "core")
    otherwise = ", and if they wait for something else, more workers would" if run.waits else ""
    return (
        f"its threads use {run.own_cores:.1f} of {cores}, and in Python only one can compute at a time (the GIL): "
        f"if samples are computed in Python, worker='process' would help{otherwise}"
    )


def _if_python(run: _Run) -> str:
    """Return the condition on advice for thread workers, unless measurements show that they release the GIL."""
    return "; if samples are computed in Python, only with worker='process' (the GIL)" if _may_queue_for_gil(run) else ""


def _may_queue_for_gil(run: _Run) -> bool:
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return run.statistics.kind == "thread" and has_gil and run.cores > 1 and run.own_cores < _GIL_CORES


def _spare(run: _Run) -> str:
    """Return how many workers would be enough, if there are clearly too many; else ``""``."""
    # Spare time in long steps does not help during short ones, so the peak rate counts too.
    peak = ceil(1.1 * run.peak_rate * run.amounts.work_ns / max(1, run.amounts.batch_count))
    enough, busy_share = max(run.needed, peak), run.amounts.busy_share
    if run.statistics.kind == "inline" or run.statistics.is_auto or busy_share > _IDLE / 2 or enough >= run.worker_count:
        return ""
    return f"; {format_count(enough, 'worker')} would do, they were busy {busy_share:.0%} of their time"


def _slow_samples(run: _Run) -> str:
    """Return the slowest sample as the cause, if slow samples are a notable part of the wait; else ``""``."""
    statistics, worst, limit_s = run.statistics, _worst(run), _slow_s(run)
    if worst is None:
        return ""
    slow = [one for one in statistics.slowest if one.seconds >= limit_s]
    named_s = sum(map(_recent_s, slow))
    # Only the slowest samples have an index and a time. The histogram covers all others, but not when they were loaded.
    all_s = sum(upper * count for upper, count in statistics.histogram if upper > limit_s)
    all_s -= sum(one.seconds - _recent_s(one) for one in slow)
    is_much = named_s >= _SLOW_SHARE * run.amounts.waited_ns / 1e9 or all_s >= _SLOW_SHARE * statistics.waited_s
    return _blame(run, worst) if is_much else ""


def _worst(run: _Run) -> SlowSample | None:
    """Return the slowest recent sample if it is much slower than the median."""
    slow = (one for one in run.statistics.slowest if one.seconds >= _slow_s(run) and _recent_s(one))
    return max(slow, key=_recent_s, default=None)


def _recent_s(sample: SlowSample) -> float:
    return sample.seconds if sample.recent_s is None else sample.recent_s


def _pending(run: _Run) -> str:
    """Return the worker whose current sample the training loop waits for, if that is most of the wait; else ``""``."""
    least_s = max(_slow_s(run), _MOSTLY * run.amounts.waited_ns / 1e9)
    worker = max(run.statistics.workers, key=lambda one: one.pending_s, default=None)
    if worker is None or min(worker.pending_s, run.statistics.waiting_s) < least_s:
        return ""
    usual = format_seconds(run.statistics.sample_times.get("median", 0.0))
    who = "it" if run.statistics.kind == "inline" else f"worker {worker.worker}"
    return f"{who} has been at one sample for {format_seconds(worker.pending_s)}, the median is {usual}"


def _slow_s(run: _Run) -> float:
    return max(_SLOW_S, _SLOW_TIMES * run.statistics.sample_times.get("median", 0.0))


def _blame(run: _Run, worst: SlowSample) -> str:
    name = f"position {worst.position}" if worst.index is None else f"index={worst.index}"
    took, usual = format_seconds(worst.seconds), format_seconds(run.statistics.sample_times.get("median", 0.0))
    return f"single slow samples hold up the rest ({name} took {took}, the median is {usual})"


def _fallback(run: _Run) -> str:
    """Return advice for idle workers without a known cause."""
    if 0 < run.statistics.prefetch < 2 * run.worker_count:
        return f"allow more in flight than {format_count(run.statistics.prefetch, 'batch', 'batches')} (prefetch)"
    not_more = "more of them would not help; " if run.amounts.manned_ns else ""  # otherwise they may idle only during steps
    return f"{not_more}a timeline shows what the loop waits for"


def _deaths(run: _Run) -> str:
    """Return the number of workers that died, since the training loop waits for their replacements; else ``""``."""
    count = run.statistics.restart_count
    return f"{format_count(count, 'worker')} died, and the log says how" if count else ""


def _more(count: int) -> str:
    count = max(1, count)
    return "1 more worker" if count == 1 else f"{count} more workers"
