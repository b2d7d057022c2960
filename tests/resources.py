"""Resources of a process that can leak: threads, processes, descriptors, shared memory.

Used by the leak guard around every test, and by the programs of tests/stopping, which inspect themselves.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from tests.helpers import descendants, has_ended, is_foreign, is_fork_server, shm_names


class Resources(NamedTuple):
    """Resources of a process that can leak."""

    threads: dict[int, str]
    processes: dict[int, str]
    descriptors: dict[int, str]
    names: set[str]

    def new_since(self, before: Resources) -> list[str]:
        """Returns what is new compared with before, one line each."""
        lines = [f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads]
        lines += [f"process {pid}: {text}" for pid, text in self.processes.items() if pid not in before.processes]
        if len(self.descriptors) > len(before.descriptors):
            old = set(before.descriptors.items())
            lines += [f"descriptor {fd}: {target}" for fd, target in self.descriptors.items() if (fd, target) not in old]
        # Earlier resources are not inspected: their process may belong to another test run and may have ended.
        lines += [f"/dev/shm/{name}" for name in sorted(self.names - before.names) if not is_foreign(name)]
        return lines


def current_resources() -> Resources:
    import psutil

    processes: dict[int, str] = {}
    server_sockets = 0
    for process in descendants():
        try:
            if is_fork_server(process):
                server_sockets += 1
            elif sys.platform != "win32" or not has_ended(process):
                processes[process.pid] = f"{process.cmdline()} ({process.status()})"
        except psutil.ZombieProcess:
            server_sockets += 1  # A fork server that ended by itself; its socket goes with the next one.
        except psutil.NoSuchProcess:
            continue
    descriptors = _descriptors()
    # One end of a socket connects this process to its fork server, which may stay.
    for fd in [fd for fd, target in descriptors.items() if target.startswith("socket:")][:server_sockets]:
        del descriptors[fd]
    threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
    return Resources(threads, processes, descriptors, shm_names())


def _descriptors() -> dict[int, str]:
    folder = Path("/proc/self/fd")
    found = {}
    for name in os.listdir(folder) if folder.is_dir() else []:
        try:
            found[int(name)] = os.readlink(folder / name)
        except OSError:  # The descriptor that listed the folder.
            continue
    return {fd: target for fd, target in found.items() if not (target.startswith("socket:") and _is_tcp(fd))}


def _is_tcp(fd: int) -> bool:
    """Returns whether a socket is TCP. infeed opens none; obstore and Ray open and close theirs in their own threads."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return copy.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # Closed meanwhile.
        return True
