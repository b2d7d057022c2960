"""Each finding as a pure function: which figures produce it, and which do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.doctor.checks import NAMES, examine
from infeed.doctor.evidence import EpochSeen, ForkSeen, Moment, Probe, ProcessSeen, SlowIndex
from infeed.doctor.time_checks import best_workers, slowest_s, transfer_s
from tests.doctor.evidence_of import MB, auto, costly, loader, moments, names, run, stream, uneven


def test_nothing_is_found_in_a_healthy_program() -> None:
    """Some waiting is normal, OpenBLAS and OpenMP survive a fork, and the thread of tqdm is harmless."""
    forks = [
        ForkSeen(["TMonitor (tqdm._monitor)", "QueueFeederThread (threading)"], {"OpenBLAS (numpy)": 3, "OpenMP (torch)": 3})
    ]
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=0.01, switches=0.0)

    assert names(loader(wait=0.005, forks=forks, probe=probe, batch_bytes=MB)) == []


@pytest.mark.parametrize(("wait", "found"), [(0.005, False), (0.02, True)])
def test_a_loop_that_waits_a_tenth_of_its_time_is_reported(wait: float, found: bool) -> None:
    """The training step takes 0.1 s per batch."""
    assert ("data-bound" in names(loader(wait=wait))) is found


def test_a_short_wait_is_not_reported() -> None:
    """A few batches of a few milliseconds prove nothing, even if half of the time is waiting."""
    assert names(loader(wait=0.005, away=0.005)) == []


@pytest.mark.parametrize(("wait", "reason"), [(0.15, "transfer"), (0.02, "few-workers")])
def test_workers_that_could_deliver_more_are_not_too_few(wait: float, reason: str) -> None:
    """Two workers could deliver a batch every 0.1 s; the step takes 0.1 s, and the training loop waits nevertheless."""
    probe = Probe(sample_count=100, sample_s=0.02, median_s=0.02, cpu_s=0.02, switches=0.0)
    found = {finding.name: finding for finding in examine(run(loader(wait=wait, away=0.1, probe=probe)))}

    assert found["data-bound"].bottleneck == reason


def test_there_is_no_wait_without_a_training_loop() -> None:
    """If the doctor iterates a dataset by itself, there is no training step."""
    assert names(loader(wait=1.0, away=0.0), has_own_loop=False) == []


def test_the_title_says_that_a_gpu_waits() -> None:
    """The title is about the GPU if there is one."""
    finding = examine(run(loader(wait=0.1, is_pinned=True), has_gpu=True))[0]

    assert finding.title == "The GPU waits for data 50% of the time"


@pytest.mark.parametrize(
    ("sample_s", "cpu_s", "away", "best"),
    [
        (0.01, 0.01, 0.1, 2),  # Worker and step take 0.1 s per batch: one worker and a reserve.
        (0.01, 0.01, 0.001, 4),  # No number suffices: all cores.
        (0.01, 0.001, 0.001, 40),  # Mostly I/O-bound: more than cores.
        (0.0001, 0.0001, 0.1, 1),
    ],
)
def test_the_number_of_workers_follows_from_load_and_step_times(sample_s: float, cpu_s: float, away: float, best: int) -> None:
    """Batches of 10 samples on 4 cores."""
    seen = loader(away=away, probe=Probe(sample_count=10, sample_s=sample_s, cpu_s=cpu_s))

    assert best_workers(run(seen), seen) == best


def test_more_workers_are_proposed_only_if_they_help() -> None:
    """Nothing is proposed if all cores are busy."""
    probe = Probe(sample_count=10, sample_s=0.04, cpu_s=0.04)

    assert "num-workers" in names(loader(wait=0.1, num_workers=1, probe=probe))
    assert "num-workers" not in names(loader(wait=0.1, num_workers=4, probe=probe))


def test_a_busy_machine_is_no_reason_for_more_workers_than_cores() -> None:
    """Samples that lose the CPU to other processes are not I/O-bound."""
    waiting, interrupted = (Probe(sample_count=10, sample_s=0.01, cpu_s=0.001, switches=number) for number in (1.0, 0.0))

    assert best_workers(run(loader()), loader(away=0.001, probe=waiting)) > 4
    assert best_workers(run(loader()), loader(away=0.001, probe=interrupted)) == 4


def test_the_gain_of_more_workers_is_predicted_from_the_current_ones() -> None:
    """Two workers take 0.4 s instead of the ideal 0.05 s; twice as many will take half of 0.4 s, not 0.025 s."""
    probe = Probe(sample_count=10, sample_s=0.01, cpu_s=0.01)
    found = {finding.name: finding for finding in examine(run(loader(wait=0.39, away=0.01, probe=probe)))}

    assert found["num-workers"].numbers["workers"] == 4
    assert found["num-workers"].numbers["gain"] == pytest.approx(0.5, abs=0.01)


def test_no_workers_are_proposed_if_they_only_add_cost() -> None:
    """Loading a batch in the main process takes 1% of the transfer from a worker."""
    probe = Probe(sample_count=10, sample_s=1e-6, cpu_s=1e-6)
    found = {finding.name: finding for finding in examine(run(loader(wait=0.001, away=0.001, batches=400, probe=probe)))}

    assert found["num-workers"].fix["torch"] == "num_workers=0"
    assert found["data-bound"].bottleneck == "transfer"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"cpu_s": 0.009}, False),  # CPU-bound
        ({"switches": 0.1}, False),  # Other processes use the CPU.
        ({"read_bytes": 0.0}, False),  # I/O-bound
    ],
)
def test_storage_is_slow_if_samples_read_and_wait(changes: dict[str, Any], found: bool) -> None:
    """All three signs are needed."""
    given: dict[str, Any] = {"sample_count": 9, "sample_s": 0.01, "cpu_s": 0.001, "switches": 1.0, "read_bytes": 1e6}
    probe = Probe(**{**given, **changes})

    assert ("slow-storage" in names(loader(wait=0.1, probe=probe))) is found


def test_slow_samples_count_if_they_dominate_the_time() -> None:
    """One of 100 samples takes as long as all others together, or as long as two samples."""
    given: dict[str, Any] = {"sample_count": 100, "sample_s": 0.02, "median_s": 0.01}

    assert "slow-samples" in names(loader(wait=0.1, probe=Probe(slow=[SlowIndex("7", 1.0)], **given)))
    assert "slow-samples" not in names(loader(wait=0.1, probe=Probe(slow=[SlowIndex("7", 0.02)], **given)))


def test_slow_samples_are_reported_before_the_number_of_workers() -> None:
    """They take most of the loading time. The training loop waits for them, so they come before a number of workers."""
    found = examine(run(uneven(), seconds=1.4))

    assert [one.name for one in found] == ["data-bound", "slow-samples", "num-workers"]
    assert found[0].bottleneck == "slow-samples"
    assert (found[0].numbers["sample"], found[0].numbers["seconds"]) == ("index 0", 0.3)


def test_slow_samples_are_not_reported_if_the_rest_keeps_workers_busy() -> None:
    """One of 200 samples is a quarter of the loading time; the others are too late as well or, for a slower loop, in time."""
    busy, calm = (
        {one.name: one for one in examine(run(uneven(1, wait=0.05, away=away)))}["data-bound"].bottleneck
        for away in (0.005, 0.03)
    )

    assert busy != "slow-samples"
    assert calm == "slow-samples"


def test_the_predicted_gain_is_limited_by_the_slowest_sample() -> None:
    """An epoch of 10 batches takes at least 0.3 s, however many workers there are: one batch per 33 ms at best, not 5 ms."""
    seen = uneven(batches=9)
    best = best_workers(run(seen), seen)
    found = {one.name: one for one in examine(run(seen))}["num-workers"]
    gain = found.numbers["gain"]

    assert slowest_s(seen, 64) == pytest.approx((0.3 + 7 * 0.004) / 10)
    assert 1 - gain >= slowest_s(seen, best) / 0.055
    assert best == 10 < best_workers(run(seen), uneven(probe=replace(seen.probe, slow=[])))
    assert found.numbers["limit"] == "slow-samples"


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"library": "infeed"}, 0.3 / 25),  # Several workers share a batch.
        ({"batches": 9999}, 0.328 / 64),  # As many are in flight.
        ({"batches": 9999, "batch_size": 1}, 0.3 / 64),
        ({"count": 1, "batches": 9999, "batch_size": 1}, 0.3 / 200),  # One in this many is slow.
        ({"count": 0}, 0.0),
    ],
)
def test_the_delay_of_slow_samples_depends_on_the_batches_in_flight(changes: dict[str, Any], bound: float) -> None:
    """With 64 workers."""
    assert slowest_s(uneven(**changes), 64) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("start_s", "epoch_count", "found"),
    [(0.015, 20, False), (0.025, 20, True), (0.015, 100, True), (0.025, 5, False)],
)
def test_short_worker_starts_are_reported_if_they_add_up(start_s: float, epoch_count: int, found: bool) -> None:
    """In a run of 10 s, starts take 2% (20 ms each) or 10%."""
    epochs = [EpochSeen(float(at), start_s=start_s, has_batch=True, waits=[0.0], aways=[0.05]) for at in range(epoch_count)]

    assert ("restarted-workers" in names(loader(epochs=epochs, is_persistent=False))) is found


def test_threads_at_a_fork_are_reported_with_their_library() -> None:
    """Python threads are reported with their library too."""
    finding = examine(run(loader(forks=[ForkSeen(["logger (threading)"], {"cv2": 3, "OpenBLAS (numpy)": 3})])))[0]

    assert finding.evidence["threads"] == "Python thread logger, cv2 (3)"
    assert finding.evidence["harmless"].startswith("OpenBLAS (numpy)")
    assert "cv2.setNumThreads(0)" in finding.fix["torch"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, True), ({"is_persistent": True}, False), ({"kind": "thread"}, False), ({"library": "infeed.torch"}, True)],
)
def test_restarted_workers_are_reported(changes: dict[str, Any], found: bool) -> None:
    """Each of three epochs begins with half a second of worker start-up."""
    epochs = [EpochSeen(float(at), start_s=0.5, has_batch=True, waits=[0.001] * 5, aways=[0.1] * 5) for at in range(3)]

    assert ("restarted-workers" in names(loader(epochs=epochs, **{"is_persistent": False, **changes}))) is found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"has_init": True}, False),  # It may seed the generator.
        ({"num_workers": 1}, False),
        ({"num_workers": 1, "is_persistent": False}, True),  # Again in every epoch.
        ({"kind": "thread"}, False),  # Which share one generator.
    ],
)
def test_a_copied_generator_is_reported(changes: dict[str, Any], found: bool) -> None:
    """It is reported for several workers, and for restarted ones."""
    seen = loader(**{"probe": Probe(generators=["dataset.rng"]), **changes})

    assert ("same-random-numbers" in names(seen)) is found


@pytest.mark.parametrize(
    ("method", "is_fork_default", "found"), [("fork", True, False), ("spawn", True, True), ("fork", False, True)]
)
def test_objects_that_pickle_rejects_matter_without_fork(method: str, is_fork_default: bool, found: bool) -> None:
    """An object that cannot be pickled at all matters with every start method."""
    seen = loader(start_method=method, probe=Probe(unpicklable="collate_fn: a lambda"))

    assert ("not-picklable" in names(seen, is_fork_default=is_fork_default)) is found
    both = Probe(unsendable="dataset.lock is a lock", unpicklable="dataset: cannot pickle a lock")
    assert "not-picklable" in names(loader(start_method=method, probe=both))


def test_objects_that_only_infeed_cannot_pickle_matter_to_infeed_only() -> None:
    """infeed pickles classes of the program by value, with the globals they use; torch runs the program again."""
    probe = Probe(unsendable="dataset is a __main__.Faces")

    assert names(loader(probe=probe)) == []
    assert names(loader(probe=probe, library="infeed", start_method="")) == ["not-picklable"]
    assert names(loader(probe=probe, library="infeed", start_method="", kind="thread")) == []


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([100, 120, 140, 160, 180, 200, 220], True),
        ([100, 200, 300, 300, 300, 300, 300], False),  # It has reached its final size.
        ([100, 101, 102, 103, 104, 105, 106], False),  # Too little to tell.
        ([100, 120, 140, 160], False),  # Too few to tell.
        ([100, 100, 100, 100, 100, 100, 220], False),  # One step at the end: another process that shared its pages has ended.
    ],
)
def test_memory_that_keeps_growing_is_reported(sizes: list[int], found: bool) -> None:
    """Sizes in megabytes, once per second."""
    assert ("memory-growth" in names(loader(pids=[7]), processes=moments(sizes))) is found


def test_memory_that_grows_in_the_first_seconds_of_a_worker_is_not_reported() -> None:
    """A worker imports modules then, and copies the pages of its parent that it writes."""
    seen = moments([100, 120, 140, 160, 180, 200, 220])
    young = [one._replace(at=one.at / 4) for one in seen[7].moments]

    assert "memory-growth" not in names(loader(pids=[7]), processes={7: ProcessSeen(7, young)})


@pytest.mark.parametrize(
    ("size", "is_array", "method", "found"),
    [
        (100 * MB, False, "fork", True),
        (100 * MB, True, "fork", False),  # Pages of arrays stay shared.
        (100 * MB, True, "spawn", True),
        (10 * MB, False, "fork", False),
    ],
)
def test_copies_in_every_worker_are_reported(size: int, is_array: bool, method: str, found: bool) -> None:
    """With two workers."""
    seen = loader(start_method=method, probe=Probe(heavy=[("dataset.names", size, is_array)]))

    assert ("large-objects" in names(seen)) is found


@pytest.mark.parametrize(("cores", "found"), [(8, False), (4, True)])
def test_pools_matter_if_there_are_more_threads_than_cores(cores: int, found: bool) -> None:
    """Two workers with three threads each."""
    processes = {7: ProcessSeen(7, pools={"OpenBLAS (numpy)": 2})}

    assert ("thread-pools" in names(loader(wait=0.1, pids=[7]), processes=processes, core_count=cores)) is found


@pytest.mark.parametrize(
    ("changes", "has_gpu", "found"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"is_pinned": True}, True, False),
        ({"is_on_device": True}, True, False),
        ({"batch_bytes": 1000}, True, False),  # Pinning makes no difference.
    ],
)
def test_batches_for_a_gpu_should_be_pinned(changes: dict[str, Any], has_gpu: bool, found: bool) -> None:
    """Only if there is a GPU, and batches are large and not on it yet."""
    assert ("no-pinning" in names(loader(**{"batch_bytes": MB, **changes}), has_gpu=has_gpu)) is found


@pytest.mark.parametrize(("waiting_s", "found"), [(9.0, True), (1.0, False)])
def test_a_missing_batch_is_reported(waiting_s: float, found: bool) -> None:
    """The run takes 10 s."""
    assert ("no-batch" in names(loader(waiting_s=waiting_s, batches=0))) is found


@pytest.mark.parametrize(
    ("options", "is_reported"),
    [
        ({}, True),
        ({"library": "infeed.torch"}, True),
        ({"library": "infeed"}, False),  # One worker reads it.
        ({"num_workers": 1}, False),
        ({"num_workers": 0, "kind": "inline"}, False),
        ({"has_init": True}, False),
        ({"shards_itself": True}, False),
        ({"is_stream": False}, False),
        ({"wait": 0.0}, True),  # Whether or not the training loop waits.
    ],
)
def test_an_iterable_dataset_that_every_worker_reads_repeats_its_samples(options: dict[str, Any], is_reported: bool) -> None:
    findings = {one.name: one for one in examine(run(stream(**options)))}
    assert ("same-samples" in findings) is is_reported
    if is_reported:
        assert findings["same-samples"].risk == "wrong results"
        assert findings["same-samples"].numbers["copies"] == 2


def test_slow_loading_is_no_reason_for_fewer_workers() -> None:
    """One worker delivers a batch as fast as it is loaded, so transfer is not the bottleneck."""
    seen = loader(wait=0.0997, away=0.0, num_workers=1, library="infeed", probe=costly(0.00994))
    findings = {one.name: one for one in examine(run(seen))}
    assert findings["data-bound"].bottleneck != "transfer"
    assert "num_workers=0" not in str(findings["data-bound"].fix)
    quick = loader(wait=0.0997, away=0.0, num_workers=1, library="infeed", probe=costly(0.007))
    assert "num_workers=0" in str({one.name: one for one in examine(run(quick))}["data-bound"].fix)


def test_findings_are_sorted_by_cost() -> None:
    """First what may lose the run, then time, the larger share first, then memory."""
    probe = Probe(
        unsendable="dataset.lock", unpicklable="it", generators=["dataset.rng"], heavy=[("dataset.names", 100 * MB, False)]
    )
    seen = loader(wait=0.1, probe=probe, forks=[ForkSeen([], {"cv2": 3})], batch_bytes=100 * MB)
    found = names(seen, has_gpu=True)

    assert found == [
        "fork-with-threads",
        "not-picklable",
        "same-random-numbers",
        "data-bound",
        "no-pinning",
        "large-objects",
    ]
    assert set(found) <= set(NAMES)


def test_short_worker_starts_are_not_reported() -> None:
    """Start-up takes 10 ms per epoch of 1 s."""
    epochs = [EpochSeen(float(at), start_s=0.01, has_batch=True, waits=[0.0] * 5, aways=[0.2] * 5) for at in range(10)]

    assert names(loader(epochs=epochs, is_persistent=False)) == []


def test_findings_about_processes_are_not_reported_for_threads() -> None:
    """Threads share memory and thread pools with the training loop."""
    worker = ProcessSeen(7, moments([100, 120, 140, 160, 180, 200, 220])[7].moments, {"OpenBLAS (numpy)": 9})
    seen = loader(kind="thread", pids=[7], probe=Probe(heavy=[("dataset.names", 100 * MB, False)]))

    assert names(seen, processes={7: worker}) == []


def test_a_loop_that_does_not_wait_needs_no_faster_samples() -> None:
    """Reading is slow, and one sample very slow, but every batch arrives in time."""
    slow = [SlowIndex("7", 1.0)]
    probe = Probe(sample_count=9, sample_s=0.01, median_s=0.001, cpu_s=0.001, switches=1.0, read_bytes=1e6, slow=slow)

    assert names(loader(probe=probe)) == []
    assert set(names(loader(wait=0.1, probe=probe))) >= {"slow-storage", "slow-samples"}


def test_a_change_with_little_gain_is_not_proposed() -> None:
    """A fourth worker is not proposed if three perform almost like four."""
    probe = Probe(sample_count=10, sample_s=0.04, cpu_s=0.04)

    assert names(loader(wait=0.06, away=0.05, num_workers=3, probe=probe)) == ["data-bound"]


def test_a_program_that_was_never_observed_has_no_findings() -> None:
    """The program was killed before anything was measured."""
    assert names(loader(batches=0, waiting_s=1.0), seconds=0.0) == []


@pytest.mark.parametrize(("sample_s", "found"), [(3e-5, False), (3e-3, True)])
def test_workers_are_proposed_only_if_a_batch_is_worth_its_transfer(sample_s: float, found: bool) -> None:
    """Batches of 10 take 0.3 or 30 ms to load and the step takes as long; transfer from torch's workers takes 1 ms."""
    seen = loader(wait=10 * sample_s, away=10 * sample_s, batches=2000, num_workers=0, kind="inline", probe=costly(sample_s))

    assert ("num-workers" in names(seen)) is found
    assert "data-bound" in names(seen)


@pytest.mark.parametrize(("library", "found"), [("torch", False), ("infeed", True)])
def test_transfer_of_large_batches_takes_longer_with_torch(library: str, found: bool) -> None:
    """Batches of 25 MB take 10 ms to load; infeed's workers write them to memory that the training loop reads."""
    given: dict[str, Any] = {"num_workers": 0, "kind": "inline", "batch_bytes": 25_000_000, "probe": costly(1e-3)}
    seen = loader(wait=0.01, away=0.01, batches=100, library=library, **given)

    assert transfer_s(seen) > 0.01 or found
    assert ("num-workers" in names(seen)) is found


@pytest.mark.parametrize(("size", "sample_s", "best"), [(1000, 1e-3, 4), (100_000_000, 1e-3, 0), (1000, 1e-4, 0)])
def test_no_more_workers_are_proposed_if_transfer_dominates(size: int, sample_s: float, best: int) -> None:
    """The loop waits 50 ms for one worker: loading takes 10 or 1 ms of these, or the transfer of 100 MB takes 41 ms."""
    seen = loader(wait=0.05, away=0.001, num_workers=1, batch_bytes=size, probe=costly(sample_s))
    found = {finding.name: finding for finding in examine(run(seen))}

    assert found["num-workers"].fix["infeed"] == f"num_workers={best}"


def test_transfer_limits_the_gain_of_more_workers() -> None:
    """Two workers deliver a 25 MB batch every 15 ms, of which 11 ms are transfer; four workers need these as well."""
    given: dict[str, Any] = {"wait": 0.014, "away": 0.001, "batches": 100, "probe": costly(1.5e-3)}

    assert names(loader(batch_bytes=1000, **given)) == ["data-bound", "num-workers"]
    assert names(loader(batch_bytes=25_000_000, **given)) == ["data-bound"]


def test_cheap_loading_in_the_main_process_does_not_refer_to_other_findings() -> None:
    """There are no other findings: workers would not help."""
    cheap, dear = (
        examine(run(loader(wait=10 * one, away=0.001, batches=900, num_workers=0, kind="inline", probe=costly(one))))
        for one in (1e-4, 1e-3)
    )

    assert ["larger batches" in finding.fix["torch"] for finding in cheap] == [True]
    assert not any("larger batches" in finding.fix["torch"] for finding in dear)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"num_workers": 0, "kind": "inline"}, "num_workers=1 or more"),
        ({"num_workers": 0, "kind": "inline", "is_gathered": True}, "larger batches"),
        ({"probe": costly(0.1)}, "num_workers=4; preprocess the dataset once"),
        ({"probe": costly(0.01), "num_workers": 0, "kind": "inline"}, "num_workers=4, to load during"),
        ({"probe": costly(0.1), "num_workers": 4}, "preprocess the dataset once"),
        ({"probe": costly(1e-4)}, "num_workers=0"),
        ({"probe": costly(0.02)}, "fewer, larger arrays"),
    ],
)
@pytest.mark.parametrize("library", ["torch", "infeed"])
def test_a_data_bound_loop_has_advice_of_its_own(changes: dict[str, Any], cure: str, library: Any) -> None:
    """Other findings may be missing or hidden."""
    found = {one.name: one for one in examine(run(loader(wait=0.3, away=0.01, library=library, **changes)))}

    assert all(cure in text for text in found["data-bound"].fix.values())


@pytest.mark.parametrize("library", ["torch", "infeed"])
def test_no_more_workers_are_proposed_for_an_iterable_dataset_without_sharding(library: Any) -> None:
    """infeed reads it in one worker, torch in each worker completely. One worker is better than none."""
    found = {one.name: one for one in examine(run(stream(library=library)))}
    alone = {one.name: one for one in examine(run(stream(library=library, num_workers=0, kind="inline", away=0.1)))}

    assert list(found) == (["data-bound"] if library == "infeed" else ["same-samples", "data-bound"])
    assert found["data-bound"].bottleneck == ("one-reader" if library == "infeed" else "every-reader")
    assert "get_worker_info()" in found["data-bound"].fix["infeed"]
    assert alone["num-workers"].fix["infeed"] == "num_workers=1"
    assert "num-workers" in names(stream(library=library, shards_itself=True, wait=0.05))


def test_no_number_of_workers_is_proposed_with_auto() -> None:
    """Slow storage is still reported."""
    probe = Probe(sample_count=100, sample_s=0.1, median_s=0.1, cpu_s=0.001, switches=1.0, read_bytes=1e6)
    found = examine(run(auto(wait=0.2, away=0.01, probe=probe)))
    fixed = loader(wait=0.2, away=0.01, probe=probe, library="infeed", start_method="")

    assert sorted(finding.name for finding in found) == ["data-bound", "slow-storage"]
    assert not any("num_workers=" in finding.fix["infeed"] for finding in found)
    assert "num-workers" in names(fixed)


def test_infeed_is_not_recommended_to_its_users() -> None:
    """Torch's users get the advice, also where infeed uses torch's workers, which are forked."""
    forks = [ForkSeen([], {"cv2": 3})]
    for library in ("infeed", "infeed.torch", "torch"):
        found = examine(run(loader(wait=0.1, library=library, forks=forks, waiting_s=9.0)))
        cures = [finding.fix["infeed"] for finding in found]
        assert {finding.name for finding in found} >= {"data-bound", "fork-with-threads"}
        assert any("import DataLoader" in cure for cure in cures) is (library == "torch")


@pytest.mark.parametrize(("cpu_s", "text"), [(0.0, "auto-workers"), (10.0, "all-cores")])
def test_cores_are_busy_if_workers_use_them(cpu_s: float, text: str) -> None:
    """Eight workers on four cores, observed for 10 s."""
    workers = {pid: ProcessSeen(pid, [Moment(0.0, 0, 0.0), Moment(10.0, 0, cpu_s)]) for pid in range(8)}
    seen = auto(wait=0.1, pids=list(workers))

    assert examine(run(seen, processes=workers))[0].bottleneck == text


@pytest.mark.parametrize(("cpu_s", "text"), [(0.0001, "auto-workers"), (0.1, "all-cores")])
def test_samples_show_whether_threads_keep_cores_busy(cpu_s: float, text: str) -> None:
    """Threads cannot be observed from outside."""
    seen = auto(wait=0.05, kind="thread", probe=Probe(sample_count=9, sample_s=0.1, cpu_s=cpu_s))

    assert examine(run(seen))[0].bottleneck == text


def test_gathered_rows_need_no_workers() -> None:
    """Probing samples one by one is not how infeed loads them."""
    seen = loader(wait=0.1, library="infeed", num_workers=0, kind="inline", is_gathered=True, probe=costly(0.01))

    assert names(seen) == ["data-bound"]


def test_auto_workers_may_share_random_numbers_later() -> None:
    """One worker with "auto" may become several."""
    probe = Probe(generators=["dataset.rng"])

    assert names(auto(num_workers=1, probe=probe)) == ["same-random-numbers"]
    assert names(auto(num_workers=1, probe=probe, is_auto=False)) == []
