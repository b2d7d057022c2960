"""Large batches: the cost of moving bytes from workers to the consumer."""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.adapters import PEERS
from benchmarks.drive import steady
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

SHAPE: Final = (3, 224, 224)


class SameImage:
    """Returns the same preallocated array for every index, so that creating samples costs nothing."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._image = np.random.default_rng(0).random(SHAPE, dtype=np.float32)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._image, index


def run(library: str, parameters: Parameters) -> Outcome:
    dataset = SameImage(parameters["samples"])
    spec = LoaderSpec(dataset, batch_size=parameters["batch_size"], num_workers=2, shuffle=True)
    epoch_s, figures = steady(library, spec, parameters["epochs"])
    sample_bytes = 4 * int(np.prod(SHAPE))
    return Outcome({"samples_per_s": len(dataset) / epoch_s, "gb_per_s": len(dataset) * sample_bytes / epoch_s / 1e9}, figures)


CASES: Final = (
    Case(
        name="big",
        title="batches of 64 x 3x224x224 float32, 2 workers",
        metrics=(
            Metric("samples_per_s", "rate", "samples/s", "higher"),
            Metric("gb_per_s", "bytes moved", "GB/s", "higher"),
        ),
        targets=(Target("samples_per_s", at_least=10, against="torch"),),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="one epoch, in which labels are checked; then the second and third are timed",
        sizes={
            "full": {"samples": 9600, "batch_size": 64, "epochs": 2},
            "quick": {"samples": 2560, "batch_size": 64, "epochs": 2},
            "tiny": {"samples": 32, "batch_size": 4, "epochs": 1},
        },
        run=run,
    ),
)
