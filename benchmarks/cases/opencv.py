"""JPEGs decoded and resized with OpenCV, with the worker count of a training machine: throughput and page faults."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import numpy as np

from benchmarks import processes
from benchmarks.adapters import PEERS
from benchmarks.drive import Run
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

_ENCODED_COUNT: Final = 64
_LOOP_S: Final = 3.0


class Photos:
    """Decodes a JPEG of 500x375 from memory and resizes it to 224x224, as uint8 in channel-first order."""

    def __init__(self, length: int) -> None:
        import cv2

        rng = np.random.default_rng(0)
        self._length = length
        self._encoded: list[Any] = []
        for _ in range(min(length, _ENCODED_COUNT)):
            # Smooth noise with grain: flat color would decode faster than a photograph, white noise slower.
            coarse = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
            pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC).astype(np.int16)
            pixels += rng.integers(-12, 12, pixels.shape, dtype=np.int16)
            jpeg = cv2.imencode(".jpg", np.clip(pixels, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])[1]
            self._encoded.append(jpeg.ravel())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        import cv2

        cv2.setNumThreads(0)
        pixels = cv2.imdecode(self._encoded[index % len(self._encoded)], cv2.IMREAD_COLOR)
        return np.ascontiguousarray(cv2.resize(pixels, (224, 224)).transpose(2, 0, 1)), index


def plain_loop(seconds: float) -> float:
    """Return images per second of one process that only decodes."""
    photos = Photos(_ENCODED_COUNT)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        photos[count % _ENCODED_COUNT]
        count += 1
    return count / (time.perf_counter() - began)


def _plain_loops_rate(count: int, seconds: float) -> float:
    """Return the total rate of one plain loop per worker, at the same time."""
    code = f"from benchmarks.cases.opencv import plain_loop; plain_loop(0.1); print(); input(); print(plain_loop({seconds}))"
    return sum(processes.outputs_of(code, count))


def run(library: str, parameters: Parameters) -> Outcome:
    workers = parameters["workers"] or max(2, (os.cpu_count() or 2) - 2)
    plain_before = _plain_loops_rate(workers, parameters["loop_s"])
    dataset = Photos(parameters["samples"])
    loading = Run(library, LoaderSpec(dataset, batch_size=parameters["batch_size"], num_workers=workers))
    loading.checked_epoch()
    before = processes.minor_faults()
    rate = len(dataset) / loading.epoch_s()
    after = processes.minor_faults()
    faults = sum(after[pid] - count for pid, count in before.items() if pid in after)
    figures = loading.close()
    # Before and after the loader, because the speed of a shared machine drifts.
    plain_after = _plain_loops_rate(workers, parameters["loop_s"])
    return Outcome(
        {
            "samples_per_s": rate,
            "of_plain_loops": rate / ((plain_before + plain_after) / 2),
            "faults_per_sample": faults / len(dataset),
        },
        figures,
        {"workers": workers, "plain_loops": [plain_before, plain_after]},
    )


CASES: Final = (
    Case(
        name="opencv",
        title="JPEGs of 500x375 decoded and resized to 3x224x224 uint8 with OpenCV, batch 64, two workers fewer than cores",
        metrics=(
            Metric("samples_per_s", "rate", "samples/s", "higher"),
            Metric("of_plain_loops", "rate / as many plain loops at the same time", "", "higher"),
            Metric("faults_per_sample", "page faults of workers", "per sample", "lower"),
        ),
        targets=(
            Target("samples_per_s", at_least=1.10, against="torch", note="on 16 cores"),
            Target("of_plain_loops", at_least=0.92, note="on 16 cores"),
            Target("faults_per_sample", at_most=10),
        ),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="one epoch of the loader, in which labels are checked; then one is timed",
        sizes={
            "full": {"samples": 19200, "batch_size": 64, "workers": None, "loop_s": _LOOP_S},
            "quick": {"samples": 6400, "batch_size": 64, "workers": None, "loop_s": 1.0},
            "tiny": {"samples": 32, "batch_size": 4, "workers": 2, "loop_s": 0.05},
        },
        run=run,
        note="Plain loops are what the machine can do without any loader.",
    ),
)
