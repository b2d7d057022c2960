"""Starting fresh interpreters: the fork server, and workers where there is no safe fork.

A process of ours is told the user's ``sys.path`` and runs an entry point of ours. The user's ``__main__`` is never run again:
it is not named to the child at all. It is a plain subprocess, not a ``multiprocessing.Process``, so it may be started from
daemonic processes and from inside other pools.
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
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, Literal

from infeed.errors import ConfigError, WorkerStartError
from infeed.memory.limits import process_limit
from infeed.programs.children import RUN_VARIABLE
from infeed.workers.process_tools import child_environment

StartMethod = Literal["auto", "forkserver", "spawn"]

# Set when a fork server of this process has refused for good.
_REFUSED: Final = threading.Event()
_CURE: Final = "name one with multiprocessing.set_executable(path), or use worker='thread'"


def uses_fork(start_method: StartMethod) -> bool:
    """Whether workers are forked by a server: where the platform forks safely and can hand descriptors to a running process.

    macOS can do both, but its own libraries forbid what follows a fork.

    Raises:
        ConfigError: a fork server was asked for and there can be none.
    """
    if start_method == "spawn":
        return False
    calls = ((os, "fork"), (os, "memfd_create"), (socket, "send_fds"), (select, "poll"))
    can_fork = sys.platform == "linux" and all(getattr(module, name, None) is not None for module, name in calls)
    if start_method == "forkserver" and not can_fork:
        raise ConfigError("start_method='forkserver' needs what only Linux has; use 'auto' or 'spawn' on this platform")
    return can_fork and not _REFUSED.is_set()


def forbid_forks() -> None:
    """Spawn workers from now on: a fork server has refused, and so would every other."""
    _REFUSED.set()


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Around what opens descriptors and starts processes or threads: a limit of the system that is met is told in words.

    Raises:
        WorkerStartError: which limit it was, and what to do about it.
    """
    try:
        yield
    except OSError as error:
        number = error.errno
        if number not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        text = _limit_met(number)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        text = _limit_met(errno.EAGAIN)
    else:
        return
    raise WorkerStartError(f"a worker cannot be started: {text}")


def _limit_met(number: int) -> str:
    if number == errno.EMFILE:
        return (
            f"this process has all the {process_limit('NOFILE')} files open that it may (ulimit -n), and every worker takes "
            "two; raise that limit, use fewer workers, or close what you keep open"
        )
    if number == errno.ENFILE:
        return "the system has all the files open that it can; use fewer workers, or end other programs"
    if number == errno.EAGAIN:
        limit = process_limit("NPROC")
        return (
            f"the system allows no more processes and threads ({'no limit' if limit is None else f'{limit} for this user'} by "
            "ulimit -u; a container may have a limit of its own); use fewer workers, raise the limit, or end other programs"
        )
    return "the system has no memory for another process; use fewer workers, or worker='thread'"


def interpreter_environment(threads: int) -> dict[str, str]:
    """The environment of an interpreter of ours, whose libraries may use so many threads."""
    return {name: value for name, value in child_environment(threads).items() if name != RUN_VARIABLE}


def start_interpreter(
    owner: list[subprocess.Popen[bytes]], entry: str, *, environ: dict[str, str], pass_fds: Sequence[int]
) -> None:
    """Start a Python that imports ``module:function`` (``entry``) and calls it with the number of this process.

    Args:
        owner: gets the process before it is started. A signal handler that raises meanwhile leaves no process without owner.
        environ: see ``interpreter_environment``.
        pass_fds: descriptors (handles, on Windows) that the child inherits; their numbers there are its further arguments.
    """
    with _above_standard(pass_fds) as fds:
        _start(owner, entry, (os.getpid(), *fds), environ, fds)


class _Owned(subprocess.Popen[bytes]):
    def __init__(self, owner: list[subprocess.Popen[bytes]], *arguments: Any, **options: Any) -> None:
        owner.append(self)
        super().__init__(*arguments, **options)


def started(owner: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
    """The process that ``start_interpreter`` has started for this owner, if it came so far."""
    return next((process for process in owner if getattr(process, "pid", None) is not None), None)


def _start(
    owner: list[subprocess.Popen[bytes]],
    entry: str,
    arguments: tuple[int, ...],
    environ: dict[str, str],
    fds: tuple[int, ...],
) -> None:
    python = _interpreter()
    module, function = entry.split(":")
    # No garbage is made by imports, and looking for it takes a tenth of the start; workers turn the collector on again.
    code = (
        f"import gc, sys; gc.disable(); sys.path[:] = {search_path()!r}; "
        f"from {module} import {function}; {function}(*{arguments!r})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    try:
        _Owned(
            owner,
            [python, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            # Of a daemon's, or a Windows program without a console. Else what is opened next would be taken for them.
            stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
            stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
            env=environ,
            **_platform_options(fds),
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise WorkerStartError(f"{python!r} cannot be started as a worker's Python; {_CURE}") from error


def search_path() -> list[str]:
    """The user's ``sys.path``, so that it means the same in another process, after another ``os.chdir``.

    Python finds modules of a relative entry where it was when it first looked there. Those that came from the working
    directory itself (``""``) may have come from an earlier one, which is not on the path any more.
    """
    path = [
        getattr(sys.path_importer_cache.get(entry), "path", entry) if entry and not os.path.isabs(entry) else entry
        for entry in sys.path
        if isinstance(entry, str)  # the import system passes over others, such as a Path, in silence
    ]
    if "" in path:
        path += sorted({root for module in list(sys.modules.values()) if (root := _root_of(module)) is not None} - set(path))
    return path


def command_line() -> list[str]:
    """The user's ``sys.argv``, which modules may read when they are imported. An embedded Python may have none."""
    return [str.__str__(part) for part in getattr(sys, "argv", None) or () if isinstance(part, str)]


def _root_of(module: ModuleType) -> str | None:
    """The folder in which the import system found a module or package of the top level, if it was found in one."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None)
    if spec is None or "." in spec.name or not isinstance(file, str):
        return None
    folder = os.path.dirname(file)
    root = os.path.dirname(folder) if spec.submodule_search_locations is not None else folder
    return root if root in sys.path_importer_cache else None


def _interpreter() -> str:
    """The Python to start. Who embeds Python in another program names it to ``multiprocessing``, which is asked here too."""
    spawn = sys.modules.get("multiprocessing.spawn")
    named = None if spawn is None else spawn.get_executable()
    if named and os.fsdecode(named) != sys.executable:
        return os.fsdecode(named)
    if not sys.executable:
        raise WorkerStartError(f"sys.executable={sys.executable!r} names no Python to start workers with; {_CURE}")
    if getattr(sys, "frozen", False):
        # It would run the whole program again, once for every worker, and each of these its own workers.
        raise WorkerStartError(f"sys.executable={sys.executable!r} is a frozen program and no Python for workers; {_CURE}")
    return sys.executable


if sys.platform == "win32":

    @contextmanager
    def _above_standard(handles: Sequence[int]) -> Iterator[tuple[int, ...]]:
        yield tuple(handles)  # handles are no small numbers that mean something

    def _platform_options(handles: tuple[int, ...]) -> dict[str, Any]:
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)})
        # A group of its own gets no Ctrl+C from the console: interrupts belong to the user's process.
        return {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

else:

    @contextmanager
    def _above_standard(fds: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """These descriptors, those that have the numbers of standard streams under others.

        A process whose own streams are closed is given their numbers for whatever it opens. The child has streams there.
        """
        import fcntl

        copies = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds if fd < 3}
        try:
            yield tuple(copies.get(fd, fd) for fd in fds)
        finally:
            for copy in copies.values():
                os.close(copy)

    def _platform_options(fds: tuple[int, ...]) -> dict[str, Any]:
        # A process group of its own gets no Ctrl+C from the terminal, not even while it starts.
        return {"pass_fds": fds, "process_group": 0}
