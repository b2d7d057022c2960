"""Helpers for infeed's own processes: environment, process name, memory and CPU wait times, exit with the parent."""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, NoReturn

from infeed.workers.native_threads import thread_variables

# How often to check for the parent on platforms without a notification of its exit.
_PARENT_LOOK_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def child_environment(threads: int) -> dict[str, str]:
    """Return a copy of the current environment in which libraries use ``threads`` threads."""
    return {**os.environ, **thread_variables(threads)}


def adopt_environment(environ: dict[str, str]) -> None:
    """Replace ``os.environ`` with that of the main process when it requested this worker."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def current_directory() -> str | None:
    """Return the working directory; ``None`` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


_importing: Final = threading.Event()


@contextmanager
def importing() -> Iterator[None]:
    """Mark the time during which this worker or fork server imports modules."""
    _importing.set()
    try:
        yield
    finally:
        _importing.clear()


def is_importing() -> bool:
    return _importing.is_set()


def flush_output() -> None:
    """Flush stdout and stderr, which user code may have replaced with any object."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


if sys.platform == "win32":
    import _winapi

    def end_process(code: int) -> NoReturn:
        """Exit immediately. ``os._exit`` runs DLL clean-up first, which may wait for threads that are already gone."""
        _winapi.TerminateProcess(_winapi.GetCurrentProcess(), code)
        os._exit(code)

else:

    def end_process(code: int) -> NoReturn:
        """Exit immediately, without clean-up."""
        os._exit(code)

    def keep_to_oneself(*fds: int) -> None:
        """Keep child processes of user code from inheriting these descriptors.

        The engine detects a worker's death by end of file on its pipe, which requires that no process holds the other end.
        """

        def close() -> None:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

        for fd in fds:
            os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=close)


def ignore_interrupts() -> None:
    """Ignore Ctrl+C: the main process handles it and stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def queued_ns() -> int:
    """Return how long this thread was runnable but waited for a CPU core; 0 if the platform does not report it."""
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as schedstat:
            return int(schedstat.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class MemoryUse(NamedTuple):
    resident_bytes: int = 0
    private_bytes: int = 0  # part of resident_bytes that is not shared with other processes


def memory_use() -> MemoryUse:
    """Return the memory use of this process; on macOS, its peak."""
    if sys.platform == "linux":
        try:
            with open("/proc/self/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
                return MemoryUse(resident * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE)
        except (OSError, ValueError):
            return MemoryUse()
    if sys.platform != "win32":
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return MemoryUse(most, most)
    import ctypes

    counters = (ctypes.c_size_t * 10)()  # PROCESS_MEMORY_COUNTERS_EX, whose first member is two 32-bit numbers
    kernel = ctypes.windll.kernel32
    kernel.K32GetProcessMemoryInfo(ctypes.c_void_p(kernel.GetCurrentProcess()), counters, ctypes.sizeof(counters))
    # WorkingSetSize; PrivateUsage, or PagefileUsage where that is not filled in.
    return MemoryUse(counters[2], counters[9] or counters[7])


def name_process(name: str) -> None:
    """Set the process name in ``ps`` and ``top``, which show 15 characters. Linux only."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(name[:15])


def open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; ``None`` if the platform has none."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def watch_parent(pid: int, on_gone: Callable[[], object]) -> None:
    """Call ``on_gone`` from a separate thread when the parent process has exited.

    End of file on a pipe is not enough: a forked child of the main process may outlive it and hold the other end.
    """
    if sys.platform == "win32":
        return  # handles are inherited only explicitly, so end of file on the pipe is enough
    threading.Thread(target=_watchdog, args=(pid, on_gone), name="infeed:watch", daemon=True).start()


def _watchdog(pid: int, on_gone: Callable[[], object]) -> None:
    descriptor = open_process(pid)
    if descriptor is not None:
        select.select([descriptor], [], [])
    else:
        never = threading.Event()
        while os.getppid() == pid:
            never.wait(_PARENT_LOOK_S)
    on_gone()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the parent exits for any reason. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
