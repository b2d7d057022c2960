"""The history of a loader: spans, marks, points and slices, each within a limit."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from infeed.metrics.recent import Slices
from infeed.metrics.statistics import Mark, Point, Span, SpanKind
from infeed.scheduler.messages import WorkerId
from infeed.workers import recorder
from infeed.workers.recorder import NO_INDEX, RawSpan

# Limits of the history. It keeps the latest spans and marks; when there are too many points, it drops every other one.
_SPANS_KEPT: Final = 100_000
_LOOP_SPANS_KEPT: Final = 20_000
_MARKS_KEPT: Final = 2_000
_POINTS_KEPT: Final = 1_000

_KINDS: Final[dict[int, SpanKind]] = {
    recorder.LOAD: "load",
    recorder.COLLATE: "collate",
    recorder.WRITE: "write",
    recorder.START: "start",
}


@final
class History:
    """Spans, marks and points of all engines of a loader. Times are those of ``perf_counter_ns``."""

    def __init__(self) -> None:
        self._loop_spans: deque[Span] = deque(maxlen=_LOOP_SPANS_KEPT)
        self._recorded: deque[tuple[WorkerId, bytes]] = deque()  # raw spans of workers, decoded only in `spans`
        self._span_count = 0
        self.marks: deque[Mark] = deque(maxlen=_MARKS_KEPT)
        self.points: list[Point] = []
        self.past = Slices()
        self.lost_span_count = 0
        self._stride = 1  # keep one point out of this many
        self._point_count = 0

    def spans(self) -> list[Span]:
        # Copied first: the training loop's thread may append meanwhile.
        recorded, loop = list(self._recorded), list(self._loop_spans)
        return [*(_worker_span(worker, one) for worker, raw in recorded for one in recorder.spans_of(raw)), *loop]

    def add_spans(self, spans: list[Span]) -> None:
        """Add spans of the training loop."""
        self.lost_span_count += max(0, len(self._loop_spans) + len(spans) - _LOOP_SPANS_KEPT)
        self._loop_spans.extend(spans)

    def add_recorded(self, worker: WorkerId, raw: bytes, lost_count: int) -> None:
        """Add the raw spans of a worker, and the number of spans that it overwrote before they were read."""
        self._recorded.append((worker, raw))
        self._span_count += recorder.span_count(raw)
        self.lost_span_count += lost_count
        while self._span_count > _SPANS_KEPT:
            count = recorder.span_count(self._recorded.popleft()[1])
            self._span_count -= count
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
