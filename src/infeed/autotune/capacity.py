"""How many workers keep up with a training loop, and how many the CPU cores can use.

Pure arithmetic with the thresholds that ``statistics()``, the doctor and the tuner share.
"""

from __future__ import annotations

from math import ceil
from typing import Final

# Below the first wait share, the training loop does not wait for data in practice. From the second on, it is data-bound.
COMPUTE_BOUND_WAIT: Final = 0.05
DATA_BOUND_WAIT: Final = 0.1
# Work with a smaller CPU share is I/O-bound: it waits for a disk, a network or another process.
IO_BOUND_CPU: Final = 0.6
# Threads that together use more than this number of cores release the GIL.
GIL_CORES: Final = 1.2
# More workers than this are never proposed.
MOST_WORKERS: Final = 64
# Headroom above the average need, because sample times vary.
HEADROOM: Final = 1.1
# A cause of more than this share of the wait is the bottleneck.
MAIN_CAUSE: Final = 0.5


def is_io_bound(cpu_share: float) -> bool:
    """Return whether work with this CPU share waits for something other than a CPU core most of the time."""
    return cpu_share < IO_BOUND_CPU


def has_no_step(load: float, away: float) -> bool:
    """Return whether the training loop's own time is too short for any number of workers to hide the loading time."""
    return away * MOST_WORKERS < load


def workers_needed(load: float, away: float) -> int:
    """Return the number of workers that load as fast as the training loop consumes.

    Args:
        load: Time of one worker to load some batches.
        away: The training loop's own time for these batches, in the same unit.

    >>> workers_needed(0.2, 0.1), workers_needed(0.01, 0.1)
    (3, 1)
    """
    return max(1, ceil(HEADROOM * load / away)) if away else MOST_WORKERS


def workers_useful(cores: float, cpu_share: float) -> int:
    """Return the number of workers that use all cores; with more, they would queue for cores.

    >>> workers_useful(8, 1.0), workers_useful(8, 0.2)
    (8, 40)
    """
    return max(1, int(cores / max(cpu_share, 0.01)))
