"""Findings for CPU-bound threads, of which only one at a time runs Python code."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Probe, read_events
from infeed.doctor.finding import describe
from tests.doctor.evidence_of import costly, found, loader, run


def threads(*, cores: float = 1.0, load_s: float = 0.1, **options: Any) -> LoaderSeen:
    """Two threads; a batch arrives every 0.1 s, the step takes a tenth of it, and the process uses this many cores."""
    epoch = EpochSeen(0.0, start_s=0.1, has_batch=True, waits=[0.09] * 20, aways=[0.01] * 20, cpu_s=20 * 0.1 * cores)
    given = {"library": "infeed", "start_method": "", "kind": "thread", "asked": "2, worker='thread'", "epochs": [epoch]}
    return loader(**{**given, "probe": costly(load_s / 10), **options})


def test_threads_that_use_one_core_should_be_processes() -> None:
    """No other number of workers is proposed before that change."""
    findings = found(threads(), seconds=2.0)

    assert list(findings) == ["data-bound"]
    assert findings["data-bound"].bottleneck == "gil"
    assert (findings["data-bound"].numbers["used_cores"], findings["data-bound"].numbers["cores"]) == (pytest.approx(1.0), 4)
    assert findings["data-bound"].fix["infeed"].startswith("worker='process'; ")
    assert findings["data-bound"].loader == "infeed.DataLoader(Faces, batch_size=10, num_workers=2, worker='thread')"


WAITING = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=0.001, switches=1.0)


@pytest.mark.parametrize(
    ("seen", "options"),
    [
        (threads(cores=1.6), {}),  # They release the GIL.
        (threads(cores=0.1, probe=WAITING), {}),
        (threads(load_s=0.01), {}),  # Samples take too little of the time.
        (threads(asked="2, worker='auto'", is_auto=True), {}),  # infeed has tried processes.
        (threads(kind="process"), {}),
        (threads(), {"has_gil": False}),
        (threads(), {"core_count": 1}),
    ],
)
def test_the_gil_is_not_reported_for_other_causes(seen: LoaderSeen, options: dict[str, Any]) -> None:
    """Not if the threads use several cores or are I/O-bound, or if there is one core."""
    assert found(seen, seconds=2.0, **options)["data-bound"].bottleneck != "gil"


def test_more_cpu_bound_threads_are_proposed_as_processes() -> None:
    """One thread uses a core, whether or not it releases the GIL."""
    findings = found(threads(num_workers=1, asked="1, worker='thread'"), seconds=2.0)

    assert findings["data-bound"].fix["infeed"].startswith("num_workers=4, worker='process'; ")
    assert findings["num-workers"].fix["infeed"].startswith("num_workers=4, worker='process'")


def test_the_cpu_time_of_the_process_is_read_from_the_journal() -> None:
    """It is recorded with each group of batches, along with whether there is a GIL."""
    seen = run(loader())
    machine = {"event": "machine", "has_gpu": False, "is_fork_default": True, "has_gil": False}
    settings = {"number": 0, "library": "infeed", "dataset": "Faces", "kind": "thread", "num_workers": 2}
    batches = {"event": "batches", "loader": 0, "waits": [0.5], "aways": [0.5], "cpu_s": 1.5}
    read_events(seen, [{"event": "loader", **settings}, {"event": "epoch", "loader": 0}, batches, batches, machine])

    assert seen.loaders[0].own_cores == pytest.approx(1.5)
    assert not seen.has_gil
    assert describe(seen.loaders[0]) == "infeed.DataLoader(Faces, batch_size=1, num_workers=2)"
