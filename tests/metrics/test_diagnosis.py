"""The one sentence: right about made-up runs of which the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.metrics.diagnosis import diagnose
from infeed.metrics.recent import Amounts, Past, Recent, Slice
from infeed.metrics.statistics import SlowSample, Statistics, WorkerStatistics

S = 10**9


def worker(number: int, **changes: Any) -> WorkerStatistics:
    base = WorkerStatistics(
        worker=number,
        pid=100 + number,
        is_alive=True,
        sample_count=1000,
        load_s=9.0,
        collate_s=0.2,
        write_s=0.3,
        alive_s=10.0,
        cpu_s=9.4,
        queued_s=0.0,
        memory_bytes=1 << 26,
        restart_count=0,
        retry_count=0,
    )
    return replace(base, **changes)


def run(workers: int = 2, each: dict[str, Any] | None = None, **changes: Any) -> Statistics:
    """Ten seconds in which the loop waits for six."""
    base = Statistics(
        epoch=0,
        batch_count=200,
        sample_count=2000,
        byte_count=1 << 30,
        waited_s=6.0,
        started_s=0.1,
        away_s=4.0,
        deliver_s=0.1,
        loads_by="__getitem__",
        has_collate_fn=False,
        kind="process",
        is_auto=False,
        worker_count=workers,
        workers=tuple(worker(number, **(each or {})) for number in range(max(1, workers))),
        core_count=8.0,
        batches_in_flight=16,
        bytes_in_flight=1 << 28,
        memory_limit=1 << 33,
        skipped_count=0,
        replaced_count=0,
        sample_times={"median": 0.009, "p90": 0.01, "p99": 0.012, "max": 0.013},
        histogram=((0.01, 2000),),
        slowest=(SlowSample(0, 5, 5, 0.013),),
        diagnosis="",
    )
    return replace(base, **changes)


def lately(**changes: int) -> Amounts:
    """Ten seconds of two workers that compute, in which the loop waits for six."""
    base = Amounts(
        batch_count=200, waited_ns=6 * S, away_ns=4 * S, blocked_ns=6 * S, load_ns=19 * S, alive_ns=20 * S, cpu_ns=19 * S
    )  # fmt: skip
    return base._replace(**changes)


def judged(changes: dict[str, int], **others: Any) -> str:
    """What is said of such ten seconds, after others."""
    return diagnose(run(recent=Recent(lately(**changes), 0, is_all=False), **others))


def test_workers_that_compute_are_missing_and_cores_are_free() -> None:
    said = diagnose(run())
    assert said == (
        "input-bound: the loop waited 60% of the time, 93% of it for __getitem__; 4 more workers would help, 6 cores are free"
    )


def test_no_more_workers_are_advised_than_the_loop_can_use() -> None:
    assert "1 more worker would help" in diagnose(run(waited_s=0.6, away_s=9.4, each={"load_s": 9.3, "alive_s": 10.0}))


def test_no_number_is_advised_where_infeed_decides_it() -> None:
    assert "there are as many workers as bring something" in diagnose(run(is_auto=True))


def test_as_long_as_infeed_tries_out_numbers_nothing_is_said_of_them() -> None:
    for also in ({}, {"most_workers": 2}, {"each": {"load_s": 1.0, "alive_s": 10.0}}):
        said = diagnose(run(is_auto=True, is_settled=False, **also))
        assert said.endswith("; infeed is still finding out how many workers are best, and tries 2")
    assert "keeping up" in diagnose(run(is_auto=True, is_settled=False, waited_s=0.1, away_s=9.9))


def test_all_cores_are_busy() -> None:
    assert "all 2 cores are busy, so" in diagnose(run(core_count=2.0))


def test_a_loop_that_does_nothing_is_not_promised_hundreds_of_workers() -> None:
    amounts = {"cpu_ns": S, "waited_ns": 10 * S, "away_ns": S // 100}
    assert "so 6 more workers would help, beyond the cores too" in judged(amounts)


def test_where_no_number_can_be_told_none_is() -> None:
    amounts = {"load_ns": 15 * S, "cpu_ns": S, "waited_ns": 6 * S // 10, "away_ns": 94 * S // 10}
    assert "so more workers would help" in judged(amounts)


def test_a_run_of_which_nothing_is_known_of_workers_is_judged_all_the_same() -> None:
    nothing = {"load_ns": 0, "cpu_ns": 0, "alive_ns": 0}
    for kind in ("process", "thread", "inline"):
        assert "input-bound: the loop" in judged(nothing, kind=kind)
    # Where the platform does not tell what a process uses, it is taken to compute.
    assert judged({"cpu_ns": 0}).endswith("4 more workers would help, 6 cores are free")


def test_waiting_for_a_core_is_not_waiting_for_a_disk() -> None:
    assert "all 2 cores are busy" in diagnose(run(core_count=2.0, each={"cpu_s": 4.0, "queued_s": 5.4}))


def test_work_that_waits_gains_from_more_workers_than_cores() -> None:
    said = diagnose(run(core_count=2.0, each={"cpu_s": 0.5}))
    assert "it waits and does not compute" in said
    assert "more workers would help" in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"has_collate_fn": True, "each": {"load_s": 1.0, "collate_s": 8.0}}, "collate_fn"),
        ({"each": {"load_s": 1.0, "collate_s": 8.0}}, "stacking samples"),
        ({"each": {"load_s": 1.0, "write_s": 8.0}}, "writing into shared memory"),
        ({"loads_by": "__iter__"}, "__iter__"),
        ({"deliver_s": 5.5}, "infeed's own work in the loop's thread"),
    ],
)
def test_it_names_what_most_of_the_wait_was_for(changes: dict[str, Any], named: str) -> None:
    said = diagnose(run(**changes))
    assert f"of it for {named}" in said
    assert ("larger batches cost less of it" in said) is named.startswith("infeed")


def test_one_slow_sample_that_holds_up_idle_workers_is_named() -> None:
    slow = (SlowSample(0, 7, 3, 2.5),)
    said = diagnose(run(each={"load_s": 3.0}, slowest=slow))
    assert "index=3 took 2.5 s, the median is 9 ms" in said
    unnamed = (SlowSample(0, 7, None, 2.5),)
    assert "(position 7 took 2.5 s" in diagnose(run(each={"load_s": 3.0}, slowest=unnamed))


@pytest.mark.parametrize(
    ("slow_s", "changes"),
    [
        (0.0003, {"sample_times": {"median": 0.0000061}}),  # a fraction of a millisecond
        (0.4, {}),  # once, in a wait of six seconds
    ],
)
def test_no_sample_is_blamed_that_did_not_hold_up_the_loop(slow_s: float, changes: dict[str, Any]) -> None:
    said = diagnose(run(each={"load_s": 3.0}, slowest=(SlowSample(0, 7, 3, slow_s),), **changes))
    assert "workers were busy only" in said
    assert "slow samples" not in said


@pytest.mark.parametrize(("recent_s", "is_blamed"), [(0.0, False), (0.05, False), (3.5, True)])
def test_no_sample_is_blamed_for_what_came_long_after_it(recent_s: float, is_blamed: bool) -> None:
    """It made most of all the waiting there ever was, and the loop waited for six of the last ten seconds."""
    others: dict[str, Any] = {"slowest": (SlowSample(0, 5, 5, 30.0, recent_s),), "histogram": ((0.01, 1999), (30.0, 1))}
    for busy in ({}, {"load_ns": 3 * S, "manned_ns": 12 * S, "idled_ns": 9 * S}):
        assert ("index=5 took 30 s" in judged(busy, **others, waited_s=40.0)) is is_blamed


def test_idle_workers_without_a_slow_sample_need_more_in_flight_where_that_is_fixed() -> None:
    idle: dict[str, Any] = {"each": {"load_s": 3.0}}
    assert "allow more in flight than 3 batches (prefetch)" in diagnose(run(**idle, prefetch=3))
    for enough in (0, 4):
        said = diagnose(run(**idle, prefetch=enough))
        assert said.endswith("busy only 35% of their time: a timeline shows what the loop waits for")
    assert "allow more in flight than prefetch=1" in diagnose(run(prefetch=1))
    assert "prefetch" not in diagnose(run(prefetch=2))


def test_a_loop_that_does_not_wait_is_left_alone() -> None:
    said = diagnose(run(waited_s=0.1, away_s=9.9))
    assert said == "keeping up: the loop waited 1.0% of the time"


def test_workers_that_are_too_many_are_named() -> None:
    said = diagnose(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 0.9, "sample_count": 250}))
    assert "2 workers would do" in said


def test_workers_are_not_too_many_if_all_are_needed_between_long_steps() -> None:
    idle = lately(waited_ns=S // 10, away_ns=10 * S, load_ns=16 * S, alive_ns=80 * S)
    for peak, said in (
        (20, "; 2 workers would do"),
        (60, "; 6 workers would do"),
        (100, "keeping up: the loop waited 1.0% of"),
    ):
        told = diagnose(run(workers=8, recent=Recent(idle, 0, is_all=False, peak_rate=peak / S)))
        assert said in told
        assert ("would do" in told) is (peak < 100)


def test_the_peak_is_where_the_loop_took_most_batches_for_a_while() -> None:
    past = Past()
    for count, ms in ((4, 100), (10, 100), (4, 100), (9, 10)):  # of ten milliseconds nothing can be told
        past.add(Slice("process", 0, Amounts(batch_count=count, away_ns=ms * S // 1000)))
    recent = past.recent([])
    assert recent is not None
    assert recent.peak_rate * S == pytest.approx(100)


def test_what_is_loaded_ahead_needs_no_workers() -> None:
    """Twice as much was loaded as the loop has had: that is for the next epoch."""
    said = diagnose(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 2.0, "sample_count": 500}))
    assert "2 workers would do" in said


def test_workers_that_are_started_anew_for_every_epoch_are_named() -> None:
    said = diagnose(run(changeover_s=4.5, keeps_workers=False))
    assert said == (
        "input-bound: the loop waited 60% of the time, 75% of it for workers that are started anew for every epoch; "
        "persistent_workers=True keeps them"
    )
    for others in ({"changeover_s": 1.0, "keeps_workers": False}, {"changeover_s": 4.5}):
        assert "persistent_workers" not in diagnose(run(**others))


def test_workers_that_died_are_named_where_the_loop_waited_for_others_in_their_place() -> None:
    died: dict[str, Any] = {"each": {"restart_count": 2}}
    hired = {"changeover_ns": 4 * S, "added_worker_ns": 3 * S, "waited_ns": 5 * S, "away_ns": 5 * S}
    for keeps_workers in (True, False):
        said = judged(hired, **died, keeps_workers=keeps_workers)
        assert "50% of the last 10 s, 80% of it for the start of workers in the place of 4 that died; the log says how" in said
    assert "80% of it for the start of workers; these stay" in judged(hired)
    assert "persistent_workers=True" in judged({**hired, "added_worker_ns": S}, **died, keeps_workers=False)
    assert "80% of it for the start of workers; these stay" in judged({**hired, "added_worker_ns": S}, **died)
    assert "100% of it for the start of workers" in judged({**hired, "changeover_ns": 6 * S, "added_worker_ns": 6 * S})
    assert "start of workers" not in judged({**hired, "changeover_ns": 2 * S, "added_worker_ns": 2 * S}, **died)
    assert "start of workers" not in judged(hired, workers=0, kind="inline")


def test_workers_that_idle_because_others_died_are_not_told_to_have_more_in_flight() -> None:
    idle = {"load_s": 1.0, "cpu_s": 1.0}
    assert "busy only 15% of their time: 4 workers died, and the log says how" in diagnose(
        run(each={**idle, "restart_count": 2})
    )
    assert "of their time: a timeline shows" in diagnose(run(each=idle))


IN_BURSTS = {"load_ns": 10 * S, "cpu_ns": 10 * S, "manned_ns": 12 * S}


def test_workers_that_idle_only_while_the_loop_is_away_may_still_be_too_few() -> None:
    """After long steps it asks faster than they load: half of their time they idle, and not while it waits."""
    idle = "; they idle (busy 50%) mostly while the loop works"
    assert judged(IN_BURSTS).endswith(f"; more workers would help, 6 cores are free{idle}")
    assert f"so more workers would help, beyond the cores too{idle}" in judged({**IN_BURSTS, "cpu_ns": S})
    assert f"all 2 cores are busy, so make it cheaper, or give it more cores{idle}" in judged(IN_BURSTS, core_count=2.0)
    assert judged(IN_BURSTS, is_auto=True).endswith(f"give it more cores{idle}")


def test_of_workers_that_idle_while_the_loop_waits_no_more_are_needed() -> None:
    not_more = "workers were busy only 50% of their time: more of them would not help; a timeline shows"
    assert not_more in judged({**IN_BURSTS, "idled_ns": 6 * S})
    # They have tiny tasks all the time, and idle for longer than the loop was away.
    assert "busy only 20% of their time: more of them would not help" in judged({**IN_BURSTS, "load_ns": 4 * S})
    assert "more of them would not help" not in judged({**IN_BURSTS, "manned_ns": 0})  # nobody knows when they idle


def test_one_sample_that_the_loop_waits_for_is_named_however_busy_workers_are() -> None:
    slow = {"slowest": (SlowSample(0, 5, 300, 3.5),), "histogram": ((0.01, 1999), (4.0, 1))}
    said = diagnose(run(**slow))
    assert "single slow samples hold up the rest (index=300 took 3.5 s, the median is 9 ms)" in said
    assert "hold up the rest" not in diagnose(run(**{**slow, "slowest": (SlowSample(0, 5, 300, 2.5),)}))
    # Many that together take as long are work, which more workers share.
    many = {"slowest": tuple(SlowSample(0, at, at, 0.5) for at in range(16)), "histogram": ((0.01, 1984), (0.5, 16))}
    assert "more workers would help" in diagnose(run(**many))


def test_workers_that_wait_and_compute_a_little_are_as_many_as_keep_the_cores_busy() -> None:
    """Two cores, and samples that compute two fifths of their time: there is work for five."""
    mixed = {"each": {"cpu_s": 3.8}, "core_count": 2.0, "away_s": 0.5}
    assert "3 more workers would help, beyond the cores too" in diagnose(run(**mixed))
    assert "all 2 cores are busy" in diagnose(run(**{**mixed, "workers": 6}))


def test_rows_that_are_gathered_without_workers_need_none() -> None:
    said = diagnose(run(workers=0, kind="inline", loads_by="gathering rows"))
    assert said.endswith("rows of arrays are gathered without workers, whatever num_workers is; larger batches cost less of it")


def test_a_stream_of_one_worker_may_have_more() -> None:
    one: dict[str, Any] = {"workers": 1, "loads_by": "__iter__"}
    for options in ({"most_workers": 1}, {"most_workers": 4, "is_auto": True}):
        assert "infeed.get_worker_info(), with num_workers=2 or more, to use them" in diagnose(run(**one, **options))
    assert "one worker reads this stream, whatever num_workers is" in diagnose(run(**one, most_workers=4))


def test_who_leaves_the_number_to_infeed_is_not_told_of_workers_that_are_too_many() -> None:
    idle: dict[str, Any] = {"workers": 8, "waited_s": 0.1, "away_s": 9.9, "each": {"load_s": 0.9, "sample_count": 250}}
    assert "would do" in diagnose(run(**idle))
    assert "would do" not in diagnose(run(**idle, is_auto=True))


def test_a_loop_that_loads_by_itself_is_told_how_many_workers_would_do() -> None:
    inline: dict[str, Any] = {"workers": 0, "kind": "inline", "each": {"load_s": 5.9}}
    said = diagnose(run(**inline))
    assert "input-bound: the loop loaded by itself for 60% of the time" in said
    assert "num_workers=2 would hide it" in said
    assert "num_workers=4, one for each core, would" in diagnose(run(**inline, away_s=0.9, core_count=4.0))


def test_nothing_is_said_too_early() -> None:
    assert diagnose(run(batch_count=0)) == "nothing was loaded yet"
    assert diagnose(run(batch_count=0, ended_count=3)) == "nothing was loaded: 3 epochs had no batch"
    assert diagnose(run(batch_count=2)).startswith("too early to tell")


def test_it_judges_the_recent_past_and_says_so() -> None:
    assert judged({"waited_ns": S // 10, "away_ns": 10 * S}) == "keeping up: the loop waited 1.0% of the last 10.1 s"
    assert "input-bound: the loop waited 60% of the last 10 s" in judged({}, waited_s=0.1, away_s=99.9)


@pytest.mark.parametrize("threads", [2, 4, 20])
def test_threads_that_come_to_one_core_are_told_of_processes(threads: int) -> None:
    """Whether they idle, or wait for a core beside: no more threads, no more cores."""
    for queued_s in (0, 9):
        amounts = {"load_ns": threads * 8 * S, "alive_ns": threads * 10 * S, "cpu_ns": 9 * S, "queued_ns": queued_s * S}
        said = judged(amounts | {"own_cpu_ns": 10 * S}, workers=threads, kind="thread", core_count=2.0)
        assert "its threads use 1.0 of 2 cores" in said
        assert "if samples are computed in Python, worker='process' would help" in said
        assert "give it more cores" not in said
        assert "slow samples" not in said


def test_threads_that_may_wait_for_something_else_are_told_of_that_too() -> None:
    otherwise = "and if they wait for something else, more workers would"
    amounts = {"cpu_ns": 9 * S, "own_cpu_ns": 10 * S}
    assert otherwise in judged(amounts | {"load_ns": 32 * S, "alive_ns": 40 * S}, workers=4, kind="thread")
    said = judged(amounts | {"load_ns": 14 * S}, kind="thread")
    assert "worker='process' would help" in said
    assert otherwise not in said


def test_threads_that_leave_the_gil_are_not() -> None:
    for own_s in (19, 0):  # not known, but what its threads used
        assert judged({"own_cpu_ns": own_s * S}, kind="thread").endswith("4 more workers would help, 6 cores are free")


def test_of_one_thread_nobody_knows_whether_it_holds_the_gil() -> None:
    amounts = {"load_ns": 9 * S, "alive_ns": 10 * S, "cpu_ns": 9 * S, "own_cpu_ns": 9 * S}
    said = judged(amounts, workers=1, kind="thread")
    assert "more workers would help" in said
    assert "if samples are computed in Python, only with worker='process'" in said


def test_threads_that_wait_become_no_more_than_the_gil_serves() -> None:
    amounts = {"cpu_ns": 4 * S, "own_cpu_ns": 5 * S, "waited_ns": 19 * S // 2, "away_ns": S // 2}
    assert "so 2 more workers would help" in judged(amounts, kind="thread")
    assert "so 36 more workers would help" in judged(amounts)  # a fifth of eight cores each, and two are there


def test_of_a_stream_with_one_reader_more_workers_are_not_advised() -> None:
    for most in (1, 13):
        said = diagnose(run(workers=1, loads_by="__iter__", most_workers=most))
        assert "one worker reads this stream" in said
        assert "let __iter__ choose its share by infeed.get_worker_info()" in said
        assert "more worker" not in said
        assert ("whatever num_workers is" in said) is (most > 1)
    assert "num_workers=1 would load" in diagnose(run(workers=0, kind="inline", loads_by="__iter__"))


def test_a_stream_that_shares_itself_out_gets_more_workers() -> None:
    assert "4 more workers would help" in diagnose(run(loads_by="__iter__", most_workers=2))


def test_where_all_are_there_that_the_user_allows_a_larger_number_is_the_cure() -> None:
    waits: dict[str, Any] = {"each": {"cpu_s": 0.5}, "is_auto": True}
    assert "2 workers, the most that num_workers allows, so a larger number would help" in diagnose(
        run(most_workers=2, **waits)
    )
    said = diagnose(run(most_workers=3, **waits))
    assert "as many workers as bring something" in said
    assert "cores" not in said
    assert "more cores" in diagnose(run(most_workers=2, is_auto=True, core_count=2.0))


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"bound": "memory_limit"}, "; memory_limit allows no more than 2 workers: a larger one may help"),
        ({"bound": "memory"}, "; there is memory for no more than 2 workers"),
        ({"bound": "cores", "cpu_limit": 1.5}, "; cpu_limit=1.5 allows no more than 2 workers: a larger one may help"),
    ],
)
def test_what_allows_no_more_workers_is_named(limit: dict[str, Any], said: str) -> None:
    for each in ({}, {"cpu_s": 0.5}):
        assert diagnose(run(is_auto=True, each=each, most_workers=64, **limit)).endswith(said)


def test_a_core_that_the_loop_uses_is_not_free() -> None:
    amounts = {"load_ns": 9 * S, "alive_ns": 10 * S, "cpu_ns": 9 * S}
    assert "1 core is free" in judged(amounts, workers=1, core_count=2.0)
    said = judged(amounts | {"own_cpu_ns": 8 * S}, workers=1, core_count=2.0)
    assert "all 2 cores are busy (the loop itself uses 0.8)" in said
    assert "all 2 cores are busy" in judged(amounts | {"loop_queued_ns": 8 * S}, workers=1, core_count=2.0)


def test_a_core_that_others_use_is_not_free() -> None:
    assert "all 8 cores are busy" in judged({"cpu_ns": 9 * S, "queued_ns": 9 * S})


def test_many_that_compute_a_little_have_all_cores_too() -> None:
    amounts = {"load_ns": 640 * S, "alive_ns": 640 * S, "cpu_ns": 60 * S, "queued_ns": 30 * S}
    assert "all 8 cores are busy" in judged(amounts, workers=64)


def test_workers_of_a_loop_that_computes_have_fewer_cores() -> None:
    amounts = {"load_ns": 6 * S, "own_cpu_ns": 10 * S}
    assert "num_workers=1, one for each core that the loop leaves free" in judged(
        amounts, workers=0, kind="inline", core_count=2.0
    )


INLINE: dict[str, Any] = {"workers": 0, "kind": "inline", "core_count": 2.0}
NO_STEP = {"waited_ns": 10 * S, "away_ns": S // 100, "load_ns": 99 * S // 10}


def test_a_loop_that_loads_by_itself_and_sleeps_leaves_all_cores() -> None:
    """It computes, or queues for a core, while it loads; its steps are no work."""
    for own in ({"own_cpu_ns": 6 * S}, {"own_cpu_ns": 3 * S, "loop_queued_ns": 3 * S}, {}):
        said = judged({"load_ns": 59 * S // 10, **own}, **INLINE)
        assert said.endswith("num_workers=2 would hide it")
    half = {"load_ns": 59 * S // 10, "own_cpu_ns": 9 * S, "loop_queued_ns": S}
    assert "num_workers=1, one for each core that the loop leaves free" in judged(half, **INLINE)


def test_what_a_loop_without_a_step_loads_by_itself_nothing_hides() -> None:
    for own in ({}, {"own_cpu_ns": 101 * S // 10, "loop_queued_ns": S}):
        said = judged({**NO_STEP, **own}, **INLINE)
        assert said.endswith("num_workers=2, one for each core, would help; more if it waits and does not compute")
        # One worker would do what the loop does.
        alone = judged({**NO_STEP, **own}, **{**INLINE, "core_count": 1.0})
        assert alone.endswith("num_workers=2 or more would help if it waits and does not compute")
    stream = judged(NO_STEP, **INLINE, loads_by="__iter__")
    assert stream.endswith("; num_workers=2 or more help if __iter__ asks infeed.get_worker_info() for its share")


def part(kind: str, begin_s: int, waited_s: float, away_s: float) -> Slice:
    return Slice(kind, begin_s * S, Amounts(batch_count=4, waited_ns=int(waited_s * S), away_ns=int(away_s * S)))


def test_the_recent_past_is_the_last_third() -> None:
    past = Past()
    for begin_s in range(9):
        past.add(part("process", begin_s, 1.0 if begin_s < 6 else 0.0, 1.0 if begin_s >= 6 else 0.0))
    recent = past.recent([])
    assert recent is not None
    assert (recent.amounts.waited_ns, recent.amounts.away_ns, recent.since_ns, recent.is_all) == (0, 3 * S, 6 * S, False)


def test_what_is_not_in_the_past_yet_counts() -> None:
    assert Past().recent([]) is None
    recent = Past().recent([part("process", 0, 0.5, 0.5)])
    assert recent is not None
    assert (recent.amounts.elapsed_ns, recent.is_all) == (S, True)


def test_a_long_run_is_judged_by_its_last_minute() -> None:
    past = Past()
    for _ in range(1000):
        past.add(part("process", 0, 0.5, 0.5))
    recent = past.recent([])
    assert recent is not None
    assert recent.amounts.elapsed_ns == 60 * S


def test_what_other_workers_did_is_not_recent() -> None:
    past = Past()
    for kind in ("process", "process", "process", "thread"):
        past.add(part(kind, 0, 0.5, 0.0))
    recent = past.recent([part("thread", 1, 0.1, 0.0)])
    assert recent is not None
    assert recent.amounts.elapsed_ns == 6 * S // 10


@pytest.mark.parametrize(
    ("pending_s", "waiting_s", "is_told"),
    [(4.0, 3.5, True), (2.0, 6.0, False), (6.0, 2.0, False), (0.0, 6.0, False)],
)
def test_a_sample_that_is_not_there_yet_is_what_the_loop_waits_for(pending_s: float, waiting_s: float, is_told: bool) -> None:
    """If it waits now, and that is most of the wait of six seconds; the median is 9 ms."""
    statistics = run(workers=2, waiting_s=waiting_s)
    late = replace(statistics.workers[1], pending_s=pending_s)
    told = diagnose(replace(statistics, workers=(statistics.workers[0], late)))

    assert ("of the time; worker 1 has been at one sample for 4 s, the median is 9 ms" in told) is is_told


def test_a_loop_that_loads_by_itself_has_no_worker_to_name() -> None:
    """It is at the sample itself."""
    statistics = run(workers=1, kind="inline", waiting_s=4.0)
    told = diagnose(replace(statistics, workers=(replace(statistics.workers[0], pending_s=4.0),)))

    assert "the loop loaded by itself for 60% of the time; it has been at one sample for 4 s" in told
