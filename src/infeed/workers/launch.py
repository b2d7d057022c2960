"""Starting fresh interpreters: the fork server, and workers where there is no safe fork.

A process of ours is told the user's ``sys.path`` and runs an entry point of ours. The user's ``__main__`` is never run again:
it is not named to the child at all. It is a plain subprocess, not a ``multiprocessing.Process``, so it may be started from
daemonic processes and from inside other pools.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infeed.errors import WorkerStartError
from infeed.memory.budget import process_limit
from infeed.workers.insides import child_environment


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


def start_interpreter(entry: str, arguments: list[int], *, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a Python that imports ``module:function`` (``entry``) and calls it with these numbers.

    Args:
        pass_fds: descriptors (handles, on Windows) that the child inherits under the same numbers.
    """
    if not sys.executable:
        raise WorkerStartError(
            "sys.executable='' names no Python interpreter to start workers with; use worker='thread' in an embedded Python"
        )
    module, function = entry.split(":")
    # No garbage is made by imports, and looking for it takes a tenth of the start; workers turn the collector on again.
    code = (
        f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; from {module} import {function}; {function}(*{arguments!r})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        stdin=subprocess.DEVNULL,
        env=child_environment(),
        **_platform_options(pass_fds),
    )


if sys.platform == "win32":

    def _platform_options(handles: tuple[int, ...]) -> dict[str, Any]:
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)})
        # A group of its own gets no Ctrl+C from the console: interrupts belong to the user's process.
        return {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

else:

    def _platform_options(fds: tuple[int, ...]) -> dict[str, Any]:
        # A process group of its own gets no Ctrl+C from the terminal, not even while it starts.
        return {"pass_fds": fds, "process_group": 0}
