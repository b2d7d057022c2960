"""Constructed traces: a small model of workers and a loop, so that pictures can be tested without a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from infeed.metrics.statistics import LOOP, Mark, Point, SlowSample, Span, Statistics, Trace, WorkerStatistics

MS = 1_000_000
STRANGE = "</script><b>&amp; \"quoted\" 'ünï' \u2028 日本 <!-- \x07 \\"


def uneven(rng: random.Random, mean_ms: float) -> int:
    return int(rng.lognormvariate(0, 0.5) * mean_ms * MS)


def make_trace(
    *,
    workers: int = 4,
    batches: int = 24,
    batch_size: int = 8,
    grain: int = 2,
    load_ms: float = 6,
    away_ms: float = 14,
    ahead: int = 3,
    start_ms: float = 60,
    kind: Literal["inline", "thread", "process"] = "process",
    seed: int = 7,
    load_time: Callable[[random.Random, float], int] = uneven,
    marks: tuple[Mark, ...] = (),
    diagnosis: str = "The loop waits for data 31 % of its time: more workers would help.",
    settings: dict[str, str] | None = None,
) -> Trace:
    """Returns a plausible run: workers take the next grain, the training loop takes batches in order."""
    rng = random.Random(seed)
    lanes: dict[int, list[Span]] = {worker: [] for worker in (*range(max(1, workers)), LOOP)}
    points = [Point(0, 0, 0, 0, 0, 0, workers, 0, 0, 0, 80_000_000, 0)]
    slow: list[SlowSample] = []
    is_inline = kind == "inline"
    free = [0 if is_inline else int(start_ms * MS * rng.uniform(0.8, 1.2)) for _ in lanes if _ != LOOP]
    if not is_inline:
        for worker, at in enumerate(free):
            lanes[worker].append(Span(worker, "start", 0, at, 0, 0, None, 0))
    now = waited = away = busy = 0
    taken: list[int] = []  # When the training loop took each batch.
    for batch in range(batches):
        ready = 0
        for position in range(batch * batch_size, (batch + 1) * batch_size, grain):
            worker = min(range(len(free)), key=free.__getitem__)
            may_begin = now if is_inline else taken[batch - ahead] if batch >= ahead else 0
            begin = max(free[worker], may_begin)
            times = [load_time(rng, load_ms) for _ in range(grain)]
            index = (position * 7919) % (batches * batch_size)
            slow += [SlowSample(0, position + k, index + k, ns / 1e9) for k, ns in enumerate(times)]
            loaded = begin + sum(times)
            written = loaded + sum(times) // 12
            lanes[worker] += [
                Span(worker, "load", begin, loaded, 0, position, index, grain),
                Span(worker, "write", loaded, written, 0, position, index, grain),
            ]
            busy += written - begin
            free[worker] = written
            ready = max(ready, written)
            now = written if is_inline else now
        deliver = int(0.4 * MS)
        got = max(now, ready) + deliver
        asked = lanes[LOOP][-1].end_ns if lanes[LOOP] else 0
        lanes[LOOP] += [
            Span(LOOP, "wait", asked, got - deliver, 0, batch, None, 1),
            Span(LOOP, "deliver", got - deliver, got, 0, batch, None, 1),
        ]
        taken.append(got)
        worked = int(away_ms * MS * rng.uniform(0.9, 1.1))
        lanes[LOOP].append(Span(LOOP, "away", got, got + worked, 0, batch, None, 1))
        waited += got - asked
        away += worked
        now = got + worked
        memory = 80_000_000 * max(1, workers) + 3_000_000 * batch
        samples = (batch + 1) * batch_size
        points.append(
            Point(
                now, batch + 1, samples, samples * 6 << 17, waited, away, workers, busy, busy * 9 // 10, 0, memory, 15_000_000
            )
        )
    times_s = sorted(one.seconds for one in slow)
    uppers = [2.0**k / 1e4 for k in range(16)]
    histogram = tuple(
        (upper, sum(1 for one in times_s if lower < one <= upper)) for lower, upper in zip([0.0, *uppers], uppers, strict=False)
    )
    statistics = Statistics(
        epoch=0,
        batch_count=batches,
        sample_count=batches * batch_size,
        byte_count=batches * batch_size * 602_112,
        waited_s=waited / 1e9,
        started_s=0 if is_inline else start_ms / 1e3,
        away_s=away / 1e9,
        deliver_s=batches * 0.4e-3,
        loads_by="__getitem__",
        has_collate_fn=False,
        kind=kind,
        is_auto=False,
        worker_count=workers,
        workers=tuple(_worker(worker, lanes[worker], now) for worker in range(workers)),
        core_count=8.0,
        batches_in_flight=3,
        bytes_in_flight=15_000_000,
        memory_limit=2 << 30,
        skipped_count=0,
        replaced_count=0,
        sample_times=_quantiles(times_s),
        histogram=histogram if times_s else (),
        slowest=tuple(sorted(slow, key=lambda one: -one.seconds)[:10]),
        diagnosis=diagnosis,
    )
    return Trace(
        began=1_760_000_000.0,
        statistics=statistics,
        spans=tuple(span for lane in lanes.values() for span in lane),
        marks=marks,
        points=tuple(points),
        lost_span_count=0,
        settings={"batch_size": str(batch_size), "num_workers": str(workers)} if settings is None else settings,
        machine={"processor": "8 cores", "memory": "31.3 GiB", "python": "3.12", "infeed": "0.1"},
    )


def empty_trace() -> Trace:
    """A loader that was never iterated over."""
    full = make_trace(batches=0, workers=0, kind="inline")
    statistics = with_statistics(full, sample_times={}, histogram=(), slowest=(), workers=()).statistics
    return replace(full, statistics=statistics, spans=(), points=(), settings={}, machine={})


def strange_trace() -> Trace:
    """Text that would be markup, or cannot be encoded, in all places."""
    marks = (
        Mark(50 * MS, 1, "bad sample", STRANGE * 4),
        Mark(100 * MS, LOOP, "failure", "$x^$ " + STRANGE),
        Mark(110 * MS, LOOP, "epoch", "\udcff of a path that is no text"),
    )
    trace = make_trace(diagnosis=STRANGE, marks=marks, settings={STRANGE: STRANGE * 5, "path": "\udcff"})
    return replace(trace, machine={"host": STRANGE})


def faulty_trace() -> Trace:
    """A long run in which a worker died."""
    marks = (
        Mark(2_300 * MS, 2, "death", "worker 2 (pid 1002) was killed by signal 9 (SIGKILL), perhaps for want of memory"),
        Mark(2_330 * MS, 2, "restart", "worker 2 was started again; 2 tasks were loaded again"),
        Mark(2_400 * MS, LOOP, "epoch", "epoch 1"),
    )
    return make_trace(batches=300, load_ms=7.5, marks=marks)


def untimed_trace() -> Trace:
    """Batches were delivered, but neither their times nor those of samples were recorded."""
    trace = with_statistics(make_trace(), sample_times={}, histogram=(), slowest=(), workers=())
    return replace(trace, spans=(), points=())


CASES: dict[str, Callable[[], Trace]] = {
    "short": make_trace,
    "faulty": faulty_trace,
    "tiny samples": lambda: make_trace(batches=600, batch_size=32, grain=4, load_ms=0.02, away_ms=0.4),
    "threads": lambda: make_trace(workers=1, kind="thread"),
    "inline": lambda: make_trace(workers=0, kind="inline", batches=12),
    "many workers": lambda: make_trace(workers=40, batch_size=64),
    "one batch": lambda: make_trace(batches=1),
    "untimed": untimed_trace,
    "strange": strange_trace,
    "empty": empty_trace,
}


def with_statistics(trace: Trace, **changes: Any) -> Trace:
    return replace(trace, statistics=replace(trace.statistics, **changes))


def _worker(worker: int, spans: list[Span], now: int) -> WorkerStatistics:
    seconds = {kind: sum(span.seconds for span in spans if span.kind == kind) for kind in ("load", "collate", "write")}
    return WorkerStatistics(
        worker=worker,
        pid=1000 + worker,
        is_alive=True,
        sample_count=sum(span.size for span in spans if span.kind == "load"),
        load_s=seconds["load"],
        collate_s=seconds["collate"],
        write_s=seconds["write"],
        alive_s=now / 1e9,
        cpu_s=seconds["load"] * 0.9,
        queued_s=0.0,
        memory_bytes=80_000_000,
        restart_count=0,
        retry_count=0,
    )


def _quantiles(times_s: list[float]) -> dict[str, float]:
    if not times_s:
        return {}
    pick = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: times_s[min(len(times_s) - 1, int(share * len(times_s)))] for name, share in pick.items()}
