"""Samples of uneven cost: does one slow sample delay the other workers?"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from benchmarks.adapters import PEERS
from benchmarks.drive import Run
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

_SLOW_EVERY: Final = 50


class Uneven:
    """Sleeps, as for I/O: briefly for most samples, fifty times as long for about one in fifty."""

    def __init__(self, length: int, fast_s: float) -> None:
        self._length = length
        self.fast_s = fast_s
        self.slow_s = 50 * fast_s

    def __len__(self) -> int:
        return self._length

    def is_slow(self, index: int) -> bool:
        # The high half of a multiplicative hash: scattered, and the same in every process.
        return (index * 0x9E3779B97F4A7C15 % 2**64 >> 32) % _SLOW_EVERY == 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.slow_s if self.is_slow(index) else self.fast_s)
        return np.zeros(4, dtype=np.float32), index


def _sleep_takes_s(seconds: float, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        time.sleep(seconds)
    return (time.perf_counter() - began) / times


def run(library: str, parameters: Parameters) -> Outcome:
    workers = parameters["workers"]
    dataset = Uneven(parameters["samples"], parameters["fast_s"])
    slow_count = sum(map(dataset.is_slow, range(len(dataset))))
    fast_count = len(dataset) - slow_count
    # A sleep of 1 ms takes longer than 1 ms. The cost of a sample is the duration of its sleep on an idle machine; any
    # delay that the load of the loader adds counts against the loader.
    fast_s = _sleep_takes_s(dataset.fast_s, parameters["calibration"])
    slow_s = _sleep_takes_s(dataset.slow_s, max(1, parameters["calibration"] // 50))
    ideal_s = (fast_count * fast_s + slow_count * slow_s) / workers
    nominal_s = (fast_count * dataset.fast_s + slow_count * dataset.slow_s) / workers
    loading = Run(library, LoaderSpec(dataset, parameters["batch_size"], num_workers=workers))
    loading.checked_epoch()
    elapsed = loading.epoch_s()
    return Outcome(
        {"efficiency": ideal_s / elapsed, "nominal_efficiency": nominal_s / elapsed},
        loading.close(),
        {"slow_samples": slow_count, "fast_ms": fast_s * 1e3, "slow_ms": slow_s * 1e3, "elapsed_s": elapsed},
    )


CASES: Final = (
    Case(
        name="uneven",
        title="1 sample in 50 is 50 x slower, batch 16, 8 workers, in order",
        metrics=(
            Metric("efficiency", "(sum of sample times / workers) / elapsed", "", "higher"),
            Metric("nominal_efficiency", "the same with sleeps taken at their word", "", "higher"),
        ),
        targets=(Target("efficiency", at_least=0.95),),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="one epoch, in which order and labels are checked; then one is timed",
        sizes={
            "full": {"samples": 8064, "batch_size": 16, "workers": 8, "fast_s": 0.001, "calibration": 500},
            "quick": {"samples": 2048, "batch_size": 16, "workers": 8, "fast_s": 0.001, "calibration": 200},
            "tiny": {"samples": 64, "batch_size": 8, "workers": 2, "fast_s": 0.0002, "calibration": 5},
        },
        run=run,
        note="time.sleep stands for I/O.",
    ),
)
