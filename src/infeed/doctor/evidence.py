"""Evidence about a monitored program: the journal that the program writes, and plain data from which findings are derived.

The journal is a file of JSON lines, so no event is lost however the program ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

from infeed.autotune.capacity import WorkerKind

EVENT: Final = "event"


@final
class Journal:
    """Writes events. Ignores writes in processes forked from the one that opened it."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # open until the process ends

    @property
    def is_here(self) -> bool:
        """Whether this process opened the journal and has not closed it."""
        return os.getpid() == self._pid and not self._file.closed

    def write(self, event: str, **facts: Any) -> None:
        if self.is_here:
            self._file.write(json.dumps({EVENT: event, **facts}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


@final
class JournalReader:
    """Reads events while the program writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self.events: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the new events and add them to ``events``. An incomplete last line is left for the next call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    def has(self, event: str) -> bool:
        return any(one[EVENT] == event for one in self.events)

    def has_fact(self, event: str, name: str, value: Any) -> bool:
        return any(one[EVENT] == event and one.get(name) == value for one in self.events)


Library: TypeAlias = Literal["torch", "infeed", "infeed.torch"]
Ending: TypeAlias = Literal["finished", "exit", "error", "time", "stuck", "died"]

# A call counts as I/O-bound from this many voluntary context switches on average; a busy machine also preempts it.
_LEAST_SWITCHES: Final = 0.5


@final
@dataclass(slots=True)
class EpochSeen:
    """One iteration of a loader. Times are in seconds; ``at`` is on the clock that all processes share."""

    at: float
    start_s: float = 0.0  # from `iter` to the first batch
    has_batch: bool = False
    waits: list[float] = field(default_factory=list)  # for each judged batch; the first of an epoch is excluded
    aways: list[float] = field(default_factory=list)  # time in the training loop before each of these requests
    cpu_s: float = 0.0  # CPU time of the program's main process meanwhile, all threads
    # Batches that arrived while infeed searched for the best number of workers; excluded from the judged waits.
    warm_count: int = 0
    warm_s: float = 0.0

    @property
    def batch_count(self) -> int:
        """All batches of the epoch, including the first and the warm-up batches."""
        return self.has_batch + self.warm_count + len(self.waits)

    def warm(self, waits: Sequence[float], aways: Sequence[float]) -> None:
        """Count these batches as warm-up."""
        self.warm_count += len(waits)
        self.warm_s += sum(waits) + sum(aways)


@final
@dataclass(slots=True)
class ForkSeen:
    """A fork of the main process for a worker, with the threads that were running at that moment."""

    python_threads: list[str]
    libraries: dict[str, int]  # native threads by library


def can_be_io_bound(switches: float | None) -> bool:
    """Whether a call made enough voluntary context switches to be I/O-bound; otherwise it was preempted."""
    return switches is None or switches >= _LEAST_SWITCHES


class SlowIndex(NamedTuple):
    """A sample that took much longer than others in two measurements."""

    which: str  # repr of the index
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class Probe:
    """Results of probing a dataset: timings of directly loaded samples, and properties of the dataset."""

    sample_count: int = 0
    sample_s: float = 0.0  # on average
    median_s: float = 0.0
    cpu_s: float = 0.0  # CPU time per sample
    switches: float | None = None  # voluntary context switches per call (for one sample or several), on average
    read_bytes: float = 0.0  # per sample, on average
    has_collate_fn: bool = False  # the program passed its own collate_fn
    is_collate_known: bool = True  # whether collation could be timed
    collate_s: float = 0.0  # per batch
    collate_cpu_s: float = 0.0
    collate_switches: float | None = None
    slow: list[SlowIndex] = field(default_factory=list)
    shards_itself: bool = False  # an iterable dataset that calls get_worker_info()
    heavy: list[tuple[str, int, bool]] = field(default_factory=list)  # description, bytes, whether it is an array
    unsendable: str = ""  # cannot be pickled, not even by value
    unpicklable: str = ""  # by plain pickle, which torch's loader uses where it does not fork
    generators: list[str] = field(default_factory=list)  # in the dataset or its modules, and advanced while loading
    error: str = ""


@final
@dataclass(slots=True, kw_only=True)
class LoaderSeen:
    """A loader of the program. Equal loaders over the same dataset, such as one per epoch, count as one."""

    number: int
    library: Library
    dataset: str
    kind: WorkerKind
    num_workers: int  # actual count; with "auto", the latest one recorded
    asked: str = ""  # num_workers (and worker) as the program wrote them
    is_auto: bool = False  # whether infeed chooses the number or the kind of workers
    is_gathered: bool = False  # whether infeed gathers rows of arrays, so no worker loads samples
    is_stream: bool = False
    batch_size: int | None = 1
    is_persistent: bool = False
    is_pinned: bool = False
    has_init: bool = False  # whether it has a worker_init_fn
    start_method: str = ""  # of torch's workers
    pids: list[int] = field(default_factory=list)
    epochs: list[EpochSeen] = field(default_factory=list)
    forks: list[ForkSeen] = field(default_factory=list)
    batch_bytes: int = 0
    batch_rows: int = 0
    is_on_device: bool = False
    waiting_s: float = 0.0  # wait for the batch that was pending when time was up
    is_settled: bool = True  # False while infeed searches for the best number of workers
    settled_as: tuple[WorkerKind, int] | None = None  # the result of that search, if recorded
    probe: Probe = field(default_factory=Probe)

    def see_workers(self, kind: WorkerKind, count: int, is_gathered: bool, is_settled: bool = True) -> None:
        """Update the worker kind and count. A number set by the program is kept, as some workers may not have started yet."""
        self.kind, self.is_gathered, self.is_settled = kind, is_gathered, is_settled
        if kind == "inline":
            self.num_workers = 0
        elif self.is_auto:
            self.num_workers = max(1, count)
        if not self.is_auto or not is_settled or self.settled_as == (kind, count):
            return
        if self.settled_as is not None:
            for epoch in self.epochs:  # batches from the previous worker setting do not count
                epoch.warm(epoch.waits, epoch.aways)
                epoch.waits, epoch.aways, epoch.cpu_s = [], [], 0.0
        self.settled_as = (kind, count)

    def see_batches(self, waits: Sequence[float], aways: Sequence[float], cpu_s: float = 0.0) -> None:
        """Add batches to the latest epoch."""
        if not self.is_settled:
            self.epochs[-1].warm(waits, aways)
            return
        self.epochs[-1].waits += waits
        self.epochs[-1].aways += aways
        self.epochs[-1].cpu_s += cpu_s

    def add_pids(self, pids: Sequence[int]) -> None:
        self.pids += [pid for pid in pids if pid not in self.pids]

    @property
    def waited_s(self) -> float:
        return sum(sum(epoch.waits) for epoch in self.epochs)

    @property
    def away_s(self) -> float:
        return sum(sum(epoch.aways) for epoch in self.epochs)

    @property
    def batch_count(self) -> int:
        """Judged batches: excludes the first of each epoch and those during infeed's search for the best worker count."""
        return sum(len(epoch.waits) for epoch in self.epochs)

    @property
    def delivered_count(self) -> int:
        """All batches that the loader yielded."""
        return sum(epoch.batch_count for epoch in self.epochs)

    @property
    def usual_wait_s(self) -> float:
        """Average wait for a batch; 0 if no wait after the first was measured."""
        return self.waited_s / max(1, self.batch_count)

    @property
    def has_warmed_up(self) -> bool:
        """Whether any batches were warm-up batches."""
        return any(epoch.warm_count for epoch in self.epochs)

    @property
    def iterated_s(self) -> float:
        """Total measured time that the loader was iterated."""
        return self.waited_s + self.away_s + sum(epoch.start_s + epoch.warm_s for epoch in self.epochs)

    @property
    def wait_share(self) -> float:
        total = self.waited_s + self.away_s
        return self.waited_s / total if total else 0.0

    @property
    def shown_wait_share(self) -> float:
        """Wait share for reports. Unlike ``wait_share`` it includes the wait still pending when time was up."""
        waited_s = self.waited_s + self.waiting_s
        return waited_s / (waited_s + self.away_s) if waited_s else 0.0

    @property
    def own_cores(self) -> float:
        """Average CPU cores used by the program's main process, all threads."""
        total = self.waited_s + self.away_s
        return sum(epoch.cpu_s for epoch in self.epochs) / total if total else 0.0

    @property
    def rows(self) -> int:
        """Samples in a batch."""
        return self.batch_size or self.batch_rows or 1

    @property
    def slow_share(self) -> float:
        """Share of the probe's loading time that slow samples took beyond the median."""
        probe = self.probe
        lost = sum(one.seconds - probe.median_s for one in probe.slow)
        all_s = self.load_s / self.rows * probe.sample_count
        return min(1.0, lost / all_s) if all_s else 0.0

    @property
    def collate_share(self) -> float:
        """Share of a batch's loading time spent in collation."""
        return self.probe.collate_s / self.load_s if self.load_s else 0.0

    @property
    def cpu_share(self) -> float:
        """CPU share of a batch's loading time; calls without voluntary context switches count as fully CPU-bound."""
        if not self.load_s:
            return 1.0
        probe = self.probe
        samples_s = probe.cpu_s if can_be_io_bound(probe.switches) else probe.sample_s
        collate_s = probe.collate_cpu_s if can_be_io_bound(probe.collate_switches) else probe.collate_s
        return min(1.0, (self.rows * samples_s + collate_s) / self.load_s)

    @property
    def is_on_cluster(self) -> bool:
        """Whether workers run on a Ray cluster, not only on the cores of this machine."""
        return "worker='ray'" in self.asked

    @property
    def has_one_reader(self) -> bool:
        """Whether more workers cannot help: infeed reads such an iterable dataset in one worker, torch reads it in each."""
        return self.is_stream and bool(self.probe.sample_count) and not self.probe.shards_itself

    @property
    def is_load_known(self) -> bool:
        """Whether the probe timed both samples and collation."""
        return bool(self.probe.sample_count) and self.probe.is_collate_known

    @property
    def load_s(self) -> float:
        """Time for a single worker with one thread to load a batch."""
        return self.rows * self.probe.sample_s + self.probe.collate_s


class Moment(NamedTuple):
    """Memory (USS) and CPU time of a process at one time."""

    at: float
    uss_bytes: int
    cpu_s: float


@final
@dataclass(slots=True)
class ProcessSeen:
    """A descendant process of the program, sampled from outside."""

    pid: int
    moments: list[Moment] = field(default_factory=list)
    pools: dict[str, int] = field(default_factory=dict)  # working threads other than the main thread, by library
    read_bytes: int = 0

    @property
    def cpu_share(self) -> float:
        """CPU time divided by elapsed time."""
        if len(self.moments) < 2:
            return 0.0
        first, last = self.moments[0], self.moments[-1]
        return (last.cpu_s - first.cpu_s) / max(last.at - first.at, 1e-9)


@final
@dataclass(slots=True, kw_only=True)
class Run:
    """A monitored run of a program."""

    program: str
    ending: Ending = "finished"
    exit_code: int | None = None
    error: str = ""
    seconds: float = 0.0  # from the first iteration of a loader to the end
    has_own_loop: bool = True  # False if the doctor iterated a dataset itself
    has_gpu: bool = False
    core_count: float = 1
    memory_bytes: int = 0  # free memory
    is_fork_default: bool = True
    has_gil: bool = True
    loaders: list[LoaderSeen] = field(default_factory=list)
    processes: dict[int, ProcessSeen] = field(default_factory=dict)

    @property
    def has_batch(self) -> bool:
        """Whether any loader yielded a batch. If none did, nothing was examined."""
        return any(epoch.has_batch for loader in self.loaders for epoch in loader.epochs)

    @property
    def has_failed(self) -> bool:
        """Whether the program failed, as opposed to being stopped when time was up."""
        return self.ending == "error" or (self.ending in ("exit", "died") and self.exit_code != 0)

    def workers_of(self, loader: LoaderSeen) -> list[ProcessSeen]:
        return [self.processes[pid] for pid in loader.pids if pid in self.processes]


def read_events(run: Run, events: Sequence[dict[str, Any]]) -> None:
    """Fill ``run`` from the events of a journal."""
    loaders: dict[int, LoaderSeen] = {}
    began = None
    for event in events:
        facts = {name: value for name, value in event.items() if name not in (EVENT, "loader", "at")}
        at = event.get("at", 0.0)
        match event[EVENT]:
            case "loader":
                loaders[event["number"]] = LoaderSeen(**facts)
                began = at if began is None else began
            case "epoch":
                loaders[event["loader"]].epochs.append(EpochSeen(at))
            case "fork":
                loaders[event["loader"]].forks.append(ForkSeen(**facts))
            case "first":
                loader = loaders[event["loader"]]
                loader.epochs[-1].start_s, loader.epochs[-1].has_batch = facts["start_s"], True
                loader.add_pids(facts["pids"])
                loader.batch_bytes = max(loader.batch_bytes, facts["batch_bytes"])
                loader.batch_rows = max(loader.batch_rows, facts["batch_rows"])
                loader.is_on_device |= facts["is_on_device"]
            case "batches":
                loaders[event["loader"]].see_batches(**facts)
            case "waiting":
                loaders[event["loader"]].waiting_s = facts["seconds"]
                loaders[event["loader"]].add_pids(facts["pids"])
            case "workers":
                loaders[event["loader"]].add_pids(facts.pop("pids"))
                loaders[event["loader"]].see_workers(**facts)
            case "probe":
                for name, value in facts.items():
                    is_slow = name == "slow"
                    setattr(loaders[event["loader"]].probe, name, [SlowIndex(*one) for one in value] if is_slow else value)
            case "machine":
                run.has_gpu, run.is_fork_default, run.has_gil = facts["has_gpu"], facts["is_fork_default"], facts["has_gil"]
            case "end":
                run.ending, run.exit_code, run.error = facts["ending"], facts["exit_code"], facts["error"]
                run.seconds = at - began if began is not None else 0.0
    run.loaders = list(loaders.values())
