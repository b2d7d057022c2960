"""What is known of a run: counters, and what happened when. Plain, frozen data; others make words and pictures of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, final

from infeed.autotune.tuner import Bound
from infeed.formatting import format_bytes, format_count, format_seconds, format_workers
from infeed.metrics.recent import Recent

# What a worker does with its time. "load": the dataset's own code (`__getitem__`, `__iter__`); "collate": `collate_fn`, or
# finding out how samples stack; "write": into shared memory.
# What the loop does: "wait" for a batch, "deliver" (what infeed does in the user's thread), "away" (the user's own code).
SpanKind: TypeAlias = Literal["start", "load", "collate", "write", "wait", "deliver", "away"]
MarkKind: TypeAlias = Literal["death", "restart", "bad sample", "failure", "hang", "workers", "epoch"]


class Span(NamedTuple):
    """Somebody did something for a while. Times are nanoseconds since the run began."""

    lane: int  # a worker's number, or ``LOOP``
    kind: SpanKind
    begin_ns: int
    end_ns: int
    epoch: int
    position: int  # of the first sample, in the epoch; of the loop's spans, the batch's number in its epoch
    first_index: int | None  # of the first sample, if that is a number
    size: int  # samples; short ones are put together, so that the record stays cheap. Of the loop's spans, batches

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


LOOP = -1  # the lane of the user's loop


class Mark(NamedTuple):
    """Something happened."""

    at_ns: int
    lane: int
    kind: MarkKind
    text: str


class Point(NamedTuple):
    """How far everything had come at a time: all sums are from the beginning."""

    at_ns: int
    batch_count: int
    sample_count: int
    byte_count: int
    waited_ns: int
    away_ns: int
    worker_count: int
    busy_ns: int  # of all workers together
    cpu_ns: int  # processor time of all workers together
    queued_ns: int  # how long they were ready to run and had no core
    memory_bytes: int  # of all workers together, or of this process where there are none
    flight_bytes: int  # of batches that are loaded, being loaded, or kept by the user
    room_bytes: int = 0  # of all memory for batches, used or not


@final
class Times(dict[str, float]):
    """Seconds by name, that cannot be changed. A dict, so that it can be compared, sent and written as JSON like one."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("statistics cannot be changed; make a dict of them to change that: dict(statistics.sample_times)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Times], tuple[dict[str, float]]]:
        return Times, (dict(self),)


@final
@dataclass(frozen=True, slots=True)
class SlowSample:
    """One of the samples that took longest."""

    __module__ = "infeed"

    epoch: int
    position: int
    index: int | None  # if it is a number
    seconds: float
    recent_s: float | None = None  # of that, in the part of the run that the verdict judges; None: all

    def __str__(self) -> str:
        index = "" if self.index is None else f"index={self.index} "
        return f"{index}(position {self.position} of epoch {self.epoch}): {self.seconds * 1e3:.1f} ms"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """What one worker did so far."""

    __module__ = "infeed"

    worker: int
    pid: int | None  # of a process
    is_alive: bool
    sample_count: int
    load_s: float
    collate_s: float
    write_s: float
    alive_s: float  # while it was there and an epoch was in progress or it loaded ahead for the next, all lives together
    cpu_s: float  # processor time; 0 where it cannot be had
    queued_s: float  # how long it was ready to run and had no core; 0 where it cannot be had
    memory_bytes: int  # resident; shared memory counts in every worker that has touched it
    restart_count: int
    retry_count: int
    pending_s: float = 0.0  # how long it has been at the sample that it is at, if that is long; not in the others yet

    @property
    def busy_s(self) -> float:
        return self.load_s + self.collate_s + self.write_s

    @property
    def busy_share(self) -> float:
        """Of its time, how much it worked; the rest it waited for something to do."""
        return min(1.0, self.busy_s / self.alive_s) if self.alive_s else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a loader did so far, in all its epochs. ``str`` gives a short table and, first, the verdict."""

    __module__ = "infeed"

    epoch: int
    ended_count: int = 0  # epochs that were not left before their end
    batch_count: int
    sample_count: int
    byte_count: int  # of batches given to the loop; 0 for what is handed over as it is
    waited_s: float  # how long the loop waited in `iter` and `next`, without the loader's first start
    waiting_s: float = 0.0  # of that, how long it has been waiting for a batch that is not there yet
    started_s: float  # how long it waited for the very first batch, while workers were starting
    away_s: float  # how long the loop did its own work
    deliver_s: float  # of the wait, what infeed did in the loop's own thread
    changeover_s: float = 0.0  # of the wait, what workers took that were started anew, to the first batch, or stopped
    loads_by: str  # what of the dataset loads samples: "__getitem__", "__getitems__", "__iter__", or "gathering rows"
    has_collate_fn: bool
    keeps_workers: bool = True  # from one epoch to the next
    kind: Literal["inline", "thread", "process"]
    is_auto: bool  # whether infeed decides how many workers there are
    is_settled: bool = True  # not while it is still finding out how many are best
    bound: Bound = ""  # what allows no more workers, though more might bring something, where infeed decides how many there are
    cpu_limit: float | None = None  # as it was given
    worker_count: int  # now
    workers: tuple[WorkerStatistics, ...]
    core_count: float  # that this process may use
    batches_in_flight: int  # planned, being loaded or ready
    bytes_in_flight: int  # of these, and of batches that the user keeps
    memory_limit: int  # for all of these bytes: the one that holds, or that would hold if an epoch began now
    skipped_count: int
    replaced_count: int
    sample_times: Mapping[str, float]  # seconds: "median", "p90", "p99", "max"; empty while nothing is known
    histogram: tuple[tuple[float, int], ...]  # of sample times: up to so many seconds, how many
    slowest: tuple[SlowSample, ...]
    diagnosis: str
    most_workers: int = 0  # that there may be, by num_workers; 0 if that is not known
    prefetch: int = 0  # batches that may be in flight, where the user says how many
    recent: Recent | None = None  # what the verdict judges; None: all of it

    @property
    def elapsed_s(self) -> float:
        """While an epoch was in progress, the first start apart."""
        return self.waited_s + self.away_s

    @property
    def wait_share(self) -> float:
        """Of the time in which an epoch was in progress, how much the loop waited for data."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def recent_wait_share(self) -> float:
        """The same, in the part of the run that the verdict judges."""
        return self.wait_share if self.recent is None else self.recent.amounts.wait_share

    @property
    def samples_per_s(self) -> float:
        return self.sample_count / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def work_s(self) -> float:
        """What workers did for what the loop has had; what they have loaded ahead is left out."""
        loaded_count = sum(one.sample_count for one in self.workers)
        busy_s = sum(one.busy_s for one in self.workers)
        return busy_s * min(1.0, self.sample_count / loaded_count) if loaded_count else busy_s

    @property
    def restart_count(self) -> int:
        return sum(one.restart_count for one in self.workers)

    @property
    def retry_count(self) -> int:
        return sum(one.retry_count for one in self.workers)

    @property
    def busy_share(self) -> float:
        """Of all workers' time, how much they worked."""
        alive_s = sum(one.alive_s for one in self.workers)
        return min(1.0, sum(one.busy_s for one in self.workers) / alive_s) if alive_s else 0.0

    @property
    def memory_bytes(self) -> int:
        """Of all workers together; what they share counts in each."""
        return sum(one.memory_bytes for one in self.workers if one.is_alive)

    def numbers(self) -> dict[str, float]:
        """The figures that are worth plotting, by name: for TensorBoard, Weights & Biases, Prometheus and the like."""
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
        start = f"; first start {self.started_s:.2f} s" if self.started_s else ""
        anew = f", {self.changeover_s:.2f} s of it for workers to start and stop" if self.changeover_s >= 0.005 else ""
        rows = {
            "given": ", ".join(
                [
                    format_count(self.batch_count, "batch", "batches"),
                    format_count(self.sample_count, "sample"),
                    format_bytes(self.byte_count),
                ]
            ),
            "rate": f"{self.samples_per_s:,.0f} samples/s",
            "loop": f"waited {self.waited_s:.2f} s ({self.wait_share:.0%}{anew}), worked {self.away_s:.2f} s{start}",
            "workers": self._workers_text() + (f", {format_bytes(self.memory_bytes)}" if self.memory_bytes else ""),
            "time": ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
            + f", deliver {self.deliver_s:.2f} s",
        }
        if self.sample_times:
            rows["a sample"] = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.sample_times.items())
        rows["in flight"] = ", ".join(
            [
                format_count(self.batches_in_flight, "batch", "batches"),
                f"{format_bytes(self.bytes_in_flight)} of {format_bytes(self.memory_limit)}",
            ]
        )
        faults = {
            "restart" if self.restart_count == 1 else "restarts": self.restart_count,
            "skipped": self.skipped_count,
            "replaced": self.replaced_count,
            "retried": self.retry_count,
        }
        if any(faults.values()):
            rows["faults"] = ", ".join(f"{count} {name}" for name, count in faults.items() if count)
        return "\n".join([self.diagnosis, *(f"  {name:<9}  {text}" for name, text in rows.items())])

    def _workers_text(self) -> str:
        if self.kind == "inline":
            return "none: the loop loads by itself"
        workers = format_workers(self.worker_count, self.kind)
        return f"{workers}{' (auto)' if self.is_auto else ''}, {self.busy_share:.0%} busy"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything that is known of a run, for timeline and report."""

    began: float  # seconds since 1970
    statistics: Statistics
    spans: tuple[Span, ...]  # in order of lanes, and of time in each
    marks: tuple[Mark, ...]
    points: tuple[Point, ...]
    lost_span_count: int  # older ones that were not kept
    settings: Mapping[str, str]  # options as given, for people to read
    machine: Mapping[str, str]
