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

    def keep_to_oneself(*handles: int) -> None:
        """Keep child processes of user code from inheriting these handles, which this process has inherited.

        The engine detects a worker's death by end of file on its pipe, which requires that no process holds the other end.
        """
        for handle in handles:
            os.set_handle_inheritable(handle, False)

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
    """Return the memory use of this process."""
    if sys.platform == "linux":
        try:  # every 100 ms in every worker: not psutil, which takes 20 ms to import
            with open("/proc/self/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
                return MemoryUse(resident * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE)
        except (OSError, ValueError):
            return MemoryUse()
    import psutil

    found = psutil.Process().memory_info()
    private: int = getattr(found, "private", 0) or getattr(found, "pagefile", 0)  # Windows; Wine fills in only the latter
    return MemoryUse(found.rss, private or found.rss)


def name_process(name: str) -> None:
    """Set the process name in ``ps`` and ``top``, which show 15 characters. Linux only."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(name[:15])


def open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; ``None`` if the platform has none."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):  # some builds of Python lack it
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def watch_parent(pid: int, on_gone: Callable[[], object]) -> None:
    """Call ``on_gone`` from a separate thread when the parent process has exited.

    End of file on a pipe is not enough: a forked child of the main process may outlive it and hold the other end.
    """
    if sys.platform == "win32":
        return  # the parent's end of the pipe is never inheritable, so end of file is enough
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


# --- malloc: keep the memory that samples free
#
# A worker copies each sample into shared memory and frees it at once. glibc then returns the pages to the kernel, because they
# are at the end of the heap, or because the buffer was large enough for a separate mapping. The next sample faults them in
# again: 243 page faults per decoded JPEG, 20% of the time on 16 cores.

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
# Buffers up to this size come from the heap, which keeps them. Larger ones are mapped for each sample. glibc accepts no larger
# value before 2.35. Since then it does, which would save a quarter of the CPU time of a sample of 100 MB, but each worker would
# keep that memory.
_MMAP_BYTES: Final = 32 << 20
# Free memory kept at the end of each heap (malloc arena): two of the largest buffers. The main thread has one; threads that
# user code starts have others. For comparison, a torch worker holds a whole batch.
_TRIM_BYTES: Final = 64 << 20
# The heap grows in steps of at least this size.
_PAD_BYTES: Final = 1 << 20


def keep_freed_memory() -> None:
    """Configure malloc to keep freed memory. Does nothing if the user has configured malloc, or if it is not glibc's.

    The allocators of macOS and Windows have no such setting.
    """
    if not _is_configured() and _is_glibc():
        import ctypes

        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
            mallopt(_M_TOP_PAD, _PAD_BYTES)


def _is_configured() -> bool:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


def _is_glibc() -> bool:
    """Whether the C library is glibc and ``LD_PRELOAD`` names no other allocator."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if sys.platform != "linux" or "malloc" in preloaded:  # jemalloc, tcmalloc, mimalloc, debugging allocators
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):  # musl defines the name, but has no value for it
        return False


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has no name.

    >>> signal_name(15)
    'SIGTERM'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
