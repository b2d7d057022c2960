"""How many processors this process may use: by its affinity, by its container's quota, and beside other ranks."""

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

OWN: Final = "/proc/self/cgroup"  # where a process finds its groups
ROOT: Final = "/sys/fs/cgroup"  # where they are: of version 2, and below it those of version 1, a folder for each controller


def groups_of(controller: str | None, own: str = OWN) -> list[str]:
    """This process's group and all above it, as paths below the root, from the root on.

    In a container the root itself is its own. ``controller`` is that of version 1, ``None`` the one hierarchy of version 2.
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
# Where a process finds its group, and where groups are: cgroup version 2 and version 1, each with the names of its files for
# limit, usage and statistics, and what in the statistics is only the cache of files, which the kernel gives up when asked.
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
    """Bytes from a number, or from text such as ``"512MB"`` and ``"1.5 GiB"`` (units of 1024 either way).

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
    """What can be allocated now without swapping or being killed: the machine's free memory or the container's, the lesser."""
    return min(_machine_bytes(), *_group_bytes())


def _machine_bytes() -> int:
    import psutil  # here, because it takes 10 ms to import and workers have no need of it

    try:
        available: int = psutil.virtual_memory().available
    except OSError:  # no /proc, or no descriptor left to read it with
        if sys.platform == "win32":
            raise
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available


def _group_bytes() -> Iterator[int]:
    """What is left to each of the groups that this process is in and that has a limit."""
    yield sys.maxsize
    for root, limit_name, usage_name, cached in _CGROUPS:
        for group in groups_of("memory" if root.endswith("/memory") else None, _CGROUP_OF):
            folder = root + group
            try:
                limit, usage = int(_text(f"{folder}/{limit_name}")), int(_text(f"{folder}/{usage_name}"))
                lines = (line.split() for line in _text(f"{folder}/memory.stat").splitlines())
                cache = sum(int(value) for name, value in lines if name in cached)
            except (OSError, ValueError):  # there is no such group, or its limit reads "max"
                continue
            yield max(0, limit - usage + cache)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


Limit = Literal["AS", "FSIZE", "NOFILE", "NPROC"]

if sys.platform == "win32":

    def process_limit(name: Limit) -> int | None:
        del name  # there are none
        return None

else:
    import resource

    def process_limit(name: Limit) -> int | None:
        """What ``ulimit`` allows this process, or ``None`` if it is not limited."""
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        return None if limit == resource.RLIM_INFINITY else limit


_OOM_CGROUPS: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")


@final
class OomWatch:
    """Remembers how often the kernel has killed for memory, and tells later whether it has again."""

    def __init__(self, *, cgroups: Path = _OOM_CGROUPS, own: Path = _SELF, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._folders = list(_folders(cgroups, own))
        self._container, self._machine = self._counts()

    def diagnosis(self) -> str | None:
        """Who has killed for memory since this was last asked; ``None`` if nobody has, or nobody counts."""
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
                except (OSError, ValueError):  # not there, or "max"
                    continue
        return min(limits, default=None)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Where the counters of this process's group are: in a container at the root, else where the kernel says."""
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
    except OSError:  # another version of cgroups, or no Linux
        return 0
    return next((int(words[1]) for words in map(str.split, lines) if len(words) == 2 and words[0] == name), 0)


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
