"""The additional memory that workers need for a dataset in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks import processes
from benchmarks.drive import Run
from benchmarks.spec import Case, Figures, LoaderSpec, Metric, Outcome, Parameters, SizeName, Target

_COLUMNS: Final = 1024


class OneArray:
    """Rows of one large array. Every page is written, so the array is resident."""

    def __init__(self, length: int, hold: Callable[[Any], Any]) -> None:
        self._rows = hold(np.ones((length, _COLUMNS), dtype=np.float32))
        self.nbytes: int = self._rows.nbytes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._rows[index], index


class Strings:
    """A list of many small Python objects, such as file names."""

    def __init__(self, length: int, hold: Callable[[Any], Any]) -> None:
        names = [f"train/{index % 1000:04d}/image_{index:08d}.jpg" for index in range(length)]
        self.nbytes = sys.getsizeof(names) + sum(map(sys.getsizeof, names))  # of the list that it is or was
        self._names = hold(names)

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


def _run(library: str, parameters: Parameters, make: type[OneArray | Strings], hold: Callable[[Any], Any]) -> Outcome:
    baseline, _ = _growth_over_an_epoch(library, make(parameters["baseline_samples"], hold), parameters)
    dataset = make(parameters["samples"], hold)
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


def _holding(library: str) -> Callable[[Any], Any]:
    """Return a large object as a careful user would store it: with infeed, through `infeed.share`."""
    if library != "infeed":
        return _as_it_is
    import infeed

    return infeed.share


def _as_it_is(obj: Any) -> Any:
    return obj


def run_array(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, OneArray, _holding(library))


def run_strings(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, Strings, _holding(library))


def run_plain_array(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, OneArray, _as_it_is)


def run_plain_strings(library: str, parameters: Parameters) -> Outcome:
    return _run(library, parameters, Strings, _as_it_is)


_METRICS: Final = (
    Metric("extra_percent", "growth of all processes together", "% of dataset", "lower"),
    Metric("workers_pss_percent", "share of the workers (sum of PSS)", "% of dataset", "lower"),
    Metric("workers_private_percent", "private to workers (sum of USS)", "% of dataset", "lower"),
)
_LIBRARIES: Final = ("infeed", "torch-fork", "torch-spawn", "grain")
_WARM_UP: Final = "an epoch over a small dataset of the same kind; what it takes is subtracted"

_ARRAY_SIZES: Final[Mapping[SizeName, Parameters]] = {
    "full": {"samples": 262_144, "baseline_samples": 2048, "batch_size": 64, "workers": 4},
    "quick": {"samples": 25_600, "baseline_samples": 2048, "batch_size": 64, "workers": 4},
    "tiny": {"samples": 256, "baseline_samples": 64, "batch_size": 16, "workers": 2},
}
_STRING_SIZES: Final[Mapping[SizeName, Parameters]] = {
    "full": {"samples": 2_000_000, "baseline_samples": 8192, "batch_size": 1024, "workers": 4},
    "quick": {"samples": 200_000, "baseline_samples": 8192, "batch_size": 1024, "workers": 4},
    "tiny": {"samples": 2048, "baseline_samples": 256, "batch_size": 64, "workers": 2},
}

CASES: Final = (
    Case(
        name="memory",
        title="extra memory for a 1 GB array, 4 workers, after a shuffled epoch",
        metrics=_METRICS,
        targets=(Target("extra_percent", at_most=10),),
        libraries=_LIBRARIES,
        baseline=None,
        warm_up=_WARM_UP,
        sizes=_ARRAY_SIZES,
        run=run_array,
        note="Growth is the sum of PSS of main and all descendants after the epoch, less that of main before the "
        "loader was made. A page that several processes share is counted once in it.",
    ),
    Case(
        name="memory_strings",
        title="extra memory for a list of 2 M strings, 4 workers, after a shuffled epoch",
        metrics=_METRICS,
        targets=(Target("extra_percent", at_most=10),),
        libraries=_LIBRARIES,
        baseline=None,
        warm_up=_WARM_UP,
        sizes=_STRING_SIZES,
        run=run_strings,
        note="With infeed the list is shared before the loader is made. The dataset's size is that of the plain list.",
    ),
    Case(
        name="memory_plain",
        title="the same array, not shared by the user",
        metrics=_METRICS,
        targets=(),
        libraries=("infeed",),
        baseline=None,
        warm_up=_WARM_UP,
        sizes=_ARRAY_SIZES,
        run=run_plain_array,
        note="Workers share one copy, which is beside the user's own.",
    ),
    Case(
        name="memory_strings_plain",
        title="the same strings, not shared by the user",
        metrics=_METRICS,
        targets=(),
        libraries=("infeed",),
        baseline=None,
        warm_up=_WARM_UP,
        sizes=_STRING_SIZES,
        run=run_plain_strings,
        note="Every worker has a list of its own.",
    ),
)
