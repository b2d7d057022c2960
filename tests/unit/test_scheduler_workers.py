"""The scheduler with a crew whose size changes: each rule by hand. All under random schedules: ``test_schedules``."""

from collections.abc import Iterable

from infeed.scheduler.messages import (
    Drop,
    SlotId,
    StartWorker,
    StopWorker,
    WorkerDied,
    WorkerId,
    WorkerReady,
)
from tests.unit.engine_model import EngineModel, ModelOptions
from tests.unit.test_scheduler import load_all, place, ready_model, ready_model_with_slots, sent

W0, W1, W2 = map(WorkerId, range(3))


def kinds_of(messages: Iterable[object]) -> list[type]:
    """Of messages with the same contents: as tuples they are equal."""
    return [type(message) for message in messages]


def test_a_worker_that_is_added_is_given_work_when_it_is_ready() -> None:
    """Before that no worker could take it."""
    model = ready_model_with_slots(workers=1)
    model.plan(4)
    model.add()
    assert not sent(model, W1)

    model.make_ready(W1)

    assert sent(model, W1)


def test_a_worker_that_is_released_gets_nothing_more() -> None:
    """It does what it has; what comes after goes to others."""
    model = ready_model_with_slots(workers=2)
    model.plan(8)
    (task,) = sent(model, W1)

    assert model.release(W1) == []
    actions = model.load(task)

    assert StopWorker in kinds_of(actions)
    assert not sent(model, W1)
    load_all(model)
    assert len(model.batches[task.batch.batch].loaded) == 8


def test_a_worker_without_a_task_is_stopped_at_once() -> None:
    """There is nothing to wait for."""
    model = ready_model(workers=2)

    assert kinds_of(model.release(W1)) == [StopWorker]


def test_a_worker_that_is_still_starting_can_be_released() -> None:
    """Whoever grew too far need not wait for it; and if it is heard of all the same, nothing comes of it."""
    model = EngineModel(ModelOptions(workers=2))

    assert kinds_of(model.release(W1)) == [StopWorker]
    assert model.tell(WorkerReady(W1)) == []
    assert model.tell(WorkerDied(W1)) == []


def test_a_worker_that_dies_on_its_way_out_is_not_started_again() -> None:
    """Its work is done by others."""
    model = ready_model_with_slots(workers=2)
    model.plan(2)
    (task,) = sent(model, W1)
    model.release(W1)

    actions = model.kill(W1)

    assert not {StartWorker, StopWorker} & set(kinds_of(actions))
    load_all(model)
    assert model.batches[task.batch.batch].loaded == {0, 1}


def test_abandoned_samples_are_dropped_before_their_worker_is_stopped() -> None:
    """A message to a worker that is stopped would go nowhere."""
    model = ready_model(workers=2, slots=0)
    model.plan(2)
    model.unplace(sent(model, W1)[0])
    model.release(W1)

    model.abandon()

    kinds = kinds_of(model.story)
    assert kinds.index(Drop) < kinds.index(StopWorker)


def test_a_number_can_be_used_again() -> None:
    """A worker that has left is forgotten."""
    model = ready_model_with_slots(workers=2)
    model.release(W1)
    model.add()
    model.make_ready(W1)
    model.plan(4)

    assert sent(model, W1)


def test_the_oldest_batch_is_loaded_although_its_worker_left_by_dying() -> None:
    """Nobody is started in its place, and the only other worker holds samples that wait for memory: it must help all the
    same, or the loop would get a memory error although the batch has its slot."""
    model = ready_model(workers=2, slots=0)
    model.plan(1)
    model.plan(1)
    first, second = sorted(model.tasks.values(), key=lambda task: task.batch.batch)
    model.unplace(first)
    model.unplace(second)
    model.limit = 1  # there is memory for one now, and it is asked for once more
    model.want()
    assert first.slot is not None
    model.release(first.worker)

    model.kill(first.worker, first)

    load_all(model)
    assert model.delivered == [0]
    assert not model.has_failed_memory


def test_deaths_of_a_crew_that_was_larger_are_borne_as_long_as_it_would_have() -> None:
    """A machine that takes eight workers at once takes those that are left with them, and is not broken for that."""
    model = EngineModel(ModelOptions(workers=1))
    for _ in range(7):
        model.add()
    for worker in map(WorkerId, range(8)):
        model.kill(worker)
    for worker in map(WorkerId, range(7, 0, -1)):
        model.release(worker)
    model.add()

    model.kill(W0)

    assert not model.has_failed_workers


def test_the_first_batch_is_shared_by_those_that_stay() -> None:
    """A part for a worker that leaves would wait for another."""
    model = EngineModel(ModelOptions(workers=4, window=1))
    model.release(W2)
    model.release(WorkerId(3))
    for worker in (W0, W1):
        model.make_ready(worker)
    model.plan(8)

    assert sorted((task.worker, task.grain_count) for task in model.tasks.values()) == [(0, 4), (1, 4)]


def test_a_slot_is_leased_as_ever_while_workers_come_and_go() -> None:
    """What was loaded by a worker that has left is delivered."""
    model = ready_model_with_slots(workers=2)
    model.plan(2)
    for task in list(model.tasks.values()):
        place(model, task)
        model.load(task)
    model.release(W1)
    model.want()

    assert list(model.leased) == [SlotId(0)]
