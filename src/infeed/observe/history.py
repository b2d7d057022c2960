"""What happened when, for as long as anybody may want to see it: the latest, and no more than fits."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from infeed.observe.recent import Past
from infeed.observe.records import Mark, Point, Span, SpanKind
from infeed.scheduler.messages import WorkerId
from infeed.workers import tape
from infeed.workers.tape import NO_INDEX, RawSpan

# Spans, marks and points that are kept. Of spans the latest; of points, when there are too many, every other is forgotten.
_SPANS_KEPT: Final = 100_000
_LOOP_SPANS_KEPT: Final = 20_000
_MARKS_KEPT: Final = 2_000
_POINTS_KEPT: Final = 1_000

_KINDS: Final[dict[int, SpanKind]] = {tape.LOAD: "load", tape.COLLATE: "collate", tape.WRITE: "write", tape.START: "start"}


@final
class History:
    """Of all engines of a loader. Times are those of ``perf_counter_ns``."""

    def __init__(self) -> None:
        self._loop_spans: deque[Span] = deque(maxlen=_LOOP_SPANS_KEPT)
        self._tapes: deque[tuple[WorkerId, bytes]] = deque()  # as workers wrote them: read when somebody wants to see them
        self._tape_count = 0
        self.marks: deque[Mark] = deque(maxlen=_MARKS_KEPT)
        self.points: list[Point] = []
        self.past = Past()
        self.lost_span_count = 0
        self._stride = 1  # of so many points one is kept
        self._point_count = 0

    def spans(self) -> list[Span]:
        # Copied at once: the loop's thread may go on meanwhile.
        tapes, loop = list(self._tapes), list(self._loop_spans)
        return [*(_worker_span(worker, one) for worker, raw in tapes for one in tape.spans_of(raw)), *loop]

    def add_spans(self, spans: list[Span]) -> None:
        """Of the loop."""
        self.lost_span_count += max(0, len(self._loop_spans) + len(spans) - _LOOP_SPANS_KEPT)
        self._loop_spans.extend(spans)

    def add_tape(self, worker: WorkerId, raw: bytes, lost_count: int) -> None:
        """Of a worker, with how many it has overwritten."""
        self._tapes.append((worker, raw))
        self._tape_count += tape.span_count(raw)
        self.lost_span_count += lost_count
        while self._tape_count > _SPANS_KEPT:
            count = tape.span_count(self._tapes.popleft()[1])
            self._tape_count -= count
            self.lost_span_count += count

    def add_point(self, point: Point) -> None:
        self._point_count += 1
        if self._point_count % self._stride:
            return
        self.points.append(point)
        if len(self.points) >= _POINTS_KEPT:
            del self.points[::2]
            self._stride *= 2


def _worker_span(worker: WorkerId, raw: RawSpan) -> Span:
    index = None if raw.first_index == NO_INDEX else raw.first_index
    return Span(worker, _KINDS.get(raw.kind, "load"), raw.begin_ns, raw.end_ns, raw.epoch, raw.position, index, raw.size)
