"""Runs a program under the doctor: starts it, samples its processes from outside, and stops it when time is up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from infeed.doctor.child import ChildOptions, stop_signal
from infeed.doctor.evidence import JournalReader, Moment, ProcessSeen, Run, read_events
from infeed.doctor.thread_owners import Pools
from infeed.memory.limits import available_bytes, available_cores

_TICK_S: Final = 0.05
_LOOK_S: Final = 0.2
# Sampling processes may use at most this share of a CPU core.
_LOOK_SHARE: Final = 0.1
_POOLS_S: Final = 0.8
# A program that requests a batch after its time is stopped there. Otherwise it is interrupted and, after this time, killed.
_PATIENCE_S: Final = 2.0
_PROBES_S: Final = 20.0
_STUCK_PROBES_S: Final = 4.0  # if a worker hangs in a sample, the probe may hang too
_LEAVE_S: Final = 5.0


def survey(
    orders: ChildOptions,
    program: Sequence[str],
    *,
    start_seconds: float,
    stdout: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Run a program and return the evidence about it.

    Args:
        start_seconds: time limit until the program first iterates a loader.
        stdout: destination of the program's output; by default the standard output of this process.
    """
    run = Run(
        program=" ".join(program),
        has_own_loop=orders.kind != "dataset",
        core_count=available_cores(),
        memory_bytes=available_bytes(),
    )
    with tempfile.TemporaryDirectory(prefix="infeed-doctor-") as folder:
        path = Path(folder) / "journal"
        orders = replace(orders, journal=str(path))
        process = subprocess.Popen([sys.executable, "-m", "infeed.doctor.child", orders.text(), *program], stdout=stdout)
        watchdog = _Watch(process, JournalReader(path), run, orders.seconds, start_seconds, clock)
        try:
            watchdog.wait()
        finally:
            watchdog.end()
    read_events(run, watchdog.journal.events)
    if not watchdog.journal.has("end"):
        is_ours = watchdog.code is None or watchdog.was_stopped
        run.ending = "stuck" if is_ours else "died"
        run.exit_code = watchdog.code
        # The program may have died before the first poll; use at least the time that its loaders were iterated.
        run.seconds = max([watchdog.seconds, *(loader.iterated_s for loader in run.loaders)])
    return run


@final
class _Watch:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        journal: JournalReader,
        run: Run,
        seconds: float,
        start_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process = process
        self._below: dict[int, Any] = {}
        self._pools = Pools(run)
        self.journal = journal
        self._run = run
        self._clock = clock
        self._limit_s, self._start_s = seconds, start_seconds
        self._began: float | None = None
        self._next_look = self._next_pools = 0.0
        self.code: int | None = None
        self.seconds = 0.0

    def wait(self) -> None:
        """Wait until the program exits, has reported everything, or has exceeded a time limit."""
        started = self._clock()
        asked: float | None = None  # when we interrupted it
        ended: float | None = None  # when the program had ended
        probed: float | None = None  # when its datasets had been probed
        while self._process.poll() is None:
            now = self._clock()
            self.journal.read()
            if self._began is None and self.journal.has("loader"):
                self._began = now
            if ended is None and self.journal.has("end"):
                ended = now
            if probed is None and self.journal.has("done"):
                probed = now
            # A stopped program waits until we kill it. A finished one exits by itself and needs time for its exit handlers.
            if probed is not None and (self.journal.has_fact("end", "exit_code", None) or now > probed + _LEAVE_S):
                break
            is_stuck = self.journal.has_fact("end", "ending", "stuck")
            if ended is not None and now > ended + (_STUCK_PROBES_S if is_stuck else _PROBES_S):
                break
            if asked is not None and ended is None and now > asked + _PATIENCE_S:
                break
            limit = started + self._start_s if self._began is None else self._began + self._limit_s + _PATIENCE_S
            if asked is None and ended is None and now > limit:
                self._interrupt()
                asked = now
            if ended is None and now >= self._next_look:
                self._look(now)
            time.sleep(_TICK_S)
        self.code = self._process.poll()
        self.seconds = self._clock() - self._began if self._began is not None else 0.0

    @property
    def was_stopped(self) -> bool:
        """Whether our stop signal killed the program, which happens if it removed the signal handler."""
        number = stop_signal()
        return number is not None and self.code == -number

    def end(self) -> None:
        """Kill the program and all its descendants."""
        psutil = self._psutil
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                self._below[one.pid] = one
        if self._process.poll() is None:
            self._process.kill()
        for one in self._below.values():
            with suppress(psutil.NoSuchProcess):  # also raised if the PID was reused
                one.kill()
        self._process.wait()
        self.journal.read()

    def _interrupt(self) -> None:
        number = stop_signal()
        if number is not None:
            self._process.send_signal(number)

    def _look(self, now: float) -> None:
        psutil = self._psutil
        began = time.thread_time()  # CPU time: on a busy machine most of the elapsed time is waiting for a core
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        # Reuse the psutil objects: they keep the earlier CPU times of a process.
        processes = [self._below.setdefault(one.pid, one) for one in children]
        for process in processes:
            with suppress(psutil.Error, OSError):
                self._look_at(process, now)
        if now >= self._next_pools:
            self._pools.look(processes)
            self._next_pools = now + max(_POOLS_S, (time.thread_time() - began) / _LOOK_SHARE)
        self._next_look = now + max(_LOOK_S, (time.thread_time() - began) / _LOOK_SHARE)

    def _look_at(self, process: Any, now: float) -> None:
        if process.status() == self._psutil.STATUS_ZOMBIE:
            return
        seen = self._run.processes.setdefault(process.pid, ProcessSeen(process.pid))
        times = process.cpu_times()
        seen.moments.append(Moment(now, process.memory_full_info().uss, times.user + times.system))
        if hasattr(process, "io_counters"):
            seen.read_bytes = process.io_counters().read_bytes
