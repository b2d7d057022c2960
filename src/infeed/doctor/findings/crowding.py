"""Contention between workers: library thread pools with more threads than CPU cores, and threads that wait for the GIL."""

from __future__ import annotations

from typing import Final, NamedTuple

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.finding import MOST_OF_IT, Finding, describe, way_s
from infeed.formatting import format_count, format_seconds

ONE_THREAD: Final = "threads_per_worker=1, which is the default"
# Reporting threshold, as a share of the run: below it the extra threads do no harm.
_LEAST_COST: Final = 0.02

# _COMPUTES: loading below this CPU share is I/O-bound. _GIL_CORES: threads that use more cores in total release the GIL.
# _GIL_LOAD: if loading takes less than this share of the time between batches, something else is the bottleneck; the
# comparison is inexact on a busy machine.
_COMPUTES: Final = 0.6
_GIL_CORES: Final = 1.2
_GIL_LOAD: Final = 0.3


class _Crowd(NamedTuple):
    pools: dict[str, int]  # threads besides the worker's main thread, by library
    each: int
    total: int
    lost_s: float  # the part of the wait that one thread per worker would save

    @property
    def cure(self) -> str:
        cures = ["cv2.setNumThreads(0) in worker_init_fn"] if "cv2" in self.pools else []
        if self.pools.keys() - {"cv2"}:
            cures.append("OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 in the environment")
        return "; ".join(cures)


def thread_pools(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that libraries use several threads in each worker, more in total than CPU cores."""
    crowd = _find_crowd(run, loader)
    if crowd is None or crowd.lost_s <= _LEAST_COST * run.seconds:
        return None
    who = f"{', '.join(sorted(crowd.pools))} {'uses' if len(crowd.pools) == 1 else 'use'}"
    evidence = {
        "threads at work": ", ".join(f"{name}: {count} besides the worker's own" for name, count in crowd.pools.items())
    }
    if loader.is_load_known and loader.batch_count:
        comes_s = (loader.waited_s + loader.away_s) / loader.batch_count
        workers = format_count(loader.num_workers, "worker")
        alone = f"{format_seconds(loader.load_s)} by one worker that has one thread"
        evidence["a batch"] = f"{alone}; from {workers} one came every {format_seconds(comes_s)}"
    return Finding(
        name="thread-pools",
        title=f"{who} {crowd.each} threads in each worker: {crowd.total} for {format_count(run.core_count, 'core')}",
        risk="time",
        cost=crowd.lost_s / run.seconds,
        evidence=evidence,
        cure={"torch": crowd.cure, "infeed": ONE_THREAD},
        loader=describe(loader),
    )


def waits_for_pools(run: Run, loader: LoaderSeen) -> str:
    """Return the fix for torch's workers if thread pools are the bottleneck, else an empty string."""
    crowd = _find_crowd(run, loader)
    return crowd.cure if crowd is not None and crowd.lost_s >= MOST_OF_IT * loader.waited_s > 0 else ""


def _find_crowd(run: Run, loader: LoaderSeen) -> _Crowd | None:
    if loader.kind != "process":
        return None
    pools: dict[str, int] = {}
    for worker in run.workers_of(loader):
        for name, count in worker.pools.items():
            pools[name] = max(pools.get(name, 0), count)
    each = 1 + sum(pools.values())
    total = loader.num_workers * each
    if not pools or total <= run.core_count:
        return None
    return _Crowd(pools, each, total, _lost_s(run, loader, total))


def _lost_s(run: Run, loader: LoaderSeen, total: int) -> float:
    """Estimate the lost time from the probe with one thread; without a probe, count threads beyond the cores as lost."""
    if not loader.is_load_known:
        return loader.waited_s * (1 - run.core_count / total)
    could_s = loader.load_s / min(loader.num_workers, run.core_count)
    comes_s = max(could_s, loader.away_s / max(1, loader.batch_count)) + way_s(loader)
    return min(loader.waited_s, max(0.0, loader.waited_s + loader.away_s - loader.batch_count * comes_s))


def may_hold_gil(run: Run, loader: LoaderSeen) -> bool:
    """Whether workers are CPU-bound threads; they run in parallel only as far as the code releases the GIL."""
    return loader.kind == "thread" and run.has_gil and loader.is_load_known and loader.cpu_share >= _COMPUTES


def waits_for_gil(run: Run, loader: LoaderSeen) -> bool:
    """Whether several CPU-bound threads use no more than about one core although more are available."""
    if not may_hold_gil(run, loader) or loader.num_workers < 2 or run.core_count < 2:
        return False
    if "worker='auto'" in loader.asked:
        return False  # infeed has measured both kinds
    comes_s = (loader.waited_s + loader.away_s) / max(1, loader.batch_count)
    return 0 < loader.own_cores < _GIL_CORES and loader.load_s >= _GIL_LOAD * comes_s
