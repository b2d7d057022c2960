"""The work itself: does what messages ask, one after another. The same code in every kind of worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic, perf_counter_ns
from typing import Any, Final, Generic, TypeAlias, TypeVar, assert_never, final

from infeed.collate.layout import Layout
from infeed.memory.arena import Block
from infeed.plan.seeds import derive
from infeed.scheduler.messages import TaskId
from infeed.workers.epoch_hooks import EpochHooks, Recalls
from infeed.workers.fetch import Fetcher, LoadError
from infeed.workers.gil import Probe
from infeed.workers.indexed import IndexedLoader
from infeed.workers.info import introduce
from infeed.workers.iterable import StreamLoader
from infeed.workers.process_tools import MemoryUse
from infeed.workers.protocol import (
    DropTask,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    MapSegment,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
    Unplaced,
)
from infeed.workers.recorder import NullRecorder, Recorder
from infeed.workers.rng import Place, keep_user_seeds, lent_generators, seed_worker, show_worker_seed, swap_place
from infeed.workers.spec import Making, Seeding, Source, WorkerSpec
from infeed.workers.status import Cell
from infeed.workers.write import Segments, SlotWriter

# What takes longer is long: then a thread listens. For less it would be in the way.
_LONG_S: Final = 0.005
# For how long it listens before it looks whether it is still needed, of the time that it has listened: so late the worker may
# go on.
_LISTEN_SHARE: Final = 0.02
_LEAST_S: Final = 0.001
_MOST_S: Final = 0.01

T = TypeVar("T")
Placing = PlaceTask | DropTask | MapSegment


@final
class Turns(Generic[T]):
    """Belongs to one worker."""

    def __init__(
        self, receive: Callable[[float | None], T], held_count: Callable[[], int], place: Callable[[Placing], bool]
    ) -> None:
        """
        Args:
            receive: gives the next message, and raises ``TimeoutError`` if none comes within the time.
            held_count: of how many tasks there are samples without a place.
            place: does this in another thread, while the worker is at something else; whether it may be done there.
        """
        self._receive, self._held_count, self._place = receive, held_count, place
        self._put_off: deque[T | Exception] = deque()
        self._thread: threading.Thread | None = None
        # Guards the four below, and tells the thread and the worker of each other.
        self._changed = threading.Condition()
        self._is_needed = self._is_listening = self._is_closed = False
        self._is_new = False  # it is needed for something that the thread has not heard of yet

    def next(self) -> T:
        """What to do next."""
        if self._is_needed:
            self.done()
        if not self._held_count():
            return self._take() if self._put_off else self._receive(None)
        try:
            while True:
                message = self._receive(0.0)
                if isinstance(message, Placing):
                    return message
                self._put_off.append(message)
        except TimeoutError:
            pass
        message = self._take()
        if not isinstance(message, Placing):
            self._need()
        return message

    def done(self) -> None:
        """It is done with what it was at: from here on nobody else sends and receives."""
        if self._is_needed:
            with self._changed:
                self._is_needed = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_listening)

    def close(self) -> None:
        """The worker ends."""
        self.done()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take(self) -> T:
        if not self._put_off:
            return self._receive(None)
        message = self._put_off.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    # --- the thread

    def _need(self) -> None:
        with self._changed:
            self._is_needed = self._is_new = True
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infeed:placing", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._is_needed and self._is_new))
                if self._is_closed:
                    return
                self._is_new = False
                if self._changed.wait_for(lambda: not self._is_needed or self._is_new, _LONG_S):
                    continue
                self._is_listening = True
            try:
                self._listen()
            finally:
                with self._changed:
                    self._is_listening = False
                    self._changed.notify_all()

    def _listen(self) -> None:
        began = monotonic()
        while self._is_needed and self._held_count():
            try:
                message = self._receive(min(_MOST_S, max(_LEAST_S, _LISTEN_SHARE * (monotonic() - began))))
                if not (isinstance(message, Placing) and self._place(message)):
                    self._put_off.append(message)
            except TimeoutError:
                continue
            except (EOFError, OSError):
                return  # the worker will hear of it
            except Exception as error:  # it cannot be read; the worker says so in its turn
                self._put_off.append(error)


# Stands for a position where set_epoch draws random numbers.
_TELLING: Final = 1 << 63

Work: TypeAlias = LoadGrains | LoadNext | OpenStream | PlaceTask | DropTask


@final
class Runner:
    """Belongs to one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        source: Source,
        segments: Segments,
        cell: Cell,
        recorder: Recorder | NullRecorder,
        recalls: Recalls | None = None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._place_now = Place()
        self._cell = cell
        self._recorder = recorder
        self._fetcher = Fetcher(spec, source, self._place_now, cell, recorder)
        self._slot_writer = SlotWriter(spec, source, segments, cell, recorder, self._place_now, self._fetcher)
        self._indexed = IndexedLoader(spec, source, recorder, self._fetcher, self._slot_writer)
        self._streamed = StreamLoader(spec, source, self._fetcher, self._slot_writer)
        self._probe = Probe(recorder, looks_at_gil=spec.probes_gil) if spec.probes else None
        self._epoch_hooks = EpochHooks(*([source.dataset, source.collate_fn] if spec.tells_epochs else []))
        self._recalls = recalls or Recalls()
        self._epoch = -1  # the one that tasks were last of

    def start(self) -> None:
        """Make this thread the worker, and run the user's ``worker_init_fn`` in it."""
        spec = self._spec
        introduce(spec, self._source.dataset, spec.worker_count)
        if spec.seeding is Seeding.SET:
            seed_worker(spec.worker_seed)
        if spec.is_as_torch:
            show_worker_seed(spec.worker_seed)
        if self._source.worker_init_fn is not None:
            self._source.worker_init_fn(spec.worker)
        if spec.is_as_torch:
            keep_user_seeds(spec.worker_seed)

    def handle(self, message: Work) -> FromWorker | None:
        """Do one thing; the answer, if it has one. What user code raises is in the answer."""
        match message:
            case LoadGrains() | LoadNext():
                return self._load(message)
            case PlaceTask(task, block, layout):
                try:
                    return self._place(task, block, layout)
                finally:
                    self._cell.rest()
            case DropTask(task):
                self._slot_writer.held.pop(task, None)
                return None
            case OpenStream():
                self._streamed.open(message)
                return None
            case _:
                assert_never(message)

    def gather(self, epoch: int, position: int, indices: Any, block: Block, row_count: int) -> int:
        """Copy rows of the dataset's arrays into a block, without a task. Returns the duration in ns.

        Raises:
            IndexError: an index is outside the arrays, or not an integer.
        """
        table = self._source.table
        assert table is not None
        began = perf_counter_ns()
        self._recorder.begin(began, epoch, position)
        table.gather(indices, self._slot_writer.memory(block), block.offset, row_count)
        now_ns = perf_counter_ns()
        if self._recorder.is_fine:
            self._recorder.loaded(0, ())
        self._recorder.end(row_count, now_ns)
        return now_ns - began

    def held_count(self) -> int:
        """Of how many tasks it has the samples, and waits for a place to put them."""
        return len(self._slot_writer.held)

    @property
    def can_place_aside(self) -> bool:
        """Whether another thread may place what is held, while this is at something else.

        Not where rows are gathered, which is done when they are placed; but there nobody has to wait for user code.
        """
        return self._source.making is not Making.GATHERED

    def place_aside(self, message: PlaceTask | DropTask) -> FromWorker | None:
        """As ``handle``, by another thread."""
        if isinstance(message, DropTask):
            return self.handle(message)
        task, block, layout = message
        return self._slot_writer.place(task, self._slot_writer.take_held(task), block, layout, is_aside=True)

    def note_usage(self, cpu_ns: int, queued_ns: int) -> None:
        """Of a worker that has no memory of its own."""
        self._cell.note_usage(MemoryUse(), cpu_ns, queued_ns)

    def finish(self) -> None:
        """The worker is about to end."""
        self._recorder.flush()

    def forget_segment(self, number: int) -> None:
        """Drop every view into a segment that goes away."""
        self._slot_writer.forget_segment(number)

    def _load(self, message: LoadGrains | LoadNext) -> FromWorker:
        began = self._slot_writer.began_ns = self._cell.begin(message.task)
        self._recorder.begin(began, message.epoch, message.first_position)
        if self._probe is not None:
            self._probe.begin()
        before = swap_place(self._place_now)
        try:
            if self._spec.seeding is Seeding.LEND:
                with lent_generators():
                    answer = self._load_now(message)
            else:
                answer = self._load_now(message)
            now_ns = perf_counter_ns()
            self._fetcher.learn(now_ns - began, message.row_count)
            self._recorder.end(self._loaded_count(message, answer), now_ns)
            if isinstance(answer, Unplaced):
                self._recorder.flush()  # it has yet to write: nobody else is to be judged by its parts
            if self._probe is not None:
                self._probe.end(now_ns - began)
            return answer
        except LoadError as error:
            self._recorder.failed(perf_counter_ns())
            return LoadFailed(message.task, error.failure(), error.shards_itself, error.bad)
        finally:
            swap_place(before)
            self._cell.rest()

    def _loaded_count(self, message: LoadGrains | LoadNext, answer: FromWorker) -> int:
        """How many samples the dataset has given for a task."""
        if isinstance(message, LoadGrains):
            return len(message.indices)
        if isinstance(answer, Unplaced):
            return self._slot_writer.held[message.task].row_count
        return answer.row_count if isinstance(answer, RowsLoaded | PackedLoaded) else 0

    def open_now(self, message: OpenStream) -> None:
        """Begin to read a stream before the first task asks for it.

        Raises:
            Exception: what user code raised.
        """
        before = swap_place(self._place_now)
        try:
            with lent_generators() if self._spec.seeding is Seeding.LEND else nullcontext():
                self._begin_epoch(message.epoch)
                self._streamed.open(message)
                self._streamed.begin()
        except LoadError as error:
            raise error.__cause__ or error from None
        finally:
            swap_place(before)

    def _load_now(self, message: LoadGrains | LoadNext) -> FromWorker:
        self._begin_epoch(message.epoch, message.task)
        return self._indexed.load(message) if isinstance(message, LoadGrains) else self._streamed.load(message)

    def _begin_epoch(self, epoch: int, task: TaskId | None = None) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._fetcher.epoch_seed = derive(self._spec.seed, epoch)
        if self._epoch_hooks:
            with self._recalls.lock:
                if task is not None and self._recalls.take(task):
                    raise LoadError("loading a batch of an epoch that was left", None, None) from LookupError(task)
                self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for epoch_hook in self._epoch_hooks.untold(epoch):
            self._fetcher.seed(_TELLING)
            self._place_now.at_collation(self._fetcher.epoch_seed, _TELLING)
            try:
                self._epoch_hooks.tell(epoch_hook, epoch)
            except Exception as error:
                raise LoadError(f"telling it about epoch {epoch} (set_epoch)", None, None) from error

    def _place(self, task: TaskId, block: Block, layout: Layout | None) -> FromWorker:
        self._recorder.begin(self._cell.begin(task), self._epoch, 0)
        held = self._slot_writer.take_held(task)
        if self._source.making is Making.GATHERED:
            return self._indexed.gather_into(task, held.samples, block, held.row_count)
        return self._slot_writer.place(task, held, block, layout)
