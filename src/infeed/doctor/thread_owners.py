"""Finds the library that started each native thread, and counts working threads per library in worker processes.

Native threads rarely have useful names. But a waiting thread has frames of its library on its stack, and the outermost frame
is the function that the library started the thread with. Linux exposes the stack pointer, the stack memory and the memory
maps, for this process and its descendants. Other platforms give no result.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from infeed.doctor.evidence import ProcessSeen, Run

# A thread counts as working if its CPU time exceeds this share of the main thread's CPU time, and this many seconds.
_WORKING: Final = 0.05
_WORKING_S: Final = 0.05
# Processes inspected per pass. Inspection stops a process briefly, and all workers of a loader are alike.
_AT_ONCE: Final = 2


@final
class Pools:
    """Thread pools of libraries in the worker processes of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owners: dict[int, dict[int, str]] = {}  # library by thread id, by PID
        self._looks: Counter[int] = Counter()  # inspections by PID

    def look(self, processes: Sequence[Any]) -> None:
        """Inspect up to ``_AT_ONCE`` of these psutil processes, least inspected first."""
        import psutil

        for process in sorted(processes, key=lambda one: self._looks[one.pid])[:_AT_ONCE]:
            self._looks[process.pid] += 1
            with suppress(psutil.Error, OSError):
                self._look_at(process)

    def _look_at(self, process: Any) -> None:
        times = {one.id: one.user_time + one.system_time for one in process.threads()}
        least_s = max(_WORKING * times.pop(process.pid, 0.0), _WORKING_S)
        working = {tid for tid, spent_s in times.items() if spent_s > least_s}
        owners = self._owners.setdefault(process.pid, {})
        if working - owners.keys():
            owners |= find_owners(process.pid, halts=True)
        seen = self._run.processes.setdefault(process.pid, ProcessSeen(process.pid))
        for owner, count in Counter(owners[tid] for tid in working & owners.keys() if owners[tid] != PYTHON).items():
            seen.pools[owner] = max(seen.pools.get(owner, 0), count)


PYTHON: Final = "Python"
# System and runtime libraries that start threads on behalf of others.
_GO_BETWEENS: Final = re.compile(r"/(libc|libpthread|libstdc\+\+|ld-linux|libgcc_s|libc10|libdl|libm)[.\-]")
_STACK_BYTES: Final = 1 << 16
# Retry, because a running thread shows no stack, and pool threads spin briefly after work.
_TRIES: Final = 10
_PAUSE_S: Final = 0.002


class Mapping(NamedTuple):
    """A mapped region of a process's memory."""

    begin: int
    end: int
    is_code: bool
    path: str


def find_owners(pid: int | None = None, *, halts: bool = False) -> dict[int, str]:
    """Return the library of each thread except the main thread, by thread id; omit threads of unknown origin.

    Args:
        halts: stop the process for a few milliseconds, because threads that are always busy show no stack.
    """
    if sys.platform != "linux":
        return {}
    found: dict[int, str] = {}
    if halts and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(_TRIES):
            if _look(pid or os.getpid(), found):
                break
            time.sleep(_PAUSE_S)  # on a busy machine, SIGSTOP takes a moment to reach all threads
    finally:
        if halts and pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return found


def _look(pid: int, found: dict[int, str]) -> bool:
    """Add the owners visible now. Return whether all threads are known, or the process cannot be read at all."""
    try:
        tids = {int(name) for name in os.listdir(f"/proc/{pid}/task")} - {pid}
        mappings = parse_maps(Path(f"/proc/{pid}/maps").read_text())
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:  # the process has ended, or we may not read its memory
        return True
    try:
        for tid in tids - found.keys():
            owner = _owner(f"/proc/{pid}/task/{tid}/syscall", mappings, memory)
            if owner is not None:
                found[tid] = owner
    finally:
        os.close(memory)
    return tids <= found.keys()


def parse_maps(text: str) -> list[Mapping]:
    """Parse ``/proc/<pid>/maps``, in address order."""
    mappings = []
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in words[0].split("-"))
        mappings.append(Mapping(begin, end, "x" in words[1], words[5] if len(words) > 5 else ""))
    return mappings


def name_library(path: str) -> str:
    """Return the common name of the library that a file belongs to.

    >>> name_library("/env/lib/python3.12/site-packages/numpy.libs/libscipy_openblas64_-32a4b2a6.so")
    'OpenBLAS (numpy)'
    >>> name_library("/env/lib/python3.12/site-packages/cv2/cv2.abi3.so")
    'cv2'
    >>> name_library("/usr/lib/libpython3.12.so.1.0")
    'Python'
    """
    file = path.rpartition("/")[2]
    _, is_package, rest = path.partition("/site-packages/")
    package = rest.partition("/")[0].removesuffix(".libs") if is_package else ""
    for word, name in (("openblas", "OpenBLAS"), ("gomp", "OpenMP"), ("iomp", "OpenMP"), ("libomp", "OpenMP"), ("mkl", "MKL")):
        if word in file:
            return f"{name} ({package})" if package else name
    if re.match(r"(lib)?python\d", file):
        return PYTHON
    return package or re.sub(r"\.so.*", "", file)


def _owner(syscall: str, mappings: list[Mapping], memory: int) -> str | None:
    if sys.platform != "linux":
        return None
    try:
        words = Path(syscall).read_text().split()
        if words[0] == "running":
            return None
        # Stack pointer and program counter come last.
        pointer = int(words[-2], 16)
        stack = _find(mappings, pointer)
        if stack is None:
            return None
        begin = max(pointer & ~7, stack.end - _STACK_BYTES)
        data = os.pread(memory, stack.end - begin, begin)
    except (OSError, IndexError, ValueError):
        return None
    values = struct.unpack(f"={len(data) // 8}Q", data[: len(data) // 8 * 8])
    for value in reversed(values):
        place = _find(mappings, value)
        if place is not None and place.is_code and place.path.startswith("/") and not _GO_BETWEENS.search(place.path):
            return name_library(place.path)
    return None


def _find(mappings: list[Mapping], address: int) -> Mapping | None:
    number = bisect_right(mappings, address, key=lambda mapping: mapping.begin) - 1
    return mappings[number] if number >= 0 and address < mappings[number].end else None
