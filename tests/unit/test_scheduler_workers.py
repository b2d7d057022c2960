"""The scheduler with a changing number of workers: each rule by itself. ``test_schedules`` tests all with random schedules."""

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
    """Returns the kinds of messages with the same contents: as tuples they are equal."""
    return [type(message) for message in messages]


def test_an_added_worker_gets_work_when_it_is_ready() -> None:
    """Before that no worker could take it."""
    model = ready_model_with_slots(workers=1)
    model.plan(4)
    model.add()
    assert not sent(model, W1)

    model.make_ready(W1)

    assert sent(model, W1)


def test_a_released_worker_gets_nothing_more() -> None:
    """It finishes its tasks; later ones go to others."""
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


def test_a_starting_worker_can_be_released() -> None:
    """Later messages of it have no effect."""
    model = EngineModel(ModelOptions(workers=2))

    assert kinds_of(model.release(W1)) == [StopWorker]
    assert model.emit(WorkerReady(W1)) == []
    assert model.emit(WorkerDied(W1)) == []


def test_a_worker_that_dies_after_its_release_is_not_restarted() -> None:
    """Others do its work."""
    model = ready_model_with_slots(workers=2)
    model.plan(2)
    (task,) = sent(model, W1)
    model.release(W1)

    actions = model.kill(W1)

    assert not {StartWorker, StopWorker} & set(kinds_of(actions))
    load_all(model)
    assert model.batches[task.batch.batch].loaded == {0, 1}


def test_abandoned_samples_are_dropped_before_their_worker_is_stopped() -> None:
    """A message to a stopped worker would be lost."""
    model = ready_model(workers=2, slots=0)
    model.plan(2)
    model.unplace(sent(model, W1)[0])
    model.release(W1)

    model.abandon()

    kinds = kinds_of(model.history)
    assert kinds.index(Drop) < kinds.index(StopWorker)


def test_a_number_can_be_reused() -> None:
    """A worker that has left is forgotten."""
    model = ready_model_with_slots(workers=2)
    model.release(W1)
    model.add()
    model.make_ready(W1)
    model.plan(4)

    assert sent(model, W1)


def test_the_oldest_batch_is_loaded_although_its_released_worker_died() -> None:
    """The dead worker is not replaced, and the only other worker holds samples that wait for memory.

    It must load the batch, or the training loop would get a memory error although the batch has its slot.
    """
    model = ready_model(workers=2, slots=0)
    model.plan(1)
    model.plan(1)
    first, second = sorted(model.tasks.values(), key=lambda task: task.batch.batch)
    model.unplace(first)
    model.unplace(second)
    model.limit = 1  # There is memory for one now, and it is requested again.
    model.want()
    assert first.slot is not None
    model.release(first.worker)

    model.kill(first.worker, first)

    load_all(model)
    assert model.delivered == [0]
    assert not model.has_failed_memory


def test_the_limit_of_deaths_follows_the_largest_recent_number_of_workers() -> None:
    """A machine that kills eight workers at once, and then the remaining ones, is not broken."""
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


def test_the_first_batch_is_shared_by_workers_that_stay() -> None:
    """The part of a released worker would have to wait for another."""
    model = EngineModel(ModelOptions(workers=4, window=1))
    model.release(W2)
    model.release(WorkerId(3))
    for worker in (W0, W1):
        model.make_ready(worker)
    model.plan(8)

    assert sorted((task.worker, task.grain_count) for task in model.tasks.values()) == [(0, 4), (1, 4)]


def test_slots_are_leased_while_workers_come_and_go() -> None:
    """Batches loaded by a worker that has left are delivered."""
    model = ready_model_with_slots(workers=2)
    model.plan(2)
    for task in list(model.tasks.values()):
        place(model, task)
        model.load(task)
    model.release(W1)
    model.want()

    assert list(model.leased) == [SlotId(0)]
