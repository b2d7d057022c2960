"""Tiny samples: the fixed cost per batch."""

from __future__ import annotations

from typing import Final

from benchmarks.adapters import PEERS
from benchmarks.drive import steady
from benchmarks.rows import Rows
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target


def run(library: str, parameters: Parameters) -> Outcome:
    batch_size = parameters["batch_size"]
    dataset = Rows(parameters["samples"])
    spec = LoaderSpec(dataset, batch_size=batch_size, num_workers=2, shuffle=True)
    epoch_s, figures = steady(library, spec, parameters["epochs"])
    return Outcome(
        {"us_per_batch": epoch_s * 1e6 * batch_size / len(dataset), "samples_per_s": len(dataset) / epoch_s}, figures
    )


_METRICS: Final = (
    Metric("us_per_batch", "time per batch", "us", "lower"),
    Metric("samples_per_s", "rate", "samples/s", "higher"),
)
_WARM_UP: Final = "one epoch, in which labels are checked; then the second and third are timed"

CASES: Final = (
    Case(
        name="tiny",
        title="batches of 32 tiny samples, 2 workers",
        metrics=_METRICS,
        targets=(Target("us_per_batch", at_least=25, against="torch"),),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up=_WARM_UP,
        sizes={
            "full": {"samples": 102_400, "batch_size": 32, "epochs": 2},
            "quick": {"samples": 25_600, "batch_size": 32, "epochs": 2},
            "tiny": {"samples": 256, "batch_size": 32, "epochs": 1},
        },
        run=run,
    ),
    Case(
        name="tiny256",
        title="batches of 256 tiny samples, 2 workers",
        metrics=_METRICS,
        targets=(),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up=_WARM_UP,
        sizes={
            "full": {"samples": 409_600, "batch_size": 256, "epochs": 2},
            "quick": {"samples": 102_400, "batch_size": 256, "epochs": 2},
            "tiny": {"samples": 1024, "batch_size": 256, "epochs": 1},
        },
        run=run,
    ),
)
