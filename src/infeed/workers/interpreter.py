"""Starts fresh Python interpreters: the fork server, and workers where forking is not safe.

The child gets the user's ``sys.path`` and runs an entry point of infeed. It never runs the user's ``__main__`` again, because
it does not get its name. The child is a plain subprocess, not a ``multiprocessing.Process``, so daemonic processes and workers
of other pools can start it too.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final, Literal

from infeed.errors import ConfigError, WorkerStartError
from infeed.memory.limits import is_commit_limit, process_limit
from infeed.programs.children import RUN_VARIABLE
from infeed.workers.process_tools import child_environment

StartMethod = Literal["auto", "forkserver", "spawn"]

# Set when a fork server of this process has finally refused to fork.
_REFUSED: Final = threading.Event()
_CURE: Final = "set one with multiprocessing.set_executable(path), or use worker='thread'"


def uses_fork(start_method: StartMethod) -> bool:
    """Whether a fork server forks the workers.

    The platform must fork safely and pass descriptors to a running process. macOS has both calls, but its system libraries do
    not support being used after a fork.

    Raises:
        ConfigError: ``start_method="forkserver"`` is not supported on this platform.
    """
    if start_method == "spawn":
        return False
    calls = ((os, "fork"), (os, "memfd_create"), (socket, "send_fds"), (select, "poll"))
    can_fork = sys.platform == "linux" and all(getattr(module, name, None) is not None for module, name in calls)
    if start_method == "forkserver" and not can_fork:
        raise ConfigError("start_method='forkserver' is supported on Linux only; use 'auto' or 'spawn'")
    return can_fork and not _REFUSED.is_set()


def forbid_forks() -> None:
    """Spawn workers from now on: a fork server has refused to fork, and every other server would refuse too."""
    _REFUSED.set()


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Explain system limits that code in this context reaches when it opens descriptors or starts processes or threads.

    Raises:
        WorkerStartError: the code reached a limit; the message names the limit and the fix.
    """
    try:
        yield
    except OSError as error:
        number = error.errno
        if is_commit_limit(error):
            text = "Windows is out of memory and page file space; increase the page file, use fewer workers, or worker='thread'"
        elif number in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            text = _limit_met(number)
        else:
            raise
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        text = _limit_met(errno.EAGAIN)
    else:
        return
    raise WorkerStartError(f"cannot start a worker: {text}")


def _limit_met(number: int) -> str:
    if number == errno.EMFILE:
        return (
            f"this process has reached its limit of {process_limit('NOFILE')} open files (ulimit -n), and each worker needs "
            "two; raise the limit, use fewer workers, or close files"
        )
    if number == errno.ENFILE:
        return "the system has reached its limit of open files; use fewer workers, or close other programs"
    if number == errno.EAGAIN:
        limit = process_limit("NPROC")
        return (
            f"the limit of processes and threads is reached (ulimit -u: {'unlimited' if limit is None else limit}; a container "
            "may have its own limit); raise the limit, use fewer workers, or close other programs"
        )
    return "the system has no memory for another process; use fewer workers, or worker='thread'"


def interpreter_environment(threads: int) -> dict[str, str]:
    """Return the environment of a child interpreter whose libraries may use ``threads`` threads."""
    return {name: value for name, value in child_environment(threads).items() if name != RUN_VARIABLE}


def start_interpreter(
    owner: list[subprocess.Popen[bytes]], entry: str, *, environ: dict[str, str], pass_fds: Sequence[int]
) -> None:
    """Start a Python that imports ``module:function`` (``entry``) and calls it with the pid of this process.

    Args:
        owner: gets the process before it starts. If a signal handler raises meanwhile, the process still has an owner.
        environ: see ``interpreter_environment``.
        pass_fds: descriptors (on Windows: handles) that the child inherits; their numbers in the child are further arguments.
    """
    with _inheritable(pass_fds) as fds:
        _start(owner, entry, (os.getpid(), *fds), environ, fds)


class _Owned(subprocess.Popen[bytes]):
    def __init__(self, owner: list[subprocess.Popen[bytes]], *arguments: Any, **options: Any) -> None:
        owner.append(self)
        super().__init__(*arguments, **options)


def started(owner: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
    """Return the process that ``start_interpreter`` has started for this owner, if it was started."""
    return next((process for process in owner if getattr(process, "pid", None) is not None), None)


def _start(
    owner: list[subprocess.Popen[bytes]],
    entry: str,
    arguments: tuple[int, ...],
    environ: dict[str, str],
    fds: tuple[int, ...],
) -> None:
    python = _interpreter()
    if sys.platform == "win32":
        python, environ = without_redirector(python, environ)
    module, function = entry.split(":")
    # Imports create no garbage, and collection takes 10% of the start-up time. Workers enable the collector again.
    code = (
        f"import gc, sys; gc.disable(); sys.path[:] = {search_path()!r}; "
        f"from {module} import {function}; {function}(*{arguments!r})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as in multiprocessing
    try:
        _Owned(
            owner,
            [python, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            # Daemons and Windows programs without a console have no standard streams. Without DEVNULL, the next opened file
            # would take their numbers.
            stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
            stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
            env=environ,
            **_platform_options(fds),
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise WorkerStartError(f"{python!r} cannot be run as the Python interpreter of workers; {_CURE}") from error


def search_path() -> list[str]:
    """Return the user's ``sys.path`` in a form that another process, or a later ``os.chdir``, does not change.

    Python resolves a relative entry against the working directory of the first lookup. Modules found through ``""`` may come
    from an earlier working directory, which is no longer on the path.
    """
    path = [
        getattr(sys.path_importer_cache.get(entry), "path", entry) if entry and not os.path.isabs(entry) else entry
        for entry in sys.path
        if isinstance(entry, str)  # the import system silently ignores other types, such as Path
    ]
    if "" in path:
        path += sorted({root for module in list(sys.modules.values()) if (root := _root_of(module)) is not None} - set(path))
    return path


def command_line() -> list[str]:
    """Return the user's ``sys.argv``, which modules may read at import. An embedded Python may have none."""
    return [str.__str__(part) for part in getattr(sys, "argv", None) or () if isinstance(part, str)]


def _root_of(module: ModuleType) -> str | None:
    """Return the folder in which the import system found a top-level module or package, if any."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None)
    if spec is None or "." in spec.name or not isinstance(file, str):
        return None
    folder = os.path.dirname(file)
    root = os.path.dirname(folder) if spec.submodule_search_locations is not None else folder
    return root if root in sys.path_importer_cache else None


def _interpreter() -> str:
    """Return the Python to start. Programs that embed Python set it with ``multiprocessing.set_executable``."""
    spawn = sys.modules.get("multiprocessing.spawn")
    named = None if spawn is None else spawn.get_executable()
    if named and os.fsdecode(named) != sys.executable:
        return os.fsdecode(named)
    if not sys.executable:
        raise WorkerStartError(f"sys.executable={sys.executable!r} is not a Python interpreter that can run workers; {_CURE}")
    if getattr(sys, "frozen", False):
        # Each worker would run the whole program again, which would start further workers.
        raise WorkerStartError(
            f"sys.executable={sys.executable!r} is a frozen program, not a Python interpreter that can run workers; {_CURE}"
        )
    return sys.executable


def without_redirector(python: str, environ: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the program and the environment that start ``python`` on Windows as one process.

    The ``python.exe`` of a virtual environment starts the base interpreter as a child: pid, handle and exit code of the started
    process are not those of the worker. ``multiprocessing`` bypasses it in the same way.
    """
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    if python != sys.executable or os.path.normcase(base) == os.path.normcase(python):
        return python, environ
    return base, {**environ, "__PYVENV_LAUNCHER__": python}


if sys.platform == "win32":
    # Guards whether handles are inheritable: several threads may start workers that inherit the same handle. Reentrant, because
    # a signal handler may start a worker.
    _inheriting: Final = threading.RLock()

    @contextmanager
    def _inheritable(handles: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Make the handles inheritable while the child starts.

        Otherwise other programs that this process starts would inherit them too, and keep pipes and files open.
        """
        with _inheriting:
            changed = [handle for handle in handles if not os.get_handle_inheritable(handle)]
            try:
                for handle in changed:
                    os.set_handle_inheritable(handle, True)
                yield tuple(handles)
            finally:
                for handle in changed:
                    with suppress(OSError):  # closed by another thread
                        os.set_handle_inheritable(handle, False)

    def _platform_options(handles: tuple[int, ...]) -> dict[str, Any]:
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)})
        # A separate process group gets no Ctrl+C from the console: the user's process handles interrupts.
        return {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

else:

    @contextmanager
    def _inheritable(fds: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the descriptors, with those numbered 0 to 2 duplicated to higher numbers.

        If this process has closed its standard streams, the kernel reuses their numbers. The child has streams there.
        """
        import fcntl

        copies = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds if fd < 3}
        try:
            yield tuple(copies.get(fd, fd) for fd in fds)
        finally:
            for copy in copies.values():
                os.close(copy)

    def _platform_options(fds: tuple[int, ...]) -> dict[str, Any]:
        # A separate process group gets no Ctrl+C from the terminal, not even while it starts.
        return {"pass_fds": fds, "process_group": 0}
