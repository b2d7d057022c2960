"""What a dataset in memory costs again when workers are added."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks import processes
from benchmarks.drive import Run
from benchmarks.spec import Case, Figures, LoaderSpec, Metric, Outcome, Parameters, Target

_COLUMNS: Final = 1024


class OneArray:
    """Rows of one large array. Every page is written, so all of it is real memory."""

    def __init__(self, length: int) -> None:
        self._rows = np.ones((length, _COLUMNS), dtype=np.float32)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._rows[index], index


class Strings:
    """A list of many small Python objects, as of file names."""

    def __init__(self, length: int) -> None:
        self._names = [f"train/{index % 1000:04d}/image_{index:08d}.jpg" for index in range(length)]

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._names) + sum(map(sys.getsizeof, self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return len(self._names[index]), index


@dataclass(frozen=True, slots=True)
class _Growth:
    total: int
    workers_pss: int
    workers_uss: int

    def beyond(self, baseline: _Growth) -> _Growth:
        return _Growth(
            self.total - baseline.total,
            self.workers_pss - baseline.workers_pss,
            self.workers_uss - baseline.workers_uss,
        )


def _growth_over_an_epoch(library: str, dataset: Any, parameters: Parameters) -> tuple[_Growth, Figures]:
    before = processes.memory_of_main()
    loading = Run(library, LoaderSpec(dataset, parameters["batch_size"], num_workers=parameters["workers"], shuffle=True))
    loading.epoch_s()
    workers = processes.memory_of(processes.descendants())
    main = processes.memory_of_main()
    figures = loading.close()
    return _Growth(main.pss + workers.pss - before.pss, workers.pss, workers.uss), figures


def _run(library: str, parameters: Parameters, make: Callable[[int], OneArray | Strings]) -> Outcome:
    baseline, _ = _growth_over_an_epoch(library, make(parameters["baseline_samples"]), parameters)
    dataset = make(parameters["samples"])
    growth, figures = _growth_over_an_epoch(library, dataset, parameters)
    extra = growth.beyond(baseline)
    percent = 100 / dataset.nbytes
    return Outcome(
        {
            "extra_percent": extra.total * percent,
            "workers_pss_percent": extra.workers_pss * percent,
            "workers_private_percent": extra.workers_uss * percent,
        },
        figures,
        {"dataset_mb": dataset.nbytes / 1e6, "baseline_total_mb": baseline.total / 1e6, "total_mb": growth.total / 1e6},
    )


def run_array(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, OneArray)


def run_strings(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, Strings)


_METRICS: Final = (
    Metric("extra_percent", "growth of all processes together", "% of dataset", "lower"),
    Metric("workers_pss_percent", "share of the workers (sum of PSS)", "% of dataset", "lower"),
    Metric("workers_private_percent", "private to workers (sum of USS)", "% of dataset", "lower"),
)
_LIBRARIES: Final = ("infeed", "torch-fork", "torch-spawn", "grain")
_WARM_UP: Final = "an epoch over a small dataset of the same kind; what it takes is subtracted"

CASES: Final = (
    Case(
        name="memory",
        title="extra memory for a 1 GB array, 4 workers, after a shuffled epoch",
        metrics=_METRICS,
        targets=(Target("extra_percent", at_most=10),),
        libraries=_LIBRARIES,
        baseline=None,
        warm_up=_WARM_UP,
        sizes={
            "full": {"samples": 262_144, "baseline_samples": 2048, "batch_size": 64, "workers": 4},
            "quick": {"samples": 25_600, "baseline_samples": 2048, "batch_size": 64, "workers": 4},
            "tiny": {"samples": 256, "baseline_samples": 64, "batch_size": 16, "workers": 2},
        },
        run=run_array,
        note="Growth is the sum of PSS of main and all descendants after the epoch, less that of main before the "
        "loader was made. A page that several processes share is counted once in it.",
    ),
    Case(
        name="memory_strings",
        title="extra memory for a list of 2 M strings, 4 workers, after a shuffled epoch",
        metrics=_METRICS,
        targets=(),
        libraries=_LIBRARIES,
        baseline=None,
        warm_up=_WARM_UP,
        sizes={
            "full": {"samples": 2_000_000, "baseline_samples": 8192, "batch_size": 1024, "workers": 4},
            "quick": {"samples": 200_000, "baseline_samples": 8192, "batch_size": 1024, "workers": 4},
            "tiny": {"samples": 2048, "baseline_samples": 256, "batch_size": 64, "workers": 2},
        },
        run=run_strings,
        note="Reported only: the target of 10 % belongs to sharing Python objects, which a plain list does not use.",
    ),
)
