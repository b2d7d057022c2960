"""Workers in each other's way: threads of libraries, more in all than there are cores; and threads that wait for the GIL."""

from __future__ import annotations

from typing import Final, NamedTuple

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.finding import MOST_OF_IT, Finding, describe, way_s
from infeed.formatting import format_count, format_seconds

ONE_THREAD: Final = "threads_per_worker=1, which is the default"
# Of the run. With less, all that is wrong is how it looks.
_LEAST_COST: Final = 0.02

# Work that uses the processor for less of its time waits. Threads that together use more cores than this leave the GIL. Where
# loading by hand takes less of the time in which a batch comes, something else takes it; on a busy machine that is not exact.
_COMPUTES: Final = 0.6
_GIL_CORES: Final = 1.2
_GIL_LOAD: Final = 0.3


class _Crowd(NamedTuple):
    pools: dict[str, int]  # threads besides a worker's own, by library
    each: int
    total: int
    lost_s: float  # of what the loop waited, what it would not with one thread in each worker

    @property
    def cure(self) -> str:
        cures = ["cv2.setNumThreads(0) in worker_init_fn"] if "cv2" in self.pools else []
        if self.pools.keys() - {"cv2"}:
            cures.append("OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 in the environment")
        return "; ".join(cures)


def thread_pools(run: Run, loader: LoaderSeen) -> Finding | None:
    """Libraries use several threads in each worker, more in all than there are cores."""
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
    """If that is most of what the loop waits for: what to do about it in torch's workers. Else nothing."""
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
    """By what samples take by hand, with one thread; if none could be loaded, as if threads beyond the cores were all lost."""
    if not loader.is_load_known:
        return loader.waited_s * (1 - run.core_count / total)
    could_s = loader.load_s / min(loader.num_workers, run.core_count)
    comes_s = max(could_s, loader.away_s / max(1, loader.batch_count)) + way_s(loader)
    return min(loader.waited_s, max(0.0, loader.waited_s + loader.away_s - loader.batch_count * comes_s))


def may_hold_gil(run: Run, loader: LoaderSeen) -> bool:
    """Whether workers are threads that compute: how many can do so at the same time depends on who leaves the GIL."""
    return loader.kind == "thread" and run.has_gil and loader.is_load_known and loader.cpu_share >= _COMPUTES


def waits_for_gil(run: Run, loader: LoaderSeen) -> bool:
    """Whether several threads that compute use no more than one core, though there are others."""
    if not may_hold_gil(run, loader) or loader.num_workers < 2 or run.core_count < 2:
        return False
    if "worker='auto'" in loader.asked:
        return False  # infeed has tried both kinds
    comes_s = (loader.waited_s + loader.away_s) / max(1, loader.batch_count)
    return 0 < loader.own_cores < _GIL_CORES and loader.load_s >= _GIL_LOAD * comes_s
