"""I/O-bound samples: the throughput of many workers, and its CPU cost in the main process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from benchmarks.adapters import PEERS
from benchmarks.cases.main_cpu import Waiting
from benchmarks.drive import Run
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

BATCH_SIZE: Final = 64
_CALIBRATION: Final = 200


def _sleep_takes_s(seconds: float) -> float:
    began = time.perf_counter()
    for _ in range(_CALIBRATION):
        time.sleep(seconds)
    return (time.perf_counter() - began) / _CALIBRATION


def _run(workers: int) -> Callable[[str, Parameters], Outcome]:
    def run(library: str, parameters: Parameters) -> Outcome:
        count = min(workers, parameters["most_workers"])
        batch_count = max(20, parameters["batches_each"] * count)
        wait_s = parameters["wait_s"]
        took_s = _sleep_takes_s(wait_s)
        dataset = Waiting(batch_count * parameters["batch_size"], wait_s)
        loading = Run(library, LoaderSpec(dataset, parameters["batch_size"], num_workers=count))
        loading.checked_epoch()
        cpu_before = time.process_time()
        elapsed = loading.epoch_s()
        cpu_us = (time.process_time() - cpu_before) * 1e6 / batch_count
        return Outcome(
            {"efficiency": len(dataset) * took_s / count / elapsed, "main_cpu_us": cpu_us},
            loading.close(),
            {"nominal_efficiency": len(dataset) * wait_s / count / elapsed, "sleep_ms": took_s * 1e3},
        )

    return run


CASES: Final = tuple(
    Case(
        name=f"waiting{workers}",
        title=f"samples that wait 4 ms, batch {BATCH_SIZE}, {workers} worker{'s' * (workers > 1)}",
        metrics=(
            Metric("efficiency", "(sum of sample times / workers) / elapsed", "", "higher"),
            Metric("main_cpu_us", "CPU of the main process", "us/batch", "lower"),
        ),
        targets=(Target("efficiency", at_least=0.97), Target("main_cpu_us", at_most=250)),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="one epoch, in which labels are checked; then one is timed",
        sizes={
            "full": {"batches_each": 8, "batch_size": BATCH_SIZE, "wait_s": 0.004, "most_workers": workers},
            "quick": {"batches_each": 4, "batch_size": BATCH_SIZE, "wait_s": 0.004, "most_workers": workers},
            "tiny": {"batches_each": 1, "batch_size": 4, "wait_s": 0.0005, "most_workers": 2},
        },
        run=_run(workers),
        note="A sleep of 4 ms takes longer than 4 ms: what it takes when nothing else runs is the time of a sample.",
    )
    for workers in (1, 4, 16, 64)
)
