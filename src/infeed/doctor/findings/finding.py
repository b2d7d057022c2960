"""The ``Finding`` type, and helpers that several checks share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, final, get_args

from infeed.doctor.evidence import LoaderSeen, Probe
from infeed.formatting import format_seconds, format_workers

# In order of cost: the run or its results, then time, then memory.
Risk: TypeAlias = Literal["hang", "failure", "wrong results", "time", "memory"]
RISKS: Final = get_args(Risk)

# A cause is the main one from this share of the waiting time.
MOST_OF_IT: Final = 0.5

# Cost of transferring a batch from a worker. torch: a queue, two threads, a file descriptor per tensor, and new pages in both
# processes; all its workers together transfer 2.5 GB/s, whatever their number. infeed: a message of a few dozen bytes.
_TORCH_WAY_S: Final = 1e-3
_TORCH_WAY_RATE: Final = 2.5e9
_INFEED_WAY_S: Final = 1e-4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, with its evidence and its fix."""

    name: str  # stable across versions
    title: str
    risk: Risk
    cost: float  # share of the run's time or of free memory; up to 1 if the whole run is at risk
    evidence: dict[str, str]
    cure: dict[str, str]  # by library: "torch", "infeed"
    loader: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def describe(loader: LoaderSeen) -> str:
    """Describe a loader in one line.

    >>> describe(LoaderSeen(number=0, library="torch", dataset="Faces", kind="process", num_workers=4, batch_size=32))
    "torch's DataLoader(Faces, batch_size=32, num_workers=4)"

    With ``"auto"``, also includes the current number of workers.
    """
    name = "torch's DataLoader" if loader.library == "torch" else f"{loader.library}.DataLoader"
    asked = loader.asked or loader.num_workers
    line = f"{name}({loader.dataset}, batch_size={loader.batch_size}, num_workers={asked})"
    if not loader.is_auto or loader.kind == "inline":
        return line
    return f"{line}, by now {format_workers(loader.num_workers, loader.kind)}"


def way_s(loader: LoaderSeen) -> float:
    """Return the time to transfer a batch from a worker to the training loop."""
    return _TORCH_WAY_S + loader.batch_bytes / _TORCH_WAY_RATE if loader.library == "torch" else _INFEED_WAY_S


def sample_text(probe: Probe) -> str:
    """Format the time of one sample."""
    return _time_text(probe.sample_s, probe.cpu_s)


def collate_text(probe: Probe) -> str:
    """Format the time of collating one batch."""
    return _time_text(probe.collate_s, probe.collate_cpu_s)


def _time_text(seconds: float, cpu_s: float) -> str:
    """Format elapsed and CPU time. CPU time is larger if libraries use several cores; 10% allows for clock differences."""
    if cpu_s > 1.1 * seconds:
        return f"{format_seconds(seconds)}, with threads that use {format_seconds(cpu_s)} of processors"
    return f"{format_seconds(seconds)}, of which {format_seconds(min(cpu_s, seconds))} on a processor"
