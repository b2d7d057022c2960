"""What a worker did, in numbers that the other side reads when it likes: sums, how long samples took, the latest spans.

A tape lies behind the worker's cell on the board (see ``board.py``). Only the worker writes, and a worker that is started again
goes on where its predecessor stopped. It must cost less than a hundredth of the smallest task, so a task is timed with a lap
counter (one look at the clock for each of load, collate, write), and what is short is put together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heapreplace
from struct import Struct
from time import perf_counter_ns
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final


@final
class NullRecorder:
    """In place of a tape, where nothing is to be kept."""

    is_fine = False

    def begin(self, now_ns: int, epoch: int, position: int) -> None: ...

    def loaded(self, position: int, indices: Sequence[Any], times: list[int] | None = None) -> None: ...

    def collated(self) -> None: ...

    def written(self) -> None: ...

    def retried(self) -> None: ...

    def end(self, row_count: int, now_ns: int) -> None: ...

    def failed(self, now_ns: int) -> None: ...

    def flush(self) -> None: ...

    def started(self, began_ns: int) -> None: ...

    def note_gil(self, share: float) -> None: ...

    def note_draw(self) -> None: ...


# What a worker keeps of what it does: spans of time and sums, sums alone, or nothing.
Observe: TypeAlias = Literal["timeline", "counters", "off"]

# Sums, in this order, at the beginning. Of tiny tasks only how many samples they had and what they took, until they are
# entered: the reader takes that apart by the split of one that was looked at.
_LOAD, _COLLATE, _WRITE, _SAMPLES, _RETRIES, _SPANS, _TINY_ROWS, _TINY_BUSY, _GIL, _DRAW, _SPLIT = range(11)
_SUMS: Final = 16
# Two buckets for each doubling of a sample's time, from a quarter of a microsecond to twenty minutes.
BUCKETS: Final = 64
_LEAST_BITS: Final = 9
# The slowest samples: nanoseconds, epoch, position, index, when it was there.
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
RECORDER_NUMBERS: Final = _RING_AT + _RING * _SPAN_NUMBERS
_SUM_STRUCT: Final = Struct("8q")
_SPLIT_STRUCT: Final = Struct("3q")

# Kinds of spans.
LOAD, COLLATE, WRITE, START = 1, 2, 3, 4
NO_INDEX: Final = -1 << 63  # the first sample has none, or one that is no number

# A sample that takes longer than this has a span of its own...
_LONG_NS: Final = 100_000
# ...and so have tasks that take longer than this: to look at the parts of one costs some microseconds.
_TINY_NS: Final = 1_000_000
# What is shorter is put together, up to this, if there is no pause between; and one in so long a time is looked at.
_RUN_NS: Final = 2_000_000
_PAUSE_NS: Final = 50_000
_LOOK_NS: Final = 10_000_000


def bucket_of(ns: int) -> int:
    """Which bucket of the histogram a time is in."""
    bits = ns.bit_length()
    if bits < _LEAST_BITS:
        return 0
    return min(BUCKETS - 1, 2 * (bits - _LEAST_BITS) + (ns >> (bits - 2) & 1))


def bucket_end_ns(bucket: int) -> int:
    """Times in a bucket are shorter than this."""
    bits, is_upper = divmod(bucket, 2)
    return 1 << (bits + _LEAST_BITS) if is_upper else 3 << (bits + _LEAST_BITS - 2)


@final
class Recorder:
    """The worker's side."""

    __slots__ = (
        "_began", "_busy", "_ended", "_entered", "_epoch", "_is_spanning", "_is_timed", "_laps", "_last", "_looked", "_numbers",
        "_position", "_rows", "_run_began", "_run_rows", "_slow", "_split", "_sums", "_task_split", "is_fine",
    )  # fmt: skip

    def __init__(self, numbers: Any = None, *, is_spanning: bool = True) -> None:
        """
        Args:
            numbers: where to write; by default somewhere that nobody reads.
            is_spanning: whether spans are kept, and not only sums.
        """
        self._numbers = memoryview(array("q", bytes(8 * RECORDER_NUMBERS))) if numbers is None else numbers
        numbers = self._numbers
        self._is_spanning = is_spanning
        self._sums: list[int] = list(numbers[: _SPANS + 1])
        self._split: Sequence[int] = numbers[_SPLIT : _SPLIT + 3].tolist()  # load, collate, write: of the latest tiny one
        self._busy, self._rows = numbers[_TINY_BUSY], numbers[_TINY_ROWS]  # of tiny tasks that are not in the sums yet
        rows = (tuple(numbers[at : at + _SLOW_NUMBERS]) for at in range(_SLOW_AT, _RING_AT, _SLOW_NUMBERS))
        self._slow = list(rows)  # a heap, the quickest of the slowest first
        heapify(self._slow)
        self._began = self._last = self._ended = 0
        self._epoch = self._position = 0
        self._is_timed = False
        self._laps: list[tuple[int, int, int, int, int, int]] = []  # spans of this task, if it gets any
        # Whether laps of this task are wanted. Tiny tasks of samples that are not looked at one by one are put together, and of
        # one in ten milliseconds laps are taken: what the others did with their time is what that one did with its own.
        self.is_fine = True
        self._task_split = [0, 0, 0]  # load, collate, write: of this task
        self._entered = self._looked = 0  # when they were last entered, and when the latest that was looked at ended
        self._run_began = 0
        # Of the run, those that are in the sums already; less those that are not, and belong to the run before.
        self._run_rows = 0
        if self._rows or self._busy:  # of who was here before
            self._run_rows = -self._rows
            self._enter(0)
            self.is_fine = True

    # --- a task

    def begin(self, now_ns: int, epoch: int, position: int) -> None:
        """A task begins."""
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
        """The dataset has given these samples; ``times`` is what each took, if that was looked at."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_LOAD] += now - last
        if times:
            self._note_times(now - sum(times), position, indices, times)
        elif now - last > _LONG_NS:
            self._laps.append((LOAD, last, now, position, _number(indices), len(indices)))

    def collated(self) -> None:
        """Samples have been made a batch."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_COLLATE] += now - last
        if now - last > _LONG_NS:
            self._laps.append((COLLATE, last, now, self._position, NO_INDEX, 0))

    def written(self) -> None:
        """Samples are in the slot."""
        now = perf_counter_ns()
        last, self._last = self._last, now
        self._task_split[_WRITE] += now - last
        if now - last > _LONG_NS:
            self._laps.append((WRITE, last, now, self._position, NO_INDEX, 0))

    def retried(self) -> None:
        """A sample raised and is asked for again."""
        self._sums[_RETRIES] += 1
        self._numbers[_RETRIES] = self._sums[_RETRIES]

    def end(self, row_count: int, now_ns: int) -> None:
        """The task has been done, with so many samples."""
        self._ended = now_ns
        if not self.is_fine:
            numbers = self._numbers
            numbers[_TINY_ROWS] = self._rows = self._rows + row_count
            numbers[_TINY_BUSY] = self._busy = self._busy + now_ns - self._began
            if now_ns - self._entered > _RUN_NS:
                self._enter(now_ns)
            return
        load, collate, write = self._task_split
        if row_count and not self._is_timed:
            # Too short to be looked at one by one: each took what they took on average.
            self._numbers[_HISTOGRAM_AT + bucket_of(load // row_count)] += row_count
        is_tiny = now_ns - self._began < _TINY_NS and not self._is_timed
        if not is_tiny:
            if not self._laps and not self._is_timed:
                self._laps.append((LOAD, self._began, now_ns, self._position, NO_INDEX, row_count))
            for lap in self._laps:
                self._span(*lap)
        self._add(load, collate, write, row_count)
        # One without samples is none to judge others by: it wrote what another had loaded.
        if is_tiny and row_count and load + collate + write:
            self.is_fine = False
            self._split = (load, collate, write)
            _SPLIT_STRUCT.pack_into(self._numbers, 8 * _SPLIT, *self._split)
            self._run_began, self._run_rows = self._began, row_count
            self._entered = self._looked = now_ns

    def failed(self, now_ns: int) -> None:
        """User code raised, so nothing came of the task but what it took."""
        if self.is_fine:
            self._task_split[_LOAD] += now_ns - self._last
        self.end(0, now_ns)

    def flush(self) -> None:
        """Enter tiny tasks that were put together; the next one is looked at by itself."""
        if not self.is_fine:
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
        # Who took longer than they may is not tiny any more.
        self.is_fine = now_ns - self._looked > _LOOK_NS or now_ns - self._began > _TINY_NS
        self._ended = 0  # so that the next begins a run

    def _begin_run(self, now_ns: int, epoch: int, position: int) -> None:
        """There was a pause, or the run was long enough."""
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
        _SUM_STRUCT.pack_into(self._numbers, 0, *sums, 0, 0)  # at once, with those of tiny tasks

    def started(self, began_ns: int) -> None:
        """The worker is ready."""
        self._span(START, began_ns, perf_counter_ns(), 0, NO_INDEX, 0)
        self._numbers[_SPANS] = self._sums[_SPANS]

    def note_gil(self, share: float) -> None:
        """How much of the time user code holds the GIL."""
        self._numbers[_GIL] = 1 + round(share * 1000)

    def note_draw(self) -> None:
        """User code has drawn from a generator that threads would share."""
        self._numbers[_DRAW] = 1

    # --- samples that are long enough to be looked at one by one

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
        short = 0  # how many have been put together since ``begin``
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
    """Load, collate and write, in the proportions of another task."""
    load, collate, write = split
    whole = max(1, load + collate + write)
    load, collate = busy_ns * load // whole, busy_ns * collate // whole
    return load, collate, busy_ns - load - collate


def _number(indices: Sequence[Any], row: int = 0) -> int:
    """An index as a number that fits, if it is one."""
    if row >= len(indices):
        return NO_INDEX
    index = indices[row]
    return index if type(index) is int and -1 << 62 < index < 1 << 62 else NO_INDEX


class Sums(NamedTuple):
    """What a worker has done so far."""

    load_ns: int = 0
    collate_ns: int = 0
    write_ns: int = 0
    sample_count: int = 0
    retry_count: int = 0
    span_count: int = 0
    gil_share: float | None = None  # of loading; None: not known
    is_drawing: bool = False  # from the global generators


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
    """The engine's side. After the board was closed, every method raises ``ValueError``."""

    def __init__(self, numbers: Any, begin: int) -> None:
        """``numbers`` is the whole board, so that nothing else holds on to its memory; this tape begins at ``begin``."""
        self._numbers = numbers
        self._begin = begin
        self._next = 0  # the first span that was not read yet

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
        """The samples that took longest."""
        numbers = self._part(_SLOW_AT, _RING_AT)
        rows = [numbers[at : at + _SLOW_NUMBERS] for at in range(0, len(numbers), _SLOW_NUMBERS)]
        return [(took, epoch, position, index, end) for took, epoch, position, index, end in rows if took]

    def copy(self) -> RecorderReader:
        """Of what is there now, without the spans; it stays as it is, whatever the worker does."""
        now = self._numbers[self._begin : self._begin + _RING_AT]
        return RecorderReader(memoryview(now.tobytes()).cast(now.format), 0)

    def take_spans(self, *, is_last: bool = False) -> tuple[bytes, int]:
        """Spans that were not taken yet, as ``spans_of`` reads them, and how many were overwritten before they could be.

        Args:
            is_last: with the latest one, which may still become longer.
        """
        stop = self._numbers[self._begin + _SPANS] - (0 if is_last else 1)
        first = max(self._next, stop - _RING + 1)
        if first >= stop:
            return b"", 0
        begin, end = first % _RING, (stop - 1) % _RING + 1
        raw = self._ring(begin, end) if begin < end else self._ring(begin, _RING) + self._ring(0, end)
        # While it was copied the worker may have gone on, over the oldest.
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
    """Spans that were taken from a tape."""
    return [RawSpan(*numbers) for numbers in _SPAN.iter_unpack(raw)]


def span_count(raw: bytes) -> int:
    return len(raw) // _SPAN.size
