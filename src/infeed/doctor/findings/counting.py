"""How many workers would keep up with the loop."""

from __future__ import annotations

import math
from typing import Final

from infeed.doctor.evidence import LoaderSeen, Run

MOST_WORKERS: Final = 64
# Some room, because samples are not all alike.
_ROOM: Final = 1.1
# Where slow samples are what bounds it: the least number of workers that comes so close to the most that would be of use.
_ALMOST: Final = 1.05


def best_workers(run: Run, loader: LoaderSeen) -> int:
    """How many would load as fast as the loop works, as far as there are cores for what they compute."""
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
    epoch = max((epoch.batch_count for epoch in loader.epochs), default=1)
    return slow_s / max(1.0, apart, min(workers, epoch))
