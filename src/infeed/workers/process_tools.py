"""What is different inside a process of ours: its environment, a name, an end when its parent ends."""

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

# How often the parent is looked for where nothing tells of its end.
_PARENT_LOOK_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def child_environment(threads: int) -> dict[str, str]:
    """The user's environment as it is now, for a process of ours whose libraries are to use so many threads."""
    return {**os.environ, **thread_variables(threads)}


def adopt_environment(environ: dict[str, str]) -> None:
    """Take over what the user's process had in ``os.environ`` when this worker was asked for."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def current_directory() -> str | None:
    """The working directory; ``None`` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


_importing: Final = threading.Event()


@contextmanager
def importing() -> Iterator[None]:
    """While this process, which is to load for another, imports modules."""
    _importing.set()
    try:
        yield
    finally:
        _importing.clear()


def is_importing() -> bool:
    return _importing.is_set()


def flush_output() -> None:
    """Put what was printed on the screen; user code may have put anything in the place of the streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


if sys.platform == "win32":
    import _winapi

    def end_process(code: int) -> NoReturn:
        """End this process now. `os._exit` would let DLLs clean up first, which may wait for threads that are gone by then."""
        _winapi.TerminateProcess(_winapi.GetCurrentProcess(), code)
        os._exit(code)

else:

    def end_process(code: int) -> NoReturn:
        """End this process now."""
        os._exit(code)

    def keep_to_oneself(*fds: int) -> None:
        """Processes that user code starts do not get these.

        The engine hears of a worker's death by the end of its pipe, which does not come before all who have it are gone.
        """

        def close() -> None:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

        for fd in fds:
            os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=close)


def ignore_interrupts() -> None:
    """Ctrl+C belongs to the user's process, which tells its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def queued_ns() -> int:
    """How long this thread was ready to run and had no core; 0 if the platform does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as schedstat:
            return int(schedstat.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class MemoryUse(NamedTuple):
    resident_bytes: int = 0
    private_bytes: int = 0  # of them, those that it shares with nobody


def memory_use() -> MemoryUse:
    """How much memory this process has; on macOS, how much it had at most."""
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
    """A name for ``ps`` and ``top``; fifteen characters are shown."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(name[:15])


def open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when that process ends; ``None`` if the platform has no such thing."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def watch_parent(pid: int, on_gone: Callable[[], object]) -> None:
    """Call ``on_gone`` when the process that started this one has ended, from a thread of its own.

    The end of a pipe tells the same, unless the user's process had forked a child that lives on and holds the other end.
    """
    if sys.platform == "win32":
        return  # no process inherits what it is not given
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
    """Be killed by the kernel when the parent process ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
