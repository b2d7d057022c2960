"""The limits of a training loop, the number of workers that keeps up with it, and the number that the CPU cores can use.

Pure arithmetic with one set of thresholds. ``statistics()``, the report, the doctor, the bench and the tuner all decide with
it, each from its own evidence: counters inside infeed's workers, waits and probed samples of any loader, measured throughput.
"""

from __future__ import annotations

from math import ceil
from typing import Final, Literal, TypeAlias

WorkerKind: TypeAlias = Literal["inline", "thread", "process"]
ParallelKind: TypeAlias = Literal["thread", "process"]
State: TypeAlias = Literal["warming up", "compute-bound", "balanced", "data-bound"]

# Below the first wait share, the training loop does not wait for data in practice. From the second on, it is data-bound.
COMPUTE_BOUND_WAIT: Final = 0.05
DATA_BOUND_WAIT: Final = 0.1
# With fewer batches a diagnosis would be a guess.
LEAST_BATCHES: Final = 4
# A cause of more than this share of the wait is the bottleneck.
MAIN_CAUSE: Final = 0.5
# If workers are busy for a smaller share of their time, their number is not the bottleneck.
BUSY: Final = 0.6
# The same, if their time is not measured but estimated from single samples, which omits what workers cost each other.
ESTIMATED_BUSY: Final = 0.5
# No core is free if workers use this share of all cores: the training loop uses some too.
BUSY_CORES: Final = 0.5
# Work with a smaller CPU share is I/O-bound: it waits for a disk, a network or another process.
IO_BOUND_CPU: Final = 0.6
# Threads that together use more than this number of cores release the GIL.
GIL_CORES: Final = 1.2
# More workers than this are never proposed or measured. I/O-bound work gains from more workers than CPU cores, regardless of
# the number of cores.
MOST_WORKERS: Final = 64
# A sample is slow if it takes this many times the median, and at least this many seconds. Slow samples are reported from this
# share of the wait, or of the loading time.
SLOW_TIMES: Final = 20
SLOW_S: Final = 0.005
SLOW_SHARE: Final = 0.1
# Headroom above the average need, because sample times vary.
HEADROOM: Final = 1.15
# The best number of workers is the fewest that reach this share of the best rate: workers cost memory, and runs differ.
ENOUGH: Final = 0.97
# CPU shares are measured values: this fraction of a missing worker counts as a worker.
_ROUNDING: Final = 0.1


def state_of(wait_share: float) -> State:
    """Return the state of a run from the share of the time in which the training loop waits."""
    if wait_share < COMPUTE_BOUND_WAIT:
        return "compute-bound"
    return "balanced" if wait_share < DATA_BOUND_WAIT else "data-bound"


def is_io_bound(cpu_share: float) -> bool:
    """Return whether work with this CPU share waits for something other than a CPU core most of the time."""
    return cpu_share < IO_BOUND_CPU


def slow_s(median_s: float) -> float:
    """Return from which time on a sample is slow.

    >>> slow_s(0.0001), slow_s(0.5)
    (0.005, 10.0)
    """
    return max(SLOW_S, SLOW_TIMES * median_s)


def may_queue_for_gil(kind: str, used_cores: float, cores: float, *, has_gil: bool) -> bool:
    """Return whether workers are threads that together use about one of several CPU cores, as if the GIL allowed no more."""
    return kind == "thread" and has_gil and cores > 1 and used_cores < GIL_CORES


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
    return max(1, int(cores / max(cpu_share, 0.01) + _ROUNDING))


def workers_best(load: float, away: float, cores: float, cpu_share: float) -> int:
    """Return the number of workers that keep up with the training loop, or the most that the cores can use.

    >>> workers_best(0.2, 0.1, 8, 1.0), workers_best(2.0, 0.1, 8, 1.0), workers_best(1.0, 0.0, 8, 0.02)
    (3, 8, 64)
    """
    most = min(MOST_WORKERS, workers_useful(cores, cpu_share))
    return most if has_no_step(load, away) else min(workers_needed(load, away), most)
