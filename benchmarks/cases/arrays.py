"""Arrays in memory: a loader that supports arrays gathers a shuffled batch in one call."""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.adapters import PEERS
from benchmarks.drive import steady
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target


def run(library: str, parameters: Parameters) -> Outcome:
    length = parameters["samples"]
    features = np.random.default_rng(0).random((length, 32), dtype=np.float32)
    labels = np.arange(length)
    spec = LoaderSpec((features, labels), batch_size=parameters["batch_size"], num_workers=0, shuffle=True, is_arrays=True)
    epoch_s, figures = steady(library, spec, parameters["epochs"])
    batch_count = -(-length // parameters["batch_size"])
    return Outcome({"samples_per_s": length / epoch_s, "us_per_batch": epoch_s * 1e6 / batch_count}, figures)


CASES: Final = (
    Case(
        name="arrays",
        title="100,000 x 32 float32 and labels in memory, batch 1024, shuffled, no workers",
        metrics=(
            Metric("samples_per_s", "rate", "samples/s", "higher"),
            Metric("us_per_batch", "time per batch", "us", "lower"),
        ),
        targets=(Target("samples_per_s", at_least=50, against="torch"),),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="one epoch, in which labels are checked",
        sizes={
            "full": {"samples": 100_000, "batch_size": 1024, "epochs": 10},
            "quick": {"samples": 100_000, "batch_size": 1024, "epochs": 3},
            "tiny": {"samples": 2048, "batch_size": 256, "epochs": 1},
        },
        run=run,
        note="torch: TensorDataset, num_workers=0. infeed: a tuple of arrays, num_workers=0. "
        "spdl: the gather is written by the user and runs in one thread. grain: sample by sample.",
    ),
)
