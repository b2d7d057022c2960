"""Starting fresh interpreters: the fork server, and workers where there is no safe fork.

A process of ours is told the user's ``sys.path`` and runs an entry point of ours. The user's ``__main__`` is never run again:
it is not named to the child at all. It is a plain subprocess, not a ``multiprocessing.Process``, so it may be started from
daemonic processes and from inside other pools.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from infeed.errors import WorkerStartError
from infeed.workers.insides import child_environment


def start_interpreter(
    entry: str, arguments: list[int], *, threads: int, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a Python that imports ``module:function`` (``entry``) and calls it with these numbers.

    Args:
        threads: how many the libraries in it may use.
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
        env=child_environment(threads),
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
