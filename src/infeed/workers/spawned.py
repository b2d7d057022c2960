"""Where a spawned worker begins: it is started by name, with the numbers of what it inherits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from infeed.workers.channel import WorkerEnd
from infeed.workers.child import ThreadedEnd, leave, run_worker
from infeed.workers.insides import die_with_parent, ignore_interrupts, watch_parent
from infeed.workers.seeding import seed_lazily


def over_connection(parent_pid: int, handle: int, *fds: int) -> NoReturn:
    """Entry point of a worker that is talked to over a connection of ``multiprocessing``."""
    from infeed.workers.connections import inherited_end

    if sys.platform != "win32":
        keep_to_oneself(handle)
    _work(parent_pid, inherited_end(handle), fds)


if sys.platform != "win32":
    from infeed.workers.insides import keep_to_oneself
    from infeed.workers.pipes import PipeEnd

    def over_pipes_bound(*arguments: int) -> NoReturn:
        """Entry point of a worker that the kernel ends with its parent.

        Threads, as in the others, do not run while native code of the user's keeps the GIL.
        """
        die_with_parent()
        over_pipes(*arguments)

    def over_pipes(parent_pid: int, read_fd: int, write_fd: int, *fds: int) -> NoReturn:
        """Entry point of a worker that is talked to over a pair of pipes."""
        keep_to_oneself(read_fd, write_fd)
        _work(parent_pid, PipeEnd(read_fd, write_fd), fds)


def _work(parent_pid: int, end: WorkerEnd, fds: Sequence[int]) -> NoReturn:
    ignore_interrupts()
    watch_parent(parent_pid, leave)
    seed_lazily()
    run_worker(ThreadedEnd(end), fds)
    leave()
