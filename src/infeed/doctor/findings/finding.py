"""What a finding is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, final, get_args

from infeed.doctor.evidence import LoaderSeen, Probe
from infeed.formatting import format_seconds, format_workers

# In order of what they may cost: the run, or what comes out of it; its time; its memory.
Risk: TypeAlias = Literal["hang", "failure", "wrong results", "time", "memory"]
RISKS: Final = get_args(Risk)

# Of what the loop waits for, what is most of it.
MOST_OF_IT: Final = 0.5

# What a batch costs on its way from a worker. torch: a queue, two threads, a file descriptor for each tensor, new pages for its
# bytes on both sides; all its workers together bring 2.5 GB/s, however many they are. infeed: a message of some dozen bytes.
_TORCH_WAY_S: Final = 1e-3
_TORCH_WAY_RATE: Final = 2.5e9
_INFEED_WAY_S: Final = 1e-4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, with what shows it and what to do."""

    name: str  # does not change from version to version
    title: str
    risk: Risk
    cost: float  # share of the run's time, or of the machine's free memory; 1 where the whole run is at stake
    evidence: dict[str, str]
    cure: dict[str, str]  # by library: "torch", "infeed"
    loader: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def describe(loader: LoaderSeen) -> str:
    """A loader in a line.

    >>> describe(LoaderSeen(number=0, library="torch", dataset="Faces", kind="process", num_workers=4, batch_size=32))
    "torch's DataLoader(Faces, batch_size=32, num_workers=4)"

    Where infeed decides how many workers there are, it says how many there were.
    """
    name = "torch's DataLoader" if loader.library == "torch" else f"{loader.library}.DataLoader"
    asked = loader.asked or loader.num_workers
    line = f"{name}({loader.dataset}, batch_size={loader.batch_size}, num_workers={asked})"
    if not loader.is_auto or loader.kind == "inline":
        return line
    return f"{line}, by now {format_workers(loader.num_workers, loader.kind)}"


def way_s(loader: LoaderSeen) -> float:
    """What a batch costs on its way from a worker to the loop, besides being loaded."""
    return _TORCH_WAY_S + loader.batch_bytes / _TORCH_WAY_RATE if loader.library == "torch" else _INFEED_WAY_S


def sample_text(probe: Probe) -> str:
    """What a sample takes."""
    return _time_text(probe.sample_s, probe.cpu_s)


def collate_text(probe: Probe) -> str:
    """What making a batch of its samples takes."""
    return _time_text(probe.collate_s, probe.collate_cpu_s)


def _time_text(seconds: float, cpu_s: float) -> str:
    """Threads of libraries may use several processors at once, and clocks differ a little."""
    if cpu_s > 1.1 * seconds:
        return f"{format_seconds(seconds)}, with threads that use {format_seconds(cpu_s)} of processors"
    return f"{format_seconds(seconds)}, of which {format_seconds(min(cpu_s, seconds))} on a processor"
