"""How many processors this process may use: by its affinity, by its container's quota, and beside other ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from infeed.memory.groups import OWN, ROOT, groups_of

# How many ranks are on this machine, as launchers tell it: torchrun and its like, Open MPI, MPICH and Intel MPI, MVAPICH, PALS,
# Slurm, which names all machines ("4(x2),3").
_RANKS: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
_SLURM_NODE: Final = "SLURM_NODEID"


def available_cores(environ: Mapping[str, str] | None = None, *, root: str = ROOT, own: str = OWN) -> float:
    """What this process has of the machine's processors; less than one in a container with less.

    Several ranks on one machine share it, unless each was given processors of its own.

    Args:
        environ: where the launcher says how many ranks there are.
        root: where control groups are.
        own: where this process finds its own.
    """
    ranks = local_ranks(os.environ if environ is None else environ)
    allowed = _allowed_count()
    quota = min(_quotas(root, own), default=float("inf")) / ranks
    has_own = ranks > 1 and allowed * ranks <= _machine_count(root, own)
    return min(float(allowed) if has_own else allowed / ranks, quota)


def local_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks share this machine; 1 if no launcher says anything."""
    for name in _RANKS:
        counts = _task_counts(environ.get(name, ""))
        if counts:
            node = environ.get(_SLURM_NODE, "0")
            number = int(node) if node.isdigit() and len(counts) > 1 else 0
            return max(1, counts[min(number, len(counts) - 1)])
    return 1


def _task_counts(text: str) -> list[int]:
    """One number for each machine: ``"4(x2),3"`` is 4, 4, 3. Nothing if it is not understood."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\(x(\d{1,6})\))?\s*", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _allowed_count() -> int:
    """Processors that the system lets this process run on."""
    module: Any = os
    count: Callable[[], int | None] | None = getattr(
        module, "process_cpu_count", None
    )  # Python 3.13: knows what -X cpu_count says
    if count is not None:
        return count() or 1
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _machine_count(root: str, own: str) -> int:
    """Processors of the machine, or of the container: what all ranks together may run on."""
    counts = []
    for controller, name in ((None, "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus")):
        for group in groups_of(controller, own):
            try:
                counts.append(_set_size(Path(_folder(root, controller, group), name).read_text()))
            except (OSError, ValueError):  # there is no such group, or it does not say
                continue
    return max(counts, default=os.cpu_count() or 1)


def _set_size(text: str) -> int:
    """How many numbers ``"0-3,8"`` names."""
    size = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        size += int(last or first) - int(first) + 1
    return size


def _quotas(root: str, own: str) -> Iterator[float]:
    """What each of the groups that this process is in allows it, in processors, if it has a limit."""
    for group in groups_of(None, own):
        try:
            quota, period = Path(_folder(root, None, group), "cpu.max").read_text().split()
            yield int(quota) / int(period)
        except (OSError, ValueError):  # there is no such group, or its quota reads "max"
            continue
    for group in groups_of("cpu", own):
        folder = _folder(root, "cpu", group)
        try:
            limit = int(Path(folder, "cpu.cfs_quota_us").read_text())
            if limit > 0:  # -1: none
                yield limit / int(Path(folder, "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue


def _folder(root: str, controller: str | None, group: str) -> str:
    return f"{root}{group}" if controller is None else f"{root}/{controller}{group}"
