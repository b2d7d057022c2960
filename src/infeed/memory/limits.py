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


def groups_of(controller: str | None, own: str = OWN) -> list[str]:
    """Return this process's cgroup and all its ancestors, as paths below the mount point, outermost first.

    In a container the mount point itself is its cgroup. ``controller`` names a cgroup v1 controller; ``None`` means v2.
    """
    path = ""
    try:
        for line in Path(own).read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers if controller is None else controller in controllers.split(","):
                path = name.rstrip("/")
    except (OSError, ValueError):
        pass
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# For cgroup v2 and v1: the mount point, the file names for limit and usage, and the fields of memory.stat that count file
# cache. The kernel can reclaim that cache.
_CGROUP_OF: Final = OWN
_CGROUPS: Final = (
    (ROOT, "memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        f"{ROOT}/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def parse_bytes(value: int | str) -> int:
    """Return a number of bytes from an int or from text such as ``"512MB"`` and ``"1.5 GiB"`` (both in units of 1024).

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    text = value.lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text)
    if match is None:
        raise ConfigError(f"memory_limit={value!r} is not a size; give bytes, or text such as '2GiB'")
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
    for root, limit_name, usage_name, cached in _CGROUPS:
        for group in groups_of("memory" if root.endswith("/memory") else None, _CGROUP_OF):
            folder = root + group
            try:
                limit, usage = int(_text(f"{folder}/{limit_name}")), int(_text(f"{folder}/{usage_name}"))
                lines = (line.split() for line in _text(f"{folder}/memory.stat").splitlines())
                cache = sum(int(value) for name, value in lines if name in cached)
            except (OSError, ValueError):  # no such cgroup, or the limit is "max"
                continue
            yield max(0, limit - usage + cache)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


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


_OOM_CGROUPS: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")


@final
class OomWatch:
    """Counts OOM kills and reports whether there were new ones."""

    def __init__(self, *, cgroups: Path = _OOM_CGROUPS, own: Path = _SELF, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._folders = list(_folders(cgroups, own))
        self._container, self._machine = self._counts()

    def diagnosis(self) -> str | None:
        """Return the cause of OOM kills since the last call; ``None`` if there were none or the system does not count them."""
        before = self._container, self._machine
        self._container, self._machine = self._counts()
        if self._container > before[0]:
            limit = self._limit()
            shown = "" if limit is None else f" of {format_bytes(limit)}"
            return f"the container's memory limit{shown} was reached, and the kernel killed it for that"
        if self._machine > before[1]:
            return "the machine ran out of memory, and the kernel killed it for that"
        return None

    def _counts(self) -> tuple[int, int]:
        container = 0
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                container += _field(folder / name, "oom_kill")
        return container, _field(self._vmstat, "oom_kill")

    def _limit(self) -> int | None:
        limits = []
        for folder in self._folders:
            for name in ("memory.max", "memory.limit_in_bytes"):
                try:
                    limits.append(int((folder / name).read_text()))
                except (OSError, ValueError):  # missing, or "max"
                    continue
        return min(limits, default=None)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders with this process's counters: the root in a container, otherwise the cgroup that the kernel names."""
    yield root
    yield root / "memory"
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if inner and controllers in ("", "memory"):
            yield (root if not controllers else root / "memory") / inner


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # another cgroup version, or not Linux
        return 0
    return next((int(words[1]) for words in map(str.split, lines) if len(words) == 2 and words[0] == name), 0)


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
    for controller, name in ((None, "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus")):
        for group in groups_of(controller, own):
            try:
                counts.append(_set_size(Path(_folder(root, controller, group), name).read_text()))
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
    for group in groups_of(None, own):
        try:
            quota, period = Path(_folder(root, None, group), "cpu.max").read_text().split()
            yield int(quota) / int(period)
        except (OSError, ValueError):  # no such cgroup, or the quota is "max"
            continue
    for group in groups_of("cpu", own):
        folder = _folder(root, "cpu", group)
        try:
            limit = int(Path(folder, "cpu.cfs_quota_us").read_text())
            if limit > 0:  # -1: no quota
                yield limit / int(Path(folder, "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue


def _folder(root: str, controller: str | None, group: str) -> str:
    return f"{root}{group}" if controller is None else f"{root}/{controller}{group}"
