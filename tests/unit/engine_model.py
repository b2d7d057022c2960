"""A simulated engine: plays workers, memory and the training loop against a scheduler, and checks its actions.

The checks use only the model's own records of events and actions. The model never inspects the scheduler, except to call
``validate`` and to compare its public properties with these records.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import assert_never

from infeed.scheduler.messages import (
    Action,
    BatchHasBadSamples,
    BatchId,
    BatchPlanned,
    BatchWanted,
    Closed,
    Deliver,
    DeliverError,
    Drop,
    EpochAbandoned,
    Event,
    FailMemory,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    Pass,
    Place,
    PlaceRefused,
    Reload,
    Send,
    SlotFreed,
    SlotId,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskEmpty,
    TaskFailed,
    TaskId,
    TaskLoaded,
    TaskMismatched,
    TaskUnplaced,
    WindowChanged,
    WorkerAdded,
    WorkerDied,
    WorkerId,
    WorkerReady,
    WorkerReleased,
)
from infeed.scheduler.scheduler import Scheduler

DEATHS_FORGIVEN = 3
MOST_WORKERS = 6


@dataclass(frozen=True)
class ModelOptions:
    """Options of a run."""

    workers: int = 2
    window: int = 4
    in_order: bool = True
    whole_batches: bool = False
    is_stream: bool = False
    is_bound: bool = False  # Batches are bound to workers, like those of an iterable dataset, but can be loaded again.
    slots: int = 8  # How many slots the memory has room for.
    never: Collection[str] = ()  # Kinds of faults that do not happen: rare ones are only reached without frequent ones.
    often: str = ""  # A kind that happens more often than others: some faults need several of one kind.


@dataclass
class Task:
    """A task as seen by its worker."""

    task: TaskId
    worker: WorkerId
    batch: "Batch"
    first_grain: int
    grain_count: int
    slot: SlotId | None
    is_whole: bool
    is_unplaced: bool = False

    @property
    def grains(self) -> set[int]:
        return set(range(self.first_grain, self.first_grain + self.grain_count))


@dataclass
class Batch:
    """A batch as seen by the plan and the training loop."""

    batch: BatchId
    epoch: int
    grain_count: int
    worker: WorkerId | None
    slot: SlotId | None = None
    loaded: set[int] = field(default_factory=set)
    failures: dict[TaskId, int] = field(default_factory=dict)  # By first grain.
    deaths: int = 0
    is_begun: bool = False
    must_reload: bool = False  # The whole batch, once its tasks are in: samples cannot be stacked, or one is bad.
    must_go_whole: bool = False
    next_grain_count: int = 0  # When it is loaded again.
    is_doomed: bool = False  # A bad sample that cannot be skipped or replaced.
    outcome: str = ""  # "delivered", "error", "passed", "empty", "abandoned", or nothing yet.

    @property
    def is_given_up(self) -> bool:
        """Whether it has failed for good, and only its error is still to be delivered."""
        return bool(self.failures) or self.is_doomed or self.deaths > DEATHS_FORGIVEN


class EngineModel:
    """One run of a scheduler. Events are methods; each checks everything that is observable from outside."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.window = options.window
        self.limit = options.slots
        self.workers = [WorkerId(number) for number in range(options.workers)]
        self.scheduler = Scheduler(
            workers=tuple(self.workers),
            window=options.window,
            in_order=options.in_order,
            whole_batches=options.whole_batches,
        )
        self.starting = set(self.workers)
        self.ready: set[WorkerId] = set()
        self.leaving: set[WorkerId] = set()  # Released, and not stopped yet.
        self.gone: set[WorkerId] = set()  # Died, and not restarted: the run has given up on workers.
        self.dying: WorkerId | None = None  # The cause of its death is reported, the death itself not yet.
        self.tasks: dict[TaskId, Task] = {}  # With live workers.
        self.lost: list[Task] = []  # With dead workers.
        self.seen_tasks: set[TaskId] = set()
        self.batches: dict[BatchId, Batch] = {}
        self.leased: dict[SlotId, Batch] = {}
        self.slot_count = 0
        self.is_growth_refused = False
        self.is_short = False
        self.was_short = False
        self.epoch = 0
        self.is_prefetching = False  # Batches of the next epoch are planned: this one gets no more.
        self.wanted: int | None = None
        self.has_failed_memory = False
        self.has_failed_workers = False
        self.is_closed = False
        self.delivered: list[BatchId] = []
        self.history: list[Event | Action] = []  # All events and actions.

    # --- events

    def emit(self, event: Event) -> list[Action]:
        """Handles one event and the resulting actions, and runs all checks."""
        actions = self._emit(event)
        if not self.is_closed:
            self._compare()
        return actions

    def _emit(self, event: Event) -> list[Action]:
        self.history.append(event)
        actions = self.scheduler.handle(event)
        self.history += actions
        self.scheduler.validate()
        for action in actions:
            assert not self.is_closed, f"{action} after close, or after the workers were given up"
            self._do(action)
        return actions

    def plan(self, grain_count: int = 4, *, of_next_epoch: bool = False, worker: WorkerId | None = None) -> BatchId:
        batch = BatchId(len(self.batches))
        self.is_prefetching |= of_next_epoch
        epoch = self.epoch + of_next_epoch
        if (self.options.is_stream or self.options.is_bound) and worker is None:
            worker = self.workers[batch % len(self.workers)]
        self.batches[batch] = Batch(batch, epoch, grain_count, worker, next_grain_count=grain_count)
        self.emit(BatchPlanned(batch, epoch, grain_count, worker, self.options.is_stream))
        return batch

    def want(self, away_ns: int = 0) -> list[Action]:
        self.wanted, self.has_failed_memory = self.epoch, False
        return self.emit(BatchWanted(self.epoch, away_ns))

    def abandon(self, *, keep_prefetched: bool = True) -> None:
        """The training loop leaves the epoch; the next begins."""
        self._abandon(self.epoch)
        if self.is_prefetching and not keep_prefetched:
            self._abandon(self.epoch + 1)
            self.epoch += 1
        self.begin_next_epoch()

    def _abandon(self, epoch: int) -> None:
        for batch in self.live(epoch):
            batch.outcome = "abandoned"
        if self.wanted == epoch:
            self.wanted = None
        self.emit(EpochAbandoned(epoch))

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.is_prefetching = False
        self.has_failed_memory = False

    def make_ready(self, worker: WorkerId) -> list[Action]:
        self.starting.remove(worker)
        self.ready.add(worker)
        return self.emit(WorkerReady(worker))

    @property
    def staying(self) -> set[WorkerId]:
        """Workers that are running or starting, without released ones."""
        return (self.starting | self.ready) - self.leaving

    def add(self) -> list[Action]:
        """Starts one more worker, with the lowest free number."""
        there = self.staying | self.leaving | self.gone
        worker = next(number for number in map(WorkerId, range(len(there) + 1)) if number not in there)
        if worker not in self.workers:
            self.workers.append(worker)
        self.starting.add(worker)
        return self.emit(WorkerAdded(worker))

    def release(self, worker: WorkerId) -> list[Action]:
        self.leaving.add(worker)
        return self.emit(WorkerReleased(worker))

    def kill(self, worker: WorkerId, at: Task | None = None, *, is_blamed: bool = True, at_s: float = 0.0) -> list[Action]:
        """``at`` is the task it worked on, if the worker reported one."""
        is_staying = worker not in self.leaving
        self.starting.discard(worker)
        self.ready.discard(worker)
        self.leaving.discard(worker)
        lost = [task for task in self.tasks.values() if task.worker == worker]
        for task in lost:
            del self.tasks[task.task]
        if lost and is_blamed:  # Workers do their tasks in order: unless it reported another, it died of the first one.
            culprit = min(lost, key=lambda task: (task.is_unplaced, task.task)) if at is None else at
            culprit.batch.deaths += 1
        self.lost += lost
        self.dying = None
        if is_staying:
            self.gone.add(worker)
        return self.emit(WorkerDied(worker, None if at is None else at.task, is_blamed, at_s))

    def kill_by_sample(self, at: Task, grain_count: int | None) -> list[Action]:
        """A worker died of a sample that counts as bad: its batch is planned again before the death is reported."""
        self.dying = at.worker
        self._note_bad(at.batch, grain_count)
        actions = self.emit(BatchHasBadSamples(at.batch.batch, grain_count, at.worker))
        return actions if self.is_closed else [*actions, *self.kill(at.worker, at)]

    def report_bad(self, task: Task, grain_count: int | None) -> list[Action]:
        """A task ended with a bad sample."""
        del self.tasks[task.task]
        self._note_bad(task.batch, grain_count)
        return self.emit(BatchHasBadSamples(task.batch.batch, grain_count, task.worker, task.task))

    def _note_bad(self, batch: Batch, grain_count: int | None) -> None:
        if batch.outcome or batch.is_given_up:
            return
        if grain_count is None:
            batch.is_doomed = True
        else:
            batch.must_reload, batch.next_grain_count, batch.deaths = True, grain_count, 0

    def load(self, task: Task, elapsed_ns: int = 1_000_000) -> list[Action]:
        assert task.slot is not None
        assert not task.is_unplaced
        del self.tasks[task.task]
        if not task.batch.must_reload:
            assert not task.batch.loaded & task.grains, "a grain is loaded twice"
            task.batch.loaded |= task.grains
        return self.emit(TaskLoaded(task.worker, task.task, elapsed_ns))

    def fail(self, task: Task) -> list[Action]:
        del self.tasks[task.task]
        if not task.batch.must_reload:
            task.batch.failures[task.task] = task.first_grain
        return self.emit(TaskFailed(task.worker, task.task))

    def unplace(self, task: Task) -> list[Action]:
        task.is_unplaced = True
        task.slot = None  # The slot was too small: nothing is written to it.
        return self.emit(TaskUnplaced(task.worker, task.task))

    def mismatch(self, task: Task) -> list[Action]:
        assert not task.is_whole
        del self.tasks[task.task]
        if not task.batch.is_given_up:
            task.batch.must_reload = task.batch.must_go_whole = True
        return self.emit(TaskMismatched(task.worker, task.task))

    def empty(self, task: Task) -> list[Action]:
        assert task.is_whole
        del self.tasks[task.task]
        if not task.batch.outcome:
            task.batch.outcome = "empty"
        return self.emit(TaskEmpty(task.worker, task.task))

    def free(self, slot: SlotId) -> list[Action]:
        del self.leased[slot]
        self.has_failed_memory = False
        return self.emit(SlotFreed(slot))

    def change_window(self, window: int) -> None:
        self.window = window
        self.emit(WindowChanged(window))

    def be_short(self, is_short: bool) -> None:
        """Sets whether slots that are too small can be enlarged."""
        if self.is_short and not is_short:
            self.has_failed_memory = False
        self.is_short = is_short
        self.was_short |= is_short

    def close(self) -> None:
        self.emit(Closed())
        self.is_closed = True

    # --- actions of the scheduler

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self._on_send(action)
            case Place(worker, task_id, batch_id, slot):
                task = self.tasks[task_id]
                assert task.worker == worker, f"{action}: the task is not with this worker"
                assert task.is_unplaced, f"{action}: the worker does not hold it"
                assert task.batch.batch == batch_id
                self._place(task, slot)
            case Drop(worker, task_id):
                task = self.tasks.pop(task_id)
                assert task.worker == worker
                assert task.is_unplaced, f"{action}: the worker does not hold it"
                batch = task.batch
                assert batch.outcome or batch.is_given_up or batch.must_reload, f"{action}: the samples are still wanted"
            case Grow():
                self.is_growth_refused = self.slot_count >= self.limit
                if not self.is_growth_refused:
                    self.slot_count += 1
                    self._emit(SlotsAdded((SlotId(self.slot_count - 1),)))
                else:
                    self._emit(GrowthRefused())
            case Deliver(batch_id, slot):
                batch = self._take_delivered(batch_id, "delivered")
                assert batch.loaded == set(range(batch.grain_count)), f"{action}: grains are missing"
                assert not batch.is_given_up, f"{action}: it has failed"
                assert batch.grain_count, f"{action}: nothing is left of it"
                assert batch.slot == slot, f"{action}: it was written into slot {batch.slot}"
                self.leased[slot] = batch
            case DeliverError(batch_id, failed):
                batch = self._take_delivered(batch_id, "error")
                if failed is None:
                    assert not batch.failures
                    assert batch.is_doomed or batch.deaths > DEATHS_FORGIVEN, f"{action}: after {batch.deaths} deaths"
                else:
                    assert batch.failures[failed] == min(batch.failures.values()), f"{action}: a lower grain failed too"
            case Pass(batch_id):
                epoch = self.wanted
                batch = self._take_turn(batch_id, "passed")
                assert not batch.grain_count, f"{action}: {batch.grain_count} grains are left of it"
                assert not batch.is_given_up, f"{action}: its error is lost"
                self.wanted = epoch  # The user keeps waiting.
            case Forget(batch_id):
                assert self.batches[batch_id].outcome in ("abandoned", "empty"), f"{action}: it is still wanted"
            case Reload(batch_id):
                batch = self.batches[batch_id]
                assert not batch.outcome, f"{action}: the batch is {batch.outcome}"
                assert not batch.is_given_up, f"{action}: its error is known"
                assert not self._is_with_a_worker(batch), f"{action}: a worker has some of it"
                batch.loaded, batch.must_reload, batch.slot = set(), False, None
                batch.grain_count = batch.next_grain_count
            case StartWorker(worker):
                assert worker not in self.starting | self.ready, f"{action}: it is alive"
                assert not self.scheduler.is_lost, f"{action}: workers were given up"
                self.gone.discard(worker)
                self.starting.add(worker)
                assert worker not in self.leaving, f"{action}: it was released"
            case StopWorker(worker):
                assert worker in self.leaving, f"{action}: it was not released"
                assert worker in self.starting | self.ready, f"{action}: it is gone"
                assert not [task for task in self.tasks.values() if task.worker == worker], f"{action}: it has tasks"
                for there in (self.starting, self.ready, self.leaving):
                    there.discard(worker)
            case FailWorkers():
                assert self.wanted is not None, "no loop waits"
                assert self.live(self.wanted), "the epoch is over: there is nothing to wait for"
                self.has_failed_workers = True
                self.is_closed = True
                self._emit(Closed())
            case FailMemory():
                assert self.wanted is not None, "no loop waits"
                assert self.live(self.wanted), "the epoch is over: there is nothing to wait for"
                assert self.is_growth_refused, "it was not asked for memory"
                running = [task for task in self.tasks.values() if not task.is_unplaced]
                assert not running, f"{running} may still free a slot"
                placed = [b.batch for b in self.live(self.wanted) if b.slot is not None and not b.is_given_up]
                assert not placed or self.was_short, f"batches {placed} have a slot, and will be loaded when a worker is there"
                self.has_failed_memory = True
                self.wanted = None
            case _:
                assert_never(action)

    def _on_send(self, action: Send) -> None:
        assert action.task not in self.seen_tasks, f"{action}: the number was used"
        assert action.worker in self.ready - self.leaving - {self.dying}, f"{action}: the worker is not there"
        batch = self.batches[action.batch]
        assert not batch.outcome, f"{action}: the batch is {batch.outcome}"
        task = Task(action.task, action.worker, batch, *action[3:])
        running = [other for other in self.tasks.values() if other.batch is batch]
        assert not batch.must_reload, f"{action}: what was loaded of it is not forgotten yet"
        assert task.is_whole or not batch.must_go_whole, f"{action}: the batch must go whole"
        begun = [other.batch for other in self.live() if other.is_begun]
        if max(begun, default=-1) < batch.batch:
            assert len(begun) < self.window, f"{action}: {len(begun)} batches are in flight, {self.window} may be"
        batch.is_begun = True
        assert task.grain_count > 0
        assert task.grains <= set(range(batch.grain_count)), f"{action}: no such grains"
        assert task.is_whole == (task.grain_count == batch.grain_count)
        taken = set[int]().union(batch.loaded, *(other.grains for other in running))
        assert not task.grains & taken, f"{action}: grains are loaded, or with another worker"
        if batch.worker is not None:
            assert batch.worker == task.worker, f"{action}: the share of another worker"
            for other in self.batches.values() if self.options.is_stream else ():
                if other.batch < batch.batch and other.worker == batch.worker and not other.outcome:
                    is_sent = self._is_with_a_worker(other) or other.loaded or other.is_given_up
                    assert is_sent, f"{action}: batch {other.batch} comes before it in the same share"
        self.seen_tasks.add(task.task)
        self.tasks[task.task] = task
        if task.slot is not None:
            self._give_slot(batch, task.slot)
            if self._is_too_small(task):
                task.slot = None

    def _is_too_small(self, task: Task) -> bool:
        """Whether the slot's block is too small and there is no memory for a larger one: not if something is written to it."""
        tasks = [other for other in self.tasks.values() if other.batch is task.batch and other is not task]
        return self.is_short and not task.batch.loaded and all(other.slot is None for other in tasks)

    def _place(self, task: Task, slot: SlotId) -> None:
        batch = task.batch
        self._give_slot(batch, slot)
        if self._is_too_small(task):
            batch.slot = None
            self.is_growth_refused = True
            self._emit(PlaceRefused(task.worker, task.task))
            return
        task.is_unplaced = False
        task.slot = slot

    def _give_slot(self, batch: Batch, slot: SlotId) -> None:
        assert slot < self.slot_count, f"slot {slot} does not exist"
        assert batch.slot in (None, slot), f"batch {batch.batch} has a slot already"
        assert slot not in self.leased, f"slot {slot} is given to batch {batch.batch} while the user looks into it"
        for task in self.tasks.values():
            assert task.batch is batch or task.slot != slot, f"slot {slot} is given away while {task} may write into it"
        for other in self.batches.values():
            if other is not batch and not other.outcome and not other.is_given_up:
                assert other.slot != slot, f"slot {slot} of batch {other.batch} is given to batch {batch.batch}"
        batch.slot = slot

    def _take_delivered(self, batch_id: BatchId, outcome: str) -> Batch:
        self.delivered.append(batch_id)
        return self._take_turn(batch_id, outcome)

    def _take_turn(self, batch_id: BatchId, outcome: str) -> Batch:
        batch = self.batches[batch_id]
        assert not batch.outcome, f"batch {batch_id} is delivered, and is {batch.outcome}"
        assert self.wanted == batch.epoch, f"batch {batch_id} of epoch {batch.epoch} is delivered, wanted is {self.wanted}"
        assert not self._is_with_a_worker(batch), f"batch {batch_id} is delivered while a worker may write"
        if self.options.in_order:
            assert self.live(batch.epoch)[0] is batch, f"batch {batch_id} overtakes another"
        batch.outcome = outcome
        self.wanted = None
        return batch

    # --- the model's records

    def _is_with_a_worker(self, batch: Batch) -> bool:
        return any(task.batch is batch for task in self.tasks.values())

    def live(self, epoch: int | None = None) -> list[Batch]:
        """Batches that are planned and neither delivered nor failed."""
        return [batch for batch in self.batches.values() if not batch.outcome and epoch in (None, batch.epoch)]

    @property
    def room(self) -> int:
        return max(0, self.window - len(self.live()))

    @property
    def running(self) -> list[Task]:
        """Tasks that a worker is busy with, without those that only wait for a slot."""
        return [task for task in self.tasks.values() if not task.is_unplaced]

    def _compare(self) -> None:
        scheduler = self.scheduler
        if self.wanted is not None and self.live(self.wanted):
            assert self.running or self.starting or self.dying is not None, "the user waits, and nothing will ever happen"
        assert max(0, scheduler.room) == self.room
        assert scheduler.held_slots == len(self.leased)
        for epoch in (self.epoch, self.epoch + 1):
            assert scheduler.has_undelivered(epoch) == bool(self.live(epoch))
        assert not self.gone or scheduler.is_lost, f"{self.gone} died and were not started again"
        assert set(scheduler.active_workers) == self.staying | self.gone
        assert set(scheduler.leaving_workers) == self.leaving
        for worker in self.leaving:
            assert any(task.worker == worker for task in self.tasks.values()), f"{worker} was released, and is not stopped"
        actual = [(task.worker, task.batch.batch, task.first_grain, task.grain_count) for task in scheduler._tasks.values()]
        expected = [(task.worker, task.batch.batch, task.first_grain, task.grain_count) for task in self.tasks.values()]
        assert sorted(actual) == sorted(expected)

    # --- the end of a run

    def drain(self) -> None:
        """Lets workers do everything that is left, and the user take it; batches are released only when memory is short."""
        self.be_short(False)
        for _ in range(1000):
            if self.is_closed or self._step():
                return
        raise AssertionError("the run does not end")

    def _step(self) -> bool:
        """Takes one step towards the end; returns whether it is reached."""
        if self.starting:
            self.make_ready(min(self.starting))
        elif self.running:
            task = self.running[0]
            self.unplace(task) if task.slot is None else self.load(task)
        elif self.wanted == self.epoch:
            assert not self.live(self.epoch), "the user waits, nothing is in flight, and there is no error"
            self.wanted = None  # The last batch was empty.
        elif self.has_failed_memory:
            if self.leased:
                self.free(min(self.leased))
            elif self.was_short:
                self.was_short = False  # There is memory again, and it is requested again.
            elif self.slot_count == self.limit:
                assert self.limit == 0, "the user holds nothing, and yet there is no slot for the batch that they wait for"
                self.limit = 1
            self.want()
        elif self.live(self.epoch):
            self.want()
        elif self.live():
            self.begin_next_epoch()
        else:
            return True
        return False


Choice = Callable[[], object]
# Kinds of faults that a run may exclude.
FAULTS = ("scale", "kill", "bad", "fail", "mismatch", "unplace", "late", "abandon", "window", "short", "close")


def play(options: ModelOptions, script: bytes) -> EngineModel:
    """Plays a run: at each step, the next byte chooses among all possible events."""
    return play_in(EngineModel(options), script)


def play_in(model: EngineModel, script: bytes) -> EngineModel:
    numbers = iter(script)
    for number in numbers:
        if model.is_closed:
            assert model.scheduler.handle(BatchWanted(model.epoch)) == []
            return model
        choices = list(_choices(model, numbers))
        choices[number % len(choices)]()
    model.drain()
    return model


def _choices(model: EngineModel, numbers: Iterator[int]) -> Iterator[Choice]:
    """Returns the possible next events. Frequent ones are listed more than once."""
    never, often = model.options.never, model.options.often

    def following(count: int) -> int:
        return next(numbers, 0) % count

    for task in model.tasks.values():
        yield from _answers(model, task, following)
    if model.wanted != model.epoch:
        yield from [lambda: model.want((0, 10_000_000, 1_000_000_000)[following(3)])] * 2
    if model.room:
        if not model.is_prefetching:
            yield from [lambda: model.plan(1 if model.options.is_stream else 1 + following(5))] * 3
        if not model.options.is_stream:
            yield lambda: model.plan(1 + following(5), of_next_epoch=True)
    if "scale" not in never and not (model.options.is_stream or model.options.is_bound):
        if len(model.workers) < MOST_WORKERS:
            yield from [model.add] * (3 if often == "scale" else 1)
        if len(model.staying) > 1:
            yield from [lambda: model.release(max(model.staying))] * (3 if often == "scale" else 1)
            yield lambda: model.release(sorted(model.staying)[following(len(model.staying))])
    for worker in sorted(model.staying | model.leaving):
        if worker in model.starting:
            yield from [lambda worker=worker: model.make_ready(worker)] * 3
        if "kill" not in never:
            yield from [lambda worker=worker: _kill(model, worker, following)] * (4 if often == "kill" else 1)
    for slot in model.leased:
        yield lambda slot=slot: model.free(slot)
    if "late" not in never:
        for task in model.lost[-3:]:
            yield lambda task=task: _late_message(model, task, following(5))
    if not model.live(model.epoch):
        yield model.begin_next_epoch
    elif "abandon" not in never:
        yield lambda: model.abandon(keep_prefetched=following(2) == 0)
    if "window" not in never:
        yield lambda: model.change_window(1 + following(8))
    if "short" not in never:
        yield lambda: model.be_short(not model.is_short)
    yield lambda: setattr(model, "limit", model.limit + 1)
    if "close" not in never and following(32) == 31:
        yield model.close


def _answers(model: EngineModel, task: Task, following: Callable[[int], int]) -> Iterator[Choice]:
    never, often = model.options.never, model.options.often
    if task.is_unplaced:
        return
    if task.slot is not None:
        yield from [lambda: model.load(task, (1, 100_000, 50_000_000)[following(3)])] * 4
    if task.slot is None or "unplace" not in never:
        yield lambda: model.unplace(task)
    if "fail" not in never:
        yield lambda: model.fail(task)
    if "mismatch" not in never and not task.is_whole:
        yield lambda: model.mismatch(task)
    if model.options.is_stream:
        yield lambda: model.empty(task)
    elif "bad" not in never:
        yield from [lambda: model.report_bad(task, _left_of(task.batch, following))] * (4 if often == "bad" else 1)


def _left_of(batch: Batch, following: Callable[[int], int]) -> int | None:
    """Returns what a batch has without a bad sample: some grains, none, or the batch fails without it."""
    left = following(batch.next_grain_count + 2)
    return None if left > batch.next_grain_count else left


def _kill(model: EngineModel, worker: WorkerId, following: Callable[[int], int]) -> None:
    """A worker dies; it may have reported its task, and that task's sample may count as bad."""
    busy = [task for task in model.running if task.worker == worker]
    if not busy or following(3) == 2:
        model.kill(worker, is_blamed=following(4) > 0)
        return
    # Mostly of the oldest batch: several deaths of one batch are what matters.
    task = busy[max(0, following(len(busy) + 2) - 2)]
    if "bad" in model.options.never or following(2):
        model.kill(worker, task)
    else:
        model.kill_by_sample(task, None if model.options.is_stream else _left_of(task.batch, following))


def _late_message(model: EngineModel, task: Task, kind: int) -> None:
    """A message that a worker sent before it was declared dead: it must have no effect."""
    events: list[Event] = [
        TaskLoaded(task.worker, task.task, 1000),
        TaskFailed(task.worker, task.task),
        TaskUnplaced(task.worker, task.task),
        TaskMismatched(task.worker, task.task),
        BatchHasBadSamples(task.batch.batch, task.batch.next_grain_count, task.worker, task.task),
    ]
    assert model.emit(events[kind]) == []
