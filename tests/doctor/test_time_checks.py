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
    """Workers, and how much of a core each used in ten seconds."""
    return {
        int(pid.removeprefix("p")): ProcessSeen(int(pid.removeprefix("p")), [Moment(0.0, 0, 0.0), Moment(10.0, 0, 10 * share)])
        for pid, share in shares.items()
    }


# --- data-bound


def test_waits_are_reported_in_total_and_per_batch_without_a_gpu() -> None:
    """20 batches: as much waiting as work, and a fifth of the 10 seconds that were watched."""
    told = found(loader(wait=0.1, away=0.1))["data-bound"]

    assert (told.bottleneck, told.numbers["wait_share"]) == ("few-workers", 0.5)
    assert told.evidence["waited"] == "2 s of 4 s"
    assert all(f"100 ms {what}" in told.evidence["per batch"] for what in ("waiting", "computing"))
    assert told.cost == pytest.approx(0.2)
    assert told.fix["torch"].startswith("more workers; ")
    assert told.fix["infeed"] == f"from infeed.torch import DataLoader; {told.fix['torch']}"


def test_cpu_use_per_worker_is_reported_for_processes_only() -> None:
    """A loader of infeed's had processes before it had threads."""
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
        (0.0101, "10 ms (10 ms CPU time)"),  # clocks differ a little
        (0.03, "10 ms (30 ms CPU time on several cores)"),
    ],
)
def test_a_sample_is_not_longer_on_a_processor_than_it_takes(cpu_s: float, text: str) -> None:
    """Threads of libraries are on several at once."""
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=cpu_s, switches=0.0)

    assert found(loader(wait=0.1, probe=probe))["data-bound"].evidence["sample"] == text


def test_probed_samples_are_not_reported_where_rows_are_gathered_from_arrays() -> None:
    """They are loaded in another way there."""
    seen = loader(wait=0.1, library="infeed", num_workers=0, kind="inline", is_gathered=True, probe=costly(0.01))
    told = found(seen)["data-bound"]

    assert "sample" not in told.evidence
    assert told.bottleneck == "gathering"


INLINE: dict[str, Any] = {"num_workers": 0, "kind": "inline"}


@pytest.mark.parametrize(
    ("seen", "has_bench"),
    [
        (loader(wait=0.1, probe=costly(0.1)), True),
        (loader(wait=0.1, probe=costly(0.01), **INLINE), True),
        (loader(wait=0.1, probe=costly(1e-5), **INLINE), False),  # so little work gains nothing from workers
        (loader(wait=0.1, library="infeed", is_gathered=True, **INLINE), False),
        (uneven(), False),  # more would wait for slow samples
        (stream(), False),
        (stream(**INLINE), False),
    ],
)
def test_bench_is_named_where_another_number_of_workers_may_help(seen: LoaderSeen, has_bench: bool) -> None:
    """It tries nothing else."""
    assert (BENCH in found(seen)["data-bound"].fix["torch"]) is has_bench


def reading(**options: Any) -> LoaderSeen:
    """A loop that waits for samples of 10 ms, of which 9 are reading; four cores would be busy with 40 of them."""
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
def test_storage_is_the_bottleneck_of_samples_that_wait_for_reads(seen: LoaderSeen, has_more_workers: bool) -> None:
    """More workers are not proposed where infeed chooses their number, or where there are as many as ever help."""
    told = found(seen)["data-bound"]

    assert told.bottleneck == "storage"
    assert STORAGE in told.fix["torch"]
    assert ("more workers" in told.fix["torch"]) is has_more_workers


@pytest.mark.parametrize("is_auto", [False, True], ids=["a number", "auto"])
def test_transfer_is_reduced_by_lighter_samples(is_auto: bool) -> None:
    """A batch is loaded in a millisecond and arrives after 100. Without "auto", no workers may be better."""
    told = found(auto(wait=0.1, probe=costly(1e-4), is_auto=is_auto))["data-bound"]

    assert told.bottleneck == "transfer"
    assert told.numbers["could_s"] == pytest.approx(0.001)
    assert ("num_workers=0" in told.fix["infeed"]) is not is_auto
    assert "larger batches" in told.fix["infeed"]


def test_an_iterable_dataset_in_the_main_process_gets_the_advice_of_one_worker() -> None:
    """More of them only once the stream shares itself."""
    told = found(stream(away=0.1, **INLINE))

    assert told["data-bound"].fix["torch"].startswith("num_workers=1, ")
    assert SHARD in told["data-bound"].fix["torch"]
    assert told["num-workers"].fix["torch"] == "num_workers=1, persistent_workers=True"


def test_processes_that_are_gone_do_not_tell_what_threads_use() -> None:
    """They were idle; eight threads compute all the time on four cores."""
    seen = auto(wait=0.05, kind="thread", pids=[7, 8], probe=costly(0.1))

    assert found(seen, processes=at_work(p7=0.0, p8=0.0))["data-bound"].bottleneck == "all-cores"


def test_workers_that_nothing_is_known_of_are_taken_to_compute() -> None:
    """Samples could not be loaded by hand. No more workers than cores are proposed to anyone without a reason."""
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
def test_slow_storage_gets_the_fixes_that_are_left(changes: dict[str, Any], torch: str, infeed: str) -> None:
    """Not what the program has already, nor what infeed chooses, nor readers that would read the same."""
    told = found(reading(**changes))["slow-storage"]

    assert told.numbers["io_share"] == pytest.approx(0.9)
    assert told.evidence["sample"] == "10 ms (1 ms CPU time)"
    assert "100.0 MiB/s" in told.evidence["reads"]
    assert torch in told.fix["torch"]
    assert infeed in told.fix["infeed"]
    assert all(STORAGE in fix for fix in told.fix.values())
    assert ("worker" in told.fix["infeed"]) is bool(infeed)


def test_storage_costs_what_the_loop_waits_for_it_or_all_where_there_is_no_loop() -> None:
    """The loop waits one of ten seconds; the doctor does nothing but load."""
    assert found(reading())["slow-storage"].cost == pytest.approx(0.9 * 0.1)
    assert found(reading(), has_own_loop=False)["slow-storage"].cost == pytest.approx(0.9)


# --- slow-samples


def slow(seconds: float = 2.0, **options: Any) -> LoaderSeen:
    """One of 100 samples takes this long, and the others as long together."""
    usual = seconds / 100
    probe = Probe(sample_count=100, sample_s=2 * usual, median_s=usual, cpu_s=1e-3, slow=[SlowIndex("7", seconds)])
    return loader(**{"wait": 0.05, "away": 0.05, "probe": probe, **options})


def test_a_slow_sample_is_reported_with_the_median() -> None:
    """It takes a hundred times as long."""
    told = found(slow())["slow-samples"]

    assert told.numbers == {"share": pytest.approx(0.495), "seconds": 2.0, "median_s": 0.02, "times": pytest.approx(100)}
    assert told.evidence["slow"] == "7: 2 s"


def test_slow_samples_cost_no_more_than_all_waiting_does() -> None:
    """Of ten seconds the loop waits one. Where the doctor only loads, they cost their share of that."""
    told = found(slow())

    assert told["slow-samples"].cost == pytest.approx(0.495 * 0.1)
    assert told["slow-samples"].cost < told["data-bound"].cost
    assert found(slow(), has_own_loop=False)["slow-samples"].cost == pytest.approx(0.495)


@pytest.mark.parametrize(
    ("seen", "has_timeout", "has_process"),
    [(slow(), True, False), (slow(kind="thread"), True, True), (slow(0.5), False, False)],
)
def test_a_timeout_is_proposed_only_where_it_skips_a_sample(seen: LoaderSeen, has_timeout: bool, has_process: bool) -> None:
    """The timeout is one second; half a second is less. Threads cannot have one."""
    fix = found(seen)["slow-samples"].fix["infeed"]

    assert ("sample_timeout=1, on_error='skip'" in fix) is has_timeout
    assert ("worker='process'" in fix) is has_process


# --- num-workers


def test_as_many_workers_as_keep_up_are_proposed_with_the_figures() -> None:
    """One loads a batch in 200 ms, the loop takes 100: two and some room."""
    told = found(loader(wait=0.1, away=0.1, num_workers=1, probe=costly(0.02)))["num-workers"]

    assert told.numbers == {
        "workers": 3,
        "gain": told.numbers["gain"],
        "load_s": pytest.approx(0.2),
        "away_s": pytest.approx(0.1),
        "transfer_s": 0.001,
        "limit": "step",
    }
    assert list(told.evidence) == ["load a batch", "training step", "transfer", "cores", "limit"]
    assert told.fix == {"torch": "num_workers=3, persistent_workers=True", "infeed": "num_workers=3"}


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
def test_the_limit_of_more_workers_is_reported(seen: LoaderSeen, cores: int, best: int, why: str) -> None:
    """Where they do not keep up with the loop."""
    told = found(seen, core_count=cores)["num-workers"]

    assert (told.numbers["workers"], told.numbers["limit"]) == (best, why)


def test_advice_of_no_workers_excludes_transfer_and_slow_samples() -> None:
    """Four bring a batch every half second; loading it takes 0.12 s on average, one of five slow samples 1 s."""
    uneven = [SlowIndex("7", 1.0), *(SlowIndex(str(index), 0.05) for index in range(4))]
    probe = Probe(sample_count=100, sample_s=0.0121, median_s=1e-4, cpu_s=0.0121, switches=0.0, slow=uneven)
    told = found(loader(wait=0.5, away=0.001, num_workers=4, probe=probe))["num-workers"]

    assert (told.numbers["workers"], told.numbers["limit"]) == (0, "overhead")
    assert told.numbers["load_s"] == pytest.approx(0.121)
    assert list(told.evidence) == ["load a batch", "training step", "cores", "limit"]
    assert told.fix == {"torch": "num_workers=0", "infeed": "num_workers=0"}


def test_a_loader_without_workers_is_not_advised_to_have_none() -> None:
    """It waits longer than loading by hand takes, as for a disk that was cold."""
    assert "num-workers" not in found(loader(wait=0.05, away=0.001, probe=costly(1e-4), **INLINE))


@pytest.mark.parametrize(("count", "rest"), [(1, 1.0), (4, 1 - 4 * 0.296 / 1.984)])
def test_what_slow_samples_cost_is_not_counted_again_for_workers(count: int, rest: float) -> None:
    """Where they are why the loop waits, of whose time 1.32 s were watched."""
    told = found(uneven(count), seconds=10.0)["num-workers"]
    gain = told.numbers["gain"]

    assert told.cost == pytest.approx(rest * gain * 0.132, abs=0.001)


def test_for_a_loop_that_does_nothing_all_cores_load() -> None:
    """Its clock did not move between two batches."""
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
    """Two workers, in a container that may use one core of many."""
    told = found(loader(wait=0.1, pids=[7]), processes={7: ProcessSeen(7, pools=pools)}, core_count=1)["thread-pools"]

    assert told.numbers == {"threads": pools, "each": each, "total": 2 * each}
    assert all(fix in told.fix["torch"] for fix in fixes)
    assert told.fix["torch"].count(";") == len(fixes) - 1


def test_cores_may_be_parts_of_one() -> None:
    """As in a container with a quota."""
    seen = loader(wait=0.1, pids=[7])
    told = found(seen, processes={7: ProcessSeen(7, pools={"cv2": 3})}, core_count=8 / 3)["thread-pools"]

    assert told.title.endswith("8 for 2.67 cores")


def crowded(**options: Any) -> dict[str, Finding]:
    """Two workers with four threads each for two cores; by hand, with one thread, a batch takes 0.1 s."""
    seen = loader(**{"away": 0.01, "pids": [7], "probe": costly(0.01), **options})
    return found(seen, processes={7: ProcessSeen(7, pools={"OpenBLAS (numpy)": 3})}, core_count=2)


@pytest.mark.parametrize(
    ("wait", "away", "lost"),
    [
        (0.291, 0.01, 0.25),  # one came every 0.301 s, and would every 0.05 s, and 1 ms for the way
        (0.2, 0.1, 0.199),  # no sooner than the loop works
        (0.1, 0.2, 0.099),
    ],
)
def test_threads_cost_what_the_loop_would_not_wait_without_them(wait: float, away: float, lost: float) -> None:
    """20 batches of a run of 10 s."""
    told = crowded(wait=wait, away=away)["thread-pools"]

    assert told.cost == pytest.approx(20 * lost / 10, abs=1e-6)
    assert told.evidence["load a batch"].startswith("100 ms in one worker with one thread; 2 workers deliver one every ")


@pytest.mark.parametrize(("wait", "is_told"), [(0.04, False), (0.05, False), (0.06, True)])
def test_thread_pools_without_cost_are_not_reported(wait: float, is_told: bool) -> None:
    """A fiftieth of the run, which is 10 ms for each of 20 batches; they could come every 51 ms, and the loop takes 10."""
    assert ("thread-pools" in crowded(wait=wait)) is is_told


def test_threads_that_are_not_waited_for_cost_no_more_than_was_waited() -> None:
    """No sample could be loaded by hand: of eight threads six are beyond the cores."""
    told = crowded(wait=0.2, probe=Probe())["thread-pools"]

    assert told.cost == pytest.approx(20 * 0.2 * 0.75 / 10)
    assert "load a batch" not in told.evidence


@pytest.mark.parametrize(("wait", "is_reason"), [(0.2, True), (0.08, False)])
def test_where_threads_are_most_of_it_the_loop_waits_for_them(wait: float, is_reason: bool) -> None:
    """Then neither the way from workers nor their number is to blame. A batch would come every 50 ms."""
    told = crowded(wait=wait)

    assert (told["data-bound"].bottleneck == "thread-pools") is is_reason
    assert (told["data-bound"].fix["torch"] == told["thread-pools"].fix["torch"]) is is_reason
    assert told["data-bound"].fix["infeed"].startswith("from infeed.torch import DataLoader; ")
    assert told["data-bound"].fix["infeed"].endswith("threads_per_worker=1 (the default)") is is_reason


def test_no_number_of_workers_is_proposed_where_threads_are_to_blame() -> None:
    """Loading by hand is quicker than with workers, because of the threads alone."""
    assert "num-workers" not in crowded(wait=0.2)
    assert "num-workers" in found(loader(wait=0.2, away=0.01, probe=costly(0.01)), core_count=2)


def test_a_loader_of_infeed_with_many_threads_gets_its_own_option() -> None:
    """``threads_per_worker`` was given."""
    told = crowded(wait=0.2, library="infeed", start_method="")["data-bound"]

    assert told.fix["infeed"] == "threads_per_worker=1 (the default)"


# --- no-pinning


def test_copies_to_a_gpu_are_reported_with_their_cost() -> None:
    """21 batches of 100 MB, each 12.5 ms longer than from pinned memory; an epoch that was asked for gave none."""
    seen = loader(batch_bytes=100_000_000, is_persistent=True)
    seen.epochs.append(EpochSeen(9.0))
    told = found(seen, has_gpu=True)["no-pinning"]

    assert told.numbers == {"batches": 21, "lost_s": pytest.approx(0.2625)}
    assert told.cost == pytest.approx(0.02625)


def test_one_copy_to_a_gpu_is_one_batch() -> None:
    """Of a program that was stopped after it."""
    told = found(loader(batch_bytes=100_000_000, batches=0), has_gpu=True)["no-pinning"]

    assert told.numbers == {"batches": 1, "lost_s": pytest.approx(0.0125)}


def test_what_workers_take_to_start_is_compared_with_a_batch() -> None:
    """Twice, because the first epoch starts them anyway."""
    told = found(restarting(0.501))["restarted-workers"]

    assert told.numbers == {"lost_s": pytest.approx(1.0), "restarts": 2, "usual_s": pytest.approx(0.001)}
    assert told.cost == pytest.approx(0.1)
    assert told.fix["torch"].startswith("persistent_workers=True")


def test_epochs_of_one_batch_have_no_usual_batch() -> None:
    """Each is the first."""
    told = found(restarting(0.5, batches=0))["restarted-workers"]
    assert told.numbers["usual_s"] == 0
    assert ";" not in told.evidence["first batch"]


def test_loading_the_first_batch_is_not_the_cost_of_starting() -> None:
    """It takes 0.4 s in any process: of 0.55 s only 0.15 could be saved, and of 0.41 s nothing."""
    probe = Probe(sample_count=9, sample_s=0.04, median_s=0.04, cpu_s=0.04)

    assert found(restarting(0.55, probe=probe))["restarted-workers"].numbers["lost_s"] == pytest.approx(0.3)
    assert "restarted-workers" not in found(restarting(0.41, probe=probe))


def restarting(start_s: float, batches: int = 5, **options: Any) -> LoaderSeen:
    """Three epochs that each start their workers."""
    epochs = [EpochSeen(float(at), start_s, True, [0.001] * batches, [0.1] * batches) for at in range(3)]
    return loader(**{"epochs": epochs, "is_persistent": False, **options})
