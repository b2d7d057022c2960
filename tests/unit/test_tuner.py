"""The tuner on simulated machines: it reaches the best number of workers in few steps, and stays there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infeed.autotune.tuner import Reading, Tuner, WorkerLimits
from tests.unit.simulated_machine import Simulation, Work

# Readings, of a tenth of a second: by then it has settled...
REST = 150
# ...and is observed for this long.
LONG = 400
GOOD = 0.95
MOST_CHANGES = 12


def simulate(work: Work, readings: int = LONG, **options: Any) -> Simulation:
    limits = WorkerLimits(
        options.pop("limit", work.cores),
        options.pop("most", 64),
        is_strict=options.pop("is_strict", False),
        has_more=options.pop("has_more", False),
    )
    return Simulation(work, limits, **options).run(readings)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """CPU-bound, I/O-bound and mixed work; with a loop that is slow, fast, or has no step."""
    whole_s = 10 ** draw(st.floats(-3.5, -1.5))
    computing = draw(st.sampled_from([1.0, 0.02]) | st.floats(0.1, 0.9))
    cores = draw(st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0]))
    return Work(
        compute_s=whole_s * computing,
        wait_s=whole_s * (1 - computing),
        away_s=draw(st.just(0.0) | st.floats(0.3, 2 * cores).map(lambda share: whole_s / share)),
        away_compute=draw(st.sampled_from([0.0, 0.5, 1.0])),
        cores=cores,
        io_limit=draw(st.just(1e9) | st.floats(1, 40)),
        noise=draw(st.sampled_from([0.0, 0.1, 0.2])),
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(work=works(), seed=st.integers(0, 1000))
def test_it_comes_close_to_the_best_number_in_few_steps(work: Work, seed: int) -> None:
    """For any work: within a tenth of the best number, if single batches can be measured."""
    # If rates vary by more than the possible gain, it cannot be distinguished from chance: one run in a thousand goes wrong.
    runs = sorted((simulate(work, REST, seed=seed + number) for number in range(3)), key=lambda run: run.share_of_best)

    assert runs[1].share_of_best >= 0.9 - 0.15 * work.noise, runs[1].changes
    assert all(len(run.changes) <= MOST_CHANGES for run in runs), [run.changes for run in runs]


@pytest.mark.slow
@settings(max_examples=40)
@given(work=works())
def test_it_stays_settled(work: Work) -> None:
    """Nothing is tried repeatedly."""
    run = simulate(Work(**{**work.__dict__, "noise": 0.0}))

    assert [at for at in run.change_times if at > REST] == []
    assert run.tuner.is_settled


def test_a_loop_that_waits_occasionally_settles() -> None:
    """Every other reading has a wait for a single slow sample: too often to rest, and too rarely to try something."""
    tuner = Tuner(WorkerLimits(8.0, 16))
    sums = dict.fromkeys(("batches", "waited", "away", "busy"), 0)
    for number in range(40):
        waited = 50_000_000 * (number % 2)
        for name, more in (("batches", 10), ("waited", waited), ("away", 120_000_000 - waited), ("busy", 50_000_000)):
            sums[name] += more
        reading = Reading(
            sums["waited"] + sums["away"], sums["batches"], 32 * sums["batches"], sums["waited"], sums["away"], sums["busy"],
            sums["busy"] // 2, tuner.count, tuner.count,
        )  # fmt: skip
        assert tuner.consider(reading) is None
    assert tuner.is_settled


def test_samples_of_a_minute_are_tuned_for_too() -> None:
    """No sample arrives between two readings, so there is no rate to compare with."""
    assert simulate(Work(compute_s=0.001, wait_s=60, cores=16), 2000).count > 1


def test_it_reports_whether_it_is_still_searching() -> None:
    run = Simulation(Work(cores=16), WorkerLimits(16.0, 64))
    assert not run.tuner.is_settled
    while not run.changes:
        run.run(1)
    assert not run.tuner.is_settled  # The step is being judged.
    run.run(REST)
    assert run.tuner.is_settled
    run.become(compute_s=10 * run.work.compute_s, wait_s=10 * run.work.compute_s)
    while run.tuner.is_settled:
        run.run(1)
        assert run.now < LONG, "other work would be tuned for"


@pytest.mark.parametrize(
    ("work", "count"),
    [
        (Work(cores=4), 4),
        (Work(cores=16), 16),
        (Work(cores=1), 1),
        (Work(cores=16, away_s=0.0022), 6),
        (Work(cores=16, away_s=0.02), 1),
    ],
    ids=["cores", "many cores", "one core", "as the loop needs", "slow loop"],
)
def test_cpu_bound_workers_are_as_many_as_needed_and_at_most_as_many_as_cores(work: Work, count: int) -> None:
    """More would only compete for cores."""
    run = simulate(work)

    assert run.count == count
    assert max([change.worker_count for change in run.changes], default=0) <= work.cores


def test_the_first_step_is_early_and_large() -> None:
    """Epochs are short: after half a second all cores work."""
    run = simulate(Work(cores=16), 6)

    assert run.count == 16


def test_io_bound_workers_may_exceed_the_cores() -> None:
    """Until the disk is the bottleneck."""
    run = simulate(Work(compute_s=0.0001, wait_s=0.02, cores=2, io_limit=10), most=64)

    assert 10 <= run.count <= 20
    assert run.share_of_best >= GOOD


def test_the_users_maximum_is_respected() -> None:
    """Whatever could be gained."""
    run = simulate(Work(compute_s=0.0001, wait_s=0.02), most=5)

    assert max(change.worker_count for change in run.changes) == 5


@pytest.mark.parametrize(("computing", "most"), [(1.0, 2), (0.5, 4), (0.25, 8)])
def test_the_limit_of_cores_is_respected(computing: float, most: int) -> None:
    """Two of eight cores: as many workers as use them up."""
    work = Work(compute_s=0.01 * computing, wait_s=0.01 * (1 - computing), cores=8)

    run = simulate(work, limit=2.0, is_strict=True)

    assert run.count == most
    assert max([change.worker_count for change in run.changes], default=0) <= most


def test_available_memory_is_respected() -> None:
    """A process that the OOM killer ends is no help."""
    run = simulate(Work(cores=16, worker_bytes=1 << 30), free_bytes=6 << 30)

    assert run.count == 6


@pytest.mark.parametrize(
    ("changes", "options", "bound"),
    [
        ({"worker_bytes": 1 << 30}, {"free_bytes": 6 << 30}, "memory"),
        ({"worker_bytes": 1 << 30}, {"free_bytes": 6 << 30, "is_budget": True}, "memory_limit"),
        ({"worker_bytes": 1 << 30}, {"free_bytes": 60 << 30}, ""),
        ({}, {"limit": 2.0, "is_strict": True, "has_more": True}, "cores"),
        ({}, {"limit": 2.0, "is_strict": True}, ""),  # There are no other reasons that a larger limit would remove.
        ({"compute_s": 0.001, "wait_s": 0.009}, {"limit": 0.5, "is_strict": True, "has_more": True}, "cores"),
        ({}, {"most": 4}, ""),
        ({"io_limit": 3.0, "compute_s": 0.0, "wait_s": 0.01}, {"limit": 8.0, "is_strict": True, "has_more": True}, ""),
        ({"away_s": 0.02}, {"free_bytes": 6 << 30}, ""),
    ],
)
def test_it_reports_the_limiting_resource(changes: dict[str, Any], options: dict[str, Any], bound: str) -> None:
    assert simulate(Work(**{"cores": 16, **changes}), **options).tuner.bound == bound


def test_workers_are_removed_when_memory_runs_out() -> None:
    """Another process needs it: workers end before the OOM killer strikes."""
    run = simulate(Work(cores=16, worker_bytes=1 << 30), free_bytes=20 << 30)
    assert run.count == 16
    run.free_bytes = 8 << 30
    run.run(20)

    assert run.count == 8
    assert "memory" in run.changes[-1].why
    assert run.run(LONG).tuner.bound == "memory"


@pytest.mark.parametrize("away_s", [0.0, 0.003, 0.012])
def test_a_pause_of_the_loop_changes_nothing(away_s: float) -> None:
    """The training loop saves its model and continues."""
    run = simulate(Work(cores=4, away_s=away_s), REST)
    settled, changes = run.count, len(run.changes)
    for _ in range(5):
        run.pause(30)
        run.run(20)

    assert (run.count, len(run.changes)) == (settled, changes)


def test_a_pause_does_not_distort_the_judgment_of_a_step() -> None:
    """For example, the training loop validates its first batches just when workers were added."""
    run = simulate(Work(cores=16), 8)
    assert run.count == 16
    run.pause(60)
    run.run(LONG)

    assert len(run.changes) == 1


def test_a_burst_of_slow_samples_changes_nothing() -> None:
    """Half a second passes before workers could be added."""
    run = simulate(Work(cores=8, away_s=0.004), REST)
    settled, changes = run.count, len(run.changes)
    for _ in range(5):
        run.become(compute_s=0.05)
        run.run(5)
        run.become(compute_s=0.01)
        run.run(30)

    assert (run.count, len(run.changes)) == (settled, changes)


def test_changed_work_is_measured_again() -> None:
    """More workers may help with new samples, for example from files instead of a cache."""
    run = simulate(Work(compute_s=0.01, cores=4), REST, most=64)
    assert run.count == 4
    run.become(compute_s=0.0005, wait_s=0.04)
    run.run(2 * REST)
    assert run.share_of_best >= GOOD

    run.become(compute_s=0.01, wait_s=0.0, away_s=0.009)
    run.run(2 * REST)
    assert run.share_of_best >= GOOD
    assert run.count <= 4


def test_a_step_is_not_judged_by_a_slower_loop() -> None:
    """For example, validation begins just when workers were added: they caused no loss."""
    run = simulate(Work(wait_s=0.04, compute_s=0.001, away_s=0.002, cores=16), 9, most=64)
    assert len(run.changes) == 1
    run.become(away_s=0.03)
    run.run(REST)

    assert not [change.why for change in run.changes if "lowered" in change.why or "-" in change.why]


def test_a_loop_that_hardly_waits_needs_no_more_workers() -> None:
    """Three readings in a row with a wait are no reason if most earlier ones had none."""
    tuner = Tuner(WorkerLimits(cores=16, most_workers=64))
    at = waited = 0
    for step, share in enumerate([0.0, 0.0, *[0.0, 0.0, 0.06] * 3, 0.06, 0.06]):
        at, waited = at + 100_000_000, waited + round(share * 100_000_000)
        assert tuner.consider(Reading(at, step * 10, step * 40, waited, at - waited, 2 * at, 2 * at, 2, 2)) is None


def test_workers_that_could_not_be_started_are_not_requested_again() -> None:
    """The system has an unknown limit."""
    limits = WorkerLimits(cores=16, most_workers=64)
    tuner, asked = Tuner(limits), []
    for step in range(200):
        now = step * 100_000_000
        reading = Reading(now, step * 10, step * 40, now, 0, 2 * now, 2 * now, 2, 2)
        change = tuner.consider(reading)
        asked += [] if change is None else [change.worker_count]

    assert asked == [16]


def test_every_change_is_explained() -> None:
    """A sentence for the log, with figures."""
    run = simulate(Work(cores=4), 10)

    assert [change.why for change in run.changes] == [
        "4 workers instead of 2: the training loop waited 100%, workers were busy 100% of the time; 2 cores are free"
    ]
