"""Time to the first batch, for the first loader and for later loaders and epochs."""

from __future__ import annotations

from typing import Final

from benchmarks.adapters import PEERS
from benchmarks.drive import Run
from benchmarks.rows import Rows
from benchmarks.spec import Case, LoaderSpec, Metric, Outcome, Parameters, Target


def _spec(parameters: Parameters) -> LoaderSpec:
    return LoaderSpec(Rows(parameters["samples"]), batch_size=32, num_workers=parameters["workers"], shuffle=True)


def run_cold(library: str, parameters: Parameters) -> Outcome:
    spec = _spec(parameters)
    loading = Run(library, spec)
    loading.first_batch_s()
    figures = loading.close()
    return Outcome({"first_batch_s": figures.first_batch_s}, figures)


def run_warm(library: str, parameters: Parameters) -> Outcome:
    spec = _spec(parameters)
    first = Run(library, spec)
    first.checked_epoch()
    later_epoch_s = first.first_batch_s()
    first.close()
    second = Run(library, spec)
    second.first_batch_s()
    figures = second.close()
    return Outcome({"later_loader_s": figures.first_batch_s, "later_epoch_s": later_epoch_s}, figures)


_LIBRARIES: Final = ("infeed", "infeed-torch", "torch-fork", "torch-spawn", *PEERS)

CASES: Final = (
    Case(
        name="first_cold",
        title="first batch of the first loader of a process, 2 workers, NumPy dataset",
        metrics=(Metric("first_batch_s", "construction to first batch", "s", "lower"),),
        targets=(
            Target("first_batch_s", at_most=0.25),
            Target("first_batch_s", at_least=10, against="torch-spawn"),
        ),
        libraries=_LIBRARIES,
        baseline="torch-spawn",
        warm_up="none; the library is imported before the clock starts",
        sizes={
            "full": {"samples": 3200, "workers": 2},
            "quick": {"samples": 3200, "workers": 2},
            "tiny": {"samples": 128, "workers": 1},
        },
        run=run_cold,
        note="spdl has threads, not processes, to start. torch-fork is quick because it copies a process that has "
        "threads and open libraries, which is what makes it unsafe.",
    ),
    Case(
        name="first_warm",
        title="first batch of a later loader and of a later epoch, 2 workers, NumPy dataset",
        metrics=(
            Metric("later_loader_s", "second loader: construction to first batch", "s", "lower"),
            Metric("later_epoch_s", "second epoch: iter() to first batch", "s", "lower"),
        ),
        targets=(
            Target("later_loader_s", at_least=1, against="torch-fork"),
            Target("later_epoch_s", at_least=1, against="torch-fork"),
        ),
        libraries=_LIBRARIES,
        baseline="torch-fork",
        warm_up="one epoch of the first loader, closed before the second is built",
        sizes={
            "full": {"samples": 3200, "workers": 2},
            "quick": {"samples": 3200, "workers": 2},
            "tiny": {"samples": 128, "workers": 1},
        },
        run=run_warm,
        note="spdl and grain run on over the end of an epoch here, so their later epoch is already prefetched.",
    ),
)
