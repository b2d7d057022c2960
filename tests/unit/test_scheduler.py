"""The scheduler: each rule by itself. ``test_schedules`` tests all of them with random schedules."""

import pytest

from infeed.scheduler.messages import (
    BatchId,
    BatchWanted,
    Closed,
    Deliver,
    DeliverError,
    Drop,
    EpochAbandoned,
    FailWorkers,
    Forget,
    Grow,
    Place,
    Send,
    SlotFreed,
    SlotId,
    StartWorker,
    TaskLoaded,
    WorkerDied,
    WorkerId,
    WorkerReady,
    WorkersLost,
)
from infeed.scheduler.pacing import Pacing
from tests.unit.engine_model import EngineModel, ModelOptions, Task

W0, W1, W2 = map(WorkerId, range(3))
SLOW_NS = 50_000_000  # One grain, so that tasks are single grains and none is sent ahead.


def ready_model(**options: object) -> EngineModel:
    """Returns a run whose workers are all ready."""
    model = EngineModel(ModelOptions(**options))  # type: ignore[arg-type]
    for worker in model.workers:
        model.make_ready(worker)
    return model


def place(model: EngineModel, task: Task) -> None:
    """Gives a task that was sent without a slot a slot to write to."""
    if task.slot is None:
        model.unplace(task)
    assert task.slot is not None


def load_all(model: EngineModel) -> None:
    """Lets workers finish all their tasks, and all that they are sent as a result."""
    while model.running:
        task = model.running[0]
        if task.slot is None:
            model.unplace(task)
        else:
            model.load(task, SLOW_NS)


def ready_model_with_slots(**options: object) -> EngineModel:
    """The same after a first batch: grains are known to be slow and the loop fast, so each grain is sent alone, with a slot."""
    model = ready_model(**options)
    model.plan(1)
    load_all(model)
    model.want(away_ns=1000)
    model.free(SlotId(0))
    return model


def sent(model: EngineModel, worker: WorkerId) -> list[Task]:
    return [task for task in model.tasks.values() if task.worker == worker]


# --- assignment of tasks


def test_all_workers_share_the_first_batch() -> None:
    """The cost is still unknown: the first batch is ready earliest if each worker loads a part."""
    model = ready_model(workers=4, window=1)
    model.plan(8)

    assert sorted((task.worker, task.first_grain, task.grain_count) for task in model.tasks.values()) == [
        (0, 0, 2),
        (1, 2, 2),
        (2, 4, 2),
        (3, 6, 2),
    ]


def test_grains_wait_for_a_ready_worker() -> None:
    """Batches may be planned before any worker is ready."""
    model = EngineModel(ModelOptions(workers=1))
    model.plan(4)
    assert model.tasks == {}

    actions = model.make_ready(W0)

    assert [type(action) for action in actions] == [Send]


def test_tiny_grains_are_sent_together_and_ahead() -> None:
    """If grains take a microsecond, a task is a whole batch and several are sent to a busy worker."""
    model = ready_model(workers=1, window=8)
    model.plan(4)
    place(model, sent(model, W0)[0])
    model.load(sent(model, W0)[0], elapsed_ns=4000)

    for _ in range(4):
        model.plan(4)

    assert [(task.first_grain, task.grain_count) for task in sent(model, W0)] == [(0, 4)] * 4


def test_slow_grains_are_sent_one_by_one() -> None:
    """If grains take milliseconds, a worker gets one at a time and no grain waits behind it."""
    model = ready_model(workers=2, window=8)
    model.plan(2)
    for task in list(model.tasks.values()):
        place(model, task)
        model.load(task, elapsed_ns=50_000_000)

    model.plan(4)

    assert [(task.worker, task.first_grain, task.grain_count) for task in model.tasks.values()] == [(0, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(("grain_ns", "count"), [(100_000, 3), (900_000, 3), (3_000_000, 2), (8_000_000, 1)])
def test_a_worker_has_its_next_task_queued_unless_it_is_long(grain_ns: int, count: int) -> None:
    """The training loop's thread may be late when workers use all cores; they continue meanwhile."""
    model = ready_model(workers=1, window=8)
    for _ in range(8):
        model.plan(10)
    place(model, sent(model, W0)[0])

    model.load(sent(model, W0)[0], elapsed_ns=10 * grain_ns)

    assert len(sent(model, W0)) == count


@pytest.mark.parametrize(
    ("ahead", "waiting", "grains"),
    [(0, 20, 1), (1, 20, 3), (2, 20, 5), (4, 20, 9), (9, 4, 4), (9, 2, 2), (9, 1, 1), (0, 0, 1)],
)
def test_tasks_grow_with_the_work_in_flight(ahead: int, waiting: int, grains: int) -> None:
    """All four workers load the next batch; later batches are loaded in larger parts, if enough is left for every worker."""
    pace = Pacing()
    pace.learn_task(SLOW_NS, 1)

    assert pace.task_grains(8, 4, ahead=ahead, waiting=waiting) == grains


@pytest.mark.parametrize(("grain_ns", "grains"), [(1_000, 64), (30_000, 64), (40_000, 32), (500_000, 2), (5_000_000, 1)])
def test_a_task_takes_at_least_a_millisecond(grain_ns: int, grains: int) -> None:
    """A batch is divided into equal parts, and not at all if that would make them shorter."""
    pace = Pacing()
    pace.learn_task(grain_ns, 1)

    assert pace.task_grains(64, 14, ahead=0, waiting=1) == grains


@pytest.mark.parametrize(("batches", "whole", "count"), [(8, False, 3), (3, False, 1), (8, True, 1)])
def test_nothing_is_sent_ahead_that_other_workers_need(batches: int, whole: bool, count: int) -> None:
    """Two workers: a task behind a slow one is missing elsewhere if little else waits, and whole batches are all there are."""
    model = ready_model(workers=2, window=9, slots=20, whole_batches=whole)
    for _ in range(batches):
        model.plan(1)
    for task in list(model.tasks.values()):
        place(model, task)

    model.load(sent(model, W0)[0], elapsed_ns=3_000_000)

    assert len(sent(model, W0)) == count


@pytest.mark.parametrize(("grain_ns", "ahead"), [(SLOW_NS, 5), (100 * SLOW_NS, 2)])
def test_the_first_step_is_assumed_to_be_long(grain_ns: int, ahead: int) -> None:
    """Nothing can be sent during a step: a worker has some work queued by then, but not all that others could do."""
    model = EngineModel(ModelOptions(workers=2, window=12, slots=20))
    model.make_ready(W0)
    for _ in range(12):
        model.plan(1)
    model.want()
    place(model, sent(model, W0)[0])

    model.load(sent(model, W0)[0], grain_ns)  # The other worker is not ready yet.

    assert model.delivered == [0]
    assert [task.batch.batch for task in sent(model, W0)] == list(range(1, 1 + ahead))


def test_nothing_is_sent_ahead_of_slow_samples_once_the_loop_is_known_to_be_fast() -> None:
    """A queued task cannot be taken back."""
    model = EngineModel(ModelOptions(workers=2, window=12, slots=20))
    model.make_ready(W0)
    for _ in range(12):
        model.plan(1)
    model.want()
    place(model, sent(model, W0)[0])
    model.load(sent(model, W0)[0], SLOW_NS)
    model.want(away_ns=1000)
    for _ in range(5):
        model.load(sent(model, W0)[0], SLOW_NS)

    assert len(sent(model, W0)) == 1


def test_whole_batches_are_never_split() -> None:
    """If the user's collate_fn needs all samples, one task is one batch."""
    model = ready_model(workers=4, whole_batches=True)
    model.plan(8)

    assert [(task.first_grain, task.grain_count, task.is_whole) for task in model.tasks.values()] == [(0, 8, True)]


def test_the_oldest_batch_is_loaded_first() -> None:
    """The batch that the user waits for comes before prefetched ones."""
    model = ready_model(workers=1, window=3)
    for _ in range(3):
        model.plan(1)

    order = []
    while model.running:
        task = model.running[0]
        order.append(task.batch.batch)
        place(model, task)
        model.load(task, elapsed_ns=50_000_000)

    assert order == [0, 1, 2]


def test_a_shard_stays_with_its_worker() -> None:
    """A batch that is bound to a worker waits for it, while others continue."""
    model = ready_model(workers=2, is_stream=True)
    model.kill(W1)
    model.plan(1, worker=W0)
    model.plan(1, worker=W1)

    assert [task.worker for task in model.tasks.values()] == [W0]
    model.make_ready(W1)
    assert [task.worker for task in model.tasks.values()] == [W0, W1]


def test_batches_of_shards_are_sent_in_order_although_memory_grows_in_between() -> None:
    """Growing memory is handled at once, before later actions in the list: no later batch may come first."""
    model = EngineModel(ModelOptions(workers=3, window=6, is_stream=True, whole_batches=True, slots=1))
    model.make_ready(W1)
    model.make_ready(W2)
    for worker in (W2, W0, W1, W0):
        model.plan(1, worker=worker)
    first, held = model.tasks.values()
    model.unplace(first)
    model.load(first, elapsed_ns=1)
    model.unplace(held)
    model.want()
    model.make_ready(W0)
    model.limit = 20

    model.free(SlotId(0))

    assert [task.batch.batch for task in sent(model, W0)] == [1, 3]


# --- delivery


def test_a_batch_is_delivered_only_on_request() -> None:
    """Loading ahead delivers nothing."""
    model = ready_model(workers=1)
    model.plan(1)
    load_all(model)
    assert model.delivered == []

    assert model.want() == [Deliver(BatchId(0), SlotId(0))]


def test_a_wait_ends_when_the_batch_arrives() -> None:
    """A waiting loop gets the batch with the last of its tasks."""
    model = ready_model(workers=2)
    model.plan(2)
    model.want()
    first, second = model.tasks.values()
    place(model, first)
    place(model, second)
    assert model.load(second) == []

    assert Deliver(BatchId(0), SlotId(0)) in model.load(first)


def test_in_order_a_batch_does_not_overtake() -> None:
    """A later batch that is ready waits for the earlier one."""
    model = ready_model(workers=2, whole_batches=True)
    model.plan(1)
    model.plan(1)
    model.want()
    slow, quick = model.tasks.values()
    place(model, slow)
    place(model, quick)
    model.load(quick)
    assert model.delivered == []

    model.load(slow)
    model.want()

    assert model.delivered == [0, 1]


def test_out_of_order_the_first_ready_batch_is_delivered_first() -> None:
    """With in_order=False a slow batch does not delay another that is ready."""
    model = ready_model(workers=2, whole_batches=True, in_order=False)
    model.plan(1)
    model.plan(1)
    model.want()
    slow, quick = model.tasks.values()
    place(model, slow)
    place(model, quick)
    model.load(quick)
    assert model.delivered == [1]


def test_a_batch_of_the_next_epoch_is_not_delivered_in_this_one() -> None:
    """Prefetching across the end of an epoch does not mix epochs, in order or not."""
    model = ready_model(workers=2, whole_batches=True, in_order=False)
    model.plan(1)
    model.plan(1, of_next_epoch=True)
    now, later = model.tasks.values()
    place(model, now)
    place(model, later)
    model.load(later)

    model.want()
    assert model.delivered == []

    model.load(now)
    model.begin_next_epoch()
    model.want()
    assert model.delivered == [0, 1]


def test_each_request_is_answered_once() -> None:
    """Two ready batches are not both delivered to a loop that requested one."""
    model = ready_model(workers=1, whole_batches=True)
    model.plan(1)
    model.plan(1)
    load_all(model)

    model.want()

    assert model.delivered == [0]


# --- deaths


def test_a_batch_finished_before_a_death_is_still_delivered() -> None:
    """A death after the result must neither lose nor repeat the batch."""
    model = ready_model(workers=1, whole_batches=True)
    model.plan(1)
    load_all(model)

    actions = model.kill(W0) + model.want()

    assert Deliver(BatchId(0), SlotId(0)) in actions
    assert not any(isinstance(action, Send) for action in actions)


def test_tasks_of_a_dead_worker_are_loaded_by_another() -> None:
    """The grains go to any available worker, and the dead one is restarted."""
    model = ready_model(workers=2)
    model.plan(2)
    (lost,) = sent(model, W0)
    (kept,) = sent(model, W1)
    place(model, kept)
    model.load(kept)

    actions = model.kill(W0)

    assert StartWorker(W0) in actions
    (again,) = sent(model, W1)
    assert again.grains == lost.grains
    assert again.task != lost.task


def test_a_late_message_of_a_dead_worker_is_ignored() -> None:
    """A result that arrives after the task was sent to another worker is not attributed to that one."""
    model = ready_model(workers=2, whole_batches=True)
    model.plan(1)
    model.want()
    (lost,) = model.tasks.values()
    place(model, lost)
    model.kill(lost.worker)

    assert model.emit(TaskLoaded(lost.worker, lost.task, 1000)) == []
    assert model.delivered == []

    load_all(model)
    assert model.delivered == [0]


def test_a_message_about_a_task_of_another_worker_is_ignored() -> None:
    """Only the worker of a task can report it."""
    model = ready_model(workers=2, whole_batches=True)
    model.plan(1)
    model.want()
    (task,) = model.tasks.values()
    place(model, task)

    assert model.emit(TaskLoaded(W1 if task.worker == W0 else W0, task.task, 1000)) == []


def test_a_batch_that_kills_its_workers_fails_after_four_deaths() -> None:
    """Three deaths are tolerated; then the batch is blamed, and its error is raised in order."""
    model = ready_model(workers=2, whole_batches=True, window=1)
    model.plan(1)
    model.want()
    actions = []
    for _ in range(4):
        assert model.delivered == []
        (task,) = model.tasks.values()
        actions = model.kill(task.worker)
        model.make_ready(task.worker)

    assert DeliverError(BatchId(0), None) in actions
    model.plan(1)
    model.want()
    load_all(model)
    assert model.delivered == [0, 1]


def test_a_death_counts_only_for_the_current_task() -> None:
    """A batch whose tasks merely waited behind the one that kills does not fail."""
    model = ready_model(workers=1, window=8, whole_batches=True)
    model.plan(1)
    load_all(model)
    model.plan(1)
    model.want(away_ns=10 * SLOW_NS)
    model.plan(1)
    assert [task.batch.batch for task in sent(model, W0)] == [1, 2]
    model.want()

    for _ in range(4):
        model.kill(W0)
        model.make_ready(W0)
    load_all(model)
    model.want()

    assert [batch.outcome for batch in model.batches.values()] == ["delivered", "error", "delivered"]


def test_one_death_counts_once_for_a_batch_however_many_tasks_it_had() -> None:
    """A worker with several tasks of one batch dies once."""
    model = ready_model(workers=1, window=8)
    model.plan(1)
    place(model, sent(model, W0)[0])
    model.load(sent(model, W0)[0], elapsed_ns=600_000)
    model.want()
    model.plan(8)
    assert len(sent(model, W0)) > 1

    for _ in range(3):
        model.kill(W0)
        model.make_ready(W0)
    load_all(model)
    model.want()

    assert model.delivered == [0, 1]
    assert [batch.outcome for batch in model.batches.values()] == ["delivered", "delivered"]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_that_die_without_finishing_anything_are_an_error(workers: int) -> None:
    """If each worker dies on start, the environment is broken: the run fails after three more deaths than there are workers."""
    model = EngineModel(ModelOptions(workers=workers))
    model.plan(1)

    for death in range(workers + 3):
        assert StartWorker(WorkerId(death % workers)) in model.kill(WorkerId(death % workers))

    assert model.kill(W0) == []
    assert model.want() == [FailWorkers()]


def test_ready_batches_are_delivered_before_workers_are_given_up() -> None:
    """Idle workers die at every start. Ready batches are delivered, and only a loop that waits for more gets the error."""
    model = ready_model(workers=1, whole_batches=True, window=4)
    for _ in range(3):
        model.plan(1)
        load_all(model)
    for _ in range(10):
        model.kill(W0)
    model.plan(1)

    for _ in range(3):
        model.want()
        assert not model.has_failed_workers
    model.want()

    assert model.delivered == [0, 1, 2]
    assert model.has_failed_workers


def test_an_epoch_whose_batches_are_all_ready_ends_without_workers() -> None:
    model = ready_model(workers=1)
    model.plan(1)
    load_all(model)
    for _ in range(10):
        model.kill(W0)

    model.want()
    model.want()

    assert model.delivered == [0]
    assert not model.has_failed_workers


def test_workers_that_cannot_be_started_are_given_up_when_nothing_is_ready() -> None:
    model = ready_model(workers=2)
    model.plan(1)
    load_all(model)
    model.plan(1)

    assert model.emit(WorkersLost()) == []
    assert Deliver in {type(action) for action in model.want()}
    assert model.want() == [FailWorkers()]


def test_a_worker_that_starts_resets_the_deaths_of_idle_ones() -> None:
    """Something kills idle workers repeatedly, but prevents none from starting."""
    model = ready_model(workers=1)
    model.plan(1)
    load_all(model)
    for _ in range(100):
        assert StartWorker(W0) in model.kill(W0)
        model.make_ready(W0)


def test_deaths_of_idle_workers_count_for_a_minute() -> None:
    model = EngineModel(ModelOptions(workers=1))
    model.plan(1)
    model.want()
    for death in range(100):
        model.kill(W0, at_s=death * 20.0)
    assert not model.has_failed_workers

    for _ in range(4):
        model.kill(W0, at_s=100 * 20.0)

    assert model.has_failed_workers


def test_finished_work_resets_deaths() -> None:
    """A hundred deaths are tolerated if something is loaded between them."""
    model = ready_model(workers=1, whole_batches=True, window=1)
    for _ in range(100):
        model.plan(1)
        model.kill(W0)
        model.make_ready(W0)
        load_all(model)
        model.want()
        model.free(SlotId(0))

    assert len(model.delivered) == 100


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nothing_is_requested_after_workers_are_given_up(workers: int) -> None:
    """Batch after batch kills its workers until the run is over: later actions would reach a closed engine."""
    model = ready_model(workers=workers, whole_batches=True, window=3)
    actions = []
    for _ in range(1000):
        if model.has_failed_workers:
            break
        while model.room:
            model.plan(1)
        if model.wanted is None:
            model.want()
        task = next(iter(model.tasks.values()))
        actions = model.kill(task.worker)
        if not model.has_failed_workers:
            model.make_ready(task.worker)

    assert isinstance(actions[-1], FailWorkers)
    assert model.delivered, "a batch that kills its workers is given up before they are"


def test_nothing_is_sent_to_a_worker_known_to_be_dead() -> None:
    """The cause is reported first, and may release waiting batches, which must not go to the dead worker."""
    model = ready_model_with_slots(workers=2)
    model.plan(1)
    load_all(model)
    model.want(away_ns=10 * SLOW_NS)  # Workers are sent some ahead.
    model.plan(2)
    first, second = model.tasks.values()
    model.kill(second.worker)  # Its grain waits for a worker that has nothing else.
    model.plan(1)
    assert list(model.tasks.values()) == [first]

    model.kill_by_sample(first, 1)

    model.drain()
    assert model.delivered == [0, 1, 2, 3]


def test_a_bad_sample_in_a_failed_batch_ends_it() -> None:
    """Two tasks, two faults: the error is raised, and nothing waits for more."""
    model = ready_model(workers=2, window=1)
    model.plan(2)
    first, second = model.tasks.values()
    model.want()
    model.fail(second)

    actions = model.report_bad(first, 1)

    assert DeliverError(BatchId(0), second.task) in actions


def test_a_batch_without_good_samples_is_skipped() -> None:
    """The training loop gets the next one, in a single wait."""
    model = ready_model(workers=1, whole_batches=True)
    model.plan(2)
    model.plan(2)
    model.want()
    (task,) = model.tasks.values()

    model.report_bad(task, 0)
    load_all(model)

    assert model.batches[BatchId(0)].outcome == "passed"
    assert model.delivered == [1]


def test_held_parts_are_placed_in_the_slot_of_later_parts() -> None:
    """Otherwise the batch would wait for a slot that it has, and raise a memory error."""
    model = ready_model(workers=2, window=3, slots=0)
    model.plan(1)
    model.plan(2)
    model.plan(1, of_next_epoch=True)
    first, held = model.tasks.values()
    model.unplace(first)
    model.unplace(held)
    model.limit = 1
    model.want()
    assert (first.is_unplaced, held.is_unplaced) == (False, True)

    model.report_bad(first, 0)  # Nothing is left of it: its slot goes to the next batch.

    (other,) = [task for task in model.tasks.values() if task is not held]
    assert (other.batch, other.slot, held.slot) == (held.batch, SlotId(0), SlotId(0))


def test_held_samples_are_placed_after_an_earlier_batch_fails() -> None:
    """A later batch waits until the slot of an earlier one is decided; an earlier one that fails needs none."""
    model = ready_model(workers=2, whole_batches=True)
    model.plan(1)
    model.plan(1)
    first, second = model.tasks.values()
    model.unplace(second)

    model.fail(first)
    model.drain()

    assert [batch.outcome for batch in model.batches.values()] == ["error", "delivered"]


# --- failures and mismatches


def test_the_failure_of_the_lowest_grain_is_reported() -> None:
    """Whichever worker fails first, the user gets the error that a plain loop would raise."""
    model = ready_model_with_slots(workers=4)
    batch = model.plan(4)
    model.want()
    first, second, third, fourth = model.tasks.values()
    model.fail(third)
    model.fail(second)
    model.load(first)
    assert model.delivered == [0]

    assert DeliverError(batch, second.task) in model.fail(fourth)


def test_a_failure_is_raised_in_order() -> None:
    """Earlier batches are delivered first, and later ones follow."""
    model = ready_model(workers=3, whole_batches=True)
    for _ in range(3):
        model.plan(1)
    first, second, third = model.tasks.values()
    model.fail(second)
    for task in (first, third):
        place(model, task)
        model.load(task)

    for _ in range(3):
        model.want()

    assert [batch.outcome for batch in model.batches.values()] == ["delivered", "error", "delivered"]


def test_after_a_failure_nothing_more_of_the_batch_is_loaded() -> None:
    """Waiting grains are not sent any more, and the slot is free when the error is delivered."""
    model = ready_model_with_slots(workers=1, window=2, slots=1)
    model.plan(4)
    (task,) = model.tasks.values()
    assert not task.is_whole

    model.fail(task)
    assert model.tasks == {}
    model.want()
    model.plan(1)

    assert [task.slot for task in model.tasks.values()] == [SlotId(0)]


def test_a_mismatch_regroups_the_batch_after_all_its_tasks() -> None:
    """One worker must see all samples of the batch; results of the first attempt are dropped."""
    model = ready_model(workers=2)
    model.plan(4)
    first, second = model.tasks.values()
    place(model, first)
    place(model, second)
    model.mismatch(first)
    assert list(model.tasks) == [second.task]

    model.load(second)

    (whole,) = model.tasks.values()
    assert whole.is_whole
    assert whole.grains == {0, 1, 2, 3}


def test_after_a_mismatch_later_batches_are_sent_whole() -> None:
    """Uneven samples are likely to recur."""
    model = ready_model(workers=2)
    model.plan(4)
    model.mismatch(next(iter(model.tasks.values())))
    load_all(model)
    model.plan(4)

    assert [task.is_whole for task in model.tasks.values()] == [True]


def test_a_failure_in_a_regrouped_batch_is_dropped() -> None:
    """It is loaded again, and may fail again."""
    model = ready_model(workers=2)
    model.plan(4)
    model.want()
    first, second = model.tasks.values()
    model.mismatch(first)
    model.fail(second)
    load_all(model)

    assert [batch.outcome for batch in model.batches.values()] == ["delivered"]


def test_held_samples_are_dropped_when_their_batch_fails() -> None:
    """A worker does not keep abandoned samples."""
    model = ready_model(workers=2, slots=0)
    model.plan(2)
    held, failing = model.tasks.values()
    model.unplace(held)

    assert Drop(held.worker, held.task) in model.fail(failing)


def test_an_empty_end_of_a_shard_is_no_batch() -> None:
    """The batch is dropped, its slot is free, and the next one takes its turn."""
    model = ready_model(workers=1, is_stream=True, whole_batches=True)
    model.plan(1)
    model.plan(1)
    model.want()
    task = next(iter(model.tasks.values()))

    assert Forget(BatchId(0)) in model.empty(task)
    load_all(model)
    assert model.delivered == [1]


# --- slots


def test_samples_without_a_slot_are_held_until_there_is_one() -> None:
    """Before the size of a batch is known, no slot exists: the worker reports, memory grows, the samples are placed."""
    model = ready_model(workers=1)
    model.plan(1)
    (task,) = model.tasks.values()
    assert task.slot is None

    assert [type(action) for action in model.unplace(task)] == [Grow]
    assert task.slot == SlotId(0)
    assert not task.is_unplaced


def test_a_slot_that_the_user_released_is_reused() -> None:
    """Memory grows only while the user keeps batches."""
    model = ready_model(workers=1, window=1, slots=1)
    for number in range(5):
        model.plan(1)
        load_all(model)
        model.want()
        assert model.delivered[-1] == number
        model.free(SlotId(0))

    assert model.slot_count == 1


def test_memory_grows_while_the_user_keeps_batches() -> None:
    """A kept batch is never overwritten, so each further batch takes another slot."""
    model = ready_model(workers=1, window=1, slots=5)
    for _ in range(5):
        model.plan(1)
        load_all(model)
        model.want()

    assert sorted(model.leased) == [0, 1, 2, 3, 4]


def test_a_freed_slot_is_used_for_held_samples() -> None:
    """A worker that holds samples continues as soon as the user releases a batch."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    first, second = model.tasks.values()
    model.unplace(first)
    model.unplace(second)
    assert second.is_unplaced
    model.load(first)
    model.want()

    assert Place(second.worker, second.task, BatchId(1), SlotId(0)) in model.free(SlotId(0))


def test_the_slot_of_an_empty_batch_is_used_for_held_samples_before_new_tasks() -> None:
    """A new task that asked for memory in vain would leave the held samples waiting beside a free slot."""
    model = ready_model(workers=2, whole_batches=True, is_stream=True, slots=1)
    for _ in range(3):
        model.plan(1)
    first, second = model.tasks.values()
    model.unplace(first)
    model.unplace(second)
    assert second.is_unplaced

    assert Place(second.worker, second.task, BatchId(1), SlotId(0)) in model.empty(first)


def test_the_slot_of_an_abandoned_batch_waits_for_workers_that_may_write_to_it() -> None:
    """A worker in user code writes when that returns: until then no other batch gets the slot."""
    model = ready_model_with_slots(workers=2, window=2, slots=1, whole_batches=True)
    model.plan(1)
    (old,) = model.tasks.values()
    assert old.slot == SlotId(0)

    model.abandon()
    model.plan(1)
    assert list(model.tasks.values()) == [old]
    model.load(old)

    (new,) = model.tasks.values()
    assert (new.batch.batch, new.slot) == (BatchId(2), SlotId(0))


def test_the_slot_of_an_abandoned_batch_is_free_when_its_worker_dies() -> None:
    """A dead worker writes nothing more."""
    model = ready_model_with_slots(workers=2, window=2, slots=1, whole_batches=True)
    model.plan(1)
    (old,) = model.tasks.values()
    model.abandon()
    model.plan(1)
    model.kill(old.worker)

    assert [task.slot for task in model.tasks.values()] == [SlotId(0)]


def test_a_memory_error_needs_an_empty_pipeline_and_a_waiting_loop() -> None:
    """The user holds every slot and requests more: only then is there nothing left to wait for."""
    model = ready_model(workers=1, window=2, slots=1)
    model.plan(1)
    load_all(model)
    model.want()
    model.plan(1)
    assert not model.has_failed_memory

    model.want()
    assert model.has_failed_memory
    model.free(SlotId(0))
    load_all(model)
    model.want()
    assert model.delivered == [0, 1]


def test_there_is_no_memory_error_while_a_batch_is_in_flight() -> None:
    """It is delivered first; the user may release it."""
    model = ready_model(workers=2, whole_batches=True, window=3, slots=1)
    model.plan(1)
    (task,) = model.tasks.values()
    place(model, task)
    model.plan(1)

    model.want()

    assert not model.has_failed_memory


def test_there_is_a_memory_error_when_workers_only_wait_for_a_slot() -> None:
    """Held samples are not in flight: if the user keeps every slot, nothing can proceed."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    first, second = model.tasks.values()
    model.unplace(first)
    model.unplace(second)
    model.load(first)
    model.want()

    model.want()

    assert model.has_failed_memory


def test_a_task_with_a_slot_does_not_wait_for_one_without() -> None:
    """Otherwise the batch that the user waits for would be queued behind a later one for which there is no memory."""
    model = ready_model(workers=3, slots=1)
    model.plan(4)
    model.plan(4)
    first, second, later = model.tasks.values()
    assert [first.batch.batch, second.batch.batch, later.batch.batch] == [0, 0, 1]
    model.unplace(first)
    model.unplace(later)

    model.unplace(second)

    assert not second.is_unplaced


def test_with_memory_for_one_batch_the_first_gets_it() -> None:
    """A later batch that is loaded sooner must not take the only slot from the one that is delivered first."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    model.want()
    slow, quick = model.tasks.values()
    model.unplace(quick)
    if not quick.is_unplaced:
        model.load(quick)
    model.unplace(slow)

    model.drain()

    assert model.delivered == [0, 1]


def test_with_memory_for_one_batch_a_death_does_not_give_it_to_a_later_one() -> None:
    """A batch that must be loaded again still comes before later ones."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    first, second = model.tasks.values()
    model.kill(first.worker)
    model.unplace(second)

    model.drain()

    assert model.delivered == [0, 1]


def test_with_memory_for_one_batch_shards_are_delivered_in_turn() -> None:
    """A ready worker must not take the only slot from the shard that is delivered before its own."""
    model = ready_model_with_slots(workers=2, is_stream=True, whole_batches=True, slots=1)
    model.kill(W1)
    model.plan(1, worker=W1)
    model.plan(1, worker=W0)

    model.drain()

    assert model.delivered == [0, 1, 2]


def test_the_slot_of_a_failed_batch_is_used_for_held_samples() -> None:
    """They get the slot as soon as the error is delivered."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    failing, held = model.tasks.values()
    model.unplace(failing)
    model.unplace(held)
    model.fail(failing)
    assert held.is_unplaced

    model.want()

    assert not held.is_unplaced


@pytest.mark.parametrize("ends", ["at once", "with its last task"])
def test_the_slot_of_an_abandoned_batch_is_used_for_held_samples(ends: str) -> None:
    """Samples of the new epoch get the slot when no worker of the old one can write to it any more."""
    model = ready_model(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1, of_next_epoch=True)
    old, held = model.tasks.values()
    model.unplace(old)
    if ends == "at once":
        model.load(old)
    model.unplace(held)
    assert held.is_unplaced

    model.abandon()
    if ends != "at once":
        model.load(old)

    assert not held.is_unplaced


def test_a_whole_epoch_that_fits_into_memory_can_be_kept() -> None:
    """There is no memory to prefetch the next epoch, which must not fail the end of this one."""
    model = ready_model(workers=1, whole_batches=True, slots=1)
    model.plan(1)
    load_all(model)
    model.want()
    model.plan(1, of_next_epoch=True)

    model.want()

    assert not model.has_failed_memory


def test_there_is_a_memory_error_although_a_later_batch_has_failed() -> None:
    """A pending error takes no slot and frees none."""
    model = ready_model(workers=2, whole_batches=True, slots=0)
    model.plan(1)
    model.plan(1)
    held, failing = model.tasks.values()
    model.fail(failing)
    model.want()

    model.unplace(held)

    assert model.has_failed_memory


def test_memory_is_requested_again_when_the_user_returns() -> None:
    """It may be available now, also while the error of a later batch is pending."""
    model = ready_model(workers=2, whole_batches=True, slots=0)
    model.plan(1)
    model.plan(1)
    held, failing = model.tasks.values()
    model.fail(failing)
    model.unplace(held)
    model.limit = 1

    model.want()

    assert not held.is_unplaced


def test_there_is_no_memory_error_while_a_batch_with_a_slot_waits_for_a_worker() -> None:
    """Dead workers are restarted; their batch keeps its slot and will be loaded."""
    model = ready_model_with_slots(workers=2, whole_batches=True, slots=1)
    model.plan(1)
    model.plan(1)
    for worker in (W0, W1):
        model.kill(worker)

    model.want()
    assert not model.has_failed_memory

    model.drain()
    assert model.delivered == [0, 1, 2]


# --- the window, epochs, close


def test_the_window_limits_planned_batches() -> None:
    """Each delivery makes room for one more."""
    model = ready_model(workers=1, window=2)
    model.plan(1)
    model.plan(1)
    assert model.scheduler.room == 0
    load_all(model)

    model.want()

    assert model.scheduler.room == 1


def test_a_smaller_window_withdraws_nothing() -> None:
    """Batches in flight are still delivered; only then is there room again."""
    model = ready_model(workers=1, window=4)
    for _ in range(4):
        model.plan(1)

    model.change_window(2)
    assert model.scheduler.room <= 0
    for _ in range(4):
        load_all(model)
        model.want()

    assert model.delivered == [0, 1, 2, 3]
    assert model.scheduler.room == 2


def test_a_smaller_window_starts_nothing_new_until_there_is_room() -> None:
    """Batches that were planned and not started wait: the smaller window limits memory in flight."""
    model = ready_model_with_slots(workers=2, window=3, whole_batches=True)
    model.kill(W1)
    for _ in range(3):
        model.plan(1)
    assert len(model.tasks) == 1

    model.change_window(1)
    model.make_ready(W1)

    assert len(model.tasks) == 1


def test_a_smaller_window_does_not_delay_a_batch_that_must_be_loaded_again() -> None:
    """The oldest batch is sent whatever else is in flight: all others wait for it."""
    model = ready_model(workers=2, whole_batches=True, window=2)
    model.plan(1)
    model.plan(1)
    first, second = model.tasks.values()
    model.fail(second)
    model.change_window(1)

    model.kill(first.worker)
    model.drain()

    assert model.delivered == [0, 1]


def test_an_abandoned_epoch_makes_room_at_once() -> None:
    """Its batches are dropped, loaded or not, and the next epoch begins with the whole window."""
    model = ready_model(workers=1, window=2, whole_batches=True)
    model.plan(1)
    model.plan(1)
    load_all(model)

    assert model.emit(EpochAbandoned(1)) == []
    model.abandon()

    assert model.scheduler.room == 2
    model.drain()
    assert model.delivered == []


def test_a_worker_with_an_abandoned_task_gets_no_other_before_it_reports() -> None:
    """It may be stuck, and would block the next epoch; whichever worker is done first takes that."""
    model = ready_model(workers=2, window=8)
    model.plan(1)
    (task,) = model.tasks.values()
    place(model, task)
    model.load(task, 1000)
    model.want(away_ns=1000)
    for _ in range(4):
        model.plan(1)
    assert sent(model, W0)
    assert sent(model, W1)
    model.abandon()
    batch = model.plan(1)
    assert [task.worker for task in model.tasks.values() if task.batch.batch == batch] == []

    model.load(sent(model, W1)[0], 1000)
    assert [task.worker for task in model.tasks.values() if task.batch.batch == batch] == [W1]


def test_an_abandoned_epoch_does_not_affect_prefetched_batches_of_the_next() -> None:
    """A break keeps the work that was done ahead."""
    model = ready_model(workers=1, whole_batches=True)
    model.plan(1)
    model.plan(1, of_next_epoch=True)
    load_all(model)
    model.abandon()

    model.want()

    assert model.delivered == [1]


def test_a_worker_with_tasks_of_an_abandoned_epoch_continues_with_the_next() -> None:
    """No more tasks of the old epoch are sent, and the worker is not lost."""
    model = ready_model(workers=1, whole_batches=True)
    model.plan(1)
    (old,) = model.tasks.values()
    model.abandon()
    model.plan(1)
    place_actions = model.unplace(old)
    assert Drop(W0, old.task) in place_actions
    model.want()

    load_all(model)

    assert model.delivered == [1]


@pytest.mark.parametrize(
    "event",
    [WorkerReady(W0), WorkerDied(W0), BatchWanted(0), SlotFreed(SlotId(0)), EpochAbandoned(0), Closed()],
    ids=lambda event: type(event).__name__,
)
def test_a_closed_scheduler_requests_nothing(event: object) -> None:
    """Events after close are ignored."""
    model = ready_model(workers=1)
    model.plan(1)
    load_all(model)
    model.close()

    assert model.scheduler.handle(event) == []  # type: ignore[arg-type]
