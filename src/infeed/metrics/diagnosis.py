"""Diagnose a run: whether the training loop waits for data, the bottleneck, and one action.

Measurements become a ``Diagnosis``, which is data: codes and numbers. The tables at the end of this module are the only place
that turns codes into text; the doctor uses them too. The diagnosis covers the recent part of the run (see ``recent.py``). It
never gives advice that may make things worse: if the measurements allow two explanations, the advice states its condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from infeed.autotune.capacity import (
    BUSY,
    COMPUTE_BOUND_WAIT,
    LEAST_BATCHES,
    MAIN_CAUSE,
    SLOW_SHARE,
    State,
    has_no_step,
    is_io_bound,
    may_queue_for_gil,
    slow_s,
    state_of,
    workers_best,
    workers_needed,
    workers_useful,
)
from infeed.formatting import format_count, format_seconds
from infeed.metrics.recent import Amounts

if TYPE_CHECKING:
    from infeed.metrics.statistics import SlowSample, Statistics

# With less time, as with fewer batches, a diagnosis would be a guess.
_LEAST_S: Final = 0.02
# Fewer free CPU cores than this count as none.
_FREE: Final = 0.5
# If workers queue for a larger share of the time in which they want a CPU core, no core is free.
_CROWDED: Final = 0.25
# The text mentions the CPU use of the training loop from this number of cores on.
_NOTABLE: Final = 0.3
# If threads together use less than _GIL_TAKEN cores, the GIL is free much of the time. The GIL can be the bottleneck only with
# at least _SEVERAL busy threads on average.
_GIL_TAKEN: Final = 0.75
_SEVERAL: Final = 1.3
_BOUNDS: Final = {"memory": "memory", "memory_limit": "memory-limit", "cores": "cpu-limit"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Whether a run waits for data, the bottleneck and one action, as codes and numbers. ``str`` returns it as text.

    Attributes:
        state: what limits training: data, computation, both, or not known yet.
        wait_share: share of the covered time in which the training loop waited for data.
        covered_s: length of the covered time; ``None`` for the whole run.
        bottleneck: a key of ``BOTTLENECKS``.
        action: a key of ``ACTIONS``.
        numbers: figures in the texts of ``bottleneck`` and ``action``.

    Examples:
        >>> import infeed
        >>> infeed.DataLoader(range(6)).statistics().finding.state
        'warming up'
    """

    __module__ = "infeed"

    state: State
    wait_share: float = 0.0
    covered_s: float | None = None
    bottleneck: str = ""
    action: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.state == "warming up":
            return f"Warming up: {action_text(self.action, self.numbers)}"
        covered = "the time" if self.covered_s is None else f"the last {format_seconds(self.covered_s)}"
        share = f"{self.wait_share:.1%}" if self.wait_share < COMPUTE_BOUND_WAIT else f"{self.wait_share:.0%}"
        lead = f"{self.state.capitalize()}: the training loop waits for data {share} of {covered}."
        return f"{lead} Bottleneck: {bottleneck_text(self.bottleneck, self.numbers)}. {action_text(self.action, self.numbers)}"


class _Advice(NamedTuple):
    bottleneck: str
    action: str
    numbers: dict[str, Any]


class _Run(NamedTuple):
    """The statistics and the recent amounts and peak rate that the diagnosis uses, with derived figures."""

    statistics: Statistics
    amounts: Amounts
    peak_rate: float
    has_gil: bool

    @property
    def is_iterable(self) -> bool:
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
    def cpu_share(self) -> float:
        """Return the share of busy time in which workers used a CPU core or queued for one; 1 if unknown."""
        busy_ns, cpu_ns = self.amounts.busy_ns, self.amounts.cpu_ns + self.amounts.queued_ns
        return min(1.0, cpu_ns / busy_ns) if busy_ns and cpu_ns else 1.0

    @property
    def wanted_cores(self) -> float:
        """Return the number of CPU cores that workers used or queued for."""
        return (self.amounts.cpu_ns + self.amounts.queued_ns) / self.wall_ns

    @property
    def is_io_bound(self) -> bool:
        return is_io_bound(self.cpu_share) and (self.statistics.is_on_cluster or self.wanted_cores < self.cores)

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
        wanted_ns = self.amounts.cpu_ns + self.amounts.queued_ns
        if wanted_ns and self.amounts.queued_ns / wanted_ns > _CROWDED:
            return 0.0  # other processes use them
        return self.cores - self.worker_count * self.cpu_share - self.loop_cores

    @property
    def has_no_step(self) -> bool:
        return has_no_step(self.amounts.work_ns, self.amounts.away_ns)

    @property
    def needed(self) -> int:
        """Return the number of workers that load as fast as the training loop consumes."""
        if self.has_no_step:
            return max(self.worker_count, max(1, int(self.cores)))
        return workers_needed(self.amounts.work_ns, max(1, self.amounts.away_ns))

    @property
    def slow_s(self) -> float:
        return slow_s(self.median_s)

    @property
    def median_s(self) -> float:
        return self.statistics.sample_times.get("median", 0.0)


def diagnose(statistics: Statistics, *, has_gil: bool = True) -> Diagnosis:
    """Return the diagnosis of a run from its statistics."""
    if not statistics.batch_count:
        action = "no-batch" if statistics.ended_count else "not-started"
        return Diagnosis(state="warming up", action=action, numbers={"epochs": statistics.ended_count})
    recent = statistics.recent
    if statistics.batch_count < LEAST_BATCHES or statistics.elapsed_s < _LEAST_S or recent is None:
        numbers = {"batches": statistics.batch_count, "seconds": statistics.elapsed_s}
        return Diagnosis(state="warming up", action="too-early", numbers=numbers)
    run = _Run(statistics, recent.amounts, recent.peak_rate, has_gil)
    share = run.amounts.wait_share
    found = _spare(run) if share < COMPUTE_BOUND_WAIT else _cause(run)
    return Diagnosis(
        state=state_of(share),
        wait_share=share,
        covered_s=None if recent.is_all else run.amounts.elapsed_ns / 1e9,
        bottleneck=found.bottleneck,
        action=found.action,
        numbers=found.numbers,
    )


# --- causes of the wait


def _cause(run: _Run) -> _Advice:
    """Return the bottleneck of a run that waits, and the action."""
    changeover = min(1.0, run.amounts.changeover_ns / run.amounts.waited_ns)
    if changeover > MAIN_CAUSE and run.statistics.kind != "inline":
        return _starts(run, changeover)
    pending = _pending(run)
    if pending is not None:
        return pending
    part, share = _largest_part(run)
    numbers: dict[str, Any] = {"part": part, "share": share, "cpu_share": run.cpu_share, "is_io_bound": run.is_io_bound}
    if part == "delivery":
        return _Advice("delivery", "larger-batches", numbers)
    found = _inline(run) if run.statistics.kind == "inline" else _workers(run)
    return _Advice(found.bottleneck, found.action, {**numbers, **found.numbers})


def _starts(run: _Run, share: float) -> _Advice:
    """Return which workers started while the training loop waited, and the action."""
    restart_count = run.statistics.restart_count
    numbers = {"share": share, "deaths": restart_count}
    if 2 * run.amounts.added_worker_ns > run.amounts.changeover_ns:
        return _Advice("replacements", "see-log", numbers) if restart_count else _Advice("start", "workers-stay", numbers)
    if not run.statistics.keeps_workers:
        return _Advice("restarts", "persistent-workers", numbers)
    return _Advice("start", "workers-stay", numbers)


def _pending(run: _Run) -> _Advice | None:
    """Return the worker whose current sample the training loop waits for, if that is most of the wait."""
    least_s = max(run.slow_s, MAIN_CAUSE * run.amounts.waited_ns / 1e9)
    worker = max(run.statistics.workers, key=lambda one: one.pending_s, default=None)
    if worker is None or min(worker.pending_s, run.statistics.waiting_s) < least_s:
        return None
    name = None if run.statistics.kind == "inline" else worker.worker
    numbers = {"worker": name, "pending_s": worker.pending_s, "median_s": run.median_s}
    return _Advice("pending-sample", "sample-timeout", numbers)


def _largest_part(run: _Run) -> tuple[str, float]:
    """Return the part of the work that causes most of the wait, and its share of the wait."""
    amounts = run.amounts
    parts = {
        run.statistics.loads_by: amounts.load_ns,
        "collate_fn" if run.statistics.has_collate_fn else "collation": amounts.collate_ns,
        "writing": amounts.write_ns,
    }
    name = max(parts, key=lambda name: parts[name])
    worked_ns = sum(parts.values())
    deliver_ns = amounts.waited_ns + amounts.started_ns - amounts.blocked_ns
    deliver_share = min(1.0, max(0.0, deliver_ns / amounts.waited_ns))
    of_workers = (1 - deliver_share) * (parts[name] / worked_ns if worked_ns else 0.0)
    return ("delivery", deliver_share) if deliver_share > of_workers else (name, of_workers)


def _inline(run: _Run) -> _Advice:
    """Return the action for loading in the main process."""
    if run.statistics.loads_by == "gathering rows":
        return _Advice("gathering", "larger-batches", {})
    if run.is_iterable:
        return _Advice("inline", "iterable-workers" if run.has_no_step else "iterable-worker", {})
    free = int(run.cores - run.loop_cores + _FREE)
    best = workers_best(run.amounts.work_ns, run.amounts.away_ns, free, cpu_share=1.0)
    if run.has_no_step and best == 1:  # one worker would only take the place of the training loop
        return _Advice("inline", "workers-if-io-bound", {"num_workers": 2})
    if run.needed == best and not run.has_no_step:
        return _Advice("inline", "set-num-workers", {"num_workers": best})
    return _Advice("inline", "worker-per-core", {"num_workers": best, "loop_cores": run.loop_cores})


def _workers(run: _Run) -> _Advice:
    """Return the bottleneck and the action for workers."""
    statistics, busy_share = run.statistics, run.amounts.busy_share
    gil = _gil(run)
    if gil is not None:
        return gil
    if not statistics.is_settled:
        return _Advice("work", "wait-for-tuner", {"workers": run.worker_count})
    idle = busy_share < BUSY
    if idle and run.amounts.needed_share < BUSY:
        return _slow_samples(run) or _idle(run, busy_share)
    worst = _worst(run)
    if worst is not None and _recent_s(worst) > MAIN_CAUSE * run.amounts.waited_ns / 1e9:  # even if other workers are busy
        return _slow(run, worst)
    if 0 < statistics.prefetch < run.worker_count:
        return _Advice("prefetch", "raise-prefetch", {"prefetch": statistics.prefetch})
    if run.is_iterable and run.worker_count == 1:
        is_set = statistics.most_workers > 1 and not statistics.is_auto
        return _Advice("one-reader", "share-iterable" if is_set else "share-iterable-with-workers", {})
    found = _auto(run) if statistics.is_auto else _number(run, in_bursts=idle)
    return _Advice(found.bottleneck, found.action, {**found.numbers, **({"busy_share": busy_share} if idle else {})})


def _number(run: _Run, *, in_bursts: bool) -> _Advice:
    """Return advice about the number of workers.

    Args:
        in_bursts: The training loop asks for batches quickly after long steps, at an unknown rate, so give no number.
    """
    more = 0 if in_bursts else run.needed - run.worker_count
    if run.statistics.is_on_cluster:  # the cores of this machine are not those of the workers
        return _Advice("work", "add-workers-on-cluster", {"workers": max(0, more)})
    if run.is_io_bound:
        # With more workers than this, they would queue for CPU cores.
        more = min(more, max(1, workers_useful(run.cores, run.cpu_share) - run.worker_count))
        if run.statistics.kind == "thread":  # more threads than this would wait for the GIL
            more = min(more, max(1, int(run.worker_count * (1 / max(run.own_cores, 0.01) - 1))))
        return _Advice("work", "add-workers-beyond-cores", {"workers": max(0, more)})
    is_gil_possible = _may_queue_for_gil(run)
    if run.free_cores < _FREE:
        return _all_busy(run, is_gil_possible)
    free = round(run.free_cores) or 1
    numbers = {"workers": 0 if in_bursts else max(1, min(more, free)), "free_cores": free, "is_gil_possible": is_gil_possible}
    return _Advice("work", "add-workers", numbers)


def _all_busy(run: _Run, is_gil_possible: bool = False) -> _Advice:
    numbers = {"cores": run.cores, "loop_cores": run.loop_cores, "is_gil_possible": is_gil_possible}
    return _Advice("cores", "reduce-work", numbers)


def _auto(run: _Run) -> _Advice:
    statistics, numbers = run.statistics, {"workers": run.worker_count, "cpu_limit": run.statistics.cpu_limit}
    if 0 < statistics.most_workers <= run.worker_count and (run.is_io_bound or run.free_cores >= _FREE):
        return _Advice("work", "raise-num-workers", numbers)
    if statistics.bound:
        name = _BOUNDS[statistics.bound]
        return _Advice(name, f"raise-{name}", numbers)
    return _Advice("work", "reduce-io" if run.is_io_bound else "reduce-work", {**numbers, "is_best": True})


def _gil(run: _Run) -> _Advice | None:
    """Return advice if the threads together use about one CPU core, the most that the GIL allows.

    Threads that wait for a disk and run native code in between may use one core by chance, so the advice is conditional.
    """
    # A thread that holds the GIL may queue for a CPU core, so queued time counts too.
    wanted_cores = max(run.own_cores, run.wanted_cores)
    if not _may_queue_for_gil(run) or run.amounts.busy_ns < _SEVERAL * run.wall_ns or wanted_cores < _GIL_TAKEN:
        return None
    numbers = {"used_cores": run.own_cores, "cores": run.cores, "is_io_possible": run.is_io_bound}
    return _Advice("gil", "use-processes", numbers)


def _may_queue_for_gil(run: _Run) -> bool:
    return may_queue_for_gil(run.statistics.kind, run.own_cores, run.cores, has_gil=run.has_gil)


def _spare(run: _Run) -> _Advice:
    """Return how many workers would be enough for a run that does not wait, if there are clearly too many."""
    # Spare time in long steps does not help during short ones, so the peak rate counts too.
    peak = workers_needed(run.peak_rate * run.amounts.work_ns, max(1, run.amounts.batch_count))
    enough, busy_share = max(run.needed, peak), run.amounts.busy_share
    if run.statistics.kind == "inline" or run.statistics.is_auto or busy_share > BUSY / 2 or enough >= run.worker_count:
        return _Advice("step", "none", {})
    return _Advice("step", "fewer-workers", {"workers": enough, "busy_share": busy_share})


def _idle(run: _Run, busy_share: float) -> _Advice:
    """Return advice for workers that are idle although the training loop waits."""
    numbers: dict[str, Any] = {"busy_share": busy_share}
    if run.statistics.restart_count:
        return _Advice("idle-workers", "see-log", {**numbers, "deaths": run.statistics.restart_count})
    if 0 < run.statistics.prefetch < 2 * run.worker_count:
        return _Advice("idle-workers", "raise-prefetch", {**numbers, "prefetch": run.statistics.prefetch})
    # Without `manned_ns`, they may be idle only during steps.
    return _Advice("idle-workers", "see-timeline", {**numbers, "is_enough": bool(run.amounts.manned_ns)})


def _slow_samples(run: _Run) -> _Advice | None:
    """Return the slowest sample as the cause, if slow samples are a notable part of the wait."""
    statistics, worst = run.statistics, _worst(run)
    if worst is None:
        return None
    slow = [one for one in statistics.slowest if one.seconds >= run.slow_s]
    named_s = sum(map(_recent_s, slow))
    # Only the slowest samples have an index and a time. The histogram covers all others, but not when they were loaded.
    all_s = sum(upper * count for upper, count in statistics.histogram if upper > run.slow_s)
    all_s -= sum(one.seconds - _recent_s(one) for one in slow)
    is_much = named_s >= SLOW_SHARE * run.amounts.waited_ns / 1e9 or all_s >= SLOW_SHARE * statistics.waited_s
    return _slow(run, worst) if is_much else None


def _worst(run: _Run) -> SlowSample | None:
    """Return the slowest recent sample if it is much slower than the median."""
    slow = (one for one in run.statistics.slowest if one.seconds >= run.slow_s and _recent_s(one))
    return max(slow, key=_recent_s, default=None)


def _recent_s(sample: SlowSample) -> float:
    return sample.seconds if sample.recent_s is None else sample.recent_s


def _slow(run: _Run, worst: SlowSample) -> _Advice:
    name = f"position {worst.position}" if worst.index is None else f"index {worst.index}"
    return _Advice("slow-samples", "fix-samples", {"sample": name, "seconds": worst.seconds, "median_s": run.median_s})


# --- text

# In the doctor's findings, bottlenecks and actions have the same codes and texts. Templates use `str.format_map`; a text that
# depends on more than its numbers is a function of them.
_PARTS: Final = {
    "delivery": "delivery of batches in the main process",
    "collation": "collation of samples into batches",
    "writing": "writing to shared memory",
    "gathering rows": "gathering rows of arrays",
}


def _work_text(numbers: Mapping[str, Any]) -> str:
    name = _PARTS.get(numbers["part"], f"`{numbers['part']}`")
    share = f" ({numbers['share']:.0%} of the wait)" if numbers["share"] < 0.8 else ""
    bound = "I/O-bound" if numbers["is_io_bound"] else "CPU-bound"
    return f"{name}{share}, which is {bound} ({numbers['cpu_share']:.0%} CPU)"


def _cores_text(numbers: Mapping[str, Any]) -> str:
    loop = numbers["loop_cores"]
    of_loop = f", of which the training loop uses {loop:.1f}" if loop >= _NOTABLE else ""
    return f"{_work_text(numbers)}; all {format_count(numbers['cores'], 'core')} are busy{of_loop}"


def _inline_text(numbers: Mapping[str, Any]) -> str:
    return f"{_work_text(numbers)} and runs in the main process"


BOTTLENECKS: Final[dict[str, Any]] = {
    "step": "the training step",
    "work": _work_text,
    "inline": _inline_text,
    "cores": _cores_text,
    "gathering": "gathering rows of arrays in the main process",
    "delivery": "delivery of batches in the main process ({share:.0%} of the wait)",
    "start": "worker start-up ({share:.0%} of the wait)",
    "restarts": "worker start-up in every epoch ({share:.0%} of the wait)",
    "replacements": "restarts of workers that died ({share:.0%} of the wait)",
    "pending-sample": lambda one: (
        f"one sample, which {'the main process' if one['worker'] is None else 'worker ' + str(one['worker'])} has been loading "
        f"for {format_seconds(one['pending_s'])} (median: {format_seconds(one['median_s'])})"
    ),
    "slow-samples": lambda one: (
        f"slow samples ({one['sample']} took {format_seconds(one['seconds'])}; median: {format_seconds(one['median_s'])})"
    ),
    "gil": lambda one: f"probably the GIL: threads use {one['used_cores']:.1f} of {format_count(one['cores'], 'core')}",
    "idle-workers": "idle workers (busy {busy_share:.0%} of the time)",
    "prefetch": "prefetch={prefetch}, which is too small for all workers",
    "one-reader": "one worker, which reads the whole iterable dataset",
    "memory": "memory, which allows no more workers",
    "memory-limit": "memory_limit, which allows no more workers",
    "cpu-limit": "cpu_limit, which allows no more workers",
    # Only the doctor measures these.
    "storage": "storage: samples wait for reads",
    "transfer": lambda one: (
        f"transfer from workers, which could produce a batch every {format_seconds(one['could_s'])}, but one arrives every "
        f"{format_seconds(one['comes_s'])}"
    ),
    "main-process": "loading in the main process (num_workers=0)",
    "all-cores": lambda one: f"CPU: workers use all {format_count(one['cores'], 'core')}",
    "thread-pools": "CPU: libraries use more threads in workers than there are cores",
    "every-reader": "iterable dataset: each worker reads all of it and yields the same samples",
    "few-workers": "too few workers",
    "auto-workers": "workers: they load more slowly than the training loop consumes",
    "collate": "`collate_fn` ({collate_share:.0%} of the loading time)",
}
_SHARE: Final = "Yield only this worker's share in __iter__ (infeed.get_worker_info())"
_GIL_IF: Final = "; if samples are computed in Python, also set worker='process' (the GIL)"


def _more(numbers: Mapping[str, Any]) -> str:
    return format_count(numbers["workers"], "worker") if numbers["workers"] else "workers"


def _burst(numbers: Mapping[str, Any]) -> str:
    """Return why workers with idle time are too few, if they have any."""
    share = numbers.get("busy_share")
    return "" if share is None else f" Workers are busy {share:.0%} of the time and idle mostly during training steps."


def _add_text(numbers: Mapping[str, Any]) -> str:
    free = numbers["free_cores"]
    gil = _GIL_IF if numbers["is_gil_possible"] else ""
    return f"Add {_more(numbers)}; {format_count(free, 'core')} {'is' if free == 1 else 'are'} free{gil}.{_burst(numbers)}"


def _reduce_text(numbers: Mapping[str, Any]) -> str:
    best = "More workers would not help. " if numbers.get("is_best") else ""
    gil = _GIL_IF if numbers.get("is_gil_possible") else ""
    return f"{best}Make it cheaper or use more cores, here or on other machines (worker='ray'){gil}.{_burst(numbers)}"


def _per_core_text(numbers: Mapping[str, Any]) -> str:
    each = "one per core" if numbers["loop_cores"] < _FREE else "one for each core that the training loop leaves free"
    return f"Set num_workers={numbers['num_workers']}, {each}; use more if loading is I/O-bound."


ACTIONS: Final[dict[str, Any]] = {
    "not-started": "no batch has been requested yet.",
    "no-batch": lambda one: f"no batch in {format_count(one['epochs'], 'epoch')}; check the length of the dataset.",
    "too-early": lambda one: f"{format_count(one['batches'], 'batch', 'batches')} in {one['seconds']:.2f} s so far.",
    "none": "Faster data loading would not help.",
    "fewer-workers": lambda one: f"{_more(one)} would be enough: workers are busy {one['busy_share']:.0%} of the time.",
    "add-workers": _add_text,
    "add-workers-beyond-cores": lambda one: f"Add {_more(one)}; more than one per core is fine here.{_burst(one)}",
    "add-workers-on-cluster": lambda one: f"Add {_more(one)} if the cluster has free CPUs; else make it cheaper.{_burst(one)}",
    "reduce-work": _reduce_text,
    "reduce-io": lambda one: f"More workers would not help. Use faster storage or a faster network.{_burst(one)}",
    "set-num-workers": "Set num_workers={num_workers}.",
    "worker-per-core": _per_core_text,
    "workers-if-io-bound": "Set num_workers={num_workers} or more if loading is I/O-bound.",
    "iterable-worker": "Set num_workers=1 to load during training steps; for more workers, yield only a worker's share in "
    "__iter__ (infeed.get_worker_info()).",
    "iterable-workers": f"Set num_workers=2 or more. {_SHARE}.",
    "share-iterable": f"{_SHARE}; num_workers has no effect until then.",
    "share-iterable-with-workers": f"{_SHARE} and set num_workers=2 or more.",
    "larger-batches": "Use larger batches.",
    "raise-prefetch": "Raise prefetch above {prefetch}.",
    "raise-num-workers": lambda one: f"Raise num_workers: it allows no more than {_more(one)}.{_burst(one)}",
    "raise-memory": lambda one: f"Free memory: there is room for no more than {_more(one)}.{_burst(one)}",
    "raise-memory-limit": lambda one: f"Raise memory_limit: it allows no more than {_more(one)}.{_burst(one)}",
    "raise-cpu-limit": lambda one: f"Raise cpu_limit={one['cpu_limit']:g}: it allows no more than {_more(one)}.{_burst(one)}",
    "use-processes": lambda one: (
        "If samples are computed in Python, set worker='process'"
        + ("; if they wait for something else, add workers." if one["is_io_possible"] else ".")
    ),
    "wait-for-tuner": lambda one: f"Wait: infeed is still searching for the best number of workers (now {one['workers']}).",
    "persistent-workers": "Set persistent_workers=True.",
    "workers-stay": "No action needed: the workers keep running.",
    "see-log": lambda one: f"See the log: {format_count(one['deaths'], 'worker')} died.",
    "see-timeline": lambda one: (
        ("More workers would not help. " if one["is_enough"] else "")
        + "To see what they wait for, write a timeline: loader.timeline('run.html')."
    ),
    "fix-samples": "Fix or skip these samples (sample_timeout, on_error='skip').",
    "sample-timeout": "Set hang_warning to log where it hangs, or sample_timeout and on_error='skip' to skip such samples.",
}


def bottleneck_text(code: str, numbers: Mapping[str, Any]) -> str:
    """Return the text of a bottleneck."""
    return _text(BOTTLENECKS[code], numbers)


def action_text(code: str, numbers: Mapping[str, Any]) -> str:
    """Return the text of an action."""
    return _text(ACTIONS[code], numbers)


def _text(template: Any, numbers: Mapping[str, Any]) -> str:
    text: str = template(numbers) if callable(template) else template.format_map(numbers)
    return text
