"""Shuffling a very long dataset: is the order computed on demand or stored?"""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks import processes
from benchmarks.adapters import family_of
from benchmarks.drive import Run
from benchmarks.spec import Case, Figures, LoaderSpec, Metric, Outcome, Parameters, Target


class Range:
    """A dataset of any length that stores no data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.float32, int]:
        return np.float32(0), index


def _start(library: str, length: int) -> tuple[int, Figures]:
    processes.reset_peak_rss()
    before = processes.rss_bytes()
    loading = Run(library, LoaderSpec(Range(length), batch_size=32, num_workers=0, shuffle=True))
    loading.first_batch_s()
    grown = processes.peak_rss_bytes() - before
    return grown, loading.close()


def run(library: str, parameters: Parameters) -> Outcome:
    length = parameters["torch_length"] if family_of(library) == "torch" else parameters["length"]
    _start(library, parameters["short_length"])
    short_grown, short = _start(library, parameters["short_length"])
    long_grown, long = _start(library, length)
    return Outcome(
        {
            "extra_ms": (long.first_batch_s - short.first_batch_s) * 1e3,
            "extra_mb": (long_grown - short_grown) / 1e6,
        },
        long,
        {"length": length, "short_first_batch_ms": short.first_batch_s * 1e3},
    )


CASES: Final = (
    Case(
        name="shuffle_billion",
        title="first batch of a shuffle of 10**9 samples, beyond that of 10**3, no workers",
        metrics=(
            Metric("extra_ms", "time more than for 10**3", "ms", "lower"),
            Metric("extra_mb", "peak memory more than for 10**3", "MB", "lower"),
        ),
        targets=(Target("extra_ms", at_most=50), Target("extra_mb", at_most=50)),
        libraries=("infeed", "torch", "grain"),
        baseline=None,
        warm_up="a loader of 10**3 samples, twice; the second is what is subtracted",
        sizes={
            "full": {"length": 10**9, "short_length": 10**3, "torch_length": 10**7},
            "quick": {"length": 10**9, "short_length": 10**3, "torch_length": 10**6},
            "tiny": {"length": 10**9, "short_length": 10**3, "torch_length": 10**4},
        },
        run=run,
        note="torch shuffles only 10**7 samples here (quick: 10**6), because 10**9 would need more than 8 GB; so there "
        "is no ratio, and none is claimed by extrapolation.",
    ),
)
