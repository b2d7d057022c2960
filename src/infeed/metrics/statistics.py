"""The data of a run: counters, spans and marks. Plain immutable types, which other modules turn into text and charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, final

from infeed.autotune.capacity import WorkerKind
from infeed.autotune.tuner import Bound
from infeed.formatting import align, format_bytes, format_count, format_seconds, format_workers
from infeed.metrics.recent import Recent

if TYPE_CHECKING:
    from infeed.metrics.diagnosis import Diagnosis

# Spans of a worker: "load" is the dataset's code (`__getitem__`, `__iter__`), "collate" is `collate_fn` or working out how
# samples stack, "write" is copying into shared memory.
# Spans of the training loop: "wait" for a batch, "deliver" (infeed's work in the user's thread), "away" (user code).
SpanKind: TypeAlias = Literal["start", "load", "collate", "write", "wait", "deliver", "away"]
MarkKind: TypeAlias = Literal["death", "restart", "bad sample", "failure", "hang", "workers", "epoch"]


class Span(NamedTuple):
    """An activity of a worker or of the training loop. Times are nanoseconds since the run began."""

    lane: int  # a worker's number, or ``LOOP``
    kind: SpanKind
    begin_ns: int
    end_ns: int
    epoch: int
    position: int  # of the first sample in the epoch; for LOOP spans, the batch number in the epoch
    first_index: int | None  # dataset index of the first sample, if it is an integer
    # Number of samples, or of batches for LOOP spans. Short spans are merged to keep recording cheap.
    size: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


LOOP = -1  # the lane of the training loop


class Mark(NamedTuple):
    """An event at one point in time."""

    at_ns: int
    lane: int
    kind: MarkKind
    text: str


class Point(NamedTuple):
    """A measurement of the whole loader. Counts of batches, samples and bytes, and all times, are sums since the run began."""

    at_ns: int
    batch_count: int
    sample_count: int
    byte_count: int
    waited_ns: int
    away_ns: int
    worker_count: int
    busy_ns: int  # sum over all workers
    cpu_ns: int  # CPU time, sum over all workers
    queued_ns: int  # time in which workers were ready to run but had no CPU core
    memory_bytes: int  # of all worker processes, or of this process if there are none
    flight_bytes: int  # of batches that are loaded, being loaded, or held by user code
    slot_bytes: int = 0  # all memory allocated for batches, used or not


@final
class Times(dict[str, float]):
    """A read-only dict of seconds by name. It is a dict so that it compares, pickles and converts to JSON like one."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("statistics are read-only; change a copy, such as dict(statistics.sample_times)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Times], tuple[dict[str, float]]]:
        return Times, (dict(self),)


@final
@dataclass(frozen=True, slots=True)
class SlowSample:
    """One of the slowest samples.

    Attributes:
        epoch: epoch in which it was loaded.
        position: position in the order of the epoch.
        index: index in the dataset, if it is an integer.
        seconds: time to load it.
        recent_s: part of ``seconds`` within the time that the diagnosis covers; ``None`` for all of it.

    Examples:
        >>> import infeed
        >>> from infeed.testing import SlowDataset
        >>> loader = infeed.DataLoader(SlowDataset(3, 0.001), batch_size=3)
        >>> batches = list(loader)
        >>> sorted(sample.index for sample in loader.statistics().slowest)
        [0, 1, 2]
    """

    __module__ = "infeed"

    epoch: int
    position: int
    index: int | None
    seconds: float
    recent_s: float | None = None

    def __str__(self) -> str:
        index = "" if self.index is None else f"index={self.index} "
        return f"{index}(position {self.position} of epoch {self.epoch}): {self.seconds * 1e3:.1f} ms"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """Counters and times of one worker so far.

    Attributes:
        worker: number of the worker.
        pid: process ID; ``None`` if the worker is not a process.
        is_alive: whether it is running.
        sample_count: number of samples that it loaded.
        load_s: time in the dataset's code.
        collate_s: time in ``collate_fn``, or to find out how samples stack.
        write_s: time to copy samples into shared memory.
        alive_s: time alive during epochs or while loading ahead for the next, including before restarts.
        cpu_s: CPU time; 0 if the platform does not report it.
        queued_s: time in which it was ready to run but had no CPU core; 0 if the platform does not report it.
        memory_bytes: resident memory; shared memory counts in every worker that touched it.
        restart_count: how often it was started again.
        retry_count: how often a sample was retried.
        pending_s: time spent on the current sample, if it is long; not included in the other times yet.

    Examples:
        >>> import infeed
        >>> with infeed.DataLoader(range(6), batch_size=2, num_workers=1, worker="thread") as loader:
        ...     batches = list(loader)
        ...     [(worker.worker, worker.is_alive) for worker in loader.statistics().workers]
        [(0, True)]
    """

    __module__ = "infeed"

    worker: int
    pid: int | None
    is_alive: bool
    sample_count: int
    load_s: float
    collate_s: float
    write_s: float
    alive_s: float
    cpu_s: float
    queued_s: float
    memory_bytes: int
    restart_count: int
    retry_count: int
    pending_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Time in which the worker loaded, collated or wrote samples."""
        return self.load_s + self.collate_s + self.write_s

    @property
    def busy_share(self) -> float:
        """Share of its time in which the worker worked; otherwise it waited for tasks."""
        return min(1.0, self.busy_s / self.alive_s) if self.alive_s else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counters and times of a loader over all its epochs. ``str`` returns the diagnosis followed by a short table.

    Attributes:
        epoch: the latest epoch.
        ended_count: epochs that ran to their end.
        batch_count: number of delivered batches.
        sample_count: number of delivered samples.
        byte_count: bytes of delivered batches; 0 for batches passed on as they are.
        waited_s: time that the training loop waited in ``iter`` and ``next``, without worker start-up time.
        waiting_s: part of ``waited_s`` for a batch that has not arrived yet.
        started_s: worker start-up time: the wait for the very first batch.
        away_s: time the training loop spent in user code.
        deliver_s: part of the wait that was infeed's work in the training loop's thread.
        changeover_s: part of the wait for workers to start again, up to their first batch, or to stop.
        loads_by: how samples are loaded: ``"__getitem__"``, ``"__getitems__"``, ``"__iter__"`` or ``"gathering rows"``.
        has_collate_fn: whether the user passed ``collate_fn``.
        keeps_workers: whether workers persist from one epoch to the next.
        kind: kind of worker.
        is_auto: whether infeed chooses the number of workers.
        is_settled: ``False`` while infeed is still searching for the best number of workers.
        bound: with ``is_auto``, the limit that prevents more workers, although more might help.
        cpu_limit: ``cpu_limit`` of the loader.
        worker_count: current number of workers.
        workers: one entry per worker.
        core_count: CPU cores that this process may use.
        batches_in_flight: number of batches that are planned, being loaded or ready.
        bytes_in_flight: bytes of batches in flight and batches that user code holds.
        memory_limit: limit of ``bytes_in_flight``; between epochs, the limit that an epoch would get if it began now.
        skipped_count: bad samples that were skipped.
        replaced_count: bad samples that were replaced.
        sample_times: seconds per sample: ``"median"``, ``"p90"``, ``"p99"`` and ``"max"``; empty before the first sample.
        histogram: histogram of sample times: pairs of upper bound in seconds and number of samples.
        slowest: the slowest samples, the slowest first.
        diagnosis: ``finding`` as text.
        finding: the diagnosis as data; ``None`` if nothing is measured.
        most_workers: maximum that ``num_workers`` allows; 0 if unknown.
        prefetch: maximum number of batches in flight, if set by the user.
        is_on_cluster: whether workers run on a Ray cluster, not only on ``core_count`` cores.
        recent: the part of the run that the diagnosis covers; ``None`` for all of it.

    Examples:
        >>> import infeed
        >>> loader = infeed.DataLoader(range(6), batch_size=2)
        >>> batches = list(loader)
        >>> statistics = loader.statistics()
        >>> statistics.batch_count, statistics.sample_count
        (3, 6)
    """

    __module__ = "infeed"

    epoch: int
    ended_count: int = 0
    batch_count: int
    sample_count: int
    byte_count: int
    waited_s: float
    waiting_s: float = 0.0
    started_s: float
    away_s: float
    deliver_s: float
    changeover_s: float = 0.0
    loads_by: str
    has_collate_fn: bool
    keeps_workers: bool = True
    kind: WorkerKind
    is_auto: bool
    is_settled: bool = True
    bound: Bound = ""
    cpu_limit: float | None = None
    worker_count: int
    workers: tuple[WorkerStatistics, ...]
    core_count: float
    batches_in_flight: int
    bytes_in_flight: int
    memory_limit: int
    skipped_count: int
    replaced_count: int
    sample_times: Mapping[str, float]
    histogram: tuple[tuple[float, int], ...]
    slowest: tuple[SlowSample, ...]
    diagnosis: str
    finding: Diagnosis | None = None
    most_workers: int = 0
    prefetch: int = 0
    is_on_cluster: bool = False
    recent: Recent | None = None

    @property
    def elapsed_s(self) -> float:
        """Time during epochs, without worker start-up time."""
        return self.waited_s + self.away_s

    @property
    def wait_share(self) -> float:
        """Share of the time during epochs in which the training loop waited for data."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def recent_wait_share(self) -> float:
        """``wait_share`` in the part of the run that the diagnosis covers."""
        return self.wait_share if self.recent is None else self.recent.amounts.wait_share

    @property
    def samples_per_s(self) -> float:
        """Throughput: delivered samples per second, without worker start-up time."""
        return self.sample_count / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def work_s(self) -> float:
        """Busy time of workers for the delivered samples, without samples loaded ahead."""
        loaded_count = sum(one.sample_count for one in self.workers)
        busy_s = sum(one.busy_s for one in self.workers)
        return busy_s * min(1.0, self.sample_count / loaded_count) if loaded_count else busy_s

    @property
    def restart_count(self) -> int:
        """How often workers that died were replaced."""
        return sum(one.restart_count for one in self.workers)

    @property
    def retry_count(self) -> int:
        """How often samples were retried."""
        return sum(one.retry_count for one in self.workers)

    @property
    def busy_share(self) -> float:
        """Busy share of all workers' time."""
        alive_s = sum(one.alive_s for one in self.workers)
        return min(1.0, sum(one.busy_s for one in self.workers) / alive_s) if alive_s else 0.0

    @property
    def memory_bytes(self) -> int:
        """Memory of all live workers; shared memory counts once per worker."""
        return sum(one.memory_bytes for one in self.workers if one.is_alive)

    def numbers(self) -> dict[str, float]:
        """Return the figures worth plotting, by name, for TensorBoard, Weights & Biases, Prometheus and similar tools.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.statistics().numbers()["samples"]
            6
        """
        return {
            "batches": self.batch_count,
            "samples": self.sample_count,
            "samples_per_s": self.samples_per_s,
            "wait_share": self.wait_share,
            "waited_s": self.waited_s,
            "workers": self.worker_count,
            "workers_busy_share": self.busy_share,
            "workers_memory_bytes": self.memory_bytes,
            "batches_in_flight": self.batches_in_flight,
            "bytes_in_flight": self.bytes_in_flight,
            "worker_restarts": self.restart_count,
            "samples_skipped": self.skipped_count,
            "samples_replaced": self.replaced_count,
            "samples_retried": self.retry_count,
            **{f"sample_{name}_s": seconds for name, seconds in self.sample_times.items()},
        }

    def __str__(self) -> str:
        if not self.batch_count:
            return self.diagnosis
        phases = {name: sum(getattr(one, f"{name}_s") for one in self.workers) for name in ("load", "collate", "write")}
        start = f"; worker start-up {self.started_s:.2f} s" if self.started_s else ""
        changeover = f", {self.changeover_s:.2f} s of it while workers started or stopped" if self.changeover_s >= 0.005 else ""
        rows = {
            "delivered": ", ".join(
                [
                    format_count(self.batch_count, "batch", "batches"),
                    format_count(self.sample_count, "sample"),
                    format_bytes(self.byte_count),
                ]
            ),
            "throughput": f"{self.samples_per_s:,.0f} samples/s",
            "training": f"waited {self.waited_s:.2f} s for data ({self.wait_share:.0%}{changeover}), "
            f"computed {self.away_s:.2f} s{start}",
            "workers": self._workers_text() + (f", {format_bytes(self.memory_bytes)}" if self.memory_bytes else ""),
            "work": ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
            + f", deliver {self.deliver_s:.2f} s",
        }
        if self.sample_times:
            rows["per sample"] = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.sample_times.items())
        rows["in flight"] = ", ".join(
            [
                format_count(self.batches_in_flight, "batch", "batches"),
                f"{format_bytes(self.bytes_in_flight)} of {format_bytes(self.memory_limit)}",
            ]
        )
        faults = fault_counts(self)
        if faults:
            rows["faults"] = ", ".join(f"{count} {name}" for name, count in faults.items())
        return f"{self.diagnosis}\n{align(rows.items(), indent='  ')}"

    def _workers_text(self) -> str:
        if self.kind == "inline":
            return "none; loading runs in the main process"
        workers = format_workers(self.worker_count, self.kind)
        return f"{workers}{' (auto)' if self.is_auto else ''}, {self.busy_share:.0%} busy"


def fault_counts(statistics: Statistics) -> dict[str, int]:
    """Return the number of faults of each kind that occurred."""
    counts = {
        "restart" if statistics.restart_count == 1 else "restarts": statistics.restart_count,
        "skipped": statistics.skipped_count,
        "replaced": statistics.replaced_count,
        "retried": statistics.retry_count,
    }
    return {name: count for name, count in counts.items() if count}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All recorded data of a run, for the timeline and the report."""

    began: float  # Unix time in seconds
    statistics: Statistics
    spans: tuple[Span, ...]  # sorted by lane, then by time
    marks: tuple[Mark, ...]
    points: tuple[Point, ...]
    lost_span_count: int  # number of older spans that were dropped
    settings: Mapping[str, str]  # options as passed, in readable form
    machine: Mapping[str, str]
