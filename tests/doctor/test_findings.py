"""Each finding as a pure function: from which figures on it is one, and from which it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.doctor.checks import NAMES, examine
from infeed.doctor.evidence import EpochSeen, ForkSeen, Moment, Probe, ProcessSeen, SlowIndex
from infeed.doctor.time_checks import best_workers, slowest_s, transfer_s
from tests.doctor.evidence_of import MB, auto, costly, loader, moments, names, run, stream, uneven


def test_nothing_is_found_in_what_is_as_it_should_be() -> None:
    """Some waiting is normal, OpenBLAS and OpenMP survive a fork, and tqdm's thread is harmless."""
    forks = [
        ForkSeen(["TMonitor (tqdm._monitor)", "QueueFeederThread (threading)"], {"OpenBLAS (numpy)": 3, "OpenMP (torch)": 3})
    ]
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=0.01, switches=0.0)

    assert names(loader(wait=0.005, forks=forks, probe=probe, batch_bytes=MB)) == []


@pytest.mark.parametrize(("wait", "found"), [(0.005, False), (0.02, True)])
def test_a_loop_that_waits_a_tenth_of_its_time_is_reported(wait: float, found: bool) -> None:
    """Per batch it works 0.1 s."""
    assert ("data-bound" in names(loader(wait=wait))) is found


def test_a_little_waiting_proves_nothing() -> None:
    """A few batches of a few milliseconds, half of it waiting."""
    assert names(loader(wait=0.005, away=0.005)) == []


@pytest.mark.parametrize(("wait", "reason"), [(0.15, "transfer"), (0.02, "few-workers")])
def test_workers_that_could_bring_more_are_not_too_few(wait: float, reason: str) -> None:
    """Two of them could bring a batch every 0.1 s; the loop works for 0.1 s and waits besides."""
    probe = Probe(sample_count=100, sample_s=0.02, median_s=0.02, cpu_s=0.02, switches=0.0)
    found = {finding.name: finding for finding in examine(run(loader(wait=wait, away=0.1, probe=probe)))}

    assert found["data-bound"].bottleneck == reason


def test_without_a_training_loop_there_is_no_wait() -> None:
    """Where the doctor iterates a dataset by itself it does nothing else."""
    assert names(loader(wait=1.0, away=0.0), has_own_loop=False) == []


def test_a_gpu_that_waits_is_called_a_gpu() -> None:
    """The title says who waits."""
    finding = examine(run(loader(wait=0.1, is_pinned=True), has_gpu=True))[0]

    assert finding.title == "The GPU waits for data 50% of the time"


@pytest.mark.parametrize(
    ("sample_s", "cpu_s", "away", "best"),
    [
        (0.01, 0.01, 0.1, 2),  # a batch takes one worker 0.1 s, the loop as long: one, and some room
        (0.01, 0.01, 0.001, 4),  # nothing is enough: all cores
        (0.01, 0.001, 0.001, 40),  # it waits most of the time: more than cores
        (0.0001, 0.0001, 0.1, 1),
    ],
)
def test_the_number_of_workers_follows_from_what_loading_and_the_loop_take(
    sample_s: float, cpu_s: float, away: float, best: int
) -> None:
    """Batches of 10, on 4 cores."""
    seen = loader(away=away, probe=Probe(sample_count=10, sample_s=sample_s, cpu_s=cpu_s))

    assert best_workers(run(seen), seen) == best


def test_more_workers_are_proposed_only_if_they_help() -> None:
    """With all cores at work there is nothing to propose."""
    probe = Probe(sample_count=10, sample_s=0.04, cpu_s=0.04)

    assert "num-workers" in names(loader(wait=0.1, num_workers=1, probe=probe))
    assert "num-workers" not in names(loader(wait=0.1, num_workers=4, probe=probe))


def test_a_busy_machine_is_no_reason_for_more_workers_than_cores() -> None:
    """Samples that are off the processor because others have it do not wait for anything."""
    waiting, interrupted = (Probe(sample_count=10, sample_s=0.01, cpu_s=0.001, switches=number) for number in (1.0, 0.0))

    assert best_workers(run(loader()), loader(away=0.001, probe=waiting)) > 4
    assert best_workers(run(loader()), loader(away=0.001, probe=interrupted)) == 4


def test_the_gain_of_more_workers_is_predicted_from_the_present_ones() -> None:
    """Two workers take 0.4 s for what should take 0.05; twice as many will take half of that, and not 0.025."""
    probe = Probe(sample_count=10, sample_s=0.01, cpu_s=0.01)
    found = {finding.name: finding for finding in examine(run(loader(wait=0.39, away=0.01, probe=probe)))}

    assert found["num-workers"].numbers["workers"] == 4
    assert found["num-workers"].numbers["gain"] == pytest.approx(0.5, abs=0.01)


def test_no_workers_are_proposed_where_they_only_cost() -> None:
    """A batch is loaded here in a hundredth of the time that it takes to come from a worker."""
    probe = Probe(sample_count=10, sample_s=1e-6, cpu_s=1e-6)
    found = {finding.name: finding for finding in examine(run(loader(wait=0.001, away=0.001, batches=400, probe=probe)))}

    assert found["num-workers"].fix["torch"] == "num_workers=0"
    assert found["data-bound"].bottleneck == "transfer"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"cpu_s": 0.009}, False),  # it computes
        ({"switches": 0.1}, False),  # others took the processor away
        ({"read_bytes": 0.0}, False),  # it waits for something else
    ],
)
def test_reading_is_slow_if_samples_read_and_wait(changes: dict[str, Any], found: bool) -> None:
    """All three signs are needed."""
    given: dict[str, Any] = {"sample_count": 9, "sample_s": 0.01, "cpu_s": 0.001, "switches": 1.0, "read_bytes": 1e6}
    probe = Probe(**{**given, **changes})

    assert ("slow-storage" in names(loader(wait=0.1, probe=probe))) is found


def test_slow_samples_count_if_they_take_much_of_the_time() -> None:
    """Of 100 samples one takes as long as all others, or as long as two."""
    given: dict[str, Any] = {"sample_count": 100, "sample_s": 0.02, "median_s": 0.01}

    assert "slow-samples" in names(loader(wait=0.1, probe=Probe(slow=[SlowIndex("7", 1.0)], **given)))
    assert "slow-samples" not in names(loader(wait=0.1, probe=Probe(slow=[SlowIndex("7", 0.02)], **given)))


def test_slow_samples_are_blamed_before_the_number_of_workers() -> None:
    """They take most of the loading. The loop waits for them, and they come before a number of workers."""
    found = examine(run(uneven(), seconds=1.4))

    assert [one.name for one in found] == ["data-bound", "slow-samples", "num-workers"]
    assert found[0].bottleneck == "slow-samples"
    assert (found[0].numbers["sample"], found[0].numbers["seconds"]) == ("index 0", 0.3)


def test_slow_samples_are_not_blamed_where_there_is_enough_to_do_without_them() -> None:
    """One of 200 is a quarter of the loading; others would not come in time either, or, for another loop, they would."""
    busy, calm = (
        {one.name: one for one in examine(run(uneven(1, wait=0.05, away=away)))}["data-bound"].bottleneck
        for away in (0.005, 0.03)
    )

    assert busy != "slow-samples"
    assert calm == "slow-samples"


def test_no_more_is_promised_of_workers_than_the_slowest_sample_allows() -> None:
    """An epoch of 10 batches takes 0.3 s and some, however many workers there are: at best a batch each 33 ms, not 5."""
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
        ({"library": "infeed"}, 0.3 / 25),  # several workers share a batch
        ({"batches": 9999}, 0.328 / 64),  # as many are begun
        ({"batches": 9999, "batch_size": 1}, 0.3 / 64),
        ({"count": 1, "batches": 9999, "batch_size": 1}, 0.3 / 200),  # one in so many is slow
        ({"count": 0}, 0.0),
    ],
)
def test_how_much_slow_samples_hold_up_depends_on_what_is_begun(changes: dict[str, Any], bound: float) -> None:
    """Of 64 workers."""
    assert slowest_s(uneven(**changes), 64) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("start_s", "epoch_count", "found"),
    [(0.015, 20, False), (0.025, 20, True), (0.015, 100, True), (0.025, 5, False)],
)
def test_short_starts_are_reported_if_they_add_up(start_s: float, epoch_count: int, found: bool) -> None:
    """Of a run of ten seconds: a fiftieth, with 20 ms each time, or a tenth."""
    epochs = [EpochSeen(float(at), start_s=start_s, has_batch=True, waits=[0.0], aways=[0.05]) for at in range(epoch_count)]

    assert ("restarted-workers" in names(loader(epochs=epochs, is_persistent=False))) is found


def test_threads_at_a_fork_are_reported_with_their_library() -> None:
    """And Python's own threads with theirs."""
    finding = examine(run(loader(forks=[ForkSeen(["logger (threading)"], {"cv2": 3, "OpenBLAS (numpy)": 3})])))[0]

    assert finding.evidence["threads"] == "Python thread logger, cv2 (3)"
    assert finding.evidence["harmless"].startswith("OpenBLAS (numpy)")
    assert "cv2.setNumThreads(0)" in finding.fix["torch"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, True), ({"is_persistent": True}, False), ({"kind": "thread"}, False), ({"library": "infeed.torch"}, True)],
)
def test_restarted_workers_are_reported(changes: dict[str, Any], found: bool) -> None:
    """Three epochs, each of which begins with half a second."""
    epochs = [EpochSeen(float(at), start_s=0.5, has_batch=True, waits=[0.001] * 5, aways=[0.1] * 5) for at in range(3)]

    assert ("restarted-workers" in names(loader(epochs=epochs, **{"is_persistent": False, **changes}))) is found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"has_init": True}, False),  # which may seed it
        ({"num_workers": 1}, False),
        ({"num_workers": 1, "is_persistent": False}, True),  # again in every epoch
        ({"kind": "thread"}, False),  # which share the one
    ],
)
def test_a_copied_generator_is_reported(changes: dict[str, Any], found: bool) -> None:
    """In several workers, or in restarted workers."""
    seen = loader(**{"probe": Probe(generators=["dataset.rng"]), **changes})

    assert ("same-random-numbers" in names(seen)) is found


@pytest.mark.parametrize(
    ("method", "is_fork_default", "found"), [("fork", True, False), ("spawn", True, True), ("fork", False, True)]
)
def test_what_pickle_cannot_send_matters_where_nothing_is_forked(method: str, is_fork_default: bool, found: bool) -> None:
    """What nothing can send matters everywhere."""
    seen = loader(start_method=method, probe=Probe(unpicklable="collate_fn: a lambda"))

    assert ("not-picklable" in names(seen, is_fork_default=is_fork_default)) is found
    both = Probe(unsendable="dataset.lock is a lock", unpicklable="dataset: cannot pickle a lock")
    assert "not-picklable" in names(loader(start_method=method, probe=both))


def test_what_only_infeed_cannot_send_matters_to_infeed_only() -> None:
    """A class of the program goes to infeed's workers by value, with the globals that it uses; torch runs the program again."""
    probe = Probe(unsendable="dataset is a __main__.Faces")

    assert names(loader(probe=probe)) == []
    assert names(loader(probe=probe, library="infeed", start_method="")) == ["not-picklable"]
    assert names(loader(probe=probe, library="infeed", start_method="", kind="thread")) == []


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([100, 120, 140, 160, 180, 200, 220], True),
        ([100, 200, 300, 300, 300, 300, 300], False),  # it has what it needs
        ([100, 101, 102, 103, 104, 105, 106], False),  # too little to tell
        ([100, 120, 140, 160], False),  # too short to tell
    ],
)
def test_memory_that_keeps_growing_is_reported(sizes: list[int], found: bool) -> None:
    """Megabytes, once a second."""
    assert ("memory-growth" in names(loader(pids=[7]), processes=moments(sizes))) is found


@pytest.mark.parametrize(
    ("size", "is_array", "method", "found"),
    [
        (100 * MB, False, "fork", True),
        (100 * MB, True, "fork", False),  # pages of arrays stay shared
        (100 * MB, True, "spawn", True),
        (10 * MB, False, "fork", False),
    ],
)
def test_copies_in_every_worker_are_reported(size: int, is_array: bool, method: str, found: bool) -> None:
    """Two workers."""
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
        ({"batch_bytes": 1000}, True, False),  # as fast either way
    ],
)
def test_batches_for_a_gpu_should_be_pinned(changes: dict[str, Any], has_gpu: bool, found: bool) -> None:
    """If there is a GPU, they are large and not there yet."""
    assert ("no-pinning" in names(loader(**{"batch_bytes": MB, **changes}), has_gpu=has_gpu)) is found


@pytest.mark.parametrize(("waiting_s", "found"), [(9.0, True), (1.0, False)])
def test_a_missing_batch_is_reported(waiting_s: float, found: bool) -> None:
    """Of 10 seconds."""
    assert ("no-batch" in names(loader(waiting_s=waiting_s, batches=0))) is found


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({}, True),
        ({"library": "infeed.torch"}, True),
        ({"library": "infeed"}, False),  # where one worker reads it
        ({"num_workers": 1}, False),
        ({"num_workers": 0, "kind": "inline"}, False),
        ({"has_init": True}, False),
        ({"shards_itself": True}, False),
        ({"is_stream": False}, False),
        ({"wait": 0.0}, True),  # whether or not the loop waits
    ],
)
def test_a_stream_that_every_worker_reads_gives_its_samples_again(options: dict[str, Any], is_told: bool) -> None:
    told = {one.name: one for one in examine(run(stream(**options)))}
    assert ("same-samples" in told) is is_told
    if is_told:
        assert told["same-samples"].risk == "wrong results"
        assert told["same-samples"].numbers["copies"] == 2


def test_loading_that_takes_as_long_by_hand_is_no_reason_for_fewer_workers() -> None:
    """One worker brings a batch as fast as it is loaded: that is not the way from it."""
    seen = loader(wait=0.0997, away=0.0, num_workers=1, library="infeed", probe=costly(0.00994))
    told = {one.name: one for one in examine(run(seen))}
    assert told["data-bound"].bottleneck != "transfer"
    assert "num_workers=0" not in str(told["data-bound"].fix)
    quick = loader(wait=0.0997, away=0.0, num_workers=1, library="infeed", probe=costly(0.007))
    assert "num_workers=0" in str({one.name: one for one in examine(run(quick))}["data-bound"].fix)


def test_findings_come_in_order_of_what_they_cost() -> None:
    """What may lose the run, then time, the larger share first, then memory."""
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


def test_short_starts_are_not_reported() -> None:
    """Ten milliseconds for each epoch of a second."""
    epochs = [EpochSeen(float(at), start_s=0.01, has_batch=True, waits=[0.0] * 5, aways=[0.2] * 5) for at in range(10)]

    assert names(loader(epochs=epochs, is_persistent=False)) == []


def test_findings_about_processes_are_not_reported_for_threads() -> None:
    """They share memory and pools with the loop."""
    worker = ProcessSeen(7, moments([100, 120, 140, 160, 180, 200, 220])[7].moments, {"OpenBLAS (numpy)": 9})
    seen = loader(kind="thread", pids=[7], probe=Probe(heavy=[("dataset.names", 100 * MB, False)]))

    assert names(seen, processes={7: worker}) == []


def test_a_loop_that_does_not_wait_needs_no_faster_samples() -> None:
    """Reading is slow, and a sample very slow, but all come in time."""
    slow = [SlowIndex("7", 1.0)]
    probe = Probe(sample_count=9, sample_s=0.01, median_s=0.001, cpu_s=0.001, switches=1.0, read_bytes=1e6, slow=slow)

    assert names(loader(probe=probe)) == []
    assert set(names(loader(wait=0.1, probe=probe))) >= {"slow-storage", "slow-samples"}


def test_a_change_that_brings_little_is_not_proposed() -> None:
    """A fourth worker, if three already do almost as well as four should."""
    probe = Probe(sample_count=10, sample_s=0.04, cpu_s=0.04)

    assert names(loader(wait=0.06, away=0.05, num_workers=3, probe=probe)) == ["data-bound"]


def test_a_program_that_was_never_seen_to_run_has_no_findings() -> None:
    """It was killed before anything was measured."""
    assert names(loader(batches=0, waiting_s=1.0), seconds=0.0) == []


@pytest.mark.parametrize(("sample_s", "found"), [(3e-5, False), (3e-3, True)])
def test_workers_are_proposed_only_where_a_batch_is_worth_its_way(sample_s: float, found: bool) -> None:
    """Batches of 10, loaded in 0.3 or 30 ms by a loop that works as long; torch's take a millisecond to come over."""
    seen = loader(wait=10 * sample_s, away=10 * sample_s, batches=2000, num_workers=0, kind="inline", probe=costly(sample_s))

    assert ("num-workers" in names(seen)) is found
    assert "data-bound" in names(seen)


@pytest.mark.parametrize(("library", "found"), [("torch", False), ("infeed", True)])
def test_large_batches_take_longer_from_workers_of_torch(library: str, found: bool) -> None:
    """Loaded in 10 ms, and 25 MB; infeed's are written where the loop reads them."""
    given: dict[str, Any] = {"num_workers": 0, "kind": "inline", "batch_bytes": 25_000_000, "probe": costly(1e-3)}
    seen = loader(wait=0.01, away=0.01, batches=100, library=library, **given)

    assert transfer_s(seen) > 0.01 or found
    assert ("num-workers" in names(seen)) is found


@pytest.mark.parametrize(("size", "sample_s", "best"), [(1000, 1e-3, 4), (100_000_000, 1e-3, 0), (1000, 1e-4, 0)])
def test_no_more_workers_are_proposed_where_the_way_is_longer_than_loading(size: int, sample_s: float, best: int) -> None:
    """One worker, for whom the loop waits 50 ms: of these it loads 10, or 1; or the way of 100 MB takes 41."""
    seen = loader(wait=0.05, away=0.001, num_workers=1, batch_bytes=size, probe=costly(sample_s))
    found = {finding.name: finding for finding in examine(run(seen))}

    assert found["num-workers"].fix["infeed"] == f"num_workers={best}"


def test_the_way_counts_in_what_more_workers_would_bring() -> None:
    """Two workers bring a batch every 15 ms. Of one of 25 MB 11 of these are its way, which it takes from four as well."""
    given: dict[str, Any] = {"wait": 0.014, "away": 0.001, "batches": 100, "probe": costly(1.5e-3)}

    assert names(loader(batch_bytes=1000, **given)) == ["data-bound", "num-workers"]
    assert names(loader(batch_bytes=25_000_000, **given)) == ["data-bound"]


def test_a_loop_that_loads_a_little_by_itself_is_not_sent_to_other_findings() -> None:
    """There are none: workers would not help."""
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
def test_a_data_bound_loop_gets_advice_beside_other_findings(changes: dict[str, Any], cure: str, library: Any) -> None:
    """It stands alone: other findings may not be there, or be left out."""
    found = {one.name: one for one in examine(run(loader(wait=0.3, away=0.01, library=library, **changes)))}

    assert all(cure in text for text in found["data-bound"].fix.values())


@pytest.mark.parametrize("library", ["torch", "infeed"])
def test_no_more_workers_are_proposed_for_a_stream_that_does_not_share_itself(library: Any) -> None:
    """With infeed's loader one reads it, with torch's each reads all of it. One is better than none."""
    found = {one.name: one for one in examine(run(stream(library=library)))}
    alone = {one.name: one for one in examine(run(stream(library=library, num_workers=0, kind="inline", away=0.1)))}

    assert list(found) == (["data-bound"] if library == "infeed" else ["same-samples", "data-bound"])
    assert found["data-bound"].bottleneck == ("one-reader" if library == "infeed" else "every-reader")
    assert "get_worker_info()" in found["data-bound"].fix["infeed"]
    assert alone["num-workers"].fix["infeed"] == "num_workers=1"
    assert "num-workers" in names(stream(library=library, shards_itself=True, wait=0.05))


def test_no_number_of_workers_is_advised_if_it_is_automatic() -> None:
    """Whatever would be best, and whoever waits; storage is slow all the same."""
    probe = Probe(sample_count=100, sample_s=0.1, median_s=0.1, cpu_s=0.001, switches=1.0, read_bytes=1e6)
    found = examine(run(auto(wait=0.2, away=0.01, probe=probe)))
    fixed = loader(wait=0.2, away=0.01, probe=probe, library="infeed", start_method="")

    assert sorted(finding.name for finding in found) == ["data-bound", "slow-storage"]
    assert not any("num_workers=" in finding.fix["infeed"] for finding in found)
    assert "num-workers" in names(fixed)


def test_infeed_is_not_advised_to_its_users() -> None:
    """Torch's loader is; also where infeed left its work to torch, which forked."""
    forks = [ForkSeen([], {"cv2": 3})]
    for library in ("infeed", "infeed.torch", "torch"):
        found = examine(run(loader(wait=0.1, library=library, forks=forks, waiting_s=9.0)))
        cures = [finding.fix["infeed"] for finding in found]
        assert {finding.name for finding in found} >= {"data-bound", "fork-with-threads"}
        assert any("import DataLoader" in cure for cure in cures) is (library == "torch")


@pytest.mark.parametrize(("cpu_s", "text"), [(0.0, "auto-workers"), (10.0, "all-cores")])
def test_processors_are_at_work_if_workers_use_them(cpu_s: float, text: str) -> None:
    """Eight workers on four cores, which were looked at for ten seconds."""
    workers = {pid: ProcessSeen(pid, [Moment(0.0, 0, 0.0), Moment(10.0, 0, cpu_s)]) for pid in range(8)}
    seen = auto(wait=0.1, pids=list(workers))

    assert examine(run(seen, processes=workers))[0].bottleneck == text


@pytest.mark.parametrize(("cpu_s", "text"), [(0.0001, "auto-workers"), (0.1, "all-cores")])
def test_of_threads_samples_tell_whether_processors_are_at_work(cpu_s: float, text: str) -> None:
    """They cannot be looked at from outside."""
    seen = auto(wait=0.05, kind="thread", probe=Probe(sample_count=9, sample_s=0.1, cpu_s=cpu_s))

    assert examine(run(seen))[0].bottleneck == text


def test_rows_out_of_arrays_need_no_workers() -> None:
    """Samples by hand are not how infeed loads them."""
    seen = loader(wait=0.1, library="infeed", num_workers=0, kind="inline", is_gathered=True, probe=costly(0.01))

    assert names(seen) == ["data-bound"]


def test_the_random_numbers_of_one_worker_may_be_those_of_several_soon() -> None:
    """If infeed decides."""
    probe = Probe(generators=["dataset.rng"])

    assert names(auto(num_workers=1, probe=probe)) == ["same-random-numbers"]
    assert names(auto(num_workers=1, probe=probe, is_auto=False)) == []
