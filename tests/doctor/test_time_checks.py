"""Findings that cost time: bottleneck, figures and fixes of constructed programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Moment, Probe, ProcessSeen, SlowIndex
from infeed.doctor.finding import Finding
from infeed.doctor.time_checks import best_workers
from tests.doctor.evidence_of import MB, auto, costly, found, loader, run, stream, uneven

BENCH = "infeed bench"
STORAGE = "local disk"
SHARD = "get_worker_info()"


def at_work(**shares: float) -> dict[int, ProcessSeen]:
    """Workers and how much of a core each used in ten seconds."""
    return {
        int(pid.removeprefix("p")): ProcessSeen(int(pid.removeprefix("p")), [Moment(0.0, 0, 0.0), Moment(10.0, 0, 10 * share)])
        for pid, share in shares.items()
    }


# --- data-bound


def test_waits_are_reported_in_total_and_per_batch_without_a_gpu() -> None:
    """20 batches: as much waiting as work, and a fifth of the 10 seconds observed."""
    finding = found(loader(wait=0.1, away=0.1))["data-bound"]

    assert (finding.bottleneck, finding.numbers["wait_share"]) == ("few-workers", 0.5)
    assert finding.evidence["waited"] == "2 s of 4 s"
    assert all(f"100 ms {what}" in finding.evidence["per batch"] for what in ("waiting", "computing"))
    assert finding.cost == pytest.approx(0.2)
    assert finding.fix["torch"].startswith("more workers; ")
    assert finding.fix["infeed"] == f"from infeed.torch import DataLoader; {finding.fix['torch']}"


def test_cpu_use_per_worker_is_reported_for_processes_only() -> None:
    """A loader of infeed had processes before it switched to threads."""
    processes = at_work(p7=0.3, p8=0.5)
    as_processes, as_threads = (
        found(loader(wait=0.1, kind=kind, pids=[7, 8]), processes=processes)["data-bound"] for kind in ("process", "thread")
    )

    assert as_processes.evidence["workers"] == "40% of a core each"
    assert "workers" not in as_threads.evidence


@pytest.mark.parametrize(
    ("cpu_s", "text"),
    [
        (0.002, "10 ms (2 ms CPU time)"),
        (0.0101, "10 ms (10 ms CPU time)"),  # Clocks differ slightly.
        (0.03, "10 ms (30 ms CPU time on several cores)"),
    ],
)
def test_the_cpu_time_of_a_sample_is_at_most_its_duration(cpu_s: float, text: str) -> None:
    """Threads of libraries use several cores at once."""
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=cpu_s, switches=0.0)

    assert found(loader(wait=0.1, probe=probe))["data-bound"].evidence["sample"] == text


def test_probed_samples_are_not_reported_for_gathered_arrays() -> None:
    """Gathered rows are not loaded one by one."""
    seen = loader(wait=0.1, library="infeed", num_workers=0, kind="inline", is_gathered=True, probe=costly(0.01))
    finding = found(seen)["data-bound"]

    assert "sample" not in finding.evidence
    assert finding.bottleneck == "gathering"


INLINE: dict[str, Any] = {"num_workers": 0, "kind": "inline"}


@pytest.mark.parametrize(
    ("seen", "has_bench"),
    [
        (loader(wait=0.1, probe=costly(0.1)), True),
        (loader(wait=0.1, probe=costly(0.01), **INLINE), True),
        (loader(wait=0.1, probe=costly(1e-5), **INLINE), False),  # So little work gains nothing from workers.
        (loader(wait=0.1, library="infeed", is_gathered=True, **INLINE), False),
        (uneven(), False),  # More would wait for slow samples.
        (stream(), False),
        (stream(**INLINE), False),
    ],
)
def test_bench_is_mentioned_if_another_number_of_workers_may_help(seen: LoaderSeen, has_bench: bool) -> None:
    """`infeed bench` tries only numbers and kinds of workers."""
    assert (BENCH in found(seen)["data-bound"].fix["torch"]) is has_bench


def reading(**options: Any) -> LoaderSeen:
    """A training loop that waits for samples of 10 ms, 9 of them reading; 40 such workers would keep four cores busy."""
    probe = Probe(sample_count=9, sample_s=0.01, median_s=0.01, cpu_s=0.001, switches=1.0, read_bytes=MB)
    return loader(**{"wait": 0.05, "away": 0.05, "probe": probe, **options})


@pytest.mark.parametrize(
    ("seen", "has_more_workers"),
    [
        (reading(), True),
        (reading(library="infeed", start_method="", is_auto=True), False),
        (reading(num_workers=64), False),
    ],
)
def test_storage_is_the_bottleneck_of_io_bound_samples(seen: LoaderSeen, has_more_workers: bool) -> None:
    """More workers are not proposed if infeed chooses the number, or if there are as many as ever help."""
    finding = found(seen)["data-bound"]

    assert finding.bottleneck == "storage"
    assert STORAGE in finding.fix["torch"]
    assert ("more workers" in finding.fix["torch"]) is has_more_workers


@pytest.mark.parametrize("is_auto", [False, True], ids=["a number", "auto"])
def test_the_fix_for_transfer_is_smaller_samples(is_auto: bool) -> None:
    """A batch is loaded in 1 ms and arrives after 100 ms. Without "auto", num_workers=0 may be better."""
    finding = found(auto(wait=0.1, probe=costly(1e-4), is_auto=is_auto))["data-bound"]

    assert finding.bottleneck == "transfer"
    assert finding.numbers["could_s"] == pytest.approx(0.001)
    assert ("num_workers=0" in finding.fix["infeed"]) is not is_auto
    assert "larger batches" in finding.fix["infeed"]


def test_an_iterable_dataset_in_the_main_process_should_get_one_worker() -> None:
    """More workers help only if the dataset shards itself."""
    findings = found(stream(away=0.1, **INLINE))

    assert findings["data-bound"].fix["torch"].startswith("num_workers=1, ")
    assert SHARD in findings["data-bound"].fix["torch"]
    assert findings["num-workers"].fix["torch"] == "num_workers=1, persistent_workers=True"


def test_exited_processes_do_not_show_what_threads_use() -> None:
    """The processes were idle; eight threads compute all the time on four cores."""
    seen = auto(wait=0.05, kind="thread", pids=[7, 8], probe=costly(0.1))

    assert found(seen, processes=at_work(p7=0.0, p8=0.0))["data-bound"].bottleneck == "all-cores"


@pytest.mark.parametrize(
    ("batch_bytes", "is_named"), [(1_500_000, True), (38_500_000, False)], ids=["less than loading", "more than loading"]
)
def test_when_all_cores_load_other_machines_are_named_if_the_transfer_costs_less(batch_bytes: int, is_named: bool) -> None:
    """Four cores load batches of 40 ms: a fix where all are in use, and the limit of the proposed number elsewhere."""
    given: dict[str, Any] = {
        "away": 0.001,
        "batches": 100,
        "probe": costly(0.004),
        "batch_bytes": batch_bytes,
        "library": "infeed",
    }
    busy = found(loader(wait=0.01, num_workers=4, **given))["data-bound"]
    few = found(loader(wait=0.04, num_workers=1, **given))["num-workers"]

    assert busy.bottleneck == "all-cores"
    assert ("worker='ray'" in busy.fix["infeed"]) is is_named
    assert ("worker='ray'" in few.evidence["limit"]) is is_named
    assert found(loader(wait=0.01, num_workers=4, asked="4, worker='ray'", **given))["data-bound"].bottleneck != "all-cores"


def test_unmeasured_workers_count_as_cpu_bound() -> None:
    """Samples could not be probed. No more workers than cores are proposed without evidence."""
    few, enough = (found(loader(wait=0.1, kind="thread", num_workers=count))["data-bound"].fix["torch"] for count in (2, 4))

    assert few.startswith("more workers")
    assert "more workers" not in enough


# --- slow-storage


@pytest.mark.parametrize(
    ("changes", "torch", "infeed"),
    [
        ({}, "(up to 40)", "worker='thread', num_workers=40; "),
        ({"num_workers": 50}, "(up to 51)", "worker='thread', num_workers=51; "),
        ({"num_workers": 64}, "", ""),
        ({"is_auto": True}, "(up to 40)", "worker='thread'; "),
        ({"is_auto": True, "kind": "thread"}, "(up to 40)", ""),
        ({"is_stream": True}, SHARD, SHARD),
    ],
)
def test_slow_storage_gets_the_remaining_fixes(changes: dict[str, Any], torch: str, infeed: str) -> None:
    """Not a fix that the program already has, that infeed chooses, or that makes several workers read the same data."""
    finding = found(reading(**changes))["slow-storage"]

    assert finding.numbers["io_share"] == pytest.approx(0.9)
    assert finding.evidence["sample"] == "10 ms (1 ms CPU time)"
    assert "100.0 MiB/s" in finding.evidence["reads"]
    assert torch in finding.fix["torch"]
    assert infeed in finding.fix["infeed"]
    assert all(STORAGE in fix for fix in finding.fix.values())
    assert ("worker" in finding.fix["infeed"]) is bool(infeed)


def test_slow_storage_costs_the_wait_or_the_whole_run_without_a_loop() -> None:
    """The training loop waits one of ten seconds; the doctor without a program only loads."""
    assert found(reading())["slow-storage"].cost == pytest.approx(0.9 * 0.1)
    assert found(reading(), has_own_loop=False)["slow-storage"].cost == pytest.approx(0.9)


# --- slow-samples


def slow(seconds: float = 2.0, **options: Any) -> LoaderSeen:
    """One of 100 samples takes this long, and all others together as long."""
    usual = seconds / 100
    probe = Probe(sample_count=100, sample_s=2 * usual, median_s=usual, cpu_s=1e-3, slow=[SlowIndex("7", seconds)])
    return loader(**{"wait": 0.05, "away": 0.05, "probe": probe, **options})


def test_a_slow_sample_is_reported_with_the_median() -> None:
    """It takes 100 times the median."""
    finding = found(slow())["slow-samples"]

    assert finding.numbers == {"share": pytest.approx(0.495), "seconds": 2.0, "median_s": 0.02, "times": pytest.approx(100)}
    assert finding.evidence["slow"] == "7: 2 s"


def test_slow_samples_cost_no_more_than_the_total_wait() -> None:
    """The training loop waits one of ten seconds. If the doctor only loads, they cost their share of the run."""
    findings = found(slow())

    assert findings["slow-samples"].cost == pytest.approx(0.495 * 0.1)
    assert findings["slow-samples"].cost < findings["data-bound"].cost
    assert found(slow(), has_own_loop=False)["slow-samples"].cost == pytest.approx(0.495)


@pytest.mark.parametrize(
    ("seen", "has_timeout", "has_process"),
    [(slow(), True, False), (slow(kind="thread"), True, True), (slow(0.5), False, False)],
)
def test_a_timeout_is_proposed_only_if_it_skips_a_sample(seen: LoaderSeen, has_timeout: bool, has_process: bool) -> None:
    """The proposed timeout is 1 s; half a second is below it. Threads have no timeout."""
    fix = found(seen)["slow-samples"].fix["infeed"]

    assert ("sample_timeout=1, on_error='skip'" in fix) is has_timeout
    assert ("worker='process'" in fix) is has_process


# --- num-workers


def test_a_sufficient_number_of_workers_is_proposed_with_figures() -> None:
    """One worker loads a batch in 200 ms, the step takes 100 ms: two workers and a reserve."""
    finding = found(loader(wait=0.1, away=0.1, num_workers=1, probe=costly(0.02)))["num-workers"]

    assert finding.numbers == {
        "workers": 3,
        "gain": finding.numbers["gain"],
        "load_s": pytest.approx(0.2),
        "away_s": pytest.approx(0.1),
        "transfer_s": 0.001,
        "limit": "step",
    }
    assert list(finding.evidence) == ["load a batch", "training step", "transfer", "cores", "limit"]
    assert finding.fix == {"torch": "num_workers=3, persistent_workers=True", "infeed": "num_workers=3"}


@pytest.mark.parametrize(
    ("seen", "cores", "best", "why"),
    [
        (loader(wait=0.39, away=0.01, num_workers=1, probe=costly(0.04)), 4, 4, "cores"),
        (
            loader(wait=0.39, away=0.001, num_workers=1, probe=replace(costly(0.04), cpu_s=0.01, switches=1.0)),
            4,
            16,
            "cores",
        ),
        (loader(wait=9.9, away=0.01, num_workers=1, probe=costly(1.0)), 128, 64, "most"),
        (
            stream(wait=0.1, away=0.05, **INLINE),
            4,
            1,
            "one-reader",
        ),
    ],
)
def test_the_limit_on_the_number_of_workers_is_reported(seen: LoaderSeen, cores: int, best: int, why: str) -> None:
    """The proposed workers do not keep up with the training loop."""
    finding = found(seen, core_count=cores)["num-workers"]

    assert (finding.numbers["workers"], finding.numbers["limit"]) == (best, why)


def test_advice_of_no_workers_excludes_transfer_and_slow_samples() -> None:
    """Four workers deliver a batch every 0.5 s; loading it takes 0.12 s on average, one of five slow samples 1 s."""
    uneven = [SlowIndex("7", 1.0), *(SlowIndex(str(index), 0.05) for index in range(4))]
    probe = Probe(sample_count=100, sample_s=0.0121, median_s=1e-4, cpu_s=0.0121, switches=0.0, slow=uneven)
    finding = found(loader(wait=0.5, away=0.001, num_workers=4, probe=probe))["num-workers"]

    assert (finding.numbers["workers"], finding.numbers["limit"]) == (0, "overhead")
    assert finding.numbers["load_s"] == pytest.approx(0.121)
    assert list(finding.evidence) == ["load a batch", "training step", "cores", "limit"]
    assert finding.fix == {"torch": "num_workers=0", "infeed": "num_workers=0"}


def test_a_loader_without_workers_is_not_told_to_use_none() -> None:
    """The training loop waits longer than the probe took, as with a cold disk cache."""
    assert "num-workers" not in found(loader(wait=0.05, away=0.001, probe=costly(1e-4), **INLINE))


@pytest.mark.parametrize(("count", "rest"), [(1, 1.0), (4, 1 - 4 * 0.296 / 1.984)])
def test_the_cost_of_slow_samples_is_not_counted_again_for_workers(count: int, rest: float) -> None:
    """They cause the wait of the training loop, of which 1.32 s were observed."""
    finding = found(uneven(count), seconds=10.0)["num-workers"]
    gain = finding.numbers["gain"]

    assert finding.cost == pytest.approx(rest * gain * 0.132, abs=0.001)


def test_all_cores_load_for_a_loop_without_a_step() -> None:
    """The training loop's clock did not advance between two batches."""
    seen = loader(away=0.0, probe=costly(0.01))

    assert best_workers(run(seen), seen) == 4


# --- thread-pools


@pytest.mark.parametrize(
    ("pools", "each", "fixes"),
    [
        ({"cv2": 3}, 4, ["cv2.setNumThreads(0)"]),
        ({"OpenBLAS (numpy)": 3}, 4, ["OPENBLAS_NUM_THREADS=1"]),
        ({"cv2": 2, "OpenBLAS (numpy)": 3}, 6, ["cv2.setNumThreads(0)", "OPENBLAS_NUM_THREADS=1"]),
    ],
)
def test_each_library_with_threads_gets_its_fix(pools: dict[str, int], each: int, fixes: list[str]) -> None:
    """Two workers, in a container with one of many cores."""
    finding = found(loader(wait=0.1, pids=[7]), processes={7: ProcessSeen(7, pools=pools)}, core_count=1)["thread-pools"]

    assert finding.numbers == {"threads": pools, "each": each, "total": 2 * each}
    assert all(fix in finding.fix["torch"] for fix in fixes)
    assert finding.fix["torch"].count(";") == len(fixes) - 1


def test_the_number_of_cores_may_be_a_fraction() -> None:
    """As in a container with a quota."""
    seen = loader(wait=0.1, pids=[7])
    finding = found(seen, processes={7: ProcessSeen(7, pools={"cv2": 3})}, core_count=8 / 3)["thread-pools"]

    assert finding.title.endswith("8 for 2.67 cores")


def crowded(**options: Any) -> dict[str, Finding]:
    """Two workers with four threads each on two cores; with one thread, the probe takes 0.1 s per batch."""
    seen = loader(**{"away": 0.01, "pids": [7], "probe": costly(0.01), **options})
    return found(seen, processes={7: ProcessSeen(7, pools={"OpenBLAS (numpy)": 3})}, core_count=2)


@pytest.mark.parametrize(
    ("wait", "away", "lost"),
    [
        (0.291, 0.01, 0.25),  # A batch arrived every 0.301 s, and could every 0.05 s, plus 1 ms of transfer.
        (0.2, 0.1, 0.199),  # Not sooner than the step ends.
        (0.1, 0.2, 0.099),
    ],
)
def test_thread_pools_cost_the_wait_they_cause(wait: float, away: float, lost: float) -> None:
    """20 batches in a run of 10 s."""
    finding = crowded(wait=wait, away=away)["thread-pools"]

    assert finding.cost == pytest.approx(20 * lost / 10, abs=1e-6)
    assert finding.evidence["load a batch"].startswith("100 ms in one worker with one thread; 2 workers deliver one every ")


@pytest.mark.parametrize(("wait", "is_reported"), [(0.04, False), (0.05, False), (0.06, True)])
def test_thread_pools_without_cost_are_not_reported(wait: float, is_reported: bool) -> None:
    """Less than 2% of the run, which is 10 ms per batch; batches could arrive every 51 ms, and the step takes 10 ms."""
    assert ("thread-pools" in crowded(wait=wait)) is is_reported


def test_thread_pools_cost_no_more_than_the_wait() -> None:
    """No sample could be probed: six of eight threads exceed the cores."""
    finding = crowded(wait=0.2, probe=Probe())["thread-pools"]

    assert finding.cost == pytest.approx(20 * 0.2 * 0.75 / 10)
    assert "load a batch" not in finding.evidence


@pytest.mark.parametrize(("wait", "is_reason"), [(0.2, True), (0.08, False)])
def test_thread_pools_are_the_bottleneck_if_they_cause_most_of_the_wait(wait: float, is_reason: bool) -> None:
    """Then neither transfer nor the number of workers is the bottleneck. A batch would arrive every 50 ms."""
    findings = crowded(wait=wait)

    assert (findings["data-bound"].bottleneck == "thread-pools") is is_reason
    assert (findings["data-bound"].fix["torch"] == findings["thread-pools"].fix["torch"]) is is_reason
    assert findings["data-bound"].fix["infeed"].startswith("from infeed.torch import DataLoader; ")
    assert findings["data-bound"].fix["infeed"].endswith("threads_per_worker=1 (the default)") is is_reason


def test_no_number_of_workers_is_proposed_if_thread_pools_are_the_bottleneck() -> None:
    """The probe is faster than the workers only because of the threads."""
    assert "num-workers" not in crowded(wait=0.2)
    assert "num-workers" in found(loader(wait=0.2, away=0.01, probe=costly(0.01)), core_count=2)


def test_a_loader_of_infeed_with_many_threads_gets_its_own_option() -> None:
    """``threads_per_worker`` was set."""
    finding = crowded(wait=0.2, library="infeed", start_method="")["data-bound"]

    assert finding.fix["infeed"] == "threads_per_worker=1 (the default)"


# --- no-pinning


def test_copies_to_a_gpu_are_reported_with_their_cost() -> None:
    """21 batches of 100 MB, each 12.5 ms slower than from pinned memory; the last epoch delivered none."""
    seen = loader(batch_bytes=100_000_000, is_persistent=True)
    seen.epochs.append(EpochSeen(9.0))
    finding = found(seen, has_gpu=True)["no-pinning"]

    assert finding.numbers == {"batches": 21, "lost_s": pytest.approx(0.2625)}
    assert finding.cost == pytest.approx(0.02625)


def test_one_copy_to_a_gpu_counts_as_one_batch() -> None:
    """The program was stopped after it."""
    finding = found(loader(batch_bytes=100_000_000, batches=0), has_gpu=True)["no-pinning"]

    assert finding.numbers == {"batches": 1, "lost_s": pytest.approx(0.0125)}


def test_worker_start_up_is_compared_with_a_batch() -> None:
    """Two restarts count, because the first epoch starts workers anyway."""
    finding = found(restarting(0.501))["restarted-workers"]

    assert finding.numbers == {"lost_s": pytest.approx(1.0), "restarts": 2, "usual_s": pytest.approx(0.001)}
    assert finding.cost == pytest.approx(0.1)
    assert finding.fix["torch"].startswith("persistent_workers=True")


def test_epochs_of_one_batch_have_no_usual_batch_time() -> None:
    """Each batch is the first of its epoch."""
    finding = found(restarting(0.5, batches=0))["restarted-workers"]
    assert finding.numbers["usual_s"] == 0
    assert ";" not in finding.evidence["first batch"]


def test_loading_the_first_batch_is_not_counted_as_start_up() -> None:
    """It takes 0.4 s in any process: only 0.15 s of 0.55 s could be saved, and nothing of 0.41 s."""
    probe = Probe(sample_count=9, sample_s=0.04, median_s=0.04, cpu_s=0.04)

    assert found(restarting(0.55, probe=probe))["restarted-workers"].numbers["lost_s"] == pytest.approx(0.3)
    assert "restarted-workers" not in found(restarting(0.41, probe=probe))


def restarting(start_s: float, batches: int = 5, **options: Any) -> LoaderSeen:
    """Three epochs that start their workers each."""
    epochs = [EpochSeen(float(at), start_s, True, [0.001] * batches, [0.1] * batches) for at in range(3)]
    return loader(**{"epochs": epochs, "is_persistent": False, **options})
