"""What a finding is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, final, get_args

from infeed.doctor.evidence import LoaderSeen, Probe

# In order of what they may cost: the run, or what comes out of it; its time; its memory.
Risk: TypeAlias = Literal["hang", "failure", "wrong results", "time", "memory"]
RISKS: Final = get_args(Risk)


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
    return f"{line}, by now {counted(loader.num_workers, loader.kind, 'processes' if loader.kind == 'process' else '')}"


def counted(count: float, one: str, many: str = "") -> str:
    """A number of things.

    >>> counted(1, "core"), counted(2.5, "core"), counted(1200, "batch", "batches")
    ('1 core', '2.5 cores', '1,200 batches')
    """
    return f"{round(count, 2):,.15g} {one if count == 1 else many or one + 's'}"


def sample_text(probe: Probe) -> str:
    """What a sample takes. Threads of libraries may use several processors at once, and clocks differ a little."""
    if probe.cpu_s > 1.1 * probe.sample_s:
        return f"{duration(probe.sample_s)}, with threads that use {duration(probe.cpu_s)} of processors"
    return f"{duration(probe.sample_s)}, of which {duration(min(probe.cpu_s, probe.sample_s))} on a processor"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(0.00000042), duration(0.0123), duration(75)
    ('0.42 µs', '12.3 ms', '75.0 s')
    """
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:  # which is 1e+03 ms in three digits
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s"
