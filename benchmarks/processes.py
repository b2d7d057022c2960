"""CPU time and memory of this process and of all its descendants.

Descendants are read directly as well, because ``RUSAGE_CHILDREN`` counts a process only after it has been waited for, and never
counts a worker whose parent is a helper process that is still running.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    main: float
    children: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.main - before.main, self.children - before.children)


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """``pss`` counts a page shared by n processes as 1/n in each, so sums are physical memory; ``uss`` is unshared memory."""

    pss: int
    uss: int


def descendants() -> list[psutil.Process]:
    # Imported here, so that the cold-start cases do not include its import time.
    import psutil

    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children


def cpu_seconds() -> CpuSeconds:
    import psutil

    children = 0.0
    if sys.platform != "win32":  # does not count children that have exited
        import resource

        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        children = reaped.ru_utime + reaped.ru_stime
    for process in descendants():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        children += times.user + times.system + getattr(times, "children_user", 0.0)
        children += getattr(times, "children_system", 0.0)
    return CpuSeconds(main=time.process_time(), children=children)


def minor_faults() -> dict[int, int]:
    """Return the page faults of each descendant process; empty without /proc."""
    found = {}
    for process in descendants():
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        found[process.pid] = int(fields[7])
    return found


def memory_of(processes: list[psutil.Process]) -> MemoryBytes:
    import psutil

    pss = uss = 0
    for process in processes:
        try:
            memory = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        uss += memory.uss
        pss += getattr(memory, "pss", memory.uss)
    return MemoryBytes(pss, uss)


def memory_of_main() -> MemoryBytes:
    import psutil

    return memory_of([psutil.Process()])


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def peak_rss_bytes() -> int:
    # ru_maxrss survives exec on Linux, so a child would report the size of its parent; VmHWM does not.
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def rss_bytes() -> int:
    return _status_bytes("VmRSS") or peak_rss_bytes()


def reset_peak_rss() -> None:
    """Reset the peak of ``peak_rss_bytes`` where the system supports it (Linux: proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def outputs_of(code: str, count: int) -> list[float]:
    """Run a program in several processes at the same time, and return the numbers that they print.

    Args:
        code: prints a line when it is ready, waits for a line of input, and then prints a number.
        count: number of processes.
    """
    command = [sys.executable, "-uc", code]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    return [float(child.communicate()[0]) for child in children]
