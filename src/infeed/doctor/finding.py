"""The ``Finding`` type: a problem of a monitored program, with its cost, the evidence and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias, final, get_args

from infeed.doctor.evidence import LoaderSeen
from infeed.formatting import format_workers

# In order of cost: the run or its results, then time, then memory.
Risk: TypeAlias = Literal["hang", "failure", "wrong results", "time", "memory"]
RISKS: Final = get_args(Risk)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, with its evidence and its fix."""

    name: str  # stable across versions
    title: str
    risk: Risk
    cost: float  # share of the run's time or of free memory; up to 1 if the whole run is at risk
    evidence: dict[str, str]
    fix: dict[str, str]  # by library: "torch", "infeed"
    loader: str
    bottleneck: str = ""  # of "data-bound": a key of `infeed.metrics.diagnosis.BOTTLENECKS`
    numbers: Mapping[str, Any] = field(default_factory=dict)  # the figures behind the text, in seconds, bytes and counts

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
    return f"{line}, now {format_workers(loader.num_workers, loader.kind)}"
