"""Resource limits of this process: memory, ``ulimit``, OOM kills and CPU cores.

The limits come from the machine, the container's cgroups, CPU affinity and the number of ranks on the machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, final

from infeed.errors import ConfigError
from infeed.formatting import format_bytes

OWN: Final = "/proc/self/cgroup"  # lists the cgroups of a process
ROOT: Final = "/sys/fs/cgroup"  # mount point of cgroup v2; cgroup v1 has one subfolder per controller


def _cgroup_folders(controller: str, root: str, own: str) -> Iterator[tuple[Literal[1, 2], Path]]:
    """Yield the version and folder of this process's cgroup and of its ancestors, outermost first: of v2, then of v1.

    In a container the mount point itself is its cgroup. Folders and files may be missing.
    """
    try:
        lines = [line.split(":", 2) for line in Path(own).read_text().splitlines()]
    except OSError:  # not Linux
        lines = []
    versions: tuple[tuple[Literal[1, 2], str], ...] = ((2, ""), (1, controller))
    for version, name in versions:
        paths = [line[2].rstrip("/") for line in lines if len(line) == 3 and name in line[1].split(",")]
        parts = paths[-1].split("/") if paths else [""]
        yield from ((version, Path(f"{root}/{name}" + "/".join(parts[:count]))) for count in range(1, len(parts) + 1))


def _read_fields(path: Path) -> dict[str, int]:
    """Return the lines of a file that consist of a name and a number; empty if the file is missing."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # another cgroup version, or not Linux
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# For cgroup v1 and v2: the files with limit and usage, and the prefix of the fields in memory.stat that count file cache.
_MEMORY_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def parse_bytes(value: int | str, name: str = "memory_limit") -> int:
    """Return a number of bytes from an int or from text such as ``"512MB"`` and ``"1.5 GiB"`` (both in units of 1024).

    Args:
        name: the option's name, for the error message.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    text = value.lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text)
    if match is None:
        raise ConfigError(f"{name}={value!r} is not a size; pass bytes, or text such as '2GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes() -> int:
    """Return how much can be allocated without swapping or an OOM kill: the lower of machine and container memory."""
    return min(_machine_bytes(), *_group_bytes())


def _machine_bytes() -> int:
    import psutil  # lazy: the import takes 10 ms and workers do not need it

    try:
        available: int = psutil.virtual_memory().available
    except OSError:  # no /proc, or no free descriptor to read it
        if sys.platform == "win32":
            raise
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available


def _group_bytes() -> Iterator[int]:
    """Yield the remaining memory of every cgroup of this process that has a limit."""
    yield sys.maxsize
    for version, folder in _cgroup_folders("memory", ROOT, OWN):
        limit_name, usage_name, prefix = _MEMORY_FILES[version]
        try:
            limit, usage = int((folder / limit_name).read_text()), int((folder / usage_name).read_text())
        except (OSError, ValueError):  # no such cgroup, or the limit is "max"
            continue
        statistics = _read_fields(folder / "memory.stat")
        # The kernel can reclaim file cache.
        cache = sum(statistics.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
        yield max(0, limit - usage + cache)


# ERROR_NOT_ENOUGH_MEMORY, ERROR_NO_SYSTEM_RESOURCES, ERROR_COMMITMENT_LIMIT
_COMMIT_ERRORS: Final = (8, 1450, 1455)


def is_commit_limit(error: OSError) -> bool:
    """Whether Windows could not commit memory: all processes together may commit as much as RAM and page file can hold."""
    return getattr(error, "winerror", None) in _COMMIT_ERRORS


Limit = Literal["AS", "FSIZE", "NOFILE", "NPROC"]

if sys.platform == "win32":

    def process_limit(name: Limit) -> int | None:
        del name  # Windows has no such limits
        return None

else:
    import resource

    def process_limit(name: Limit) -> int | None:
        """Return the ``ulimit`` of this process, or ``None`` if there is no limit."""
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        return None if limit == resource.RLIM_INFINITY else limit


@final
class OomWatch:
    """Counts OOM kills and reports whether there were new ones."""

    def __init__(self, *, root: str = ROOT, own: str = OWN, vmstat: str = "/proc/vmstat") -> None:
        self._vmstat = Path(vmstat)
        # The mount point and this process's cgroup of each version. Cgroups in between count kills in other cgroups too.
        of_version = {1: list[Path](), 2: list[Path]()}
        for version, folder in _cgroup_folders("memory", root, own):
            of_version[version].append(folder)
        self._folders = {folder for folders in of_version.values() for folder in (folders[0], folders[-1])}
        self._container, self._machine = self._counts()

    def diagnosis(self) -> str | None:
        """Return the cause of OOM kills since the last call; ``None`` if there were none or the system does not count them."""
        before = self._container, self._machine
        self._container, self._machine = self._counts()
        if self._container > before[0]:
            limit = self._limit()
            shown = "" if limit is None else f" of {format_bytes(limit)}"
            return f"the OOM killer killed it: the container reached its memory limit{shown}"
        if self._machine > before[1]:
            return "the OOM killer killed it: the machine ran out of memory"
        return None

    def _counts(self) -> tuple[int, int]:
        files = [folder / name for folder in self._folders for name in ("memory.events", "memory.oom_control")]
        container = sum(_read_fields(file).get("oom_kill", 0) for file in files)
        return container, _read_fields(self._vmstat).get("oom_kill", 0)

    def _limit(self) -> int | None:
        limits = []
        for folder in self._folders:
            for name, _, _ in _MEMORY_FILES.values():
                try:
                    limits.append(int((folder / name).read_text()))
                except (OSError, ValueError):  # missing, or "max"
                    continue
        return min(limits, default=None)


# Variables in which launchers set the number of local ranks: torchrun and similar, Open MPI, MPICH and Intel MPI, MVAPICH,
# PALS, Slurm. Slurm lists all machines ("4(x2),3").
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
    """Return how many CPU cores this process may use; less than 1 if the container's quota is lower.

    Ranks on one machine share its cores, unless each rank is pinned to separate cores.

    Args:
        environ: Environment variables that contain the launcher's number of ranks.
        root: Mount point of the cgroups.
        own: File that lists the cgroups of this process.
    """
    ranks = local_ranks(os.environ if environ is None else environ)
    allowed = _allowed_count()
    quota = min(_quotas(root, own), default=float("inf")) / ranks
    has_own = ranks > 1 and allowed * ranks <= _machine_count(root, own)
    return min(float(allowed) if has_own else allowed / ranks, quota)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return how many ranks share this machine; 1 if no launcher variable is set."""
    for name in _RANKS:
        counts = _task_counts(environ.get(name, ""))
        if counts:
            node = environ.get(_SLURM_NODE, "0")
            number = int(node) if node.isdigit() and len(counts) > 1 else 0
            return max(1, counts[min(number, len(counts) - 1)])
    return 1


def _task_counts(text: str) -> list[int]:
    """Return one count per machine: ``"4(x2),3"`` is 4, 4, 3. Empty if the text cannot be parsed."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\(x(\d{1,6})\))?\s*", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _allowed_count() -> int:
    """Return the number of CPU cores that the system allows this process to run on."""
    module: Any = os
    count: Callable[[], int | None] | None = getattr(
        module, "process_cpu_count", None
    )  # Python 3.13 and later; respects -X cpu_count
    if count is not None:
        return count() or 1
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _machine_count(root: str, own: str) -> int:
    """Return the CPU cores of the machine or container, which all ranks share."""
    counts = []
    for version, folder in _cgroup_folders("cpuset", root, own):
        name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
        try:
            counts.append(_set_size((folder / name).read_text()))
        except (OSError, ValueError):  # no such cgroup, or no usable value
            continue
    return max(counts, default=os.cpu_count() or 1)


def _set_size(text: str) -> int:
    """Return how many numbers a set such as ``"0-3,8"`` contains."""
    size = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        size += int(last or first) - int(first) + 1
    return size


def _quotas(root: str, own: str) -> Iterator[float]:
    """Yield the quota, in CPU cores, of every cgroup of this process that has one."""
    for version, folder in _cgroup_folders("cpu", root, own):
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        except (OSError, ValueError):  # no such cgroup, or the quota is "max"
            continue
        if quota > 0:  # -1: no quota
            yield quota / period
