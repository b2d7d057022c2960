"""Counts what one engine does, from the side of the user's loop, and reads what its workers keep on their tapes.

Always on, so the usual way through it (``given``) is a handful of additions. All else happens ten times a second at most.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final, Literal, NamedTuple, TypeAlias, final

from infeed.observe.gauges import Gauges
from infeed.observe.history import History
from infeed.observe.members import Members, busy_ns
from infeed.observe.owntime import OwnTime
from infeed.observe.recent import Amounts, LoopTimes, Slice
from infeed.observe.records import LOOP, Mark, MarkKind, Point, Span, SpanKind
from infeed.scheduler.messages import WorkerId
from infeed.workers.board import Board
from infeed.workers.insides import memory_use
from infeed.workers.tape import Observe

# How often workers are looked at, and how much of the time that may take: a hundredth.
_TICK_NS: Final = 100_000_000
_TICK_SHARE: Final = 200
# Of the loop, too: what is shorter than the first is put together, up to the second.
_LONG_NS: Final = 50_000
_RUN_NS: Final = 2_000_000
_NEVER: Final = 1 << 63
# Of epochs that are shorter, and follow each other, it is not noted exactly what was loaded ahead for the next.
_SHORT_NS: Final = 20_000_000

WorkerKind: TypeAlias = Literal["inline", "thread", "process"]


class Flight(NamedTuple):
    """What is on its way."""

    batch_count: int
    nbytes: int
    room_bytes: int  # of all memory for batches, used or not


# Of a gauge, what engines have in common.
_SUMMED: Final = (
    "batch_count", "sample_count", "waited_ns", "started_ns", "away_ns", "blocked_ns", "outside_ns", "changeover_ns",
    "hired_ns", "manned_ns", "idled_ns", "ended_count", "_final_bytes",
)  # fmt: skip


@final
class Gauge:
    """Belongs to one engine.

    Others may ask at any time. So what belongs together is assigned together, in one statement: they must not see half of it.
    """

    def __init__(
        self,
        history: History,
        gauges: Gauges,
        board: Board,
        workers: tuple[WorkerId, ...],
        kind: WorkerKind,
        observe: Observe,
        memory_limit: int,
    ) -> None:
        self._history, self._gauges = history, gauges
        self.kind: WorkerKind = kind
        self._is_on = observe != "off"
        self._is_spanning = observe == "timeline"
        self.members = Members(board, workers)
        self.flight: Callable[[], Flight] = _no_flight  # the engine says what is
        self.bytes_given: Callable[[], int] = _no_bytes
        self._final_bytes = 0
        self.batch_count = self.sample_count = 0
        self.ended_count = 0  # epochs that were not left before their end
        self.waited_ns = 0
        self.started_ns = 0
        self.away_ns = 0
        self.blocked_ns = 0  # of the wait, what was not infeed's own work in the loop's thread
        self.outside_ns = 0  # of the wait, while epochs began and ended
        self.changeover_ns = 0  # of the wait, for workers that were started or stopped
        self.hired_ns = 0  # of that, what came in the middle of epochs
        self.manned_ns = self.idled_ns = 0  # workers' time while the loop waited for a batch; of that, with nothing to load
        self.memory_limit = memory_limit  # for batches
        self.tick_count = 0
        self.latest: Point | None = None  # what the last tick found
        self.outcomes: Counter[str] = Counter()  # of bad samples
        self.next_ns = 0  # when `note` wants to be called next
        # When it was last, and how far the sums were then.
        self._noted_ns = self._noted_waited = self._noted_count = self._noted_blocked = 0
        # When the loop asked for the batch that it waits for, and how far `blocked_ns` was then; 0: it does not wait.
        self.asked_ns = self.asked_blocked = 0
        self._left_ns = 0
        self._seen_ns = 0  # until when the step that goes on was told of
        self._idle_ns = 0  # since when no epoch is in progress; 0: one is
        self._next_tick = 0
        self._epoch = self._step_offset = 0
        self.is_closed = False
        self._taking = threading.Lock()
        self._own = OwnTime()
        self._begun_ns = 0  # when the epoch began
        self._told, self._told_ns = Amounts(), perf_counter_ns()  # what the past knows of this, and since when
        self._owner_pid = os.getpid()

    # --- the user's loop

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        self._epoch, self._step_offset = epoch, first_step - self.batch_count
        self._begun_ns = perf_counter_ns()
        self._left_ns = self._noted_ns = self._seen_ns = 0  # what the user did between epochs is not their loop
        self._noted_waited, self._noted_blocked = self.waited_ns, self.blocked_ns
        self._gauges.active = self
        if self._idle_ns:
            # A look is due after so much of the loop's own time: who has several loaders pays for one at a time.
            self._next_tick += self._begun_ns - self._idle_ns
            self._idle_ns = 0
            self.members.wake()
        self.next_ns = 0 if self._is_on else _NEVER
        if self._is_on:
            self._own.begin()
        self.mark("epoch", LOOP, f"epoch {epoch} begins")

    def changed_over(self, begin_ns: int, end_ns: int) -> None:
        """The loop waited for something else than a batch: an epoch began, or was over, and workers with it."""
        took_ns = end_ns - begin_ns
        if not self._gauges.has_given:
            self.outside_ns, self.started_ns = self.outside_ns + took_ns, self.started_ns + took_ns
        else:
            self.outside_ns, self.waited_ns = self.outside_ns + took_ns, self.waited_ns + took_ns
            if self.is_closed or not self.batch_count:
                self.changeover_ns += took_ns
            if self.is_closed and self._is_on:  # nobody tells of it later
                lost = Amounts(waited_ns=took_ns, blocked_ns=took_ns, changeover_ns=took_ns)
                self._history.past.add(Slice(self.kind, begin_ns, lost))
        if self._is_spanning and took_ns >= _LONG_NS:
            number = max(0, self.batch_count - 1) if self._idle_ns else self.batch_count
            self._history.add_spans([self._span("wait", begin_ns, end_ns, number, 1)])

    def waited_for_workers(self, took_ns: int) -> None:
        """In the middle of an epoch the loop waited for a worker to be there: in the place of one that died, or one more."""
        self.blocked_ns += took_ns
        if self.batch_count:  # else all of the wait is for workers, and counted with the first batch
            self.changeover_ns += took_ns
            self.hired_ns += took_ns

    def given(self, asked_ns: int, left_ns: int) -> None:
        """The loop asked for a batch and got it."""
        self.waited_ns, self.asked_ns = self.waited_ns + left_ns - asked_ns, 0
        self.batch_count += 1
        before_ns, self._left_ns = self._left_ns, left_ns
        if left_ns > self.next_ns:
            self.note(before_ns, asked_ns, left_ns)

    def stop_waiting(self) -> None:
        """The loop asked for a batch, and gets an exception for it, or this engine is closed; if it did not get one."""
        asked_ns, now_ns = self.asked_ns, perf_counter_ns()
        if asked_ns:
            took_ns = now_ns - asked_ns if self._gauges.has_given else 0  # what nothing came of yet is no start
            self.waited_ns, self.asked_ns = self.waited_ns + took_ns, 0

    def note(self, before_ns: int, asked_ns: int, left_ns: int) -> None:
        """Take in what the loop did since the last time. For who counts ``waited_ns`` and ``batch_count`` by themselves.

        Args:
            before_ns: when the loop got the batch before; 0 if this is the first of an epoch.
        """
        wait_ns = left_ns - asked_ns
        away_ns = self.away_ns
        if before_ns:
            if self._is_spanning:
                self._record(before_ns, asked_ns, left_ns)
            away_ns += left_ns - self._noted_ns - (self.waited_ns - self._noted_waited)
        else:
            if self.batch_count == 1 and self._gauges.has_given:
                self.changeover_ns += wait_ns
            elif self.batch_count == 1:
                self.waited_ns, self.started_ns = self.waited_ns - wait_ns, self.started_ns + wait_ns
            self._gauges.has_given = True
            if self._is_spanning:
                self._history.add_spans([self._span("wait", asked_ns, left_ns, self.batch_count - 1, 1)])
        self.away_ns, self._noted_ns, self._noted_waited = away_ns, left_ns, self.waited_ns
        self._noted_count, self._noted_blocked = self.batch_count, self.blocked_ns
        self._gauges.active = self
        self.next_ns = left_ns + _RUN_NS
        if left_ns > self._next_tick:
            self._tick(left_ns)

    def end_epoch(self, left_ns: int, asked_ns: int = 0) -> None:
        """The epoch is over, or was left.

        Args:
            left_ns: when the loop got its last batch; 0 if it got none.
            asked_ns: when it asked for another, and there was none; 0 if it did not: nobody knows how long its last step was,
                but that it lasted when it was told of.
        """
        if self._idle_ns:
            return
        now_ns = perf_counter_ns()
        left_ns = self._left_ns or left_ns
        end_ns = asked_ns or max(left_ns, self._seen_ns)
        away_ns, waited_ns = self._step_ns(end_ns), now_ns - asked_ns if asked_ns else 0
        if self._noted_ns and self._is_spanning:
            self._record_last(left_ns, end_ns)
        away_ns, waited_ns = self.away_ns + away_ns, self.waited_ns + waited_ns
        self.away_ns, self.waited_ns, self.asked_ns, self._idle_ns = away_ns, waited_ns, 0, now_ns
        self.ended_count += bool(asked_ns)
        is_live = self._is_on and not self.is_closed
        is_long = now_ns - self._begun_ns >= _SHORT_NS
        self.members.rest(now_ns, is_still=is_live and is_long and self.kind != "inline")
        if self._own.end() and is_live:
            self._tell_past()

    def _step_ns(self, end_ns: int) -> int:
        """How long the loop was away since the last time, if its latest step ended then."""
        return max(0, end_ns - self._noted_ns - (self.waited_ns - self._noted_waited)) if self._noted_ns else 0

    def _record_last(self, left_ns: int, asked_ns: int) -> None:
        """Keep what the loop did since the last time, and its last step."""
        spans: list[Span] = []
        short_count = self.batch_count - self._noted_count
        if short_count:
            spans.append(self._short_span(left_ns, self.waited_ns - self._noted_waited, short_count))
        if asked_ns - left_ns >= _LONG_NS:
            spans.append(self._span("away", left_ns, asked_ns, self.batch_count - 1, 1))
        self._history.add_spans(spans)

    def _record(self, before_ns: int, asked_ns: int, left_ns: int) -> None:
        """Keep what the loop did: short rounds together, and the latest by itself."""
        spans: list[Span] = []
        number = self.batch_count - 1
        wait_ns = left_ns - asked_ns
        short_count = number - self._noted_count
        if short_count:
            spans.append(self._short_span(before_ns, self.waited_ns - self._noted_waited - wait_ns, short_count))
        if asked_ns - before_ns >= _LONG_NS:
            spans.append(self._span("away", before_ns, asked_ns, number, 1))
        # What infeed itself did is put last, where most of it was.
        worked_ns = 0 if short_count else min(wait_ns, max(0, wait_ns - (self.blocked_ns - self._noted_blocked)))
        if wait_ns - worked_ns >= _LONG_NS:
            spans.append(self._span("wait", asked_ns, left_ns - worked_ns, number, 1))
        if worked_ns >= _LONG_NS:
            spans.append(self._span("deliver", left_ns - worked_ns, left_ns, number, 1))
        self._history.add_spans(spans)

    def _short_span(self, end_ns: int, waited_ns: int, count: int) -> Span:
        """Rounds since the last time, put together."""
        kind: SpanKind = "wait" if 2 * waited_ns > end_ns - self._noted_ns else "away"
        return self._span(kind, self._noted_ns, end_ns, self._noted_count, count)

    def _span(self, kind: SpanKind, begin_ns: int, end_ns: int, number: int, size: int) -> Span:
        return Span(LOOP, kind, begin_ns, end_ns, self._epoch, number + self._step_offset, None, size)

    @property
    def byte_count(self) -> int:
        return self._final_bytes if self.is_closed else self.bytes_given()

    def mark(self, kind: MarkKind, lane: int, text: str) -> None:
        if self._is_spanning:
            self._history.marks.append(Mark(perf_counter_ns(), lane, kind, text))

    # --- from time to time

    def point(self, now_ns: int, *, is_own: bool = True) -> Point:
        """How far this engine has come; ``is_own``: with the memory of this process, where workers are no processes."""
        members = self.members
        usages = [members.usage(worker) for worker in list(members.known)]
        own_bytes = memory_use().resident_bytes if is_own and self.kind != "process" else 0
        flight = self.flight()
        return Point(
            at_ns=now_ns,
            batch_count=self.batch_count,
            sample_count=self.sample_count,
            byte_count=self.byte_count,
            waited_ns=self.waited_ns,
            away_ns=self.away_ns,
            worker_count=0 if self.is_closed else members.count,
            busy_ns=sum(map(busy_ns, members.sums().values())),
            cpu_ns=sum(one.cpu_ns for one in usages),
            queued_ns=sum(one.queued_ns for one in usages),
            memory_bytes=sum(one.memory_bytes for one in usages) if self.kind == "process" else own_bytes,
            flight_bytes=flight.nbytes,
            room_bytes=flight.room_bytes,
        )

    def _tick(self, now_ns: int) -> None:
        self.tick_count += 1
        self.take_spans()
        self.latest = self.point(now_ns)
        self._history.add_point(self._gauges.total(self, self.latest))
        self._own.count()
        self._tell_past()
        done_ns = perf_counter_ns()
        self._next_tick = done_ns + max(_TICK_NS, _TICK_SHARE * (done_ns - now_ns))

    def loop_times(self) -> LoopTimes:
        """Up to now."""
        # The clock first, then all that is read, with nothing called between: whatever the loop does meanwhile, no more is
        # told than was, and a later answer is no less.
        is_here, now_ns = os.getpid() == self._owner_pid, perf_counter_ns()
        waited_ns, away_ns, blocked_ns, asked_ns = self.waited_ns, self.away_ns, self.blocked_ns, self.asked_ns
        noted_ns, since_ns, seen_ns = self._noted_ns, waited_ns - self._noted_waited, self._seen_ns
        is_over, not_own_ns, asked_blocked = self.is_closed or self._idle_ns, blocked_ns + self.outside_ns, self.asked_blocked
        if not self._gauges.has_given:
            return LoopTimes(0, 0, not_own_ns, 0)  # it is still the first start
        if is_over or not self._is_on:
            return LoopTimes(waited_ns, away_ns, not_own_ns, 0)
        is_waiting, waiting_ns = is_here and asked_ns, 0
        if not is_waiting and is_here and self._gauges.active is self:
            self._seen_ns = now_ns
        elif is_waiting:
            waiting_ns = max(0, now_ns - asked_ns)
            not_own_ns += max(0, waiting_ns - (blocked_ns - asked_blocked))
        else:
            now_ns = seen_ns  # what was told is not taken back
        if noted_ns:
            away_ns += max(0, now_ns - noted_ns - since_ns - waiting_ns)
        return LoopTimes(waited_ns + waiting_ns, away_ns, not_own_ns, waiting_ns)

    def amounts(self, *, is_exact: bool = True) -> Amounts:
        """All that this engine did so far; ``is_exact``: up to now, not up to the latest count."""
        loop = self.loop_times() if is_exact else None
        members = self.members
        sums = members.sums()
        usages = [members.usage(worker) for worker in sums]
        return Amounts(
            batch_count=self.batch_count,
            sample_count=self.sample_count,
            loaded_count=sum(one.sample_count for one in sums.values()),
            waited_ns=self.waited_ns if loop is None else loop.waited_ns,
            started_ns=self.started_ns,
            away_ns=self.away_ns if loop is None else loop.away_ns,
            blocked_ns=self.blocked_ns + self.outside_ns if loop is None else loop.blocked_ns,
            changeover_ns=self.changeover_ns,
            hired_ns=self.hired_ns,
            manned_ns=self.manned_ns,
            idled_ns=self.idled_ns,
            load_ns=sum(one.load_ns for one in sums.values()),
            collate_ns=sum(one.collate_ns for one in sums.values()),
            write_ns=sum(one.write_ns for one in sums.values()),
            alive_ns=sum(members.alive_ns(worker) for worker in sums),
            cpu_ns=sum(one.cpu_ns for one in usages),
            queued_ns=sum(one.queued_ns for one in usages),
            own_cpu_ns=self._own.cpu_ns if is_exact else self._own.counted_ns,
            loop_queued_ns=self._own.queued_ns,
        )

    def latest_slice(self) -> Slice:
        """What was done since the past was told."""
        return Slice(self.kind, self._told_ns, Amounts() if self.is_closed else self.amounts().minus(self._told))

    def _tell_past(self) -> None:
        amounts = self.amounts(is_exact=False)
        self._history.past.add(Slice(self.kind, self._told_ns, amounts.minus(self._told)))
        self._told, self._told_ns = amounts, perf_counter_ns()

    def take_spans(self, *, is_last: bool = False) -> None:
        """Read what workers have put on their tapes since the last time."""
        if not self._is_spanning or self.is_closed or not self._taking.acquire(blocking=False):
            return  # or another thread does it just now
        try:
            for worker, raw, lost in self.members.take_spans(is_last=is_last):
                self._history.add_tape(worker, raw, lost)
        finally:
            self._taking.release()

    def close(self) -> None:
        """The workers are gone; the board is about to be."""
        if self.is_closed or os.getpid() != self._owner_pid:
            return
        self.take_spans(is_last=True)
        if not self._idle_ns:
            self.away_ns, self._noted_ns = self.away_ns + self._step_ns(self.asked_ns or self._seen_ns), 0
        self.stop_waiting()
        self._tell_past()
        self._final_bytes = self.bytes_given()
        self.members.close()
        # The engine is not to be kept for what it was.
        self.flight, self.bytes_given = _no_flight, _no_bytes
        self.is_closed = True

    def absorb(self, other: Gauge) -> None:
        """Count for another engine as well; both are closed."""
        self.kind, self.memory_limit = other.kind, other.memory_limit
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes += other.outcomes
        self.members.absorb(other.members)


def _no_flight() -> Flight:
    return Flight(0, 0, 0)


def _no_bytes() -> int:
    return 0
