"""Memory that samples free in workers: page faults, throughput and memory, by the size of the buffer that a sample frees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from benchmarks import processes
from benchmarks.drive import Run
from benchmarks.spec import Case, Figures, LoaderSpec, Metric, Outcome, Parameters, Target

_SIZES_MB: Final = (0.1, 1, 10, 100)
_MB: Final = 1_000_000
_CROP_BYTES: Final = 3 * 224 * 224


class Buffers:
    """Fills a buffer of a constant size and returns a copy of half of it, as a decoder with a crop does."""

    def __init__(self, length: int, nbytes: int) -> None:
        self._length, self._nbytes = length, nbytes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(self._nbytes, 7, np.uint8)[: self._nbytes // 2].copy(), index


class MixedBuffers:
    """Fills buffers of 0.05 to 50 MB, evenly distributed on a logarithmic scale, and returns a copy of the first 150 kB."""

    def __init__(self, length: int, most_bytes: int) -> None:
        self._sizes = np.exp(np.random.default_rng(0).uniform(np.log(most_bytes / 1000), np.log(most_bytes), length)).astype(
            int
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        buffer = np.full(max(_CROP_BYTES, int(self._sizes[index])), 7, np.uint8)
        return buffer[:_CROP_BYTES].copy(), index


@contextmanager
def _glibc_defaults() -> Iterator[None]:
    """Keep workers from configuring malloc: this tunable has its default value, but infeed leaves malloc to the user."""
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.check=0"
    try:
        yield
    finally:
        del os.environ["GLIBC_TUNABLES"]


def _variants(library: str, measure: Callable[[str], tuple[dict[str, float], Figures]]) -> Outcome:
    """Measure a library; infeed also with workers that do not configure malloc."""
    metrics, figures = measure("")
    if library == "infeed":
        with _glibc_defaults():
            metrics |= measure("_defaults")[0]
    return Outcome(metrics, figures)


def run_sizes(library: str, parameters: Parameters) -> Outcome:
    def measure(suffix: str) -> tuple[dict[str, float], Figures]:
        metrics: dict[str, float] = {}
        for size_mb in _SIZES_MB:
            nbytes = int(size_mb * parameters["mb"])
            count = max(4 * parameters["workers"], parameters["bytes"] // nbytes)
            batch_size = max(1, min(32, count // 8))
            loading = Run(library, LoaderSpec(Buffers(count, nbytes), batch_size, num_workers=parameters["workers"]))
            loading.checked_epoch()
            before = processes.minor_faults()
            metrics[f"rate_{size_mb}{suffix}"] = count / loading.epoch_s()
            after = processes.minor_faults()
            metrics[f"faults_{size_mb}{suffix}"] = sum(after[pid] - n for pid, n in before.items() if pid in after) / count
            figures = loading.close()
        return metrics, figures

    return _variants(library, measure)


def run_mixed(library: str, parameters: Parameters) -> Outcome:
    def measure(suffix: str) -> tuple[dict[str, float], Figures]:
        dataset = MixedBuffers(parameters["samples"], parameters["most_bytes"])
        loading = Run(library, LoaderSpec(dataset, 32, num_workers=parameters["workers"], shuffle=True))
        loading.checked_epoch()
        private: list[float] = []
        elapsed = 0.0
        for _ in range(parameters["epochs"]):
            elapsed += loading.epoch_s()
            private.append(processes.memory_of(processes.descendants()).uss / _MB)
        metrics = {"rate": len(dataset) * len(private) / elapsed, "first_mb": private[0], "last_mb": private[-1]}
        metrics["most_mb"] = max(private)
        return {name + suffix: value for name, value in metrics.items()}, loading.close()

    return _variants(library, measure)


def _both(name: str, title: str, unit: str, better: Any) -> tuple[Metric, Metric]:
    return Metric(name, title, unit, better), Metric(f"{name}_defaults", f"{title}, glibc's defaults", unit, better)


CASES: Final = (
    Case(
        name="freed_memory",
        title="samples that fill a buffer of 0.1 to 100 MB and return half of it, 2 workers",
        metrics=tuple(
            metric
            for size_mb in _SIZES_MB
            for metric in (
                *_both(f"faults_{size_mb}", f"page faults, {size_mb} MB", "per sample", "lower"),
                *_both(f"rate_{size_mb}", f"rate, {size_mb} MB", "samples/s", "higher"),
            )
        ),
        targets=(Target("faults_0.1", at_most=10), Target("faults_1", at_most=10)),
        libraries=("infeed", "torch"),
        baseline="torch",
        warm_up="one epoch of each loader, in which labels are checked; then one is timed",
        sizes={
            "full": {"mb": _MB, "bytes": 4_000_000_000, "workers": 2},
            "quick": {"mb": _MB, "bytes": 1_000_000_000, "workers": 2},
            "tiny": {"mb": 10_000, "bytes": 1_000_000, "workers": 2},
        },
        run=run_sizes,
        note="Linux with glibc. infeed runs a second time with workers that leave malloc as it is.",
    ),
    Case(
        name="freed_memory_mixed",
        title="private memory of 2 workers in a long run with buffers of 0.05 to 50 MB in random order",
        metrics=(
            *_both("most_mb", "most after any epoch", "MB", "lower"),
            *_both("first_mb", "after the first epoch", "MB", "lower"),
            *_both("last_mb", "after the last epoch", "MB", "lower"),
            *_both("rate", "rate", "samples/s", "higher"),
        ),
        targets=(),
        libraries=("infeed", "torch"),
        baseline="torch",
        warm_up="one epoch, in which labels are checked",
        sizes={
            "full": {"samples": 1024, "epochs": 20, "most_bytes": 50 * _MB, "workers": 2},
            "quick": {"samples": 512, "epochs": 5, "most_bytes": 50 * _MB, "workers": 2},
            "tiny": {"samples": 64, "epochs": 2, "most_bytes": _MB, "workers": 2},
        },
        run=run_mixed,
        note="Sum of USS of all child processes; for infeed this includes the fork server.",
    ),
)
