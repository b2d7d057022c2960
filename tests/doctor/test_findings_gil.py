"""What is said of threads that compute: in Python one at a time does."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Probe, read_events
from infeed.doctor.finding import describe
from tests.doctor.evidence_of import costly, found, loader, run


def threads(*, cores: float = 1.0, load_s: float = 0.1, **options: Any) -> LoaderSeen:
    """Two threads; a batch comes every 0.1 s, of which the loop works for a tenth, and the process uses so many cores."""
    epoch = EpochSeen(0.0, start_s=0.1, has_batch=True, waits=[0.09] * 20, aways=[0.01] * 20, cpu_s=20 * 0.1 * cores)
    given = {"library": "infeed", "start_method": "", "kind": "thread", "asked": "2, worker='thread'", "epochs": [epoch]}
    return loader(**{**given, "probe": costly(load_s / 10), **options})


def test_threads_that_use_one_core_are_advised_to_be_processes() -> None:
    """And no other number of them is proposed, nor none, before they are."""
    told = found(threads(), seconds=2.0)

    assert list(told) == ["data-bound"]
    assert told["data-bound"].bottleneck == "gil"
    assert (told["data-bound"].numbers["used_cores"], told["data-bound"].numbers["cores"]) == (pytest.approx(1.0), 4)
    assert told["data-bound"].fix["infeed"].startswith("worker='process'; ")
    assert told["data-bound"].loader == "infeed.DataLoader(Faces, batch_size=10, num_workers=2, worker='thread')"


WAITING = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=0.001, switches=1.0)


@pytest.mark.parametrize(
    ("seen", "options"),
    [
        (threads(cores=1.6), {}),  # they leave the GIL
        (threads(cores=0.1, probe=WAITING), {}),
        (threads(load_s=0.01), {}),  # it is not what takes the time
        (threads(asked="2, worker='auto'", is_auto=True), {}),  # infeed has tried processes
        (threads(kind="process"), {}),
        (threads(), {"has_gil": False}),
        (threads(), {"core_count": 1}),
    ],
)
def test_the_gil_is_not_blamed_for_other_things(seen: LoaderSeen, options: dict[str, Any]) -> None:
    """Not if threads use several cores, wait, or have only one."""
    assert found(seen, seconds=2.0, **options)["data-bound"].bottleneck != "gil"


def test_more_threads_that_compute_are_proposed_as_processes() -> None:
    """One of them uses a core, whether or not it leaves the GIL."""
    told = found(threads(num_workers=1, asked="1, worker='thread'"), seconds=2.0)

    assert told["data-bound"].fix["infeed"].startswith("num_workers=4, worker='process'; ")
    assert told["num-workers"].fix["infeed"].startswith("num_workers=4, worker='process'")


def test_what_the_process_used_is_read_from_the_journal() -> None:
    """With each lot of batches, and whether there is a GIL at all."""
    seen = run(loader())
    machine = {"event": "machine", "has_gpu": False, "is_fork_default": True, "has_gil": False}
    settings = {"number": 0, "library": "infeed", "dataset": "Faces", "kind": "thread", "num_workers": 2}
    batches = {"event": "batches", "loader": 0, "waits": [0.5], "aways": [0.5], "cpu_s": 1.5}
    read_events(seen, [{"event": "loader", **settings}, {"event": "epoch", "loader": 0}, batches, batches, machine])

    assert seen.loaders[0].own_cores == pytest.approx(1.5)
    assert not seen.has_gil
    assert describe(seen.loaders[0]) == "infeed.DataLoader(Faces, batch_size=1, num_workers=2)"
