"""Findings on hangs, failures, wrong samples and memory: figures, evidence and fixes of constructed programs."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import ForkSeen, LoaderSeen, Moment, Probe, ProcessSeen
from infeed.doctor.finding import describe
from tests.doctor.evidence_of import MB, auto, found, loader, moments

FORKED = [ForkSeen([], {"cv2": 3})]


def worker(pid: int, *cpu: tuple[float, float]) -> ProcessSeen:
    """A process with these CPU times at these times."""
    return ProcessSeen(pid, [Moment(at, 0, cpu_s) for at, cpu_s in cpu])


def seen_by(*workers: ProcessSeen) -> dict[int, ProcessSeen]:
    return {one.pid: one for one in workers}


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (loader(), "torch's DataLoader(Faces, batch_size=10, num_workers=2)"),
        (loader(library="infeed.torch", batch_size=None), "infeed.torch.DataLoader(Faces, batch_size=None, num_workers=2)"),
        (auto(), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), now 8 processes"),
        (auto(num_workers=1), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), now 1 process"),
        (auto(kind="thread"), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), now 8 threads"),
        (auto(kind="thread", num_workers=1), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), now 1 thread"),
        (auto(kind="inline", num_workers=0), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto')"),
    ],
)
def test_a_loader_is_written_as_in_the_program(seen: LoaderSeen, text: str) -> None:
    """With the current workers where infeed chooses them."""
    assert describe(seen) == text


# --- no-batch


def stuck(**options: Any) -> LoaderSeen:
    """The training loop waits 9 of 10 seconds for a batch."""
    return loader(**{"waiting_s": 9.0, "batches": 0, "pids": [7, 8], **options})


def test_workers_that_wait_forever_are_idle() -> None:
    """For torch's loader the fix includes a timeout that raises an error."""
    finding = found(stuck(), processes=seen_by(worker(7, (0, 0.0), (10, 0.01)), worker(8, (0, 0.0), (10, 0.1))))["no-batch"]

    assert finding.numbers == {"waiting_s": 9.0, "workers": 2, "busiest": pytest.approx(0.01), "is_idle": True}
    assert "timeout=60" in finding.fix["torch"]
    assert "hang_warning=10" in finding.fix["infeed"]


def test_a_worker_that_computes_forever_is_not_idle() -> None:
    """A lock is not the cause, whatever threads ran at the fork."""
    finding = found(stuck(forks=FORKED), processes=seen_by(worker(7, (0, 0.0), (10, 10.0))))["no-batch"]

    assert (finding.numbers["workers"], finding.numbers["busiest"], finding.numbers["is_idle"]) == (1, 1.0, False)
    assert "cause" not in finding.evidence
    assert "timeout=60" in finding.fix["torch"]


@pytest.mark.parametrize("workers", [[worker(7, (0, 0.0), (10, 0.0))], []])
def test_a_fork_with_threads_is_the_probable_cause_of_a_hang(workers: list[ProcessSeen]) -> None:
    """The workers are idle or could not be sampled."""
    finding = found(stuck(forks=FORKED), processes=seen_by(*workers))["no-batch"]

    assert "fork-with-threads" in finding.evidence["cause"]
    assert ("workers" in finding.evidence) is bool(workers)
    assert finding.numbers["is_idle"] is bool(workers)
    assert "multiprocessing_context='forkserver'" in finding.fix["torch"]
    assert finding.fix["infeed"].startswith("from infeed.torch import DataLoader")


def test_a_fork_of_torch_under_infeed_has_another_fix() -> None:
    """infeed has no start method of its own to change there."""
    finding = found(stuck(forks=FORKED, library="infeed.torch", start_method=""))["no-batch"]

    assert "import DataLoader" not in finding.fix["infeed"]
    assert "multiprocessing_context='fork'" in finding.fix["infeed"]


def test_cpu_time_before_the_wait_does_not_count() -> None:
    """One worker computed for a second and then stopped; the other exited with its epoch."""
    workers = seen_by(worker(7, (0, 0.0), (1, 1.0), (2, 1.0), (10, 1.0)), worker(8, (0, 0.0), (0.9, 0.9)))
    finding = found(stuck(waiting_s=8.5), processes=workers)["no-batch"]

    assert (finding.numbers["workers"], finding.numbers["busiest"], finding.numbers["is_idle"]) == (1, 0.0, True)


def test_a_batch_that_may_just_be_slow_is_not_missing() -> None:
    """Earlier batches took 0.9 s each, and this one 8.1 s so far."""
    assert "no-batch" not in found(loader(wait=0.9, away=0.0, batches=2, waiting_s=8.1))
    assert "no-batch" in found(loader(wait=0.01, away=0.0, batches=2, waiting_s=8.1))


def test_a_hanging_main_process_gets_a_worker_first() -> None:
    """torch rejects a timeout without workers, and infeed cannot stop the main process."""
    finding = found(stuck(kind="inline", num_workers=0, pids=[]))["no-batch"]

    assert all(fix.startswith("num_workers=1; then ") for fix in finding.fix.values())


def test_a_hanging_thread_must_become_a_process_to_be_stopped() -> None:
    """infeed rejects sample_timeout with threads."""
    finding = found(stuck(kind="thread", library="infeed", start_method="", pids=[]))["no-batch"]

    assert "worker='process'" in finding.fix["infeed"]


# --- fork-with-threads


@pytest.mark.parametrize(
    ("fork", "threads", "fixes"),
    [
        (ForkSeen([], {"cv2": 3}), {"cv2": 3}, ["cv2.setNumThreads(0)", "'forkserver'"]),
        (ForkSeen(["logger (threading)"], {}), {"Python thread logger": 1}, ["'forkserver'", "start the threads after"]),
        (
            ForkSeen(["logger (threading)"], {"cv2": 1}),
            {"Python thread logger": 1, "cv2": 1},
            ["cv2.setNumThreads(0)", "start the other threads after", "'forkserver'"],
        ),
    ],
)
def test_the_fix_of_a_fork_covers_all_threads(fork: ForkSeen, threads: dict[str, int], fixes: list[str]) -> None:
    """Harmless threads are not mentioned if there are none."""
    finding = found(loader(forks=[fork]))["fork-with-threads"]

    assert finding.numbers == {"threads": threads, "forks": 1}
    assert "harmless" not in finding.evidence
    assert all(fix in finding.fix["torch"] for fix in fixes)


def test_only_forks_with_threads_are_counted() -> None:
    """The first two happened before any thread ran."""
    findings = found(loader(forks=[ForkSeen([], {}), ForkSeen([], {"OpenMP (torch)": 3}), ForkSeen([], {"cv2": 2}), *FORKED]))

    assert findings["fork-with-threads"].numbers == {"threads": {"cv2": 3}, "forks": 2}


# --- not-picklable

LOCKED = Probe(unsendable="dataset.lock is a _thread.lock", unpicklable="dataset: cannot pickle '_thread.lock' object")
LAMBDA = Probe(unpicklable="collate_fn: a lambda")


@pytest.mark.parametrize(("method", "works", "cost"), [("fork", True, 0.5), ("spawn", False, 1.0)])
def test_an_object_that_cannot_be_pickled_may_work_with_fork(method: str, works: bool, cost: float) -> None:
    """A lock: a fork copies it, though it should not."""
    finding = found(loader(start_method=method, probe=LOCKED))["not-picklable"]

    assert finding.evidence["object"] == LOCKED.unsendable
    assert LOCKED.unsendable in finding.title
    assert (finding.evidence["works now"] != "no") is works
    assert finding.cost == cost
    assert finding.fix["infeed"] == f"{finding.fix['torch']}; or worker='thread'"


def test_a_program_that_sets_fork_does_not_rely_on_the_default() -> None:
    """As on macOS, or with Python 3.14."""
    finding = found(loader(start_method="fork", probe=LAMBDA), is_fork_default=False)["not-picklable"]

    assert "'fork'" in finding.evidence["works now"]


def test_objects_pickled_by_value_need_no_fix_in_infeed() -> None:
    """A lambda."""
    finding = found(loader(start_method="spawn", probe=LAMBDA))["not-picklable"]

    assert finding.evidence["works now"] == "no"
    assert finding.fix["infeed"].startswith("no change needed")


def test_all_copied_generators_are_named() -> None:
    for held in (["dataset.rng"], ["a", "b"]):
        finding = found(loader(probe=Probe(generators=held)))["same-random-numbers"]
        assert finding.numbers["generators"] == held
        assert ", ".join(held) in finding.title


# --- memory


def growing(pid: int, rate: int) -> ProcessSeen:
    """Grows by this number of megabytes per second."""
    return ProcessSeen(pid, moments([100 + rate * second for second in range(7)])[7].moments)


def test_growth_is_reported_with_the_time_until_memory_is_full() -> None:
    """20 MiB a second, of which 80 after the first third; of two workers one grows."""
    workers = seen_by(growing(7, 20), growing(8, 0))
    finding = found(loader(pids=[7, 8]), processes=workers, memory_bytes=16_000 * MB)["memory-growth"]

    assert finding.numbers == {"bytes_per_s": 20 * MB, "growing": 1, "workers": 2, "bytes": 80 * MB, "full_s": 800}
    assert finding.cost == pytest.approx(1200 / 16_000)


def test_growth_that_fills_memory_soon_costs_most() -> None:
    """Within a minute."""
    finding = found(loader(pids=[7]), processes=seen_by(growing(7, 20)), memory_bytes=1000 * MB)["memory-growth"]

    assert (finding.numbers["full_s"], finding.numbers["workers"], finding.cost) == (50, 1, 1.0)


def test_growth_is_the_mean_of_all_growing_workers() -> None:
    """20 and 40 MiB a second are 30 each."""
    finding = found(loader(pids=[7, 8]), processes=seen_by(growing(7, 20), growing(8, 40)))["memory-growth"]

    assert finding.numbers["bytes_per_s"] == 30 * MB


def test_workers_of_past_epochs_do_not_fill_memory() -> None:
    """Six workers in total, never more than two at once."""
    workers = seen_by(*(growing(pid, 20) for pid in range(6)))
    finding = found(loader(pids=list(workers)), processes=workers, memory_bytes=16_000 * MB)["memory-growth"]

    assert (finding.numbers["growing"], finding.numbers["bytes"], finding.numbers["full_s"]) == (6, 480 * MB, 400)


def heavy(is_array: bool = False, **options: Any) -> LoaderSeen:
    """A loader with 100 MiB in its dataset."""
    return loader(**{"probe": Probe(heavy=[("dataset.names, a list of 900,000 str", 100 * MB, is_array)]), **options})


@pytest.mark.parametrize(
    ("changes", "is_forked"),
    [({}, True), ({"start_method": "spawn"}, False), ({"start_method": "spawn", "is_array": True}, False)],
)
def test_copied_objects_are_reported_with_the_reason(changes: dict[str, Any], is_forked: bool) -> None:
    """Without a fork arrays are copied too, so they are no fix."""
    finding = found(heavy(**changes))["large-objects"]

    assert finding.numbers == {"bytes": 200 * MB, "is_forked": is_forked}
    assert finding.evidence["object 1"] == "dataset.names, a list of 900,000 str"
    assert ("array" in finding.fix["torch"]) is is_forked
    assert all("infeed.share(" in fix for fix in finding.fix.values())


def test_one_worker_has_one_copy() -> None:
    """One copy besides that of the main process."""
    assert found(heavy(num_workers=1))["large-objects"].numbers["bytes"] == 100 * MB


def test_infeed_stores_arrays_once() -> None:
    """Other objects are copied to each worker."""
    finding = found(heavy(library="infeed", start_method=""))["large-objects"]

    assert not finding.numbers["is_forked"]
    assert "array" in finding.fix["torch"]
    assert "large-objects" not in found(heavy(is_array=True, library="infeed", start_method=""))
