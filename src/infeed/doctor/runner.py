"""Running a program under the doctor's eyes: starts it, looks at its processes from outside, ends it when time is up."""

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

from infeed.doctor.child import Orders, stop_signal
from infeed.doctor.evidence import Moment, ProcessSeen, Run, read_events
from infeed.doctor.journal import JournalReader
from infeed.doctor.thread_owners import Pools
from infeed.memory.limits import available_bytes, available_cores

_TICK_S: Final = 0.05
_LOOK_S: Final = 0.2
# Looking takes at most this part of a core.
_LOOK_SHARE: Final = 0.1
_POOLS_S: Final = 0.8
# A program that asks for a batch is stopped there. One that does not is interrupted, and if that does not help, killed.
_PATIENCE_S: Final = 2.0
_PROBES_S: Final = 20.0
_STUCK_PROBES_S: Final = 4.0  # where a worker hangs in a sample, so may we
_LEAVE_S: Final = 5.0


def survey(
    orders: Orders,
    program: Sequence[str],
    *,
    start_seconds: float,
    stdout: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Run a program, and tell what was seen of it.

    Args:
        start_seconds: how long it may take until it first iterates a loader.
        stdout: where the program's output goes, by default where ours does.
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
        # It may have died before we looked. Not less than its loaders say, which are measured by it.
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
        """Until it has told all, has ended, or will not."""
        started = self._clock()
        asked: float | None = None  # when it was interrupted
        ended: float | None = None  # when the program was over
        told: float | None = None  # when its datasets had been looked at
        while self._process.poll() is None:
            now = self._clock()
            self.journal.read()
            if self._began is None and self.journal.has("loader"):
                self._began = now
            if ended is None and self.journal.has("end"):
                ended = now
            if told is None and self.journal.has("done"):
                told = now
            # A program that was stopped waits for us. One that has finished leaves by itself, with all that it does at its end.
            if told is not None and (self.journal.has_fact("end", "exit_code", None) or now > told + _LEAVE_S):
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
        """Whether it died of our asking it to stop: it had taken away what hears that."""
        number = stop_signal()
        return number is not None and self.code == -number

    def end(self) -> None:
        """End it and all that it started."""
        psutil = self._psutil
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                self._below[one.pid] = one
        if self._process.poll() is None:
            self._process.kill()
        for one in self._below.values():
            with suppress(psutil.NoSuchProcess):  # which also knows when a number was given to another
                one.kill()
        self._process.wait()
        self.journal.read()

    def _interrupt(self) -> None:
        number = stop_signal()
        if number is not None:
            self._process.send_signal(number)

    def _look(self, now: float) -> None:
        psutil = self._psutil
        began = time.thread_time()  # on a busy machine it takes long, and most of that it waits for a core
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        # The same objects again and again: they remember what a process used before.
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
