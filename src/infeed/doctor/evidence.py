"""What was seen of a program: plain data, from which findings are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

from infeed.doctor.journal import EVENT

Library: TypeAlias = Literal["torch", "infeed", "infeed.torch"]
Kind: TypeAlias = Literal["inline", "thread", "process"]
Ending: TypeAlias = Literal["finished", "exit", "error", "time", "stuck", "died"]

# How often a call must give the processor up by itself to be said to wait: a busy machine takes it away as well.
_LEAST_SWITCHES: Final = 0.5


@final
@dataclass(slots=True)
class EpochSeen:
    """One iteration of a loader. Times are seconds, ``at`` on the clock that all processes share."""

    at: float
    start_s: float = 0.0  # from `iter` to the first batch
    has_batch: bool = False
    waits: list[float] = field(default_factory=list)  # for every batch but the first, of those that count
    aways: list[float] = field(default_factory=list)  # what the loop did before it asked for each of them
    cpu_s: float = 0.0  # what the program's own process used meanwhile, with all its threads
    # Others came while infeed found out how many workers are best, by which it is not judged.
    warm_count: int = 0
    warm_s: float = 0.0

    @property
    def batch_count(self) -> int:
        """Of all that came."""
        return self.has_batch + self.warm_count + len(self.waits)

    def warm(self, waits: Sequence[float], aways: Sequence[float]) -> None:
        """These do not count."""
        self.warm_count += len(waits)
        self.warm_s += sum(waits) + sum(aways)


@final
@dataclass(slots=True)
class Fork:
    """The process was copied to make a worker, with threads running in it."""

    python_threads: list[str]
    libraries: dict[str, int]  # native threads by library


def gives_up(switches: float | None) -> bool:
    """Whether so many times are enough to say that a call waits; if not, others took the processor away."""
    return switches is None or switches >= _LEAST_SWITCHES


class SlowIndex(NamedTuple):
    """A sample that took much longer than others, twice."""

    which: str  # its index, as written
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class Probe:
    """What loading some samples by hand, and looking at the dataset, told."""

    sample_count: int = 0
    sample_s: float = 0.0  # on average
    median_s: float = 0.0
    cpu_s: float = 0.0  # of it, on a processor
    switches: float | None = None  # how often a call for a sample, or for several, gave up the processor by itself, on average
    read_bytes: float = 0.0  # a sample, on average
    has_collate_fn: bool = False  # of the program's own
    is_collate_known: bool = True  # what it takes
    collate_s: float = 0.0  # a batch
    collate_cpu_s: float = 0.0
    collate_switches: float | None = None
    slow: list[SlowIndex] = field(default_factory=list)
    shards_itself: bool = False  # a stream that asks which worker reads it
    heavy: list[tuple[str, int, bool]] = field(default_factory=list)  # what it is, bytes, whether it is an array
    unsendable: str = ""  # by any means
    unpicklable: str = ""  # by pickle, which is what torch's loader sends with where it does not fork
    generators: list[str] = field(default_factory=list)  # in the dataset or its module, and drawn from
    error: str = ""


@final
@dataclass(slots=True, kw_only=True)
class LoaderSeen:
    """A loader of the program; loaders that are made alike over the same dataset, as for each epoch, count as one."""

    number: int
    library: Library
    dataset: str
    kind: Kind
    num_workers: int  # that there are; where infeed decides, those that were seen last
    asked: str = ""  # for how many the program asked, as it would write it
    is_auto: bool = False  # whether infeed decides how many there are, or of which kind
    is_gathered: bool = False  # whether infeed takes rows out of arrays, so that nobody loads samples
    is_stream: bool = False
    batch_size: int | None = 1
    is_persistent: bool = False
    is_pinned: bool = False
    has_init: bool = False  # a worker_init_fn
    start_method: str = ""  # of torch's workers
    pids: list[int] = field(default_factory=list)
    epochs: list[EpochSeen] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    batch_bytes: int = 0
    batch_rows: int = 0
    is_on_device: bool = False
    waiting_s: float = 0.0  # for the batch that it was asked for when time was up
    is_settled: bool = True  # not while infeed finds out how many workers are best
    settled_as: tuple[Kind, int] | None = None  # what it found, if that was seen
    probe: Probe = field(default_factory=Probe)

    def see_workers(self, kind: Kind, count: int, is_gathered: bool, is_settled: bool = True) -> None:
        """Take what was seen for what was asked for. Where the program names a number, not all may have started yet."""
        self.kind, self.is_gathered, self.is_settled = kind, is_gathered, is_settled
        if kind == "inline":
            self.num_workers = 0
        elif self.is_auto:
            self.num_workers = max(1, count)
        if not self.is_auto or not is_settled or self.settled_as == (kind, count):
            return
        if self.settled_as is not None:
            for epoch in self.epochs:  # what came with others says nothing of these
                epoch.warm(epoch.waits, epoch.aways)
                epoch.waits, epoch.aways, epoch.cpu_s = [], [], 0.0
        self.settled_as = (kind, count)

    def see_batches(self, waits: Sequence[float], aways: Sequence[float], cpu_s: float = 0.0) -> None:
        """Take in what came in the latest epoch."""
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
        """Of those whose wait was measured and counts: not the first of an epoch, nor while infeed found out what is best."""
        return sum(len(epoch.waits) for epoch in self.epochs)

    @property
    def given_count(self) -> int:
        """Of all batches that it gave."""
        return sum(epoch.batch_count for epoch in self.epochs)

    @property
    def has_warmed_up(self) -> bool:
        """Whether some do not count."""
        return any(epoch.warm_count for epoch in self.epochs)

    @property
    def iterated_s(self) -> float:
        """How long it was iterated, as far as that was measured."""
        return self.waited_s + self.away_s + sum(epoch.start_s + epoch.warm_s for epoch in self.epochs)

    @property
    def wait_share(self) -> float:
        total = self.waited_s + self.away_s
        return self.waited_s / total if total else 0.0

    @property
    def told_share(self) -> float:
        """Of its time, what the loop waited: with the wait that still went on when time was up, by which it is not judged."""
        waited_s = self.waited_s + self.waiting_s
        return waited_s / (waited_s + self.away_s) if waited_s else 0.0

    @property
    def own_cores(self) -> float:
        """That the program's own process used, with all its threads."""
        total = self.waited_s + self.away_s
        return sum(epoch.cpu_s for epoch in self.epochs) / total if total else 0.0

    @property
    def rows(self) -> int:
        """Samples in a batch."""
        return self.batch_size or self.batch_rows or 1

    @property
    def slow_share(self) -> float:
        """Of the time that loading by hand took, what the few slow samples took beyond the usual."""
        probe = self.probe
        lost = sum(one.seconds - probe.median_s for one in probe.slow)
        all_s = self.load_s / self.rows * probe.sample_count
        return min(1.0, lost / all_s) if all_s else 0.0

    @property
    def collate_share(self) -> float:
        """Of loading a batch, what making it of its samples takes."""
        return self.probe.collate_s / self.load_s if self.load_s else 0.0

    @property
    def cpu_share(self) -> float:
        """Of loading a batch, how much is on a processor; all of it counts where nothing gives that up by itself."""
        if not self.load_s:
            return 1.0
        probe = self.probe
        samples_s = probe.cpu_s if gives_up(probe.switches) else probe.sample_s
        collate_s = probe.collate_cpu_s if gives_up(probe.collate_switches) else probe.collate_s
        return min(1.0, (self.rows * samples_s + collate_s) / self.load_s)

    @property
    def has_one_reader(self) -> bool:
        """Whether more workers bring nothing: of such a stream infeed lets one read, and each of torch's reads all of it."""
        return self.is_stream and bool(self.probe.sample_count) and not self.probe.shards_itself

    @property
    def is_load_known(self) -> bool:
        """Whether all that loading takes was seen by hand."""
        return bool(self.probe.sample_count) and self.probe.is_collate_known

    @property
    def load_s(self) -> float:
        """What loading a batch takes one who is alone with it, and has one thread."""
        return self.rows * self.probe.sample_s + self.probe.collate_s


class Moment(NamedTuple):
    """How a process was at a time."""

    at: float
    uss_bytes: int
    cpu_s: float


@final
@dataclass(slots=True)
class ProcessSeen:
    """A process below the program's, as seen from outside."""

    pid: int
    moments: list[Moment] = field(default_factory=list)
    pools: dict[str, int] = field(default_factory=dict)  # threads besides its first that do work, by library
    read_bytes: int = 0

    @property
    def cpu_share(self) -> float:
        """Of its time, how much it was on a processor."""
        if len(self.moments) < 2:
            return 0.0
        first, last = self.moments[0], self.moments[-1]
        return (last.cpu_s - first.cpu_s) / max(last.at - first.at, 1e-9)


@final
@dataclass(slots=True, kw_only=True)
class Run:
    """A program that was watched."""

    program: str
    ending: Ending = "finished"
    exit_code: int | None = None
    error: str = ""
    seconds: float = 0.0  # from the first iteration of a loader to the end
    has_own_loop: bool = True  # else the doctor only iterated a dataset
    has_gpu: bool = False
    core_count: float = 1
    memory_bytes: int = 0  # that is free
    is_fork_default: bool = True
    has_gil: bool = True
    loaders: list[LoaderSeen] = field(default_factory=list)
    processes: dict[int, ProcessSeen] = field(default_factory=dict)

    @property
    def has_batch(self) -> bool:
        """Whether any loader gave one. If none did, nothing was looked at."""
        return any(epoch.has_batch for loader in self.loaders for epoch in loader.epochs)

    @property
    def has_failed(self) -> bool:
        """Whether the program ended with an error, and not because its time was up."""
        return self.ending == "error" or (self.ending in ("exit", "died") and self.exit_code != 0)

    def workers_of(self, loader: LoaderSeen) -> list[ProcessSeen]:
        return [self.processes[pid] for pid in loader.pids if pid in self.processes]


def read_events(run: Run, events: Sequence[dict[str, Any]]) -> None:
    """Fill in what a journal tells."""
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
                loaders[event["loader"]].forks.append(Fork(**facts))
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
