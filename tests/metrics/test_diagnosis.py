"""The diagnosis of constructed runs, as codes and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.autotune.capacity import DATA_BOUND_WAIT, state_of
from infeed.metrics.diagnosis import ACTIONS, BOTTLENECKS, Diagnosis, action_text, bottleneck_text, diagnose
from infeed.metrics.recent import Amounts, Recent, Slice, Slices
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


def amounts_of(statistics: Statistics) -> Amounts:
    """Returns the amounts of the whole run."""

    def of_workers(name: str) -> int:
        seconds: float = sum(getattr(one, name) for one in statistics.workers)
        return round(1e9 * seconds)

    waited_ns, started_ns = round(1e9 * statistics.waited_s), round(1e9 * statistics.started_s)
    return Amounts(
        batch_count=statistics.batch_count,
        sample_count=statistics.sample_count,
        loaded_count=sum(one.sample_count for one in statistics.workers),
        waited_ns=waited_ns,
        started_ns=started_ns,
        away_ns=round(1e9 * statistics.away_s),
        changeover_ns=round(1e9 * statistics.changeover_s),
        blocked_ns=waited_ns + started_ns - round(1e9 * statistics.deliver_s),
        load_ns=of_workers("load_s"),
        collate_ns=of_workers("collate_s"),
        write_ns=of_workers("write_s"),
        alive_ns=of_workers("alive_s"),
        cpu_ns=of_workers("cpu_s"),
        queued_ns=of_workers("queued_s"),
    )


def run(workers: int = 2, each: dict[str, Any] | None = None, **changes: Any) -> Statistics:
    """Ten seconds in which the training loop waits for six. They are also the recent part, unless ``recent`` is set."""
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
    changed = replace(base, **changes)
    return changed if changed.recent else replace(changed, recent=Recent(amounts_of(changed), 0, is_all=True))


def lately(**changes: int) -> Amounts:
    """Ten seconds of two CPU-bound workers, in which the training loop waits for six."""
    base = Amounts(
        batch_count=200, waited_ns=6 * S, away_ns=4 * S, blocked_ns=6 * S, load_ns=19 * S, alive_ns=20 * S, cpu_ns=19 * S
    )  # fmt: skip
    return base._replace(**changes)


def lately_diagnosed(changes: dict[str, int], **others: Any) -> Diagnosis:
    """Returns the diagnosis of ten such seconds, after others."""
    return diagnose(run(recent=Recent(lately(**changes), 0, is_all=False), **others))


def codes(found: Diagnosis) -> tuple[str, str]:
    return found.bottleneck, found.action


@pytest.mark.parametrize(
    ("wait_share", "state"),
    [
        (0.0, "compute-bound"),
        (0.049, "compute-bound"),
        (0.05, "balanced"),
        (0.099, "balanced"),
        (DATA_BOUND_WAIT, "data-bound"),
    ],
)
def test_the_state_follows_from_the_wait_share(wait_share: float, state: str) -> None:
    assert state_of(wait_share) == state


def test_busy_workers_on_free_cores_should_be_more() -> None:
    found = diagnose(run())
    assert (found.state, *codes(found)) == ("data-bound", "work", "add-workers")
    assert found.wait_share == 0.6
    assert found.numbers["part"] == "__getitem__"
    assert found.numbers["share"] == pytest.approx(0.93, abs=0.01)
    assert (found.numbers["workers"], found.numbers["free_cores"]) == (4, 6)


def test_the_text_leads_with_the_state_then_bottleneck_then_action() -> None:
    text = str(diagnose(run(each={"cpu_s": 0.5})))
    lead, bottleneck, action = text.split(". ", 2)
    assert lead.startswith("Data-bound: ")
    assert bottleneck.startswith("Bottleneck: `__getitem__`")
    assert action.startswith("Add 4 workers")


NUMBERS: dict[str, Any] = {
    "part": "__getitem__", "share": 0.7, "cpu_share": 0.02, "is_io_bound": True, "cores": 8.0, "loop_cores": 0.5, "worker": 1,
    "pending_s": 4.0, "median_s": 0.009, "sample": "index 3", "seconds": 2.5, "used_cores": 1.0, "busy_share": 0.3,
    "prefetch": 2, "collate_share": 0.6, "workers": 4, "free_cores": 6, "is_gil_possible": True, "num_workers": 4,
    "cpu_limit": 1.5, "is_io_possible": True, "deaths": 2, "is_enough": True, "epochs": 3, "batches": 2,
    "slow_share": 0.6, "could_s": 0.05, "comes_s": 0.2, "kind": "thread",
}  # fmt: skip


@pytest.mark.parametrize("code", BOTTLENECKS)
def test_every_bottleneck_has_a_text(code: str) -> None:
    assert not set("{}") & set(bottleneck_text(code, NUMBERS))


@pytest.mark.parametrize("code", ACTIONS)
def test_every_action_is_a_sentence(code: str) -> None:
    text = action_text(code, NUMBERS)
    assert text.endswith(".")
    assert not set("{}") & set(text)


def test_no_more_workers_are_advised_than_the_loop_can_use() -> None:
    assert diagnose(run(waited_s=0.6, away_s=9.4, each={"load_s": 9.3, "alive_s": 10.0})).numbers["workers"] == 1


def test_with_auto_no_number_is_advised() -> None:
    found = diagnose(run(is_auto=True))
    assert codes(found) == ("work", "reduce-work")
    assert found.numbers["is_best"]


def test_while_the_tuner_searches_the_advice_is_to_wait() -> None:
    for also in ({}, {"most_workers": 2}, {"each": {"load_s": 1.0, "alive_s": 10.0}}):
        found = diagnose(run(is_auto=True, is_settled=False, **also))
        assert (found.action, found.numbers["workers"]) == ("wait-for-tuner", 2)
    assert diagnose(run(is_auto=True, is_settled=False, waited_s=0.1, away_s=9.9)).state == "compute-bound"


def test_busy_cores_are_the_bottleneck() -> None:
    assert codes(diagnose(run(core_count=2.0))) == ("cores", "reduce-work")


def test_workers_on_a_cluster_are_not_compared_with_the_cores_of_this_machine() -> None:
    found = diagnose(run(core_count=2.0, is_on_cluster=True))
    assert codes(found) == ("work", "add-workers-on-cluster")
    assert found.numbers["workers"] == 4
    assert "all 2 cores are busy" not in str(found)


def test_a_loop_without_a_step_gets_a_limited_number_of_workers() -> None:
    found = lately_diagnosed({"cpu_ns": S, "waited_ns": 10 * S, "away_ns": S // 100})
    assert (found.action, found.numbers["workers"]) == ("add-workers-beyond-cores", 6)


def test_no_number_is_advised_where_it_is_unknown() -> None:
    found = lately_diagnosed({"load_ns": 15 * S, "cpu_ns": S, "waited_ns": 6 * S // 10, "away_ns": 94 * S // 10})
    assert (found.action, found.numbers["workers"]) == ("add-workers-beyond-cores", 0)


def test_a_run_without_measurements_of_workers_has_a_diagnosis() -> None:
    nothing = {"load_ns": 0, "cpu_ns": 0, "alive_ns": 0}
    for kind in ("process", "thread", "inline"):
        assert "Data-bound: " in str(lately_diagnosed(nothing, kind=kind))
    # Without CPU times of the platform, work counts as CPU-bound.
    found = lately_diagnosed({"cpu_ns": 0})
    assert (found.action, found.numbers["workers"], found.numbers["free_cores"]) == ("add-workers", 4, 6)


def test_waiting_for_a_core_is_not_io_bound() -> None:
    assert diagnose(run(core_count=2.0, each={"cpu_s": 4.0, "queued_s": 5.4})).bottleneck == "cores"


def test_io_bound_work_gains_from_more_workers_than_cores() -> None:
    found = diagnose(run(core_count=2.0, each={"cpu_s": 0.5}))
    assert found.numbers["is_io_bound"]
    assert found.action == "add-workers-beyond-cores"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"has_collate_fn": True, "each": {"load_s": 1.0, "collate_s": 8.0}}, "collate_fn"),
        ({"each": {"load_s": 1.0, "collate_s": 8.0}}, "collation"),
        ({"each": {"load_s": 1.0, "write_s": 8.0}}, "writing"),
        ({"loads_by": "__iter__"}, "__iter__"),
        ({"deliver_s": 5.5}, "delivery"),
    ],
)
def test_the_largest_part_of_the_wait_is_named(changes: dict[str, Any], part: str) -> None:
    found = diagnose(run(**changes))
    assert found.numbers["part"] == part
    assert (codes(found) == ("delivery", "larger-batches")) is (part == "delivery")


def test_delivery_is_compared_with_the_wait_without_worker_start_up() -> None:
    """In a short run, worker start-up takes longer than all later waits together."""
    found = diagnose(run(each={"load_s": 0.1}, waited_s=0.2, started_s=2.0, away_s=0.3, deliver_s=0.18))
    assert codes(found) == ("delivery", "larger-batches")
    assert found.numbers["share"] == pytest.approx(0.9)


def test_one_slow_sample_that_keeps_workers_idle_is_named() -> None:
    slow = (SlowSample(0, 7, 3, 2.5),)
    found = diagnose(run(each={"load_s": 3.0}, slowest=slow))
    assert codes(found) == ("slow-samples", "fix-samples")
    assert found.numbers == {**found.numbers, "sample": "index 3", "seconds": 2.5, "median_s": 0.009}
    unnamed = (SlowSample(0, 7, None, 2.5),)
    assert diagnose(run(each={"load_s": 3.0}, slowest=unnamed)).numbers["sample"] == "position 7"


@pytest.mark.parametrize(
    ("slow_s", "changes"),
    [
        (0.0003, {"sample_times": {"median": 0.0000061}}),  # A fraction of a millisecond.
        (0.4, {}),  # Once, in a wait of six seconds.
    ],
)
def test_a_sample_that_did_not_delay_the_loop_is_not_named(slow_s: float, changes: dict[str, Any]) -> None:
    found = diagnose(run(each={"load_s": 3.0}, slowest=(SlowSample(0, 7, 3, slow_s),), **changes))
    assert found.bottleneck == "idle-workers"


@pytest.mark.parametrize(("recent_s", "is_named"), [(0.0, False), (0.05, False), (3.5, True)])
def test_a_sample_is_not_reported_for_waits_long_after_it(recent_s: float, is_named: bool) -> None:
    """It caused most of the total wait, but the training loop waited for six of the last ten seconds."""
    others: dict[str, Any] = {"slowest": (SlowSample(0, 5, 5, 30.0, recent_s),), "histogram": ((0.01, 1999), (30.0, 1))}
    for busy in ({}, {"load_ns": 3 * S, "manned_ns": 12 * S, "idled_ns": 9 * S}):
        assert (lately_diagnosed(busy, **others, waited_s=40.0).bottleneck == "slow-samples") is is_named


def test_idle_workers_without_a_slow_sample_need_a_larger_prefetch_if_it_is_set() -> None:
    idle: dict[str, Any] = {"each": {"load_s": 3.0}}
    found = diagnose(run(**idle, prefetch=3))
    assert (*codes(found), found.numbers["prefetch"]) == ("idle-workers", "raise-prefetch", 3)
    for enough in (0, 4):
        found = diagnose(run(**idle, prefetch=enough))
        assert (*codes(found), found.numbers["busy_share"]) == ("idle-workers", "see-timeline", pytest.approx(0.35))
    assert codes(diagnose(run(prefetch=1))) == ("prefetch", "raise-prefetch")
    assert diagnose(run(prefetch=2)).action == "add-workers"


def test_a_loop_that_does_not_wait_needs_nothing() -> None:
    found = diagnose(run(waited_s=0.1, away_s=9.9))
    assert (found.state, *codes(found)) == ("compute-bound", "step", "none")


def test_too_many_workers_are_reported() -> None:
    found = diagnose(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 0.9, "sample_count": 250}))
    assert (found.action, found.numbers["workers"]) == ("fewer-workers", 2)


@pytest.mark.parametrize(("peak", "workers"), [(20, 2), (60, 6), (100, None)])
def test_workers_needed_between_long_steps_are_not_too_many(peak: int, workers: int | None) -> None:
    idle = lately(waited_ns=S // 10, away_ns=10 * S, load_ns=16 * S, alive_ns=80 * S)
    found = diagnose(run(workers=8, recent=Recent(idle, 0, is_all=False, peak_rate=peak / S)))
    assert found.numbers.get("workers") == workers
    assert (found.action == "fewer-workers") is (workers is not None)


def test_the_peak_rate_is_that_of_the_fastest_slice() -> None:
    past = Slices()
    for count, ms in ((4, 100), (10, 100), (4, 100), (9, 10)):  # Ten milliseconds are too short.
        past.add(Slice("process", 0, Amounts(batch_count=count, away_ns=ms * S // 1000)))
    recent = past.recent([])
    assert recent is not None
    assert recent.peak_rate * S == pytest.approx(100)


def test_samples_loaded_ahead_are_not_counted() -> None:
    """Twice as much was loaded as the training loop received: the rest is for the next epoch."""
    found = diagnose(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 2.0, "sample_count": 500}))
    assert (found.action, found.numbers["workers"]) == ("fewer-workers", 2)


def test_workers_that_start_in_every_epoch_are_reported() -> None:
    found = diagnose(run(changeover_s=4.5, keeps_workers=False))
    assert (*codes(found), found.numbers["share"]) == ("restarts", "persistent-workers", pytest.approx(0.75))
    for others in ({"changeover_s": 1.0, "keeps_workers": False}, {"changeover_s": 4.5}):
        assert diagnose(run(**others)).action != "persistent-workers"


def test_deaths_are_reported_where_the_loop_waited_for_replacements() -> None:
    died: dict[str, Any] = {"each": {"restart_count": 2}}
    started = {"changeover_ns": 4 * S, "added_worker_ns": 3 * S, "waited_ns": 5 * S, "away_ns": 5 * S}
    for keeps_workers in (True, False):
        found = lately_diagnosed(started, **died, keeps_workers=keeps_workers)
        assert codes(found) == ("replacements", "see-log")
        assert (found.wait_share, found.numbers["share"], found.numbers["deaths"]) == (0.5, 0.8, 4)
    assert codes(lately_diagnosed(started)) == ("start", "workers-stay")
    few = {**started, "added_worker_ns": S}
    assert lately_diagnosed(few, **died, keeps_workers=False).action == "persistent-workers"
    assert codes(lately_diagnosed(few, **died)) == ("start", "workers-stay")
    assert lately_diagnosed({**started, "changeover_ns": 6 * S, "added_worker_ns": 6 * S}).numbers["share"] == 1.0
    for other in (
        lately_diagnosed({**started, "changeover_ns": 2 * S}, **died),
        lately_diagnosed(started, workers=0, kind="inline"),
    ):
        assert other.bottleneck not in ("start", "replacements", "restarts")


def test_workers_that_are_idle_because_others_died_do_not_need_a_larger_prefetch() -> None:
    idle = {"load_s": 1.0, "cpu_s": 1.0}
    found = diagnose(run(each={**idle, "restart_count": 2}))
    assert (*codes(found), found.numbers["deaths"]) == ("idle-workers", "see-log", 4)
    assert diagnose(run(each=idle)).action == "see-timeline"


IN_BURSTS = {"load_ns": 10 * S, "cpu_ns": 10 * S, "manned_ns": 12 * S}


def test_workers_that_are_idle_only_during_steps_may_be_too_few() -> None:
    """After long steps the training loop requests batches faster than they load.

    They are idle half of the time, but not during waits.
    """
    for others, changes, action in (
        ({}, {}, "add-workers"),
        ({}, {"cpu_ns": S}, "add-workers-beyond-cores"),
        ({"core_count": 2.0}, {}, "reduce-work"),
        ({"is_auto": True}, {}, "reduce-work"),
    ):
        found = lately_diagnosed({**IN_BURSTS, **changes}, **others)
        assert (found.action, found.numbers["busy_share"]) == (action, 0.5)
        if action.startswith("add"):
            assert found.numbers["workers"] == 0


def test_workers_that_are_idle_while_the_loop_waits_are_enough() -> None:
    found = lately_diagnosed({**IN_BURSTS, "idled_ns": 6 * S})
    assert (found.action, found.numbers["is_enough"]) == ("see-timeline", True)
    # They always have tiny tasks, and are idle for longer than the steps took.
    found = lately_diagnosed({**IN_BURSTS, "load_ns": 4 * S})
    assert (found.numbers["busy_share"], found.numbers["is_enough"]) == (0.2, True)
    assert not lately_diagnosed({**IN_BURSTS, "manned_ns": 0}).numbers["is_enough"]  # It is unknown when they are idle.


def test_a_single_sample_that_the_loop_waits_for_is_reported_however_busy_workers_are() -> None:
    slow = {"slowest": (SlowSample(0, 5, 300, 3.5),), "histogram": ((0.01, 1999), (4.0, 1))}
    found = diagnose(run(**slow))
    assert (found.bottleneck, found.numbers["sample"]) == ("slow-samples", "index 300")
    assert diagnose(run(**{**slow, "slowest": (SlowSample(0, 5, 300, 2.5),)})).bottleneck != "slow-samples"
    # Many samples that take as long together are work, which more workers share.
    many = {"slowest": tuple(SlowSample(0, at, at, 0.5) for at in range(16)), "histogram": ((0.01, 1984), (0.5, 16))}
    assert diagnose(run(**many)).action == "add-workers"


def test_enough_partly_cpu_bound_workers_keep_the_cores_busy() -> None:
    """Two cores, and samples that compute 40% of their time: there is work for five workers."""
    mixed = {"each": {"cpu_s": 3.8}, "core_count": 2.0, "away_s": 0.5}
    found = diagnose(run(**mixed))
    assert (found.action, found.numbers["workers"]) == ("add-workers-beyond-cores", 3)
    assert diagnose(run(**{**mixed, "workers": 6})).bottleneck == "cores"


def test_gathered_rows_need_no_workers() -> None:
    found = diagnose(run(workers=0, kind="inline", loads_by="gathering rows"))
    assert codes(found) == ("gathering", "larger-batches")


def test_an_iterable_dataset_with_one_worker_may_have_more() -> None:
    one: dict[str, Any] = {"workers": 1, "loads_by": "__iter__"}
    for options in ({"most_workers": 1}, {"most_workers": 4, "is_auto": True}):
        assert codes(diagnose(run(**one, **options))) == ("one-reader", "share-iterable-with-workers")
    assert codes(diagnose(run(**one, most_workers=4))) == ("one-reader", "share-iterable")


def test_with_auto_workers_are_never_too_many() -> None:
    idle: dict[str, Any] = {"workers": 8, "waited_s": 0.1, "away_s": 9.9, "each": {"load_s": 0.9, "sample_count": 250}}
    assert diagnose(run(**idle)).action == "fewer-workers"
    assert diagnose(run(**idle, is_auto=True)).action == "none"


def test_loading_in_the_main_process_gets_an_advised_number_of_workers() -> None:
    inline: dict[str, Any] = {"workers": 0, "kind": "inline", "each": {"load_s": 5.9}}
    found = diagnose(run(**inline))
    assert (found.wait_share, *codes(found), found.numbers["num_workers"]) == (0.6, "inline", "set-num-workers", 2)
    found = diagnose(run(**inline, away_s=0.9, core_count=4.0))
    assert (found.action, found.numbers["num_workers"]) == ("worker-per-core", 4)


def test_a_run_that_has_just_begun_is_warming_up() -> None:
    for changes, action in (
        ({"batch_count": 0}, "not-started"),
        ({"batch_count": 0, "ended_count": 3}, "no-batch"),
        ({"batch_count": 2}, "too-early"),
    ):
        found = diagnose(run(**changes))
        assert (found.state, found.action) == ("warming up", action)
        assert str(found).startswith("Warming up: ")


def test_the_diagnosis_covers_the_recent_past_and_says_so() -> None:
    found = lately_diagnosed({"waited_ns": S // 10, "away_ns": 10 * S})
    assert (found.state, found.covered_s) == ("compute-bound", pytest.approx(10.1))
    found = lately_diagnosed({}, waited_s=0.1, away_s=99.9)
    assert (found.state, found.wait_share, found.covered_s) == ("data-bound", 0.6, 10.0)
    assert "60% of the last 10 s" in str(found)


@pytest.mark.parametrize("threads", [2, 4, 20])
def test_threads_that_use_one_core_together_should_be_processes_however_idle(threads: int) -> None:
    """Whether they are idle or wait for a core: neither more threads nor more cores help."""
    for queued_s in (0, 9):
        amounts = {"load_ns": threads * 8 * S, "alive_ns": threads * 10 * S, "cpu_ns": 9 * S, "queued_ns": queued_s * S}
        found = lately_diagnosed(amounts | {"own_cpu_ns": 10 * S}, workers=threads, kind="thread", core_count=2.0)
        assert codes(found) == ("gil", "use-processes")
        assert (found.numbers["used_cores"], found.numbers["cores"]) == (1.0, 2.0)


def test_without_the_gil_it_is_not_the_bottleneck() -> None:
    amounts = lately(load_ns=16 * S, alive_ns=20 * S, cpu_ns=9 * S, own_cpu_ns=10 * S)
    statistics = run(recent=Recent(amounts, 0, is_all=False), kind="thread")
    assert [diagnose(statistics, has_gil=has_gil).bottleneck for has_gil in (True, False)] == ["gil", "work"]


def test_threads_that_may_be_io_bound_get_both_actions() -> None:
    amounts = {"cpu_ns": 9 * S, "own_cpu_ns": 10 * S}
    for load_s, alive_s, workers, is_io_possible in ((32, 40, 4, True), (14, 20, 2, False)):
        found = lately_diagnosed(amounts | {"load_ns": load_s * S, "alive_ns": alive_s * S}, workers=workers, kind="thread")
        assert (found.action, found.numbers["is_io_possible"]) == ("use-processes", is_io_possible)


def test_threads_that_release_the_gil_get_more_threads() -> None:
    for own_s in (19, 0):  # Unknown, except for what its threads used.
        found = lately_diagnosed({"own_cpu_ns": own_s * S}, kind="thread")
        assert (found.action, found.numbers["workers"], found.numbers["is_gil_possible"]) == ("add-workers", 4, False)


def test_whether_one_thread_holds_the_gil_is_unknown() -> None:
    amounts = {"load_ns": 9 * S, "alive_ns": 10 * S, "cpu_ns": 9 * S, "own_cpu_ns": 9 * S}
    found = lately_diagnosed(amounts, workers=1, kind="thread")
    assert (found.action, found.numbers["is_gil_possible"]) == ("add-workers", True)


def test_io_bound_threads_are_limited_by_the_gil() -> None:
    amounts = {"cpu_ns": 4 * S, "own_cpu_ns": 5 * S, "waited_ns": 19 * S // 2, "away_ns": S // 2}
    assert lately_diagnosed(amounts, kind="thread").numbers["workers"] == 2
    assert lately_diagnosed(amounts).numbers["workers"] == 36  # Two threads exist, each using a fifth of eight cores.


def test_an_iterable_dataset_with_one_reader_gets_no_more_workers() -> None:
    for most, action in ((1, "share-iterable-with-workers"), (13, "share-iterable")):
        found = diagnose(run(workers=1, loads_by="__iter__", most_workers=most))
        assert codes(found) == ("one-reader", action)
    assert diagnose(run(workers=0, kind="inline", loads_by="__iter__")).action == "iterable-worker"


def test_an_iterable_dataset_that_shards_itself_gets_more_workers() -> None:
    found = diagnose(run(loads_by="__iter__", most_workers=2))
    assert (found.action, found.numbers["workers"]) == ("add-workers", 4)


def test_a_larger_num_workers_is_advised_where_auto_has_reached_it() -> None:
    waits: dict[str, Any] = {"each": {"cpu_s": 0.5}, "is_auto": True}
    assert diagnose(run(most_workers=2, **waits)).action == "raise-num-workers"
    assert diagnose(run(most_workers=3, **waits)).action == "reduce-io"
    assert diagnose(run(most_workers=2, is_auto=True, core_count=2.0)).action == "reduce-work"


@pytest.mark.parametrize(
    ("limit", "bottleneck"),
    [
        ({"bound": "memory_limit"}, "memory-limit"),
        ({"bound": "memory"}, "memory"),
        ({"bound": "cores", "cpu_limit": 1.5}, "cpu-limit"),
    ],
)
def test_the_limit_that_prevents_more_workers_is_named(limit: dict[str, Any], bottleneck: str) -> None:
    for each in ({}, {"cpu_s": 0.5}):
        found = diagnose(run(is_auto=True, each=each, most_workers=64, **limit))
        assert codes(found) == (bottleneck, f"raise-{bottleneck}")
        assert found.numbers["workers"] == 2


def test_a_core_used_by_the_loop_is_not_free() -> None:
    amounts = {"load_ns": 9 * S, "alive_ns": 10 * S, "cpu_ns": 9 * S}
    assert lately_diagnosed(amounts, workers=1, core_count=2.0).numbers["free_cores"] == 1
    found = lately_diagnosed(amounts | {"own_cpu_ns": 8 * S}, workers=1, core_count=2.0)
    assert (found.bottleneck, found.numbers["loop_cores"]) == ("cores", pytest.approx(0.8))
    assert lately_diagnosed(amounts | {"loop_queued_ns": 8 * S}, workers=1, core_count=2.0).bottleneck == "cores"


def test_a_core_used_by_other_programs_is_not_free() -> None:
    assert lately_diagnosed({"cpu_ns": 9 * S, "queued_ns": 9 * S}).bottleneck == "cores"


def test_many_partly_cpu_bound_workers_use_all_cores() -> None:
    amounts = {"load_ns": 640 * S, "alive_ns": 640 * S, "cpu_ns": 60 * S, "queued_ns": 30 * S}
    assert lately_diagnosed(amounts, workers=64).bottleneck == "cores"


def test_workers_of_a_cpu_bound_loop_have_fewer_cores() -> None:
    found = lately_diagnosed({"load_ns": 6 * S, "own_cpu_ns": 10 * S}, workers=0, kind="inline", core_count=2.0)
    assert (found.action, found.numbers["num_workers"]) == ("worker-per-core", 1)
    assert found.numbers["loop_cores"] >= 0.5


INLINE: dict[str, Any] = {"workers": 0, "kind": "inline", "core_count": 2.0}
NO_STEP = {"waited_ns": 10 * S, "away_ns": S // 100, "load_ns": 99 * S // 10}


def test_a_loop_without_workers_whose_steps_sleep_leaves_all_cores_free() -> None:
    """It computes, or waits for a core, while it loads; its steps use no core."""
    for own in ({"own_cpu_ns": 6 * S}, {"own_cpu_ns": 3 * S, "loop_queued_ns": 3 * S}, {}):
        found = lately_diagnosed({"load_ns": 59 * S // 10, **own}, **INLINE)
        assert (found.action, found.numbers["num_workers"]) == ("set-num-workers", 2)
    half = lately_diagnosed({"load_ns": 59 * S // 10, "own_cpu_ns": 9 * S, "loop_queued_ns": S}, **INLINE)
    assert (half.action, half.numbers["num_workers"]) == ("worker-per-core", 1)


def test_loading_is_not_hidden_by_a_loop_without_a_step() -> None:
    for own in ({}, {"own_cpu_ns": 101 * S // 10, "loop_queued_ns": S}):
        found = lately_diagnosed({**NO_STEP, **own}, **INLINE)
        assert (found.action, found.numbers["num_workers"]) == ("worker-per-core", 2)
        # One worker would do the work of the training loop.
        alone = lately_diagnosed({**NO_STEP, **own}, **{**INLINE, "core_count": 1.0})
        assert (alone.action, alone.numbers["num_workers"]) == ("workers-if-io-bound", 2)
    assert lately_diagnosed(NO_STEP, **INLINE, loads_by="__iter__").action == "iterable-workers"


def part(kind: str, begin_s: int, waited_s: float, away_s: float) -> Slice:
    return Slice(kind, begin_s * S, Amounts(batch_count=4, waited_ns=int(waited_s * S), away_ns=int(away_s * S)))


def test_the_recent_past_is_the_last_third() -> None:
    past = Slices()
    for begin_s in range(9):
        past.add(part("process", begin_s, 1.0 if begin_s < 6 else 0.0, 1.0 if begin_s >= 6 else 0.0))
    recent = past.recent([])
    assert recent is not None
    assert (recent.amounts.waited_ns, recent.amounts.away_ns, recent.since_ns, recent.is_all) == (0, 3 * S, 6 * S, False)


def test_what_is_not_yet_in_the_past_counts() -> None:
    assert Slices().recent([]) is None
    recent = Slices().recent([part("process", 0, 0.5, 0.5)])
    assert recent is not None
    assert (recent.amounts.elapsed_ns, recent.is_all) == (S, True)


def test_a_long_run_is_judged_by_its_last_minute() -> None:
    past = Slices()
    for _ in range(1000):
        past.add(part("process", 0, 0.5, 0.5))
    recent = past.recent([])
    assert recent is not None
    assert recent.amounts.elapsed_ns == 60 * S


def test_work_of_other_workers_is_not_recent() -> None:
    past = Slices()
    for kind in ("process", "process", "process", "thread"):
        past.add(part(kind, 0, 0.5, 0.0))
    recent = past.recent([part("thread", 1, 0.1, 0.0)])
    assert recent is not None
    assert recent.amounts.elapsed_ns == 6 * S // 10


@pytest.mark.parametrize(
    ("pending_s", "waiting_s", "is_named"),
    [(4.0, 3.5, True), (2.0, 6.0, False), (6.0, 2.0, False), (0.0, 6.0, False)],
)
def test_a_sample_that_is_still_loading_is_the_bottleneck(pending_s: float, waiting_s: float, is_named: bool) -> None:
    """If the training loop waits now, and that is most of the wait of six seconds; the median is 9 ms."""
    statistics = run(workers=2, waiting_s=waiting_s)
    late = replace(statistics.workers[1], pending_s=pending_s)
    found = diagnose(replace(statistics, workers=(statistics.workers[0], late)))

    assert (found.bottleneck == "pending-sample") is is_named
    if is_named:
        assert found.numbers == {"worker": 1, "pending_s": 4.0, "median_s": 0.009}


def test_loading_in_the_main_process_has_no_worker_to_name() -> None:
    statistics = run(workers=1, kind="inline", waiting_s=4.0)
    found = diagnose(replace(statistics, workers=(replace(statistics.workers[0], pending_s=4.0),)))

    assert (found.bottleneck, found.numbers["worker"]) == ("pending-sample", None)
