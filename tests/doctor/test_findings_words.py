"""What a user reads of each finding: what is wrong, what shows it and what to do, for programs of which that is known."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, Fork, LoaderSeen, Moment, Probe, ProcessSeen
from infeed.doctor.findings.finding import describe
from tests.doctor.evidence_of import MB, auto, found, loader, moments

FORKED = [Fork([], {"cv2": 3})]


def worker(pid: int, *cpu: tuple[float, float]) -> ProcessSeen:
    """A process that had used so much of a core at these times."""
    return ProcessSeen(pid, [Moment(at, 0, cpu_s) for at, cpu_s in cpu])


def seen_by(*workers: ProcessSeen) -> dict[int, ProcessSeen]:
    return {one.pid: one for one in workers}


# --- loaders and times


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (loader(), "torch's DataLoader(Faces, batch_size=10, num_workers=2)"),
        (loader(library="infeed.torch", batch_size=None), "infeed.torch.DataLoader(Faces, batch_size=None, num_workers=2)"),
        (auto(), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), by now 8 processes"),
        (auto(num_workers=1), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), by now 1 process"),
        (auto(kind="thread"), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), by now 8 threads"),
        (auto(kind="thread", num_workers=1), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto'), by now 1 thread"),
        (auto(kind="inline", num_workers=0), "infeed.DataLoader(Faces, batch_size=10, num_workers='auto')"),
    ],
)
def test_a_loader_is_written_as_in_the_program(seen: LoaderSeen, text: str) -> None:
    """With what became of it where infeed decides."""
    assert describe(seen) == text


# --- no-batch


def stuck(**options: Any) -> LoaderSeen:
    """Of 10 seconds a loop waits 9 for a batch."""
    return loader(**{"waiting_s": 9.0, "batches": 0, "pids": [7, 8], **options})


def test_workers_that_wait_for_ever_are_said_to_do_nothing() -> None:
    """And torch's loader can be told to give up."""
    told = found(stuck(), processes=seen_by(worker(7, (0, 0.0), (10, 0.01)), worker(8, (0, 0.0), (10, 0.1))))["no-batch"]

    assert told.title == "A batch does not come: the workers do nothing"
    assert told.evidence == {
        "waiting": "9 s of 10 s for one batch",
        "workers": "2, of which the busiest used 1% of a core",
    }
    assert told.cure["torch"] == "timeout=60 makes it an error"
    assert told.cure["infeed"] == "hang_warning=10 logs the sample and its stack; sample_timeout=60 ends it"


def test_a_worker_that_computes_for_ever_is_not_said_to_do_nothing() -> None:
    """Nor is a lock blamed, whatever threads ran when it was forked."""
    told = found(stuck(forks=FORKED), processes=seen_by(worker(7, (0, 0.0), (10, 10.0))))["no-batch"]

    assert told.title == "A batch does not come"
    assert told.evidence["workers"] == "1, which used 100% of a core"
    assert "cause" not in told.evidence
    assert told.cure["torch"] == "timeout=60 makes it an error"


@pytest.mark.parametrize("workers", [[worker(7, (0, 0.0), (10, 0.0))], []])
def test_a_fork_among_threads_is_blamed_where_no_batch_comes(workers: list[ProcessSeen]) -> None:
    """Of workers that do nothing, or that nobody could look at."""
    told = found(stuck(forks=FORKED), processes=seen_by(*workers))["no-batch"]

    assert "see fork-with-threads" in told.evidence["cause"]
    assert ("workers" in told.evidence) is bool(workers)
    assert ("do nothing" in told.title) is bool(workers)
    assert told.cure == {
        "torch": "multiprocessing_context='forkserver'",
        "infeed": "from infeed.torch import DataLoader  # never forks this process",
    }


def test_who_waits_for_a_fork_that_infeed_left_to_torch_is_told_how_to_be_without() -> None:
    """There is no start method of its own to be told."""
    told = found(stuck(forks=FORKED, library="infeed.torch", start_method=""))["no-batch"]

    assert told.cure["infeed"].startswith("leave out what its warning names, such as multiprocessing_context='fork'")


def test_what_workers_did_before_the_wait_does_not_count() -> None:
    """One computed for a second and then stopped; the other ended with its epoch."""
    workers = seen_by(worker(7, (0, 0.0), (1, 1.0), (2, 1.0), (10, 1.0)), worker(8, (0, 0.0), (0.9, 0.9)))
    told = found(stuck(waiting_s=8.5), processes=workers)["no-batch"]

    assert told.title == "A batch does not come: the workers do nothing"
    assert told.evidence["workers"] == "1, which used 0% of a core"


def test_a_batch_that_may_just_be_slow_is_not_missed() -> None:
    """Those before took 0.9 s each, and this one 8.1 s so far."""
    assert "no-batch" not in found(loader(wait=0.9, away=0.0, batches=2, waiting_s=8.1))
    assert "no-batch" in found(loader(wait=0.01, away=0.0, batches=2, waiting_s=8.1))


def test_a_loop_that_hangs_by_itself_is_first_given_a_worker() -> None:
    """torch refuses a timeout without workers, and infeed cannot end the loop."""
    told = found(stuck(kind="inline", num_workers=0, pids=[]))["no-batch"]

    assert told.cure["torch"] == "num_workers=1; then timeout=60 makes it an error"
    assert told.cure["infeed"].startswith("num_workers=1; then hang_warning=10")


def test_a_thread_that_hangs_can_be_ended_only_if_it_is_a_process() -> None:
    """infeed refuses sample_timeout with threads."""
    told = found(stuck(kind="thread", library="infeed", start_method="", pids=[]))["no-batch"]

    assert told.cure["infeed"].endswith("sample_timeout=60 ends it, with worker='process'")


# --- fork-with-threads


@pytest.mark.parametrize(
    ("fork", "threads", "cure"),
    [
        (
            Fork([], {"cv2": 3}),
            "cv2 (3)",
            "cv2.setNumThreads(0) before the first use of cv2, or multiprocessing_context='forkserver'",
        ),
        (
            Fork(["logger (threading)"], {}),
            "Python thread logger",
            "multiprocessing_context='forkserver', or start the threads after the workers",
        ),
        (
            Fork(["logger (threading)"], {"cv2": 1}),
            "Python thread logger, cv2",
            "cv2.setNumThreads(0) before the first use of cv2 and start the other threads after the workers, "
            "or multiprocessing_context='forkserver'",
        ),
    ],
)
def test_the_cure_of_a_fork_is_for_all_threads_that_ran(fork: Fork, threads: str, cure: str) -> None:
    """What is harmless is not spoken of if there is none."""
    told = found(loader(forks=[fork]))["fork-with-threads"]

    assert told.evidence == {"threads": threads, "forks": "1 while they ran"}
    assert told.cure["torch"] == cure


def test_only_forks_among_threads_are_counted() -> None:
    """The first two were made before there were any."""
    told = found(loader(forks=[Fork([], {}), Fork([], {"OpenMP (torch)": 3}), Fork([], {"cv2": 2}), *FORKED]))

    assert told["fork-with-threads"].evidence["forks"] == "2 while they ran"
    assert told["fork-with-threads"].evidence["threads"] == "cv2 (3)"


# --- restarted-workers


def anew(start_s: float, batches: int = 5, **options: Any) -> LoaderSeen:
    """Three epochs whose workers are started anew."""
    epochs = [EpochSeen(float(at), start_s, True, [0.001] * batches, [0.1] * batches) for at in range(3)]
    return loader(**{"epochs": epochs, "is_persistent": False, **options})


def test_what_workers_take_to_start_is_told_beside_what_a_batch_takes() -> None:
    """Twice, because the first epoch starts them anyhow."""
    told = found(anew(0.501))["restarted-workers"]

    assert told.title == "Workers are started anew for every epoch: 500 ms each time"
    assert told.evidence == {
        "epochs": "3",
        "first batch": "501 ms after each start; a usual batch: 1 ms",
        "lost": "1 s, 10% of the run",
    }
    assert told.cost == pytest.approx(0.1)
    assert told.cure["torch"] == "persistent_workers=True, and one loader for all epochs"


def test_of_epochs_of_one_batch_no_usual_one_is_known() -> None:
    """Each is the first."""
    assert found(anew(0.5, batches=0))["restarted-workers"].evidence["first batch"] == "500 ms after each start"


def test_loading_the_first_batch_is_not_what_starting_costs() -> None:
    """It takes 0.4 s, whoever loads it: of 0.55 s only 0.15 could be saved, and of 0.41 s nothing."""
    probe = Probe(sample_count=9, sample_s=0.04, median_s=0.04, cpu_s=0.04)

    assert found(anew(0.55, probe=probe))["restarted-workers"].title.endswith("150 ms each time")
    assert "restarted-workers" not in found(anew(0.41, probe=probe))


# --- cannot-be-sent

LOCKED = Probe(unsendable="dataset.lock is a _thread.lock", unpicklable="dataset: cannot pickle '_thread.lock' object")
LAMBDA = Probe(unpicklable="collate_fn: a lambda")


@pytest.mark.parametrize(
    ("method", "works", "cost"),
    [("fork", "only because torch forks here: not on Windows, macOS or Python 3.14", 0.5), ("spawn", "no", 1.0)],
)
def test_whether_what_cannot_be_sent_works_now_is_told(method: str, works: str, cost: float) -> None:
    """A lock: with a fork it comes along, though it should not."""
    told = found(loader(start_method=method, probe=LOCKED))["cannot-be-sent"]

    assert told.title == "Cannot be sent to workers: dataset.lock is a _thread.lock"
    assert told.evidence == {"what": LOCKED.unsendable, "why": "it cannot be pickled", "works now": works}
    assert told.cost == cost
    assert told.cure["infeed"] == f"{told.cure['torch']}; or worker='thread'"


def test_a_program_that_asks_for_fork_is_not_told_that_torch_forks_by_itself() -> None:
    """As on macOS, or with Python 3.14."""
    told = found(loader(start_method="fork", probe=LAMBDA), is_fork_default=False)["cannot-be-sent"]

    assert told.evidence["why"] == "pickle, with which torch sends, cannot send it"
    assert told.evidence["works now"] == (
        "only because the program asks for 'fork': by default not here, nor on Windows, macOS or Python 3.14"
    )


def test_what_infeed_sends_as_it_is_needs_no_cure_there() -> None:
    """A lambda."""
    told = found(loader(start_method="spawn", probe=LAMBDA))["cannot-be-sent"]

    assert told.evidence["works now"] == "no"
    assert told.cure == {"torch": "put the function or class at the top of a module", "infeed": "sends it as it is"}


def test_several_generators_are_copied_and_one_is() -> None:
    """Grammar."""
    one, two = (
        found(loader(probe=Probe(generators=held)))["same-random-numbers"].title for held in (["dataset.rng"], ["a", "b"])
    )

    assert one == "The same random numbers in every worker: dataset.rng is copied to each worker"
    assert two == "The same random numbers in every worker: a, b are copied to each worker"


# --- memory


def growing(pid: int, rate: int) -> ProcessSeen:
    """By so many megabytes a second."""
    return ProcessSeen(pid, moments([100 + rate * second for second in range(7)])[7].moments)


def test_growth_is_told_with_when_memory_is_full() -> None:
    """20 MiB a second, of which 80 after the first third; of two workers one grows."""
    workers = seen_by(growing(7, 20), growing(8, 0))
    told = found(loader(pids=[7, 8]), processes=workers, memory_bytes=16_000 * MB)["memory-growth"]

    assert told.title == "Workers grow by 1.2 GiB a minute each"
    assert told.evidence == {
        "growing": "1 of 2 workers, by 80.0 MiB so far",
        "full": "what is free (15.6 GiB) is used up after 13 min 20 s",
    }
    assert told.cost == pytest.approx(1200 / 16_000)


def test_growth_that_fills_memory_soon_is_the_most_costly() -> None:
    """Within a minute."""
    told = found(loader(pids=[7]), processes=seen_by(growing(7, 20)), memory_bytes=1000 * MB)["memory-growth"]

    assert told.evidence["full"] == "what is free (1000.0 MiB) is used up after 50 s"
    assert told.evidence["growing"].startswith("1 of 1 worker,")
    assert told.cost == 1.0


def test_workers_that_do_not_grow_alike_are_told_with_their_mean() -> None:
    """20 and 40 MiB a second are 30 each."""
    told = found(loader(pids=[7, 8]), processes=seen_by(growing(7, 20), growing(8, 40)))["memory-growth"]

    assert told.title == "Workers grow by 1.8 GiB a minute each"


def test_workers_of_past_epochs_do_not_fill_memory_as_well() -> None:
    """Six were there, never more than two at once."""
    workers = seen_by(*(growing(pid, 20) for pid in range(6)))
    told = found(loader(pids=list(workers)), processes=workers, memory_bytes=16_000 * MB)["memory-growth"]

    assert told.evidence["growing"] == "6 of 6 workers, by 480.0 MiB so far"
    assert told.evidence["full"].endswith("after 6 min 40 s")


def heavy(is_array: bool = False, **options: Any) -> LoaderSeen:
    """With 100 MiB in its dataset."""
    return loader(**{"probe": Probe(heavy=[("dataset.names, a list of 900,000 str", 100 * MB, is_array)]), **options})


@pytest.mark.parametrize(
    ("changes", "why", "cure"),
    [
        (
            {},
            "reading a Python object writes its reference count, so that each worker comes to have its own copy",
            "an array instead of Python objects (numpy, pyarrow), or infeed.share(...), which holds it once",
        ),
        ({"start_method": "spawn"}, "each worker is sent its own copy", "infeed.share(...), which holds it once"),
        (
            {"start_method": "spawn", "is_array": True},
            "each worker is sent its own copy",
            "infeed.share(...), which holds it once",
        ),
    ],
)
def test_objects_that_every_worker_has_are_told_with_why(changes: dict[str, Any], why: str, cure: str) -> None:
    """Where nothing is forked, arrays are copied too and so are no cure."""
    told = found(heavy(**changes))["big-objects"]

    assert told.title == "The dataset holds objects that take 200.0 MiB more in 2 workers"
    assert told.evidence == {"object 1": "dataset.names, a list of 900,000 str", "why": why}
    assert told.cure == {"torch": cure, "infeed": "self.items = infeed.share(items)"}


def test_one_worker_is_not_called_workers() -> None:
    """It has a copy besides the loop's."""
    assert found(heavy(num_workers=1))["big-objects"].title.endswith("take 100.0 MiB more in 1 worker")


def test_arrays_of_infeed_are_held_once() -> None:
    """Other objects are sent to each worker."""
    told = found(heavy(library="infeed", start_method=""))["big-objects"]

    assert told.evidence["why"] == "each worker is sent its own copy"
    assert told.cure["torch"].startswith("an array instead of Python objects")
    assert "big-objects" not in found(heavy(is_array=True, library="infeed", start_method=""))
