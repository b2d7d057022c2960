"""Collect the metrics of a loader across all its epochs and engines, and build ``Statistics`` and ``Trace`` from them.

``EngineMetrics`` belongs to one engine, whose methods it offers report every event once. ``Collector``, ``AllMetrics`` and
``History`` belong to the loader.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple, final

from infeed.autotune.capacity import WorkerKind
from infeed.autotune.tuner import Bound, Work
from infeed.metrics.diagnosis import diagnose
from infeed.metrics.history import History
from infeed.metrics.process_time import Clock, ProcessTime
from infeed.metrics.recent import Amounts, LoopTimes, Slice
from infeed.metrics.statistics import (
    LOOP,
    Mark,
    MarkKind,
    Point,
    SlowSample,
    Span,
    SpanKind,
    Statistics,
    Times,
    Trace,
    WorkerStatistics,
)
from infeed.metrics.worker_metrics import RecorderContents, Totals, WorkerMetrics, busy_ns
from infeed.scheduler.messages import WorkerId
from infeed.workers.process_tools import memory_use
from infeed.workers.recorder import BUCKETS, NO_INDEX, SLOWEST, Observe, Slow, bucket_end_ns
from infeed.workers.status import StatusBoard


@final
class AllMetrics:
    """The ``EngineMetrics`` of all engines of a loader; closed engines may be merged into one."""

    def __init__(self) -> None:
        self.all: list[EngineMetrics] = []
        # Held while metrics are summed. Reentrant, because a signal handler may request statistics during that.
        self.lock = threading.RLock()
        self.has_delivered = False  # whether the training loop ever got a batch
        # The engine whose training loop most recently began an epoch or got a batch. Other engines are not within a step.
        self.active: EngineMetrics | None = None

    def activate(self, metrics: EngineMetrics, *, has_delivered: bool = False) -> None:
        """Record that this engine's training loop began an epoch or got a batch."""
        self.active = metrics
        self.has_delivered |= has_delivered

    def total(self, metrics: EngineMetrics, own: Point) -> Point:
        """Return the point of the whole loader, given the point ``own`` of one engine. Sums never shrink when engines close."""
        with self.lock:
            others = [one.point(own.at_ns, is_own=False) for one in self.all if one is not metrics]
        if not others:
            return own
        return Point(own.at_ns, *(sum(column) for column in zip(*(point[1:] for point in (own, *others)), strict=True)))


# A tick reads the workers' metrics. The next one follows after 100 ms, or 200 times the duration of this one if longer.
TICK_NS: Final = 100_000_000
TICK_SHARE: Final = 200
# Training loop spans shorter than 50 µs are merged into spans of up to 2 ms.
_LONG_NS: Final = 50_000
_RUN_NS: Final = 2_000_000
_NEVER: Final = 1 << 63
# After epochs shorter than this, `WorkerMetrics` takes no snapshots, so work loaded ahead is not separated exactly.
_SHORT_NS: Final = 20_000_000
_CLOCK: Final = Clock()


class Flight(NamedTuple):
    """Batches in flight and their memory."""

    batch_count: int
    nbytes: int
    slot_bytes: int  # all memory allocated for batches, used or not


# The fields that `EngineMetrics.absorb` sums.
_SUMMED: Final = (
    "batch_count", "sample_count", "waited_ns", "started_ns", "away_ns", "blocked_ns", "outside_ns", "changeover_ns",
    "added_worker_ns", "manned_ns", "idled_ns", "ended_count", "_final_bytes",
)  # fmt: skip


@final
class EngineMetrics:
    """Counters and times of one engine.

    Other threads may read them at any time, so related fields are assigned in one statement: no reader sees half an update.
    """

    def __init__(
        self,
        history: History,
        all_metrics: AllMetrics,
        status_board: StatusBoard,
        workers: tuple[WorkerId, ...],
        kind: WorkerKind,
        observe: Observe,
        memory_limit: int,
        clock: Clock = _CLOCK,
    ) -> None:
        self._history, self._all_metrics, self._clock = history, all_metrics, clock
        self.kind: WorkerKind = kind
        self._is_on = observe != "off"
        self._is_spanning = observe == "timeline"
        self.workers = WorkerMetrics(status_board, workers, clock)
        self._flight: Callable[[], Flight] = _no_flight
        self._delivered_bytes: Callable[[], int] = _no_bytes
        self._final_bytes = 0
        self.batch_count = self.sample_count = 0
        self.ended_count = 0  # epochs that ran to their end
        self.waited_ns = 0
        self.started_ns = 0
        self.away_ns = 0
        # Part of the wait, and of the first start, that was not infeed's own work in the training loop's thread.
        self.blocked_ns = 0
        self.outside_ns = 0  # part of the wait while epochs began and ended
        self.changeover_ns = 0  # part of the wait spent starting or stopping workers
        self.added_worker_ns = 0  # part of changeover_ns in the middle of epochs
        # Workers' time while the training loop waited for a batch, and the part of it in which they had nothing to load.
        self.manned_ns = self.idled_ns = 0
        self.memory_limit = memory_limit  # for batches
        self.tick_count = 0
        self.latest: Point | None = None  # from the last tick
        self.outcomes: Counter[str] = Counter()  # of bad samples
        self._next_ns = 0  # when to call `_note` next
        # Time of the last `_note`, and the sums at that time.
        self._noted_ns = self._noted_waited = self._noted_count = self._noted_blocked = 0
        # When the training loop asked for the batch it waits for, and `blocked_ns` at that time; 0: it does not wait.
        self._asked_ns = self._asked_blocked = 0
        self._left_ns = 0  # when the training loop got its latest batch; 0: none in this epoch
        self._seen_ns = 0  # end of the current step as last reported by `loop_times`
        self._idle_ns = 0  # since when no epoch is in progress; 0: one is
        self._next_tick = 0
        self._epoch = self._step_offset = 0
        self.is_closed = False
        self._taking = threading.Lock()
        self._process = ProcessTime(clock)
        self._begun_ns = 0  # when the epoch began
        self._passed, self._passed_ns = Amounts(), clock.now_ns()  # amounts added to the past so far, and when
        self._owner_pid = os.getpid()

    def connect(self, flight: Callable[[], Flight], delivered_bytes: Callable[[], int]) -> None:
        """Read these when statistics are requested, until ``close``. The engine calls this when it is complete."""
        self._flight, self._delivered_bytes = flight, delivered_bytes

    # --- training loop

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        self._epoch, self._step_offset = epoch, first_step - self.batch_count
        self._begun_ns = self._clock.now_ns()
        self._left_ns = self._noted_ns = self._seen_ns = 0  # time between epochs is not part of the training loop
        self._noted_waited, self._noted_blocked = self.waited_ns, self.blocked_ns
        self._all_metrics.activate(self)
        if self._idle_ns:
            # Ticks are scheduled by time within epochs, so of several loaders only the active one pays for them.
            self._next_tick += self._begun_ns - self._idle_ns
            self._idle_ns = 0
            self.workers.wake()
        self._next_ns = 0 if self._is_on else _NEVER
        if self._is_on:
            self._process.begin()
        self.mark("epoch", LOOP, f"epoch {epoch} begins")

    def changed_over(self, begin_ns: int, end_ns: int) -> None:
        """Record a wait at the begin or end of an epoch, in which workers may start or stop."""
        took_ns = end_ns - begin_ns
        if not self._all_metrics.has_delivered:
            self.outside_ns, self.started_ns = self.outside_ns + took_ns, self.started_ns + took_ns
        else:
            self.outside_ns, self.waited_ns = self.outside_ns + took_ns, self.waited_ns + took_ns
            if self.is_closed or not self.batch_count:
                self.changeover_ns += took_ns
            if self.is_closed and self._is_on:  # no later tick would record it
                lost = Amounts(waited_ns=took_ns, blocked_ns=took_ns, changeover_ns=took_ns)
                self._history.past.add(Slice(self.kind, begin_ns, lost))
        if self._is_spanning and took_ns >= _LONG_NS:
            number = max(0, self.batch_count - 1) if self._idle_ns else self.batch_count
            self._history.add_spans([self._span("wait", begin_ns, end_ns, number, 1)])

    def waited_for_workers(self, took_ns: int) -> None:
        """Record a wait in the middle of an epoch for a worker to start: a replacement or an additional one."""
        self.blocked_ns += took_ns
        if self.batch_count:  # else the whole wait is for workers, and `_note` counts it with the first batch
            self.changeover_ns += took_ns
            self.added_worker_ns += took_ns

    def asked(self, asked_ns: int) -> None:
        """Record that the training loop asked for a batch. ``delivered``, ``end_epoch`` or ``stop_waiting`` follows."""
        self._asked_ns, self._asked_blocked = asked_ns, self.blocked_ns

    def delivered(self, asked_ns: int, left_ns: int) -> bool:
        """Record that the training loop asked for a batch and got it. Return whether there may be a new measurement."""
        self.waited_ns, self._asked_ns = self.waited_ns + left_ns - asked_ns, 0
        self.batch_count += 1
        before_ns, self._left_ns = self._left_ns, left_ns
        if left_ns <= self._next_ns:
            return False
        self._note(before_ns, asked_ns, left_ns)
        return True

    def add_samples(self, count: int) -> None:
        """Count samples of a delivered batch."""
        self.sample_count += count

    def add_outcome(self, outcome: str, text: str) -> None:
        """Count a bad sample that was skipped or replaced."""
        self.outcomes[outcome] += 1
        self.mark("bad sample", LOOP, text)

    def blocked(self, took_ns: int, idle_count: int) -> None:
        """Record that the training loop's thread waited for messages of workers, of which ``idle_count`` had no task."""
        count = self.workers.count
        if not count:
            self.waited_for_workers(took_ns)
            return
        self.blocked_ns += took_ns
        self.manned_ns += count * took_ns
        self.idled_ns += idle_count * took_ns

    @property
    def is_waiting(self) -> bool:
        """Whether the training loop waits for a batch."""
        return bool(self._asked_ns)

    def stop_waiting(self) -> None:
        """End a wait in progress without a batch: the training loop gets an exception, or the engine is closed."""
        asked_ns, now_ns = self._asked_ns, self._clock.now_ns()
        if asked_ns:
            # A failed wait before the first batch counts neither as a wait nor as start-up time.
            took_ns = now_ns - asked_ns if self._all_metrics.has_delivered else 0
            self.waited_ns, self._asked_ns = self.waited_ns + took_ns, 0
            self._left_ns = now_ns if self._left_ns else 0

    def _note(self, before_ns: int, asked_ns: int, left_ns: int) -> None:
        """Record what the training loop did since the last call.

        Args:
            before_ns: When the training loop got the previous batch; 0 for the first batch of an epoch.
        """
        wait_ns = left_ns - asked_ns
        away_ns = self.away_ns
        if before_ns:
            if self._is_spanning:
                self._record(before_ns, asked_ns, left_ns)
            away_ns += left_ns - self._noted_ns - (self.waited_ns - self._noted_waited)
        else:
            if self.batch_count == 1 and self._all_metrics.has_delivered:
                self.changeover_ns += wait_ns
            elif self.batch_count == 1:
                self.waited_ns, self.started_ns = self.waited_ns - wait_ns, self.started_ns + wait_ns
                self.blocked_ns = self._asked_blocked + wait_ns  # infeed's own work counts only after the start
            if self._is_spanning:
                self._history.add_spans([self._span("wait", asked_ns, left_ns, self.batch_count - 1, 1)])
        self.away_ns, self._noted_ns, self._noted_waited = away_ns, left_ns, self.waited_ns
        self._noted_count, self._noted_blocked = self.batch_count, self.blocked_ns
        self._all_metrics.activate(self, has_delivered=True)
        self._next_ns = left_ns + _RUN_NS
        if left_ns > self._next_tick:
            self._tick(left_ns)

    def end_epoch(self, asked_ns: int = 0) -> None:
        """Record that the epoch ended or the training loop left it.

        Args:
            asked_ns: When the training loop asked for another batch and there was none; 0 if it left early. Then the length of
                its last step is unknown, and the step counts up to the time that ``loop_times`` last reported.
        """
        if self._idle_ns:
            return
        now_ns, left_ns = self._clock.now_ns(), self._left_ns
        end_ns = asked_ns or max(left_ns, self._seen_ns)
        away_ns, waited_ns = self._step_ns(end_ns), now_ns - asked_ns if asked_ns else 0
        if self._noted_ns and self._is_spanning:
            self._record_last(left_ns, end_ns)
        away_ns, waited_ns = self.away_ns + away_ns, self.waited_ns + waited_ns
        self.away_ns, self.waited_ns, self._asked_ns, self._idle_ns = away_ns, waited_ns, 0, now_ns
        self.ended_count += bool(asked_ns)
        is_live = self._is_on and not self.is_closed
        is_long = now_ns - self._begun_ns >= _SHORT_NS
        self.workers.rest(now_ns, is_still=is_live and is_long and self.kind != "inline")
        if self._process.end() and is_live:
            self._add_to_past()

    def _step_ns(self, end_ns: int) -> int:
        """Return the time in user code since the last ``_note``, if the latest step ended at ``end_ns``."""
        return max(0, end_ns - self._noted_ns - (self.waited_ns - self._noted_waited)) if self._noted_ns else 0

    def _record_last(self, left_ns: int, asked_ns: int) -> None:
        """Add spans for the batches since the last ``_note``, and for the last step."""
        spans: list[Span] = []
        short_count = self.batch_count - self._noted_count
        if short_count:
            spans.append(self._short_span(left_ns, self.waited_ns - self._noted_waited, short_count))
        if asked_ns - left_ns >= _LONG_NS:
            spans.append(self._span("away", left_ns, asked_ns, self.batch_count - 1, 1))
        self._history.add_spans(spans)

    def _record(self, before_ns: int, asked_ns: int, left_ns: int) -> None:
        """Add training loop spans: one for all short iterations, and separate ones for the latest iteration."""
        spans: list[Span] = []
        number = self.batch_count - 1
        wait_ns = left_ns - asked_ns
        short_count = number - self._noted_count
        if short_count:
            spans.append(self._short_span(before_ns, self.waited_ns - self._noted_waited - wait_ns, short_count))
        if asked_ns - before_ns >= _LONG_NS:
            spans.append(self._span("away", before_ns, asked_ns, number, 1))
        # Show infeed's own work at the end of the wait, where most of it happens.
        worked_ns = 0 if short_count else min(wait_ns, max(0, wait_ns - (self.blocked_ns - self._noted_blocked)))
        if wait_ns - worked_ns >= _LONG_NS:
            spans.append(self._span("wait", asked_ns, left_ns - worked_ns, number, 1))
        if worked_ns >= _LONG_NS:
            spans.append(self._span("deliver", left_ns - worked_ns, left_ns, number, 1))
        self._history.add_spans(spans)

    def _short_span(self, end_ns: int, waited_ns: int, count: int) -> Span:
        """Return one span for the iterations since the last ``_note``, with the kind that took most of the time."""
        kind: SpanKind = "wait" if 2 * waited_ns > end_ns - self._noted_ns else "away"
        return self._span(kind, self._noted_ns, end_ns, self._noted_count, count)

    def _span(self, kind: SpanKind, begin_ns: int, end_ns: int, number: int, size: int) -> Span:
        return Span(LOOP, kind, begin_ns, end_ns, self._epoch, number + self._step_offset, None, size)

    @property
    def flight(self) -> Flight:
        return self._flight()

    @property
    def byte_count(self) -> int:
        return self._final_bytes if self.is_closed else self._delivered_bytes()

    def mark(self, kind: MarkKind, lane: int, text: str) -> None:
        if self._is_spanning:
            self._history.marks.append(Mark(self._clock.now_ns(), lane, kind, text))

    # --- periodic measurement

    def point(self, now_ns: int, totals: Totals | None = None, *, is_own: bool = True) -> Point:
        """Return the current point of this engine. ``is_own`` adds the memory of this process if workers are not processes."""
        workers = self.workers
        totals = totals or workers.totals()
        own_bytes = memory_use().resident_bytes if is_own and self.kind != "process" else 0
        flight = self._flight()
        return Point(
            at_ns=now_ns,
            batch_count=self.batch_count,
            sample_count=self.sample_count,
            byte_count=self.byte_count,
            waited_ns=self.waited_ns,
            away_ns=self.away_ns,
            worker_count=0 if self.is_closed else workers.count,
            busy_ns=busy_ns(totals),
            cpu_ns=totals.cpu_ns,
            queued_ns=totals.queued_ns,
            memory_bytes=totals.memory_bytes if self.kind == "process" else own_bytes,
            flight_bytes=flight.nbytes,
            slot_bytes=flight.slot_bytes,
        )

    def _tick(self, now_ns: int) -> None:
        self.tick_count += 1
        self.take_spans()
        totals = self.workers.totals()
        self.latest = self.point(now_ns, totals)
        self._history.add_point(self._all_metrics.total(self, self.latest))
        self._process.count()
        self._add_to_past(totals)
        done_ns = self._clock.now_ns()
        self._next_tick = done_ns + max(TICK_NS, TICK_SHARE * (done_ns - now_ns))

    def loop_times(self) -> LoopTimes:
        """Return the times of the training loop up to now."""
        # Race with the training loop's thread: read the clock first, then all fields with no call in between. So the result
        # never exceeds the true times, and later results are never smaller.
        is_here, now_ns = os.getpid() == self._owner_pid, self._clock.now_ns()
        waited_ns, away_ns, blocked_ns, asked_ns = self.waited_ns, self.away_ns, self.blocked_ns, self._asked_ns
        noted_ns, since_ns, seen_ns = self._noted_ns, waited_ns - self._noted_waited, self._seen_ns
        is_over, not_own_ns, asked_blocked = self.is_closed or self._idle_ns, blocked_ns + self.outside_ns, self._asked_blocked
        if not self._all_metrics.has_delivered:
            return LoopTimes(0, 0, not_own_ns, 0)  # the first worker start-up is in progress
        if is_over or not self._is_on:
            return LoopTimes(waited_ns, away_ns, not_own_ns, 0)
        is_waiting, waiting_ns = is_here and asked_ns, 0
        if not is_waiting and is_here and self._all_metrics.active is self:
            self._seen_ns = now_ns
        elif is_waiting:
            waiting_ns = max(0, now_ns - asked_ns)
            not_own_ns += max(0, waiting_ns - (blocked_ns - asked_blocked))
        else:
            now_ns = seen_ns  # never report less than before
        if noted_ns:
            away_ns += max(0, now_ns - noted_ns - since_ns - waiting_ns)
        return LoopTimes(waited_ns + waiting_ns, away_ns, not_own_ns, waiting_ns)

    def amounts(self, totals: Totals | None = None, *, is_exact: bool = True) -> Amounts:
        """Return the amounts of this engine: up to now if ``is_exact``, else up to the latest count."""
        loop = self.loop_times() if is_exact else None
        totals = totals or self.workers.totals()
        return Amounts(
            batch_count=self.batch_count,
            sample_count=self.sample_count,
            loaded_count=totals.sample_count,
            waited_ns=self.waited_ns if loop is None else loop.waited_ns,
            started_ns=self.started_ns,
            away_ns=self.away_ns if loop is None else loop.away_ns,
            blocked_ns=self.blocked_ns + self.outside_ns if loop is None else loop.blocked_ns,
            changeover_ns=self.changeover_ns,
            added_worker_ns=self.added_worker_ns,
            manned_ns=self.manned_ns,
            idled_ns=self.idled_ns,
            load_ns=totals.load_ns,
            collate_ns=totals.collate_ns,
            write_ns=totals.write_ns,
            alive_ns=totals.alive_ns,
            cpu_ns=totals.cpu_ns,
            queued_ns=totals.queued_ns,
            own_cpu_ns=self._process.cpu_ns if is_exact else self._process.counted_ns,
            loop_queued_ns=self._process.queued_ns,
        )

    def work(self) -> Work:
        """Return what the workers have done and measured so far, for the choice between threads and processes."""
        sums = self.workers.sums()
        queued_ns = sum(self.workers.usage(worker).queued_ns for worker in sums)
        shares = [one.gil_share for one in sums.values() if one.gil_share is not None]
        return Work(
            self.kind,
            max(0, sum(map(busy_ns, sums.values())) - queued_ns),
            sum(one.sample_count for one in sums.values()),
            shares[0] if shares else None,
            any(one.is_drawing for one in sums.values()),
        )

    def latest_slice(self) -> Slice:
        """Return the amounts that are not in the past yet."""
        return Slice(self.kind, self._passed_ns, Amounts() if self.is_closed else self.amounts().minus(self._passed))

    def _add_to_past(self, totals: Totals | None = None) -> None:
        amounts = self.amounts(totals, is_exact=False)
        self._history.past.add(Slice(self.kind, self._passed_ns, amounts.minus(self._passed)))
        self._passed, self._passed_ns = amounts, self._clock.now_ns()

    def take_spans(self, *, is_last: bool = False) -> None:
        """Move new spans from the workers' recorders to the history."""
        if not self._is_spanning or self.is_closed or not self._taking.acquire(blocking=False):
            return  # the lock is taken if another thread does it right now
        try:
            for worker, raw, lost in self.workers.take_spans(is_last=is_last):
                self._history.add_recorded(worker, raw, lost)
        finally:
            self._taking.release()

    def close(self) -> None:
        """Take final readings. The workers have exited, and the status board is about to close."""
        if self.is_closed or os.getpid() != self._owner_pid:
            return
        self.take_spans(is_last=True)
        if not self._idle_ns:
            self.away_ns, self._noted_ns = self.away_ns + self._step_ns(self._asked_ns or self._seen_ns), 0
        self.stop_waiting()
        self._add_to_past()
        self._final_bytes = self._delivered_bytes()
        self.workers.close()
        # Release the references to the engine, so that it can be freed.
        self._flight, self._delivered_bytes = _no_flight, _no_bytes
        self.is_closed = True

    def absorb(self, other: EngineMetrics) -> None:
        """Add the metrics of another engine; both engines are closed."""
        self.kind, self.memory_limit = other.kind, other.memory_limit
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes += other.outcomes
        self.workers.absorb(other.workers)


def _no_flight() -> Flight:
    return Flight(0, 0, 0)


def _no_bytes() -> int:
    return 0


_NO_DIAGNOSIS: Final = "No diagnosis: observe='off' records nothing."
_QUANTILES: Final = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@final
class Collector:
    """Collects the metrics of one loader."""

    def __init__(self, observe: Observe) -> None:
        self._observe: Observe = observe
        self.history = History()
        self._all_metrics = AllMetrics()
        self._began = time.time()
        self._began_ns = _CLOCK.now_ns()

    def metrics(
        self, status_board: StatusBoard, workers: tuple[WorkerId, ...], kind: WorkerKind, memory_limit: int
    ) -> EngineMetrics:
        """Create the metrics of a new engine."""
        all_metrics = self._all_metrics
        with all_metrics.lock:
            # Of closed engines only the sums matter, so merge them into one.
            closed = [metrics for metrics in all_metrics.all if metrics.is_closed]
            for metrics in closed[1:]:
                closed[0].absorb(metrics)
                all_metrics.all.remove(metrics)
            metrics = EngineMetrics(self.history, all_metrics, status_board, workers, kind, self._observe, memory_limit)
            all_metrics.all.append(metrics)
            return metrics

    def statistics(
        self,
        *,
        epoch: int,
        is_auto: bool,
        core_count: float,
        memory_limit: int,
        loads_by: str,
        has_collate_fn: bool,
        most_workers: int,
        keeps_workers: bool,
        is_settled: bool,
        bound: Bound,
        cpu_limit: float | None,
        prefetch: int,
        is_on_cluster: bool,
    ) -> Statistics:
        """Return the statistics. ``memory_limit`` is used only before the first engine: the limit if an epoch began now."""
        with self._all_metrics.lock:
            all_metrics = list(self._all_metrics.all)
            if all_metrics:
                memory_limit = all_metrics[-1].memory_limit
            if self._observe == "off":
                all_metrics = []
            latest = all_metrics[-1] if all_metrics else None
            flight = None if latest is None else latest.flight
            outcomes: Counter[str] = sum((metrics.outcomes for metrics in all_metrics), Counter())
            # Read each recorder once, so that the figures are consistent: workers keep writing meanwhile.
            recorders = [
                {worker: metrics.workers.read(worker) for worker in list(metrics.workers.known)} for metrics in all_metrics
            ]
            readings = [reading for recorder in recorders for reading in recorder.values()]
            histogram = [sum(column) for column in zip(*(one.histogram for one in readings), strict=True)] or [0] * BUCKETS
            slowest = sorted({slow for one in readings for slow in one.slowest}, reverse=True)[:SLOWEST]
            recent = self.history.past.recent([metrics.latest_slice() for metrics in all_metrics]) if all_metrics else None
            loops = [metrics.loop_times() for metrics in all_metrics]
            waited_ns = sum(one.waited_ns for one in loops)
            started_ns = sum(metrics.started_ns for metrics in all_metrics)
            statistics = Statistics(
                epoch=epoch,
                ended_count=sum(metrics.ended_count for metrics in all_metrics),
                batch_count=sum(metrics.batch_count for metrics in all_metrics),
                sample_count=sum(metrics.sample_count for metrics in all_metrics),
                byte_count=sum(metrics.byte_count for metrics in all_metrics),
                waited_s=waited_ns / 1e9,
                started_s=started_ns / 1e9,
                changeover_s=sum(metrics.changeover_ns for metrics in all_metrics) / 1e9,
                waiting_s=sum(one.waiting_ns for one in loops) / 1e9,
                away_s=sum(one.away_ns for one in loops) / 1e9,
                deliver_s=max(0, waited_ns + started_ns - sum(one.blocked_ns for one in loops)) / 1e9,
                loads_by=loads_by,
                has_collate_fn=has_collate_fn,
                keeps_workers=keeps_workers,
                kind="inline" if latest is None else latest.kind,
                is_auto=is_auto,
                is_settled=is_settled,
                bound=bound,
                cpu_limit=cpu_limit,
                prefetch=prefetch,
                is_on_cluster=is_on_cluster,
                worker_count=0 if latest is None or latest.kind == "inline" else latest.workers.count,
                workers=tuple(_workers(all_metrics, recorders)),
                core_count=core_count,
                batches_in_flight=0 if flight is None else flight.batch_count,
                bytes_in_flight=0 if flight is None else flight.nbytes,
                memory_limit=memory_limit,
                skipped_count=outcomes["skipped"],
                replaced_count=outcomes["replaced"],
                sample_times=Times(_quantiles(histogram, slowest[0][0] if slowest else 0)),
                histogram=tuple((bucket_end_ns(bucket) / 1e9, count) for bucket, count in enumerate(histogram) if count),
                slowest=tuple(_slow_sample(one, 0 if recent is None else recent.since_ns) for one in slowest),
                diagnosis="",
                most_workers=most_workers,
                recent=recent,
            )
        if self._observe == "off":
            return replace(statistics, diagnosis=_NO_DIAGNOSIS)
        finding = diagnose(statistics, has_gil=getattr(sys, "_is_gil_enabled", lambda: True)())
        return replace(statistics, finding=finding, diagnosis=str(finding))

    def trace(self, statistics: Statistics, settings: Mapping[str, str], machine: Mapping[str, str]) -> Trace:
        """Return all recorded data, for timeline and report. Times count from the creation of the loader."""
        for metrics in list(self._all_metrics.all):
            metrics.take_spans(is_last=True)
        began = self._began_ns
        history = self.history
        spans = [
            Span(*one._replace(begin_ns=max(0, one.begin_ns - began), end_ns=max(0, one.end_ns - began)))
            for one in history.spans()
        ]
        return Trace(
            began=self._began,
            statistics=statistics,
            spans=tuple(sorted(spans, key=lambda span: (span.lane, span.begin_ns))),
            marks=tuple(Mark(*one._replace(at_ns=max(0, one.at_ns - began))) for one in list(history.marks)),
            points=tuple(one._replace(at_ns=max(0, one.at_ns - began)) for one in list(history.points)),
            lost_span_count=history.lost_span_count,
            settings=settings,
            machine=machine,
        )


def _workers(all_metrics: list[EngineMetrics], recorders: list[dict[WorkerId, RecorderContents]]) -> Iterable[WorkerStatistics]:
    """Yield statistics by worker id. Workers of different engines with the same id count as one worker."""
    for worker in sorted({worker for recorded in recorders for worker in recorded}):
        own = [metrics for metrics, recorded in zip(all_metrics, recorders, strict=True) if worker in recorded]
        latest = own[-1].workers[worker]
        sums = [recorded[worker].sums for recorded in recorders if worker in recorded]
        usages = [metrics.workers.usage(worker) for metrics in own]
        busy_ns = sum(one.load_ns + one.collate_ns + one.write_ns for one in sums)
        yield WorkerStatistics(
            worker=worker,
            pid=latest.pid,
            is_alive=bool(latest.since_ns),
            sample_count=sum(one.sample_count for one in sums),
            load_s=sum(one.load_ns for one in sums) / 1e9,
            collate_s=sum(one.collate_ns for one in sums) / 1e9,
            write_s=sum(one.write_ns for one in sums) / 1e9,
            # A stopped worker may finish its task after its alive time ended.
            alive_s=max(busy_ns, sum(metrics.workers.alive_ns(worker) for metrics in own)) / 1e9,
            cpu_s=sum(one.cpu_ns for one in usages) / 1e9,
            queued_s=sum(one.queued_ns for one in usages) / 1e9,
            memory_bytes=usages[-1].memory_bytes,
            restart_count=sum(metrics.workers[worker].restart_count for metrics in own),
            retry_count=sum(one.retry_count for one in sums),
            pending_s=max(metrics.workers.pending_ns(worker) for metrics in own) / 1e9,
        )


def _slow_sample(slow: Slow, since_ns: int) -> SlowSample:
    took_ns, epoch, position, index, end_ns = slow
    recent_ns = min(took_ns, max(0, end_ns - since_ns))
    return SlowSample(epoch, position, None if index == NO_INDEX else index, took_ns / 1e9, recent_ns / 1e9)


def _quantiles(histogram: list[int], longest_ns: int) -> dict[str, float]:
    """Return the quantiles of sample times in seconds, accurate to one histogram bucket."""
    total = sum(histogram)
    if not total:
        return {}
    sums = list(accumulate(histogram))
    times = {
        name: bucket_end_ns(next(bucket for bucket, count in enumerate(sums) if count >= share * total)) / 1e9
        for name, share in _QUANTILES.items()
    }
    top = bucket_end_ns(max(bucket for bucket, count in enumerate(histogram) if count)) / 1e9
    times["max"] = longest_ns / 1e9 if longest_ns else top
    return {name: min(seconds, times["max"]) for name, seconds in times.items()}
