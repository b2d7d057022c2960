"""CPU time that the main process spends on a batch, from 1 to 64 workers."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from benchmarks.drive import Run
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

BATCH_SIZE: Final = 8
_COUNTS: Final = (1, 2, 8, 64)


class Waiting:
    """Sleeps, as for I/O, so that many workers fit on few cores."""

    def __init__(self, length: int, wait_s: float) -> None:
        self._length = length
        self._wait_s = wait_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self._wait_s)
        return np.zeros(16, dtype=np.float32), index


def run(library: str, parameters: Parameters) -> Outcome:
    metrics: dict[str, float] = {}
    detail: dict[str, float] = {}
    for workers in parameters["worker_counts"]:
        # More workers load more batches, so that each count is measured for several seconds.
        batch_count = min(max(parameters["least_batches"], 100 * workers), parameters["most_batches"])
        dataset = Waiting(batch_count * BATCH_SIZE, parameters["wait_s"])
        loading = Run(library, LoaderSpec(dataset, BATCH_SIZE, num_workers=workers))
        loading.checked_epoch()
        cpu_before = time.process_time()
        elapsed = loading.epoch_s()
        cpu_us = (time.process_time() - cpu_before) * 1e6 / batch_count
        figures = loading.close()
        metrics[f"cpu_us_{workers}"] = cpu_us
        detail[f"wall_us_{workers}"] = elapsed * 1e6 / batch_count
    costs = list(metrics.values())
    return Outcome({"spread": max(costs) / min(costs), **metrics}, figures, detail)


CASES: Final = (
    Case(
        name="main_cpu",
        title="CPU of the main process per batch of 8 samples of 2 ms, with 1, 2, 8 and 64 workers",
        metrics=(
            Metric("spread", "most / least over worker counts", "", "lower"),
            *(Metric(f"cpu_us_{count}", f"{count} workers", "us/batch", "lower") for count in _COUNTS),
        ),
        targets=(Target("spread", at_most=1.5, note="flat"),),
        libraries=("infeed", "torch"),
        baseline="torch",
        warm_up="one epoch for each worker count, in which labels are checked; then one is timed",
        sizes={
            "full": {"worker_counts": _COUNTS, "least_batches": 150, "most_batches": 3200, "wait_s": 0.002},
            "quick": {"worker_counts": _COUNTS, "least_batches": 50, "most_batches": 640, "wait_s": 0.002},
            "tiny": {"worker_counts": (1, 2), "least_batches": 4, "most_batches": 4, "wait_s": 0.0005},
        },
        run=run,
        note="All threads of the main process are counted.",
    ),
)
