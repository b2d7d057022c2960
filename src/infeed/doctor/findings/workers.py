"""How many workers there should be, and with how many threads."""

from __future__ import annotations

import math
from typing import Final

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.finding import Finding, describe
from infeed.doctor.findings.waiting import LEAST_LOAD_S, LEAST_SWITCHES, MOST_WORKERS, waits, waits_for_slow
from infeed.units import format_count, format_seconds

# A change is proposed if it saves at least this part of the time.
_GAIN: Final = 0.1
# Some room, because samples are not all alike.
_ROOM: Final = 1.1
# Where slow samples are what bounds it: the least number of workers that comes so close to the most that would be of use.
_ALMOST: Final = 1.05

# What a batch costs on its way from a worker. torch: a queue, two threads, a file descriptor for each tensor, new pages for its
# bytes on both sides; all its workers together bring 2.5 GB/s, however many they are. infeed: a message of some dozen bytes.
_TORCH_WAY_S: Final = 1e-3
_TORCH_WAY_RATE: Final = 2.5e9
_INFEED_WAY_S: Final = 1e-4


def num_workers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Another number of workers would do better."""
    probe = loader.probe
    if not run.has_own_loop or not probe.sample_count or not waits(loader):
        return None
    if loader.is_auto or loader.is_gathered:
        return None  # infeed decides; or nobody loads samples
    away, wait = loader.away_s / loader.batch_count, loader.waited_s / loader.batch_count
    best = best_workers(run, loader)
    # Some of the way is the loop's work and some is the workers'. All of it is counted, so that not too much is promised.
    way = way_s(loader)
    if best > loader.num_workers and loader.load_s >= max(LEAST_LOAD_S, way):
        # Where workers now bring less than they should, more of them will too.
        should = max(away, loader.load_s / max(1, loader.num_workers), slowest_s(loader, loader.num_workers))
        scale = max(1.0, (away + wait - way) / should) if loader.num_workers else 1.0
        after = max(away, scale * loader.load_s / best, slowest_s(loader, best)) + way
    elif loader.num_workers and loader.load_s < wait:
        best, after = 0, away + loader.load_s
    else:
        return None
    gain = 1 - after / (away + wait)
    if gain < _GAIN:
        return None
    # What slow samples take is theirs: without them fewer workers are needed.
    rest = 1 - loader.slow_share if waits_for_slow(loader) else 1.0
    return Finding(
        name="num-workers",
        title=f"num_workers={best} would be better than {loader.num_workers}: about {gain:.0%} less time",
        risk="time",
        cost=rest * gain * (loader.waited_s + loader.away_s) / run.seconds,
        evidence={
            "loading a batch": f"{format_seconds(loader.load_s)} by one worker",
            "the loop's own work": f"{format_seconds(away)} a batch",
            **({"the way from a worker": f"about {format_seconds(way)} a batch"} if best else {}),
            "cores": f"{run.core_count:g}",
            "why": _why(loader, best),
        },
        cure={
            "torch": f"num_workers={best}" + (", persistent_workers=True" if best else ""),
            "infeed": f"num_workers={best}",
        },
        loader=describe(loader),
    )


def _why(loader: LoaderSeen, best: int) -> str:
    """What speaks for this number."""
    if not best:
        return "loading is cheaper than what workers cost"
    away, bound = loader.away_s / loader.batch_count, slowest_s(loader, best)
    if bound > max(away, loader.load_s / best):
        return f"more would wait for slow samples: because of them a batch comes every {format_seconds(bound)} at best"
    if loader.load_s / best <= away:
        return "enough to keep up with the loop"
    if loader.has_one_reader:
        return "the stream does not share itself among workers, so that more would not help"
    return "the most that is ever proposed" if best == MOST_WORKERS else "as many as there are processors for"


def way_s(loader: LoaderSeen) -> float:
    """What a batch costs on its way from a worker to the loop, besides being loaded."""
    if loader.library == "torch":
        return _TORCH_WAY_S + loader.batch_bytes / _TORCH_WAY_RATE
    return _INFEED_WAY_S


def best_workers(run: Run, loader: LoaderSeen) -> int:
    """How many would load as fast as the loop works, as far as there are cores for what they compute."""
    probe = loader.probe
    away = loader.away_s / loader.batch_count
    # One that never gives the processor up by itself was only interrupted by others.
    is_waiting = probe.sample_s > 0 and (probe.switches is None or probe.switches >= LEAST_SWITCHES)
    share = min(1.0, max(probe.cpu_s / probe.sample_s, 0.05)) if is_waiting else 1.0
    most = min(MOST_WORKERS, max(1, int(run.core_count / share)))
    needed = math.ceil(_ROOM * loader.load_s / away) if away > loader.load_s / MOST_WORKERS else most
    best = max(1, min(needed, most)) if not loader.has_one_reader else 1
    if not probe.slow:
        return best

    def comes_s(workers: int) -> float:
        return max(away, loader.load_s / workers, slowest_s(loader, workers))

    return next(count for count in range(1, best + 1) if comes_s(count) <= _ALMOST * comes_s(best))


def slowest_s(loader: LoaderSeen, workers: int) -> float:
    """What lies between two batches at least, on average, because of slow samples.

    No batch comes sooner after it was begun than its slowest sample takes, and no more than one for each worker are begun. What
    else is ahead of the loop lies behind the slow one, in the queue of the same worker. An epoch begins with nothing ahead.
    """
    probe = loader.probe
    if not probe.slow:
        return 0.0
    slow_s = max(one.seconds for one in probe.slow)
    if loader.library == "torch":  # where one worker loads the whole batch
        slow_s += (loader.rows - 1) * probe.median_s
    apart = probe.sample_count / (len(probe.slow) * loader.rows)  # batches, from one with a slow sample to the next
    epoch = max((len(epoch.waits) + 1 for epoch in loader.epochs), default=1)
    return slow_s / max(1.0, apart, min(workers, epoch))


def thread_pools(run: Run, loader: LoaderSeen) -> Finding | None:
    """Libraries use several threads in each worker, more in all than there are cores."""
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
    who = ", ".join(sorted(pools))
    use = "uses" if len(pools) == 1 else "use"
    cures = ["cv2.setNumThreads(0) in worker_init_fn"] if "cv2" in pools else []
    if pools.keys() - {"cv2"}:
        cures.append("OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 in the environment")
    return Finding(
        name="thread-pools",
        title=f"{who} {use} {each} threads in each worker: {total} for {format_count(run.core_count, 'core')}",
        risk="time",
        # What is beyond the cores only takes turns; how much that costs depends on the library, half is a guess in the middle.
        cost=(1 - run.core_count / total) * 0.5,
        evidence={"threads at work": ", ".join(f"{name}: {count} besides the worker's own" for name, count in pools.items())},
        cure={
            "torch": "; ".join(cures),
            "infeed": "threads_per_worker=1, which is the default",
        },
        loader=describe(loader),
    )
