"""Per-worker counters, sample-time histogram and spans in shared memory, written by the worker, read by the engine.

A recorder follows the worker's cell on the status board (``status.py``). Only the worker writes. A replacement worker continues
the numbers of its predecessor.

Recording must cost less than 1% of the smallest task. A task is therefore timed in laps, with one clock read each for load,
collate and write, and short tasks are combined.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heapreplace
from struct import Struct
from time import perf_counter_ns
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

# A worker records spans and sums, sums only, or nothing.
Observe: TypeAlias = Literal["timeline", "counters", "off"]

# Sums, in this order, at the beginning. Pending tiny tasks have only a sample count and a busy time; the reader divides that
# time into load, collate and write in the proportions (split) of a tiny task that was timed in detail.
_LOAD, _COLLATE, _WRITE, _SAMPLES, _RETRIES, _SPANS, _TINY_ROWS, _TINY_BUSY, _GIL, _DRAW, _SPLIT = range(11)
_SUMS: Final = 16
# Two buckets per doubling of the sample time, from 0.25 µs to 20 minutes.
BUCKETS: Final = 64
_LEAST_BITS: Final = 9
# The slowest samples: duration in ns, epoch, position, index, end time in ns.
Slow: TypeAlias = tuple[int, int, int, int, int]
SLOWEST: Final = 16
_SLOW_NUMBERS: Final = 5
# The latest spans: kind, begin, end, epoch, position, index, size.
_RING: Final = 2048
_SPAN: Final = Struct("7q")
_SPAN_NUMBERS: Final = 7
_HISTOGRAM_AT: Final = _SUMS
_SLOW_AT: Final = _HISTOGRAM_AT + BUCKETS
_RING_AT: Final = _SLOW_AT + SLOWEST * _SLOW_NUMBERS
COUNTER_NUMBERS: Final = _RING_AT  # all but the spans
RECORDER_NUMBERS: Final = _RING_AT + _RING * _SPAN_NUMBERS
_SUM_STRUCT: Final = Struct("8q")
_SPLIT_STRUCT: Final = Struct("3q")

# Kinds of spans.
LOAD, COLLATE, WRITE, START = 1, 2, 3, 4
NO_INDEX: Final = -1 << 63  # the first sample has no index, or one that is not an integer

# Samples longer than this get separate spans.
_LONG_NS: Final = 100_000
# Tasks longer than this get separate spans. Timing the parts of a task costs a few microseconds.
_TINY_NS: Final = 1_000_000
# Shorter tasks are combined into runs of up to _RUN_NS, without pauses of _PAUSE_NS or more.
_RUN_NS: Final = 2_000_000
_PAUSE_NS: Final = 50_000
# One tiny task in this time is timed in detail.
_LOOK_NS: Final = 10_000_000


def bucket_of(ns: int) -> int:
    """Return the histogram bucket of a duration."""
    bits = ns.bit_length()
    if bits < _LEAST_BITS:
        return 0
    return min(BUCKETS - 1, 2 * (bits - _LEAST_BITS) + (ns >> (bits - 2) & 1))


def bucket_end_ns(bucket: int) -> int:
    """Return the exclusive upper bound of a bucket."""
    bits, is_upper = divmod(bucket, 2)
    return 1 << (bits + _LEAST_BITS) if is_upper else 3 << (bits + _LEAST_BITS - 2)


@final
class Recorder:
    """Writes the counters and spans; used by the worker."""

    __slots__ = (
        "_began", "_busy", "_ended", "_entered", "_epoch", "_is_on", "_is_spanning", "_is_timed", "_laps", "_last", "_looked",
        "_numbers", "_position", "_rows", "_run_began", "_run_rows", "_slow", "_split", "_sums", "_task_split", "is_fine",
    )  # fmt: skip

    def __init__(self, numbers: Any = None, *, is_on: bool = True, is_spanning: bool = True) -> None:
        """
        Args:
            numbers: the memory to write to; by default private memory without a reader.
            is_on: whether to record anything about tasks.
            is_spanning: whether to record spans in addition to sums.
        """
        self._numbers = memoryview(array("q", bytes(8 * RECORDER_NUMBERS))) if numbers is None else numbers
        numbers = self._numbers
        self._is_on, self._is_spanning = is_on, is_on and is_spanning
        self._sums: list[int] = list(numbers[: _SPANS + 1])
        self._split: Sequence[int] = numbers[_SPLIT : _SPLIT + 3].tolist()  # load, collate, write: of the last timed tiny task
        self._busy, self._rows = numbers[_TINY_BUSY], numbers[_TINY_ROWS]  # of tiny tasks that are not in the sums yet
        rows = (tuple(numbers[at : at + _SLOW_NUMBERS]) for at in range(_SLOW_AT, _RING_AT, _SLOW_NUMBERS))
        self._slow = list(rows)  # a min-heap by duration
        heapify(self._slow)
        self._began = self._last = self._ended = 0
        self._epoch = self._position = 0
        self._is_timed = False
        self._laps: list[tuple[int, int, int, int, int, int]] = []  # spans of this task, if it is not tiny
        # Whether the worker times the laps of this task. Tiny tasks whose samples are not timed one by one are combined. One
        # tiny task per _LOOK_NS is timed, and its split applies to the others.
        self.is_fine = is_on
        self._task_split = [0, 0, 0]  # load, collate, write: of this task
        # When tiny tasks were last added to the sums, and when the latest timed one ended.
        self._entered = self._looked = 0
        self._run_began = 0
        # Rows of the current run that are in the sums already, minus pending rows that belong to the previous run.
        self._run_rows = 0
        if self._rows or self._busy:  # left pending by the previous worker
            self._run_rows = -self._rows
            self._enter(0)
            self.is_fine = True

    # --- a task

    def begin(self, now_ns: int, epoch: int, position: int) -> None:
        """Begin a task."""
        self._began = now_ns
        if not self.is_fine:
            if self._is_spanning and now_ns - self._ended >= _PAUSE_NS:
                self._begin_run(now_ns, epoch, position)
            return
        self._last = now_ns
        self._epoch, self._position = epoch, position
        self._task_split = [0, 0, 0]
        self._is_timed = False
        self._laps = []

    def loaded(self, position: int, indices: Sequence[Any], times: list[int] | None = None) -> None:
        """Record that the dataset has returned these samples; ``times`` are their durations, if measured."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_LOAD] += now - last
        if times:
            self._note_times(now - sum(times), position, indices, times)
        elif now - last > _LONG_NS:
            self._laps.append((LOAD, last, now, position, _number(indices), len(indices)))

    def collated(self) -> None:
        """Record the end of collation."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_COLLATE] += now - last
        if now - last > _LONG_NS:
            self._laps.append((COLLATE, last, now, self._position, NO_INDEX, 0))

    def written(self) -> None:
        """Record that the samples are in the slot."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_WRITE] += now - last
        if now - last > _LONG_NS:
            self._laps.append((WRITE, last, now, self._position, NO_INDEX, 0))

    def retried(self) -> None:
        """Count a retry of a sample that raised."""
        self._sums[_RETRIES] += 1
        self._numbers[_RETRIES] = self._sums[_RETRIES]

    def end(self, row_count: int, now_ns: int) -> None:
        """End the task, which loaded ``row_count`` samples."""
        self._ended = now_ns
        if not self.is_fine:
            if not self._is_on:
                return
            numbers = self._numbers
            numbers[_TINY_ROWS] = self._rows = self._rows + row_count
            numbers[_TINY_BUSY] = self._busy = self._busy + now_ns - self._began
            if now_ns - self._entered > _RUN_NS:
                self._enter(now_ns)
            return
        load, collate, write = self._task_split
        if row_count and not self._is_timed:
            # Samples were too short to time one by one, so each counts with the average duration.
            self._numbers[_HISTOGRAM_AT + bucket_of(load // row_count)] += row_count
        is_tiny = now_ns - self._began < _TINY_NS and not self._is_timed
        if not is_tiny:
            if not self._laps and not self._is_timed:
                self._laps.append((LOAD, self._began, now_ns, self._position, NO_INDEX, row_count))
            for lap in self._laps:
                self._span(*lap)
        self._add(load, collate, write, row_count)
        # A task without samples only wrote what another task had loaded, so its split does not apply to others.
        if is_tiny and row_count and load + collate + write:
            self.is_fine = False
            self._split = (load, collate, write)
            _SPLIT_STRUCT.pack_into(self._numbers, 8 * _SPLIT, *self._split)
            self._run_began, self._run_rows = self._began, row_count
            self._entered = self._looked = now_ns

    def failed(self, now_ns: int) -> None:
        """End a task in which user code raised: record its duration, but no samples."""
        if self.is_fine:
            self._task_split[_LOAD] += now_ns - self._last
        self.end(0, now_ns)

    def flush(self) -> None:
        """Add pending tiny tasks to the sums; the next task is timed in detail."""
        if self._is_on and not self.is_fine:
            self._enter(self._ended)
            self.is_fine = True

    def _enter(self, now_ns: int) -> None:
        rows = self._rows
        load, collate, write = _taken_apart(self._busy, self._split)
        if rows:
            self._numbers[_HISTOGRAM_AT + bucket_of(load // rows)] += rows
        self._end_run()
        self._add(load, collate, write, rows)
        self._rows = self._busy = self._run_rows = 0
        self._entered = now_ns
        # Tasks longer than _TINY_NS are timed individually again.
        self.is_fine = now_ns - self._looked > _LOOK_NS or now_ns - self._began > _TINY_NS
        self._ended = 0  # makes the next task begin a run

    def _begin_run(self, now_ns: int, epoch: int, position: int) -> None:
        """Begin a new run, after a pause or when the previous run is long enough."""
        self._end_run()
        self._numbers[_SPANS] = self._sums[_SPANS]
        self._run_began, self._run_rows = now_ns, -self._rows
        self._epoch, self._position = epoch, position

    def _end_run(self) -> None:
        row_count = self._run_rows + self._rows
        if row_count:
            self._span(LOAD, self._run_began, self._ended, self._position, NO_INDEX, row_count)

    def _add(self, load_ns: int, collate_ns: int, write_ns: int, row_count: int) -> None:
        sums = self._sums
        sums[_LOAD] += load_ns
        sums[_COLLATE] += collate_ns
        sums[_WRITE] += write_ns
        sums[_SAMPLES] += row_count
        _SUM_STRUCT.pack_into(self._numbers, 0, *sums, 0, 0)  # also resets the pending tiny tasks

    def started(self, began_ns: int) -> None:
        """Record the worker start-up span."""
        self._span(START, began_ns, perf_counter_ns(), 0, NO_INDEX, 0)
        self._numbers[_SPANS] = self._sums[_SPANS]

    def note_gil(self, share: float) -> None:
        """Record the share of loading time in which user code holds the GIL."""
        self._numbers[_GIL] = 1 + round(share * 1000)

    def note_draw(self) -> None:
        """Record that user code has drawn from a random generator that worker threads would share."""
        self._numbers[_DRAW] = 1

    # --- samples long enough to be timed one by one

    def _note_times(self, began_ns: int, position: int, indices: Sequence[Any], times: list[int]) -> None:
        numbers = self._numbers
        self._is_timed = True
        longest = max(times)
        if longest <= _LONG_NS and longest <= self._slow[0][0]:
            took = sum(times)
            numbers[_HISTOGRAM_AT + bucket_of(took // len(times))] += len(times)
            self._span(LOAD, began_ns, began_ns + took, position, _number(indices), len(times))
            return
        begin = now = began_ns
        short = 0  # how many short samples were combined since ``begin``
        for row, took in enumerate(times):
            numbers[_HISTOGRAM_AT + bucket_of(took)] += 1
            if took > self._slow[0][0]:
                self._note_slow(took, position + row, _number(indices, row), now + took)
            if took > _LONG_NS:
                if short:
                    self._span(LOAD, begin, now, position + row - short, _number(indices, row - short), short)
                    short = 0
                self._span(LOAD, now, now + took, position + row, _number(indices, row), 1)
                begin = now + took
            else:
                short += 1
            now += took
        if short:
            self._span(LOAD, begin, now, position + len(times) - short, _number(indices, len(times) - short), short)

    def _note_slow(self, took: int, position: int, index: int, end_ns: int) -> None:
        heapreplace(self._slow, (took, self._epoch, position, index, end_ns))
        flat = [number for one in self._slow for number in one]
        self._numbers[_SLOW_AT:_RING_AT] = array("q", flat)

    # --- spans

    def _ring_at(self, count: int) -> int:
        return _RING_AT + count % _RING * _SPAN_NUMBERS

    def _span(self, kind: int, begin_ns: int, end_ns: int, position: int, index: int, size: int) -> None:
        if not self._is_spanning:
            return
        count = self._sums[_SPANS]
        _SPAN.pack_into(self._numbers, 8 * self._ring_at(count), kind, begin_ns, end_ns, self._epoch, position, index, size)
        self._sums[_SPANS] = count + 1


def _taken_apart(busy_ns: int, split: Sequence[int]) -> tuple[int, int, int]:
    """Divide a busy time into load, collate and write in the proportions of ``split``."""
    load, collate, write = split
    whole = max(1, load + collate + write)
    load, collate = busy_ns * load // whole, busy_ns * collate // whole
    return load, collate, busy_ns - load - collate


def _number(indices: Sequence[Any], row: int = 0) -> int:
    """Return the index of a row, or ``NO_INDEX`` if it is not an integer that fits."""
    if row >= len(indices):
        return NO_INDEX
    index = indices[row]
    return index if type(index) is int and -1 << 62 < index < 1 << 62 else NO_INDEX


class Sums(NamedTuple):
    """The totals of a worker so far."""

    load_ns: int = 0
    collate_ns: int = 0
    write_ns: int = 0
    sample_count: int = 0
    retry_count: int = 0
    span_count: int = 0
    gil_share: float | None = None  # share of loading time with the GIL held; None: unknown
    is_drawing: bool = False  # whether user code draws from the global random generators


class RawSpan(NamedTuple):
    kind: int
    begin_ns: int
    end_ns: int
    epoch: int
    position: int
    first_index: int
    size: int


@final
class RecorderReader:
    """Reads the counters and spans; used by the engine. All methods raise ``ValueError`` once the status board is closed."""

    def __init__(self, numbers: Any, begin: int) -> None:
        """
        Args:
            numbers: the whole status board; a slice would keep a second reference to its memory.
            begin: where this recorder begins.
        """
        self._numbers = numbers
        self._begin = begin
        self._next = 0  # the first unread span

    def counters(self) -> bytes:
        """Return all numbers but the spans, for ``mirror_counters``. They count the spans that were taken."""
        numbers = array("q", self._part(0, COUNTER_NUMBERS))
        numbers[_SPANS] = self._next
        return numbers.tobytes()

    def sums(self) -> Sums:
        load, collate, write, samples, retries, spans, rows, busy, gil, draw, *split = self._part(0, _SPLIT + 3)
        if rows or busy:
            tiny = _taken_apart(busy, split)
            load, collate, write, samples = load + tiny[0], collate + tiny[1], write + tiny[2], samples + rows
        return Sums(load, collate, write, samples, retries, spans, (gil - 1) / 1000 if gil else None, bool(draw))

    def histogram(self) -> list[int]:
        counts = self._part(_HISTOGRAM_AT, _SLOW_AT)
        rows, busy, _, _, *split = self._part(_TINY_ROWS, _SPLIT + 3)
        if rows:
            counts[bucket_of(_taken_apart(busy, split)[_LOAD] // rows)] += rows
        return counts

    def slowest(self) -> list[Slow]:
        """Return the slowest samples, in no particular order."""
        numbers = self._part(_SLOW_AT, _RING_AT)
        rows = [numbers[at : at + _SLOW_NUMBERS] for at in range(0, len(numbers), _SLOW_NUMBERS)]
        return [(took, epoch, position, index, end) for took, epoch, position, index, end in rows if took]

    def copy(self) -> RecorderReader:
        """Return a snapshot without the spans, which later writes of the worker do not change."""
        now = self._numbers[self._begin : self._begin + _RING_AT]
        return RecorderReader(memoryview(now.tobytes()).cast(now.format), 0)

    def take_spans(self, *, is_last: bool = False) -> tuple[bytes, int]:
        """Return the unread spans, in the format of ``spans_of``, and how many were overwritten before they were read.

        Args:
            is_last: whether to include the latest span, which may still grow.
        """
        stop = self._numbers[self._begin + _SPANS] - (0 if is_last else 1)
        first = max(self._next, stop - _RING + 1)
        if first >= stop:
            return b"", 0
        begin, end = first % _RING, (stop - 1) % _RING + 1
        raw = self._ring(begin, end) if begin < end else self._ring(begin, _RING) + self._ring(0, end)
        # During the copy the worker may have overwritten the oldest spans.
        least = min(stop, max(first, self._numbers[self._begin + _SPANS] - _RING + 1))
        lost = least - self._next
        self._next = stop
        return raw[(least - first) * _SPAN.size :], lost

    def _ring(self, begin: int, stop: int) -> bytes:
        at = self._begin + _RING_AT
        return bytes(self._numbers[at + begin * _SPAN_NUMBERS : at + stop * _SPAN_NUMBERS])

    def _part(self, begin: int, stop: int) -> list[int]:
        numbers: list[int] = self._numbers[self._begin + begin : self._begin + stop].tolist()
        return numbers


def spans_of(raw: bytes) -> list[RawSpan]:
    """Decode the spans that ``RecorderReader.take_spans`` returned."""
    return [RawSpan(*numbers) for numbers in _SPAN.iter_unpack(raw)]


def span_count(raw: bytes) -> int:
    return len(raw) // _SPAN.size


def resume_counters(numbers: Any, begin: int, counters: bytes) -> None:
    """Set the counters that the next recorder at ``begin`` continues."""
    numbers[begin : begin + COUNTER_NUMBERS] = array("q", counters)


def mirror_counters(numbers: Any, begin: int, counters: bytes, spans: bytes, shift_ns: int) -> None:
    """Copy counters and new spans of a recorder on another machine, whose clock is ``shift_ns`` behind."""
    copied = array("q", counters)
    for at in range(_SLOW_AT, _RING_AT, _SLOW_NUMBERS):
        if copied[at]:
            copied[at + _SLOW_NUMBERS - 1] += shift_ns
    span_numbers = array("q", spans)
    count = len(span_numbers) // _SPAN_NUMBERS
    stop = copied[_SPANS]
    for row in range(count):
        one = span_numbers[row * _SPAN_NUMBERS : (row + 1) * _SPAN_NUMBERS]
        one[1] += shift_ns
        one[2] += shift_ns
        at = begin + _RING_AT + (stop - count + row) % _RING * _SPAN_NUMBERS
        numbers[at : at + _SPAN_NUMBERS] = one
    numbers[begin : begin + COUNTER_NUMBERS] = copied
