"""JPEG decoding on all cores, so that CPU time of the loader itself reduces the throughput."""

from __future__ import annotations

import io
import time
from typing import Final

import numpy as np
from PIL import Image

from benchmarks import processes
from benchmarks.adapters import PEERS
from benchmarks.drive import Run
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target

WORKERS: Final = 2
_ENCODED_COUNT: Final = 16


def _encode(seed: int, side: int) -> bytes:
    # Smooth noise with grain: flat color would decode faster than a photograph, white noise slower.
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, dtype=np.int16) + rng.integers(-12, 13, (side, side, 3), dtype=np.int16)
    encoded = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


class Jpegs:
    """Decodes an image from memory and crops it, as float32 in channel-first order."""

    def __init__(self, length: int, side: int, crop: int) -> None:
        self._length = length
        self._crop = crop
        self._margin = side - crop + 1
        self._encoded = [_encode(seed, side) for seed in range(min(length, _ENCODED_COUNT))]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with Image.open(io.BytesIO(self._encoded[index % len(self._encoded)])) as image:
            pixels = np.asarray(image)
        place = index * 2654435761 % 2**32
        top, left = place % self._margin, place // self._margin % self._margin
        window = pixels[top : top + self._crop, left : left + self._crop]
        return np.ascontiguousarray(window.transpose(2, 0, 1), dtype=np.float32), index


def _inline_rate(dataset: Jpegs, samples: int) -> float:
    began = time.perf_counter()
    for index in range(samples):
        dataset[index]
    return samples / (time.perf_counter() - began)


def _plain_loops_rate(parameters: Parameters) -> float:
    """Return the total rate of one plain loop per worker, each in its own process, at the same time."""
    arguments = ", ".join(str(parameters[name]) for name in ("samples", "side", "crop"))
    code = (
        "from benchmarks.cases.jpeg import Jpegs, _inline_rate\n"
        f"dataset = Jpegs({arguments})\n"
        f"_inline_rate(dataset, {_ENCODED_COUNT}); print(flush=True); input()\n"
        f"print(_inline_rate(dataset, {parameters['inline_samples']}))"
    )
    return sum(processes.outputs_of(code, WORKERS))


def run(library: str, parameters: Parameters) -> Outcome:
    dataset = Jpegs(parameters["samples"], parameters["side"], parameters["crop"])
    inline_samples = parameters["inline_samples"]
    spec = LoaderSpec(dataset, batch_size=parameters["batch_size"], num_workers=WORKERS, shuffle=True)
    _inline_rate(dataset, min(inline_samples, _ENCODED_COUNT))
    plain_before = _plain_loops_rate(parameters)
    before = _inline_rate(dataset, inline_samples)
    loading = Run(library, spec)
    loading.checked_epoch()
    rate = len(dataset) / loading.epoch_s()
    figures = loading.close()
    # One core is measured before and after the loader, because the speed of a shared machine drifts.
    after = _inline_rate(dataset, inline_samples)
    plain_after = _plain_loops_rate(parameters)
    one_core, plain = (before + after) / 2, (plain_before + plain_after) / 2
    return Outcome(
        {
            "efficiency": rate / (WORKERS * one_core),
            "of_plain_loops": rate / plain,
            "samples_per_s": rate,
            "one_core_samples_per_s": one_core,
        },
        figures,
        {"one_core": [before, after], "plain_loops": [plain_before, plain_after]},
    )


CASES: Final = (
    Case(
        name="jpeg",
        title="decode-bound JPEGs of 1024x1024, windows of 3x224x224 float32, batch 32, 2 workers",
        metrics=(
            Metric("efficiency", "rate / (2 x one core alone)", "", "higher"),
            Metric("of_plain_loops", "rate / two plain loops at the same time", "", "higher"),
            Metric("samples_per_s", "rate", "samples/s", "higher"),
            Metric("one_core_samples_per_s", "one core alone", "samples/s", "neither"),
        ),
        targets=(Target("efficiency", at_least=0.97, note="means something only with exactly two idle cores"),),
        libraries=("infeed", "infeed-torch", "torch", *PEERS),
        baseline="torch",
        warm_up="16 images inline; one epoch of the loader, in which labels are checked; then one is timed",
        sizes={
            "full": {"samples": 1024, "inline_samples": 256, "batch_size": 32, "side": 1024, "crop": 224},
            "quick": {"samples": 512, "inline_samples": 128, "batch_size": 32, "side": 1024, "crop": 224},
            "tiny": {"samples": 32, "inline_samples": 8, "batch_size": 4, "side": 64, "crop": 32},
        },
        run=run,
        note="Two plain loops at the same time are what the machine can do without any loader: its cores are slower together "
        "than alone. Images are large on purpose. With 384x384 and batch 64 (first choice, one quick run) torch had 0.43: that "
        "measures moving batches, which is what the case big is for.",
    ),
)
