"""One sentence about a run: does the loop wait for data, for what, and what would help.

It judges how it goes now (see ``recent.py``), and advises nothing that may make it worse: where what was measured leaves two
answers open, it says on what the advice depends.
"""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from infeed.formatting import format_count, format_seconds
from infeed.metrics.recent import Amounts

if TYPE_CHECKING:
    from infeed.metrics.statistics import SlowSample, Statistics

# The loop waits so little that nobody would notice.
_LITTLE: Final = 0.05
# Before this much is known, a sentence would be a guess.
_LEAST_BATCHES: Final = 4
_LEAST_S: Final = 0.02
# Workers that are busy for less than this do not hold the loop up by their number.
_IDLE: Final = 0.7
# Work that uses the processor for less than this waits: for a disk, a network, another process.
_COMPUTES: Final = 0.6
# A core of which less than this is free is not.
_FREE: Final = 0.5
# Workers that have to wait for a core for more than this of the time that they want one have none to spare.
_CROWDED: Final = 0.25
# A loop that uses less than this of a core is not worth a word.
_NOTABLE: Final = 0.3
# Threads that together use more cores than this leave the GIL; if they use less than that, nobody holds it most of the time. So
# many threads are several.
_GIL_CORES: Final = 1.2
_GIL_TAKEN: Final = 0.75
_SEVERAL: Final = 1.3
# A sample that takes so many times the usual, and so long, holds others up, if such make so much of the wait.
_SLOW_TIMES: Final = 20
_SLOW_S: Final = 0.005
_SLOW_SHARE: Final = 0.1
_MOST_SUGGESTED: Final = 64
# What takes up more of the wait than this is what it is about.
_MOSTLY: Final = 0.5
_SHARE: Final = "let __iter__ choose its share by infeed.get_worker_info()"


class _Run(NamedTuple):
    """What is judged."""

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
        """Of workers' working time, how much they used a core or would have liked to; 1 where that is not known."""
        busy_ns, cpu_ns = self.amounts.busy_ns, self.amounts.cpu_ns + self.amounts.queued_ns
        return min(1.0, cpu_ns / busy_ns) if busy_ns and cpu_ns else 1.0

    @property
    def wanted_cores(self) -> float:
        """That workers used, or would have liked to."""
        return (self.amounts.cpu_ns + self.amounts.queued_ns) / self.wall_ns

    @property
    def waits(self) -> bool:
        """Whether workers wait for something other than a core."""
        return self.computing < _COMPUTES and self.wanted_cores < self.cores

    @property
    def own_cores(self) -> float:
        """That this process used, with all its threads, where these are its workers."""
        return max(self.amounts.own_cpu_ns, self.amounts.cpu_ns) / self.wall_ns

    @property
    def loop_cores(self) -> float:
        """That the loop itself used, and its libraries, or would have liked to."""
        amounts = self.amounts
        if self.statistics.kind == "inline":
            # While it loads it is one thread, that computes, queues, or waits for something else: the rest is its own work.
            own_ns = max(0, amounts.own_cpu_ns + amounts.loop_queued_ns - amounts.waited_ns - amounts.started_ns)
            return 0.0 if self.has_no_step else own_ns / max(1, amounts.away_ns)
        of_workers = amounts.cpu_ns if self.statistics.kind == "thread" else 0
        return (max(0, amounts.own_cpu_ns - of_workers) + amounts.loop_queued_ns) / self.wall_ns

    @property
    def free_cores(self) -> float:
        if self.queueing > _CROWDED:
            return 0.0  # others use them
        return self.cores - self.worker_count * self.computing - self.loop_cores

    @property
    def queueing(self) -> float:
        """Of the time in which workers wanted a core, how much they had none."""
        wanted_ns = self.amounts.cpu_ns + self.amounts.queued_ns
        return self.amounts.queued_ns / wanted_ns if wanted_ns else 0.0

    @property
    def needed(self) -> int:
        """Workers that load as fast as the loop works."""
        if self.has_no_step:
            return max(self.worker_count, max(1, int(self.cores)))
        return max(1, ceil(1.1 * self.amounts.work_ns / max(1, self.amounts.away_ns)))

    @property
    def has_no_step(self) -> bool:
        """The loop does next to nothing: no number of workers is enough, and nothing hides what they do."""
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
    """Which workers were started while the loop waited, and what can be done about it."""
    if 2 * run.amounts.added_worker_ns > run.amounts.changeover_ns:
        died = f" in the place of {run.statistics.restart_count} that died; the log says how"
        return "the start of workers" + (died if run.statistics.restart_count else "; these stay")
    if not run.statistics.keeps_workers:
        return "workers that are started anew for every epoch; persistent_workers=True keeps them"
    return "the start of workers; these stay"


def _amounts(statistics: Statistics) -> Amounts:
    """Of the whole run."""

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
    """What most of the wait was for, and which part of it that is."""
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
    if worst is not None and _recent_s(worst) > _MOSTLY * run.amounts.waited_ns / 1e9:  # whoever else is busy meanwhile
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
    """What more workers would bring; ``in_bursts``: the loop asks fast after long steps, and how fast is not known."""
    if run.statistics.is_auto:
        return _cure_of_auto(run)
    more = 0 if in_bursts else run.needed - run.worker_count
    if run.waits:
        # Beyond this they would wait for the cores.
        more = min(more, max(1, int(run.cores / run.computing) - run.worker_count))
        if run.statistics.kind == "thread":  # with more of them than this they would wait for the GIL
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
    if run.has_no_step and cores == 1:  # one worker would do what the loop does
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
    """Why there are no more workers."""
    workers, bound = format_count(run.worker_count, "worker"), run.statistics.bound
    if bound == "memory":
        return f"there is memory for no more than {workers}"
    name = bound if bound == "memory_limit" else f"cpu_limit={run.statistics.cpu_limit:g}"
    return f"{name} allows no more than {workers}: a larger one may help"


def _all_busy(run: _Run) -> str:
    loop = f" (the loop itself uses {run.loop_cores:.1f})" if run.loop_cores >= _NOTABLE else ""
    return f"all {format_count(run.cores, 'core')} are busy{loop}, so make it cheaper, or give it more cores"


def _held_by_gil(run: _Run) -> str:
    """What to say of threads that together come to no more than one core: that is as much as the GIL allows.

    Threads that wait for a disk and compute natively in between may come to the same by chance, so there is an if.
    """
    # Who holds the GIL may have to wait for a core.
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
    """What advice to threads depends on, if nothing shows that they leave the GIL."""
    return "; if samples are computed in Python, only with worker='process' (the GIL)" if _may_queue_for_gil(run) else ""


def _may_queue_for_gil(run: _Run) -> bool:
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return run.statistics.kind == "thread" and has_gil and run.cores > 1 and run.own_cores < _GIL_CORES


def _spare(run: _Run) -> str:
    """Which workers are too many."""
    # Long steps leave time that those between cannot use.
    peak = ceil(1.1 * run.peak_rate * run.amounts.work_ns / max(1, run.amounts.batch_count))
    enough, busy_share = max(run.needed, peak), run.amounts.busy_share
    if run.statistics.kind == "inline" or run.statistics.is_auto or busy_share > _IDLE / 2 or enough >= run.worker_count:
        return ""
    return f"; {format_count(enough, 'worker')} would do, they were busy {busy_share:.0%} of their time"


def _slow_samples(run: _Run) -> str:
    """Who is to blame, if single samples are."""
    statistics, worst, limit_s = run.statistics, _worst(run), _slow_s(run)
    if worst is None:
        return ""
    slow = [one for one in statistics.slowest if one.seconds >= limit_s]
    named_s = sum(map(_recent_s, slow))
    # Of many only some are known by name, and of the others not when they were.
    all_s = sum(upper * count for upper, count in statistics.histogram if upper > limit_s)
    all_s -= sum(one.seconds - _recent_s(one) for one in slow)
    is_much = named_s >= _SLOW_SHARE * run.amounts.waited_ns / 1e9 or all_s >= _SLOW_SHARE * statistics.waited_s
    return _blame(run, worst) if is_much else ""


def _worst(run: _Run) -> SlowSample | None:
    """The slowest sample of late, if it is much slower than others."""
    slow = (one for one in run.statistics.slowest if one.seconds >= _slow_s(run) and _recent_s(one))
    return max(slow, key=_recent_s, default=None)


def _recent_s(sample: SlowSample) -> float:
    return sample.seconds if sample.recent_s is None else sample.recent_s


def _pending(run: _Run) -> str:
    """Who is still at it, if the loop waits for one sample now, and that is most of all its waiting."""
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
    """Workers idle, and nobody is to blame."""
    if 0 < run.statistics.prefetch < 2 * run.worker_count:
        return f"allow more in flight than {format_count(run.statistics.prefetch, 'batch', 'batches')} (prefetch)"
    not_more = "more of them would not help; " if run.amounts.manned_ns else ""  # they may idle while the loop is away only
    return f"{not_more}a timeline shows what the loop waits for"


def _deaths(run: _Run) -> str:
    """Who is missed, while others start in their place."""
    count = run.statistics.restart_count
    return f"{format_count(count, 'worker')} died, and the log says how" if count else ""


def _more(count: int) -> str:
    count = max(1, count)
    return "1 more worker" if count == 1 else f"{count} more workers"
