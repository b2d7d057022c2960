"""Estimates the number of workers that keeps up with the training loop."""

from __future__ import annotations

import math
from typing import Final

from infeed.doctor.evidence import LoaderSeen, Run

MOST_WORKERS: Final = 64
# Headroom factor, because sample times vary.
_ROOM: Final = 1.1
# If slow samples are the bottleneck: take the fewest workers within this factor of the fastest useful count.
_ALMOST: Final = 1.05


def best_workers(run: Run, loader: LoaderSeen) -> int:
    """Return how many workers keep up with the training loop, limited by the CPU cores that loading needs."""
    probe = loader.probe
    away = loader.away_s / loader.batch_count
    most = min(MOST_WORKERS, max(1, int(run.core_count / max(loader.cpu_share, 0.05))))
    needed = math.ceil(_ROOM * loader.load_s / away) if away > loader.load_s / MOST_WORKERS else most
    best = max(1, min(needed, most)) if not loader.has_one_reader else 1
    if not probe.slow:
        return best

    def comes_s(workers: int) -> float:
        return max(away, loader.load_s / workers, slowest_s(loader, workers))

    return next(count for count in range(1, best + 1) if comes_s(count) <= _ALMOST * comes_s(best))


def slowest_s(loader: LoaderSeen, workers: int) -> float:
    """Return the minimum average time between two batches that slow samples impose.

    A batch takes at least as long as its slowest sample, and each worker has at most one batch in progress. Other prefetched
    batches are queued behind the slow one in the same worker. An epoch starts with no batches prefetched.
    """
    probe = loader.probe
    if not probe.slow:
        return 0.0
    slow_s = max(one.seconds for one in probe.slow)
    if loader.library == "torch":  # one worker loads the whole batch
        slow_s += (loader.rows - 1) * probe.median_s
    apart = probe.sample_count / (len(probe.slow) * loader.rows)  # batches from one slow sample to the next
    epoch = max((epoch.batch_count for epoch in loader.epochs), default=1)
    return slow_s / max(1.0, apart, min(workers, epoch))
