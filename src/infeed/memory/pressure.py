"""Whether somebody was killed for memory: what the kernel counts of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from infeed.units import format_bytes

_CGROUPS: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")


@final
class OomWatch:
    """Remembers how often the kernel has killed for memory, and tells later whether it has again."""

    def __init__(self, *, cgroups: Path = _CGROUPS, own: Path = _SELF, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._folders = list(_folders(cgroups, own))
        self._container, self._machine = self._counts()

    def verdict(self) -> str | None:
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
