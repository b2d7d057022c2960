"""What a user reads of findings that cost time: why the loop waits, and what would be faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Moment, Probe, ProcessSeen, SlowIndex
from infeed.doctor.findings import Finding
from infeed.doctor.findings.counting import best_workers
from tests.doctor.evidence_of import MB, auto, costly, found, loader, run, stream, uneven

BENCH = "; infeed bench module:dataset tries settings"
CLOSER = "a copy on a local disk; fewer, larger files"
LIGHTER = "fewer, larger arrays in a sample; larger batches"
CHEAPER = "cheaper samples: decode, resize or tokenize once, beforehand"
SHARE = "let each worker read its own part in __iter__, by get_worker_info()"


def at_work(**shares: float) -> dict[int, ProcessSeen]:
    """Workers, and how much of a core each used in ten seconds."""
    return {
        int(pid.removeprefix("p")): ProcessSeen(int(pid.removeprefix("p")), [Moment(0.0, 0, 0.0), Moment(10.0, 0, 10 * share)])
        for pid, share in shares.items()
    }


# --- loop-waits


def test_a_loop_without_a_gpu_is_told_what_it_waited_in_all_and_for_each_batch() -> None:
    """20 batches: as much waiting as work, and a fifth of the 10 seconds that were watched."""
    told = found(loader(wait=0.1, away=0.1))["loop-waits"]

    assert told.title == "The loop waits for data 50% of the time"
    assert told.evidence == {
        "waited": "2 s of 4 s",
        "a batch": "100 ms of waiting, 100 ms of work",
        "for": "workers: there are too few",
    }
    assert told.cost == pytest.approx(0.2)
    assert told.cure["torch"] == f"more workers; {CHEAPER}{BENCH}"
    assert told.cure["infeed"] == f"from infeed.torch import DataLoader; {told.cure['torch']}"


def test_what_workers_use_of_a_core_is_told_of_processes_only() -> None:
    """A loader of infeed's had processes before it had threads."""
    processes = at_work(p7=0.3, p8=0.5)
    as_processes, as_threads = (
        found(loader(wait=0.1, kind=kind, pids=[7, 8]), processes=processes)["loop-waits"] for kind in ("process", "thread")
    )

    assert as_processes.evidence["workers"] == "40% of a core each"
    assert "workers" not in as_threads.evidence


@pytest.mark.parametrize(
    ("cpu_s", "text"),
    [
        (0.002, "10 ms, of which 2 ms on a processor"),
        (0.0101, "10 ms, of which 10 ms on a processor"),  # clocks differ a little
        (0.03, "10 ms, with threads that use 30 ms of processors"),
    ],
)
def test_a_sample_is_not_longer_on_a_processor_than_it_takes(cpu_s: float, text: str) -> None:
    """Threads of libraries are on several at once."""
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=cpu_s, switches=0.0)

    assert found(loader(wait=0.1, probe=probe))["loop-waits"].evidence["a sample"] == text


def test_samples_by_hand_are_not_told_where_rows_are_taken_out_of_arrays() -> None:
    """They are loaded in another way there."""
    seen = loader(wait=0.1, library="infeed", num_workers=0, kind="inline", is_gathered=True, probe=costly(0.01))
    told = found(seen)["loop-waits"]

    assert "a sample" not in told.evidence
    assert told.evidence["for"] == "itself: rows are taken out of arrays"


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
    assert found(seen)["loop-waits"].cure["torch"].endswith(BENCH) is has_bench


def reading(**options: Any) -> LoaderSeen:
    """A loop that waits for samples of 10 ms, of which 9 are reading; four cores would be busy with 40 of them."""
    probe = Probe(sample_count=9, sample_s=0.01, median_s=0.01, cpu_s=0.001, switches=1.0, read_bytes=MB)
    return loader(**{"wait": 0.05, "away": 0.05, "probe": probe, **options})


@pytest.mark.parametrize(
    ("seen", "cure"),
    [
        (reading(), f"more workers than cores; {CLOSER}{BENCH}"),
        (reading(library="infeed", start_method="", is_auto=True), f"{CLOSER}{BENCH}"),
        (reading(num_workers=64), f"{CLOSER}{BENCH}"),
    ],
)
def test_a_loop_that_waits_for_storage_is_told_so(seen: LoaderSeen, cure: str) -> None:
    """Who leaves the number to infeed, or has as many as are ever of use, is not told to take more."""
    told = found(seen)["loop-waits"]

    assert told.evidence["for"] == "storage: samples wait to be read"
    assert told.cure["torch"] == cure


@pytest.mark.parametrize(
    ("is_auto", "cure"), [(False, f"num_workers=0; or {LIGHTER}"), (True, LIGHTER)], ids=["a number", "auto"]
)
def test_the_way_from_workers_is_cured_by_lighter_samples(is_auto: bool, cure: str) -> None:
    """Of which a batch is loaded in a millisecond and comes after 100; or by no workers, for who decides on them."""
    told = found(auto(wait=0.1, probe=costly(1e-4), is_auto=is_auto))["loop-waits"]

    assert told.evidence["for"].startswith("the way from the workers")
    assert told.cure["infeed"] == f"{cure}{BENCH}"


def test_a_loop_that_reads_a_stream_by_itself_is_told_to_take_one_worker() -> None:
    """More of them only once the stream shares itself."""
    told = found(stream(away=0.1, **INLINE))

    assert told["loop-waits"].cure["torch"] == f"num_workers=1, which loads while the loop works; for more of them {SHARE}"
    assert told["num-workers"].cure["torch"] == "num_workers=1, persistent_workers=True"


def test_processes_that_are_gone_do_not_tell_what_threads_use() -> None:
    """They were idle; eight threads compute all the time on four cores."""
    seen = auto(wait=0.05, kind="thread", pids=[7, 8], probe=costly(0.1))

    assert found(seen, processes=at_work(p7=0.0, p8=0.0))["loop-waits"].evidence["for"] == "processors: all are at work"


def test_workers_that_nothing_is_known_of_are_taken_to_compute() -> None:
    """Samples could not be loaded by hand. No more workers than cores are proposed to anyone without a reason."""
    few, enough = (found(loader(wait=0.1, kind="thread", num_workers=count))["loop-waits"].cure["torch"] for count in (2, 4))

    assert few.startswith("more workers")
    assert enough.startswith("cheaper samples")


# --- storage-bound


@pytest.mark.parametrize(
    ("changes", "torch", "infeed"),
    [
        ({}, f"more workers than cores (up to 40); {CLOSER}", f"worker='thread', num_workers=40; {CLOSER}"),
        ({"num_workers": 50}, f"more workers than cores (up to 51); {CLOSER}", f"worker='thread', num_workers=51; {CLOSER}"),
        ({"num_workers": 64}, CLOSER, CLOSER),
        ({"is_auto": True}, f"more workers than cores (up to 40); {CLOSER}", f"worker='thread'; {CLOSER}"),
        ({"is_auto": True, "kind": "thread"}, f"more workers than cores (up to 40); {CLOSER}", CLOSER),
        ({"is_stream": True}, *[f"{CLOSER}; {SHARE}, and then more workers than cores"] * 2),
    ],
)
def test_who_waits_for_storage_is_told_what_there_is_left_to_do(changes: dict[str, Any], torch: str, infeed: str) -> None:
    """Not to take what the program has, nor what infeed decides, nor readers that would read the same."""
    told = found(reading(**changes))["storage-bound"]

    assert told.title == "Reading is slow: samples wait 90% of their time for storage"
    assert told.evidence == {
        "a sample": "10 ms, of which 1 ms on a processor",
        "read": "1.0 MiB a sample, 100.0 MiB/s by one reader",
    }
    assert told.cure == {"torch": torch, "infeed": infeed}


def test_storage_costs_what_the_loop_waits_for_it_or_all_where_there_is_no_loop() -> None:
    """The loop waits one of ten seconds; the doctor does nothing but load."""
    assert found(reading())["storage-bound"].cost == pytest.approx(0.9 * 0.1)
    assert found(reading(), has_own_loop=False)["storage-bound"].cost == pytest.approx(0.9)


# --- slow-samples


def slow(seconds: float = 2.0, **options: Any) -> LoaderSeen:
    """One of 100 samples takes this long, and the others as long together."""
    usual = seconds / 100
    probe = Probe(sample_count=100, sample_s=2 * usual, median_s=usual, cpu_s=1e-3, slow=[SlowIndex("7", seconds)])
    return loader(**{"wait": 0.05, "away": 0.05, "probe": probe, **options})


def test_a_slow_sample_is_told_beside_the_usual_ones() -> None:
    """It takes a hundred times as long."""
    told = found(slow())["slow-samples"]

    assert told.title == "A few samples are very slow: index 7 takes 100 times the usual"
    assert told.evidence == {
        "slow": "7: 2 s",
        "usual": "20 ms (median of 100)",
        "share": "50% of the loading time of those that were tried",
    }


def test_slow_samples_cost_no_more_than_all_waiting_does() -> None:
    """Of ten seconds the loop waits one. Where the doctor only loads, they cost their share of that."""
    told = found(slow())

    assert told["slow-samples"].cost == pytest.approx(0.495 * 0.1)
    assert told["slow-samples"].cost < told["loop-waits"].cost
    assert found(slow(), has_own_loop=False)["slow-samples"].cost == pytest.approx(0.495)


@pytest.mark.parametrize(
    ("seen", "cure"),
    [
        (slow(), "; sample_timeout=1, on_error='skip' leave out what takes longer"),
        (slow(kind="thread"), "; worker='process', sample_timeout=1, on_error='skip' leave out what takes longer"),
        (slow(0.5), ""),
    ],
)
def test_a_timeout_is_proposed_only_where_it_leaves_a_sample_out(seen: LoaderSeen, cure: str) -> None:
    """Of a second; half a second is less. Threads cannot have one."""
    told = found(seen)["slow-samples"].cure["infeed"]

    assert told == f"several workers share a batch, so that others go on{cure}"


# --- num-workers


def test_as_many_workers_as_keep_up_are_proposed_with_the_figures() -> None:
    """One loads a batch in 200 ms, the loop takes 100: two and some room."""
    told = found(loader(wait=0.1, away=0.1, num_workers=1, probe=costly(0.02)))["num-workers"]

    assert told.title.startswith("num_workers=3 would be better than 1: about ")
    assert told.evidence == {
        "loading a batch": "200 ms by one worker",
        "the loop's own work": "100 ms a batch",
        "the way from a worker": "about 1 ms a batch",
        "cores": "4",
        "why": "enough to keep up with the loop",
    }
    assert told.cure == {"torch": "num_workers=3, persistent_workers=True", "infeed": "num_workers=3"}


@pytest.mark.parametrize(
    ("seen", "cores", "best", "why"),
    [
        (loader(wait=0.39, away=0.01, num_workers=1, probe=costly(0.04)), 4, 4, "as many as there are processors for"),
        (
            loader(wait=0.39, away=0.001, num_workers=1, probe=replace(costly(0.04), cpu_s=0.01, switches=1.0)),
            4,
            16,
            "as many as there are processors for, because they mostly wait",
        ),
        (loader(wait=9.9, away=0.01, num_workers=1, probe=costly(1.0)), 128, 64, "the most that is ever proposed"),
        (
            stream(wait=0.1, away=0.05, **INLINE),
            4,
            1,
            "the stream does not share itself among workers, so that more would not help",
        ),
    ],
)
def test_why_there_should_be_no_more_workers_is_told(seen: LoaderSeen, cores: int, best: int, why: str) -> None:
    """Where they do not keep up with the loop."""
    told = found(seen, core_count=cores)["num-workers"]

    assert told.title.startswith(f"num_workers={best} would")
    assert told.evidence["why"] == why


def test_who_should_have_no_workers_is_not_told_of_their_way_nor_of_slow_samples() -> None:
    """Four bring a batch every half second; loading it takes 0.12 s on average, one of five slow samples 1 s."""
    uneven = [SlowIndex("7", 1.0), *(SlowIndex(str(index), 0.05) for index in range(4))]
    probe = Probe(sample_count=100, sample_s=0.0121, median_s=1e-4, cpu_s=0.0121, switches=0.0, slow=uneven)
    told = found(loader(wait=0.5, away=0.001, num_workers=4, probe=probe))["num-workers"]

    assert told.evidence == {
        "loading a batch": "121 ms by one worker",
        "the loop's own work": "1 ms a batch",
        "cores": "4",
        "why": "loading is cheaper than what workers cost",
    }
    assert told.cure == {"torch": "num_workers=0", "infeed": "num_workers=0"}


def test_a_loop_that_has_no_workers_is_not_told_to_have_none() -> None:
    """It waits longer than loading by hand takes, as for a disk that was cold."""
    assert "num-workers" not in found(loader(wait=0.05, away=0.001, probe=costly(1e-4), **INLINE))


@pytest.mark.parametrize(("count", "rest"), [(1, 1.0), (4, 1 - 4 * 0.296 / 1.984)])
def test_what_slow_samples_cost_is_not_counted_again_for_workers(count: int, rest: float) -> None:
    """Where they are why the loop waits, of whose time 1.32 s were watched."""
    told = found(uneven(count), seconds=10.0)["num-workers"]
    gain = float(told.title.split("about ")[1].split("%")[0]) / 100

    assert told.cost == pytest.approx(rest * gain * 0.132, abs=0.001)


def test_for_a_loop_that_does_nothing_all_cores_load() -> None:
    """Its clock did not move between two batches."""
    seen = loader(away=0.0, probe=costly(0.01))

    assert best_workers(run(seen), seen) == 4


# --- thread-pools


@pytest.mark.parametrize(
    ("pools", "title", "cure"),
    [
        ({"cv2": 3}, "cv2 uses 4 threads in each worker: 8 for 1 core", "cv2.setNumThreads(0) in worker_init_fn"),
        (
            {"OpenBLAS (numpy)": 3},
            "OpenBLAS (numpy) uses 4 threads in each worker: 8 for 1 core",
            "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 in the environment",
        ),
        (
            {"cv2": 2, "OpenBLAS (numpy)": 3},
            "OpenBLAS (numpy), cv2 use 6 threads in each worker: 12 for 1 core",
            "cv2.setNumThreads(0) in worker_init_fn; "
            "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 in the environment",
        ),
    ],
)
def test_each_library_with_threads_gets_its_cure(pools: dict[str, int], title: str, cure: str) -> None:
    """Two workers, in a container that may use one core of many."""
    told = found(loader(wait=0.1, pids=[7]), processes={7: ProcessSeen(7, pools=pools)}, core_count=1)["thread-pools"]

    assert (told.title, told.cure["torch"]) == (title, cure)


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
    assert told.evidence["a batch"].startswith("100 ms by one worker that has one thread; from 2 workers one came every ")


@pytest.mark.parametrize(("wait", "is_told"), [(0.04, False), (0.05, False), (0.06, True)])
def test_threads_that_cost_nothing_are_not_told(wait: float, is_told: bool) -> None:
    """A fiftieth of the run, which is 10 ms for each of 20 batches; they could come every 51 ms, and the loop takes 10."""
    assert ("thread-pools" in crowded(wait=wait)) is is_told


def test_threads_that_are_not_waited_for_cost_no_more_than_was_waited() -> None:
    """No sample could be loaded by hand: of eight threads six are beyond the cores."""
    told = crowded(wait=0.2, probe=Probe())["thread-pools"]

    assert told.cost == pytest.approx(20 * 0.2 * 0.75 / 10)
    assert "a batch" not in told.evidence


@pytest.mark.parametrize(("wait", "is_reason"), [(0.2, True), (0.08, False)])
def test_where_threads_are_most_of_it_the_loop_waits_for_them(wait: float, is_reason: bool) -> None:
    """Then neither the way from workers nor their number is to blame. A batch would come every 50 ms."""
    told = crowded(wait=wait)

    assert ("more threads in workers than there are cores" in told["loop-waits"].evidence["for"]) is is_reason
    assert (told["loop-waits"].cure["torch"] == told["thread-pools"].cure["torch"]) is is_reason
    assert told["loop-waits"].cure["infeed"].startswith("from infeed.torch import DataLoader; ")
    assert told["loop-waits"].cure["infeed"].endswith("threads_per_worker=1, which is the default") is is_reason


def test_no_number_of_workers_is_proposed_where_threads_are_to_blame() -> None:
    """Loading by hand is quicker than with workers, because of the threads alone."""
    assert "num-workers" not in crowded(wait=0.2)
    assert "num-workers" in found(loader(wait=0.2, away=0.01, probe=costly(0.01)), core_count=2)


def test_a_loader_of_infeed_with_many_threads_is_told_its_own_option() -> None:
    """``threads_per_worker`` was given."""
    told = crowded(wait=0.2, library="infeed", start_method="")["loop-waits"]

    assert told.cure["infeed"] == "threads_per_worker=1, which is the default"


# --- no-pinning


def test_copies_to_a_gpu_are_told_with_what_they_cost() -> None:
    """21 batches of 100 MB, each 12.5 ms longer than from pinned memory; an epoch that was asked for gave none."""
    seen = loader(batch_bytes=100_000_000, is_persistent=True)
    seen.epochs.append(EpochSeen(9.0))
    told = found(seen, has_gpu=True)["no-pinning"]

    assert told.evidence == {"a batch": "95.4 MiB", "copies": "21 batches, about 262 ms longer than from pinned memory"}
    assert told.cost == pytest.approx(0.02625)


def test_one_copy_to_a_gpu_is_one_batch() -> None:
    """Of a program that was stopped after it."""
    told = found(loader(batch_bytes=100_000_000, batches=0), has_gpu=True)["no-pinning"]

    assert told.evidence["copies"].startswith("1 batch, about 12.5 ms longer")
