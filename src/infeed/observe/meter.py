"""A loader's counters, through all its epochs and engines, as the record that the user gets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Final, final

from infeed.observe.gauge import Gauge, WorkerKind
from infeed.observe.gauges import Gauges
from infeed.observe.history import History
from infeed.observe.members import Reading
from infeed.observe.records import Mark, SlowSample, Span, Statistics, Times, Trace, WorkerStatistics
from infeed.observe.verdict import verdict_of
from infeed.scheduler.messages import WorkerId
from infeed.tuning.readings import Bound
from infeed.workers.board import Board
from infeed.workers.tape import BUCKETS, NO_INDEX, SLOWEST, Observe, Slow, bucket_end_ns

_NOTHING_KEPT: Final = "nothing is kept: observe='off'"
_QUANTILES: Final = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@final
class Meter:
    """Belongs to one loader."""

    def __init__(self, observe: Observe) -> None:
        self._observe: Observe = observe
        self._history = History()
        self._gauges = Gauges()
        self._began = time.time()
        self._began_ns = time.perf_counter_ns()

    def gauge(self, board: Board, workers: tuple[WorkerId, ...], kind: WorkerKind, memory_limit: int) -> Gauge:
        """For a new engine."""
        gauges = self._gauges
        with gauges.lock:
            # Of engines that are gone only the sums are of interest: one stands for all.
            closed = [gauge for gauge in gauges.all if gauge.is_closed]
            for gauge in closed[1:]:
                closed[0].absorb(gauge)
                gauges.all.remove(gauge)
            gauge = Gauge(self._history, gauges, board, workers, kind, self._observe, memory_limit)
            gauges.all.append(gauge)
            return gauge

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
    ) -> Statistics:
        """``memory_limit`` is what would hold if an epoch began now, where none has yet."""
        with self._gauges.lock:
            gauges = list(self._gauges.all)
            if gauges:
                memory_limit = gauges[-1].memory_limit
            if self._observe == "off":
                gauges = []
            latest = gauges[-1] if gauges else None
            flight = None if latest is None else latest.flight()
            outcomes: Counter[str] = sum((gauge.outcomes for gauge in gauges), Counter())
            # Each once, so that one figure does not contradict another: workers go on meanwhile.
            tapes = [{worker: gauge.members.read(worker) for worker in list(gauge.members.known)} for gauge in gauges]
            readings = [reading for tape in tapes for reading in tape.values()]
            histogram = [sum(column) for column in zip(*(one.histogram for one in readings), strict=True)] or [0] * BUCKETS
            slowest = sorted({slow for one in readings for slow in one.slowest}, reverse=True)[:SLOWEST]
            recent = self._history.past.recent([gauge.latest_slice() for gauge in gauges]) if gauges else None
            loops = [gauge.loop_times() for gauge in gauges]
            waited_ns = sum(one.waited_ns for one in loops)
            started_ns = sum(gauge.started_ns for gauge in gauges)
            statistics = Statistics(
                epoch=epoch,
                ended_count=sum(gauge.ended_count for gauge in gauges),
                batch_count=sum(gauge.batch_count for gauge in gauges),
                sample_count=sum(gauge.sample_count for gauge in gauges),
                byte_count=sum(gauge.byte_count for gauge in gauges),
                waited_s=waited_ns / 1e9,
                started_s=started_ns / 1e9,
                changeover_s=sum(gauge.changeover_ns for gauge in gauges) / 1e9,
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
                worker_count=0 if latest is None or latest.kind == "inline" else latest.members.count,
                workers=tuple(_workers(gauges, tapes)),
                core_count=core_count,
                batches_in_flight=0 if flight is None else flight.batch_count,
                bytes_in_flight=0 if flight is None else flight.nbytes,
                memory_limit=memory_limit,
                skipped_count=outcomes["skipped"],
                replaced_count=outcomes["replaced"],
                sample_times=Times(_quantiles(histogram, slowest[0][0] if slowest else 0)),
                histogram=tuple((bucket_end_ns(bucket) / 1e9, count) for bucket, count in enumerate(histogram) if count),
                slowest=tuple(_slow_sample(one, 0 if recent is None else recent.since_ns) for one in slowest),
                verdict="",
                most_workers=most_workers,
                recent=recent,
            )
        return replace(statistics, verdict=_NOTHING_KEPT if self._observe == "off" else verdict_of(statistics))

    def trace(self, statistics: Statistics, settings: Mapping[str, str], machine: Mapping[str, str]) -> Trace:
        """All that is known, for pictures. Times are from the making of the loader on."""
        for gauge in list(self._gauges.all):
            gauge.take_spans(is_last=True)
        began = self._began_ns
        history = self._history
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


def _workers(gauges: list[Gauge], tapes: list[dict[WorkerId, Reading]]) -> Iterable[WorkerStatistics]:
    """Workers of one number are one to the user, whichever engine they belonged to."""
    for worker in sorted({worker for tape in tapes for worker in tape}):
        own = [gauge for gauge, tape in zip(gauges, tapes, strict=True) if worker in tape]
        latest = own[-1].members[worker]
        sums = [tape[worker].sums for tape in tapes if worker in tape]
        usages = [gauge.members.usage(worker) for gauge in own]
        busy_ns = sum(one.load_ns + one.collate_ns + one.write_ns for one in sums)
        yield WorkerStatistics(
            worker=worker,
            pid=latest.pid,
            is_alive=bool(latest.since_ns),
            sample_count=sum(one.sample_count for one in sums),
            load_s=sum(one.load_ns for one in sums) / 1e9,
            collate_s=sum(one.collate_ns for one in sums) / 1e9,
            write_s=sum(one.write_ns for one in sums) / 1e9,
            # Who was let go may have had something to finish.
            alive_s=max(busy_ns, sum(gauge.members.alive_ns(worker) for gauge in own)) / 1e9,
            cpu_s=sum(one.cpu_ns for one in usages) / 1e9,
            queued_s=sum(one.queued_ns for one in usages) / 1e9,
            memory_bytes=usages[-1].memory_bytes,
            restart_count=sum(gauge.members[worker].restart_count for gauge in own),
            retry_count=sum(one.retry_count for one in sums),
            pending_s=max(gauge.members.pending_ns(worker) for gauge in own) / 1e9,
        )


def _slow_sample(slow: Slow, since_ns: int) -> SlowSample:
    took_ns, epoch, position, index, end_ns = slow
    recent_ns = min(took_ns, max(0, end_ns - since_ns))
    return SlowSample(epoch, position, None if index == NO_INDEX else index, took_ns / 1e9, recent_ns / 1e9)


def _quantiles(histogram: list[int], longest_ns: int) -> dict[str, float]:
    """Times below which so much of all samples are, to within a bucket."""
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
