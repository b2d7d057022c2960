"""The loop of a worker, the same for processes and threads.

``serve`` takes one message after another: ``Turns`` selects it, ``Runner`` handles it. With ``num_workers=0`` the engine calls
``Runner`` itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic, perf_counter_ns
from typing import Any, Final, Generic, NoReturn, TypeVar, assert_never, final

from infeed.collate.layout import Layout
from infeed.collate.rows import RowMismatch
from infeed.collate.tree import Sample
from infeed.memory.arena import Block
from infeed.plan.order import plain_indices
from infeed.scheduler.messages import TaskId
from infeed.workers.epoch_hooks import EpochHooks, Recalls
from infeed.workers.exceptions import Failure
from infeed.workers.fetch import Fetcher, LoadError
from infeed.workers.gil import KindProbe
from infeed.workers.info import introduce
from infeed.workers.iterable import IterableLoader
from infeed.workers.process_tools import MemoryUse
from infeed.workers.protocol import (
    DecodeError,
    DropTask,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    Making,
    MapSegment,
    Mismatched,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    ReportStack,
    RowsLoaded,
    Seeding,
    Source,
    ToWorker,
    UnmapSegment,
    Unplaced,
    WorkerSpec,
)
from infeed.workers.recorder import Recorder
from infeed.workers.rng import EpochPosition, keep_user_seeds, lent_generators, seed_worker, show_worker_seed, swap_place
from infeed.workers.status import Cell
from infeed.workers.write import Held, Segments, SlotWriter

# If a message takes longer than this, the thread listens. For shorter ones it would only slow the worker down.
LONG_S: Final = 0.005
# The timeout of one receive, as a share of the time that the thread has listened. It bounds how long the worker waits for the
# thread to stop.
_LISTEN_SHARE: Final = 0.02
_LEAST_S: Final = 0.001
_MOST_S: Final = 0.01

T = TypeVar("T")
Placing = PlaceTask | DropTask


@final
class Turns(Generic[T]):
    """Selects the next message of one worker: while samples wait for a block, messages that place them come first.

    While the worker handles another message for long, a thread receives and handles these messages.
    """

    def __init__(
        self, receive: Callable[[float | None], T], held_count: Callable[[], int], place: Callable[[Placing], bool]
    ) -> None:
        """
        Args:
            receive: returns the next message, or raises ``TimeoutError`` if none arrives in time.
            held_count: returns the number of tasks whose samples wait for a block.
            place: handles a message in the thread while the worker is busy; returns False if the thread must not handle it.
        """
        self._receive, self._held_count, self._place = receive, held_count, place
        self._put_off: deque[T | Exception] = deque()
        self._thread: threading.Thread | None = None
        # Guards the four flags below; the thread and the worker notify each other of changes.
        self._changed = threading.Condition()
        self._is_needed = self._is_listening = self._is_closed = False
        self._is_new = False  # the worker has begun a message that the thread has not noticed yet

    def next(self) -> T:
        """Return the next message for the worker."""
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
        """End the current message: stop the thread from listening, so that only the worker sends and receives."""
        if self._is_needed:
            with self._changed:
                self._is_needed = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_listening)

    def close(self) -> None:
        """Stop the thread; the worker is about to exit."""
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
                if self._changed.wait_for(lambda: not self._is_needed or self._is_new, LONG_S):
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
                return  # the worker gets the same error from its next receive
            except Exception as error:  # the message cannot be decoded; the worker raises the error in order
                self._put_off.append(error)


# How often a worker records its CPU time and memory use, which help to explain why it was killed.
_MEASURE_NS: Final = 100_000_000


def serve(
    runner: Runner,
    receive: Callable[[float | None], ToWorker],
    send: Callable[[FromWorker], None],
    send_aside: Callable[[FromWorker], None],
    measure: Callable[[], None],
) -> NoReturn:
    """Handle messages in turn until ``receive`` raises ``EOFError``.

    Args:
        receive: returns the next message, or raises ``TimeoutError`` if none arrives in time.
        send: sends an answer. Not batched with later answers: the next message may take any time.
        send_aside: the same, called from another thread while the worker is busy.
        measure: records CPU time and memory use.

    Raises:
        EOFError: the worker is no longer needed.
    """

    def place(message: Placing) -> bool:
        if not runner.can_place_aside:
            return False
        answer = runner.place_aside(message)
        if answer is not None:
            send_aside(answer)
        return True

    turns = Turns(receive, runner.held_count, place)
    measured = 0
    try:
        while True:
            answer: FromWorker | None
            try:
                message = turns.next()
            except DecodeError as error:
                answer = LoadFailed(error.task, Failure.of(error.__cause__ or error, "receiving a task"))
            else:
                try:
                    answer = runner.handle(message)
                except BaseException as error:  # also SystemExit and MemoryError: the training loop raises them
                    if not isinstance(message, LoadGrains | LoadNext | PlaceTask):
                        raise
                    answer = LoadFailed(message.task, Failure.of(error, "loading a batch"))
                turns.done()
                del message  # release the batch before the worker waits for the next message
            if answer is not None:
                send(answer)
                now = perf_counter_ns()
                if now - measured > _MEASURE_NS:
                    measured = now
                    measure()
            del answer
    finally:
        turns.close()


# The position that seeds the random numbers drawn in set_epoch.
_SET_EPOCH: Final = 1 << 63
_NOTHING: Final = nullcontext()


@final
class Runner:
    """Loads and places batches for one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        source: Source,
        segments: Segments,
        cell: Cell,
        recorder: Recorder,
        recalls: Recalls | None = None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._place_now = EpochPosition()
        self._cell = cell
        self._recorder = recorder
        self._fetcher = Fetcher(spec, source, self._place_now, cell, recorder)
        self._slot_writer = SlotWriter(spec, source, segments, cell, recorder, self._place_now, self._fetcher)
        self.held_count = self._slot_writer.held_count
        self._iterable = IterableLoader(spec, source, self._fetcher, self._slot_writer)
        self._probe = KindProbe(recorder, looks_at_gil=spec.probes_gil) if spec.probes else None
        self._epoch_hooks = EpochHooks(*([source.dataset, source.collate_fn] if spec.sets_epochs else []))
        self._recalls = recalls or Recalls()
        self._is_lending = spec.seeding is Seeding.LEND
        self._epoch = -1  # epoch of the latest task
        # Runs a task of a map-style dataset; raises LoadError if user code raises.
        self._load_indexed: Callable[[LoadGrains], FromWorker] = {
            Making.GATHERED: self._gather,
            Making.ROWS: self._load_rows,
        }.get(source.making, self._load_packed)

    def start(self) -> None:
        """Set worker info and seeds for this thread, then run the user's ``worker_init_fn``."""
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

    def handle(self, message: ToWorker) -> FromWorker | None:
        """Handle one message and return its answer, if any. The answer contains exceptions of user code."""
        match message:
            case LoadGrains() | LoadNext():
                return self._load(message)
            case PlaceTask(task, block, layout):
                try:
                    return self._place(task, block, layout)
                finally:
                    self._cell.rest()
            case DropTask(task):
                self._slot_writer.drop(task)
                return None
            case OpenStream():
                self._iterable.open(message)
                return None
            case UnmapSegment(number):
                self._slot_writer.forget_segment(number)
                return None
            case MapSegment() | ReportStack():
                return None  # handled where messages are received, if at all
            case _:
                assert_never(message)

    def gather(self, epoch: int, position: int, indices: Any, block: Block, row_count: int) -> int:
        """Copy rows of the dataset's arrays into a block, without a task. Return the duration in ns.

        Raises:
            IndexError: an index is out of bounds, or not an integer.
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

    @property
    def can_place_aside(self) -> bool:
        """Whether another thread may place held samples while this one is busy.

        False for gathered arrays, which are read only when they are placed; there, no user code delays placing.
        """
        return self._source.making is not Making.GATHERED

    def place_aside(self, message: PlaceTask | DropTask) -> FromWorker | None:
        """Like ``handle``, but called by another thread."""
        if isinstance(message, DropTask):
            return self.handle(message)
        task, block, layout = message
        return self._slot_writer.place(task, self._slot_writer.take_held(task), block, layout, is_aside=True)

    def note_usage(self, cpu_ns: int, queued_ns: int) -> None:
        """Record CPU and queue time of a worker that shares its process, so it has no separate memory use."""
        self._cell.note_usage(MemoryUse(), cpu_ns, queued_ns)

    def finish(self) -> None:
        """Flush the recorder before the worker exits."""
        self._recorder.flush()

    def _load(self, message: LoadGrains | LoadNext) -> FromWorker:
        began = self._slot_writer.begin(message.task)
        self._recorder.begin(began, message.epoch, message.first_position)
        if self._probe is not None:
            self._probe.begin()
        before = swap_place(self._place_now)
        try:
            with lent_generators() if self._is_lending else _NOTHING:
                if message.epoch != self._epoch or self._epoch_hooks:
                    self._begin_epoch(message.epoch, message.task)
                if isinstance(message, LoadGrains):
                    row_count = len(message.indices)
                    answer = self._load_indexed(message)
                else:
                    answer = self._iterable.load(message)
                    row_count = self._read_count(answer)
            now_ns = perf_counter_ns()
            self._fetcher.learn(now_ns - began, message.row_count)
            self._recorder.end(row_count, now_ns)
            if isinstance(answer, Unplaced):
                self._recorder.flush()  # nothing is written yet, so its split must not apply to other tasks
            if self._probe is not None:
                self._probe.end(now_ns - began)
            return answer
        except LoadError as error:
            self._recorder.failed(perf_counter_ns())
            return LoadFailed(message.task, error.failure(), error.stream, error.bad)
        finally:
            swap_place(before)
            self._cell.rest()

    def _read_count(self, answer: FromWorker) -> int:
        """Return how many elements of an iterable dataset were read for a task."""
        if isinstance(answer, Unplaced):
            return self._slot_writer.held_rows(answer.task)
        return answer.row_count if isinstance(answer, RowsLoaded | PackedLoaded) else 0

    def open_now(self, message: OpenStream) -> None:
        """Start reading an iterable dataset before its first task.

        Raises:
            Exception: any exception of user code.
        """
        before = swap_place(self._place_now)
        try:
            with lent_generators() if self._is_lending else _NOTHING:
                self._begin_epoch(message.epoch)
                self._iterable.open(message)
                self._iterable.begin()
        except LoadError as error:
            raise error.__cause__ or error from None
        finally:
            swap_place(before)

    def _begin_epoch(self, epoch: int, task: TaskId | None = None) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._fetcher.begin_epoch(epoch)
        if self._epoch_hooks:
            with self._recalls.lock:
                if task is not None and self._recalls.take(task):
                    raise LoadError("loading a batch of an abandoned epoch", None, None) from LookupError(task)
                self._notify_hooks(epoch)

    def _notify_hooks(self, epoch: int) -> None:
        for epoch_hook in self._epoch_hooks.outdated(epoch):
            self._fetcher.seed(_SET_EPOCH)
            self._place_now.at_collation(self._fetcher.epoch_seed, _SET_EPOCH)
            try:
                self._epoch_hooks.notify(epoch_hook, epoch)
            except Exception as error:
                raise LoadError(f"calling set_epoch({epoch})", None, None) from error

    def _place(self, task: TaskId, block: Block, layout: Layout | None) -> FromWorker:
        self._recorder.begin(self._cell.begin(task), self._epoch, 0)
        held = self._slot_writer.take_held(task)
        if self._source.making is Making.GATHERED:
            return self._gather_into(task, held.samples, block, held.row_count)
        return self._slot_writer.place(task, held, block, layout)

    # --- samples of a map-style dataset

    def _load_packed(self, message: LoadGrains) -> FromWorker:
        samples = self._fetcher.grains(message)
        return self._slot_writer.pack(message, samples, message.row_count, plain_indices(message.indices))

    def _load_rows(self, message: LoadGrains) -> FromWorker:
        """Load rows with the expected layout.

        * The rows fit: the worker writes them in chunks while it loads, and keeps no samples.
        * They do not fit, and the task is the whole batch: the worker infers a layout from all samples, or raises an error that
          names two samples that do not stack.
        * They do not fit, and the task is a part: the worker answers ``Mismatched``, and the scheduler assigns the whole batch
          to one worker.
        """
        slot_writer, recorder = self._slot_writer, self._recorder
        is_torch = self._source.torch_collate is not None
        if is_torch and (self._fetcher.is_together or not len(message.indices)):
            # Like torch, collate whatever __getitems__ returns, and also an empty batch.
            samples = self._fetcher.grains(message)
            if type(samples) is not list or len(samples) != message.row_count or not samples:
                return slot_writer.pack(message, samples, message.row_count, plain_indices(message.indices))
            written = slot_writer.write(message, samples, message.row_count, message.first_row)
            return self._place_fetched(message, samples) if written is None else written
        writer = slot_writer.writer(message.block, message.layout, message.row_count)
        if recorder.is_fine:
            recorder.written()  # mapping a new segment may take as long as writing into it
        if writer is None:
            samples = self._fetcher.grains(message)
        else:
            beside = writer.new_beside()
            row = message.first_row
            fits = True
            # Without seeding, a sample must not be loaded twice, so keep all samples until all are known to fit.
            chunk_rows = len(message.indices) if self._spec.seeding is Seeding.LEAVE else writer.chunk_rows
            for samples in self._fetcher.chunks(message, chunk_rows):
                try:
                    writer.write(row, samples, beside)
                except RowMismatch:
                    fits = False
                    break
                if recorder.is_fine:
                    recorder.written()
                row += len(samples)
            if fits:
                return RowsLoaded(message.task, perf_counter_ns() - slot_writer.began_ns, len(message.indices), None, beside)
            if not message.is_whole:
                return Mismatched(message.task)
            if len(samples) < len(message.indices):
                # Earlier rows were written and dropped. Loading them again is safe, because grains are seeded.
                samples = self._fetcher.grains(message)
        return self._place_fetched(message, samples)

    def _place_fetched(self, message: LoadGrains, samples: list[Sample]) -> FromWorker:
        """Make a batch, or a part of one, from samples that do not fit the expected layout."""
        indices = plain_indices(message.indices)
        if self._source.torch_collate is not None and self._slot_writer.torch_layout(samples) is None:
            if not message.is_whole:
                return Mismatched(message.task)
            return self._slot_writer.pack(message, samples, message.row_count, indices)
        block = message.block if message.is_whole else None
        return self._slot_writer.write_or_hold(
            message.task, samples, indices, block, message.row_count, first_row=message.first_row
        )

    # --- in-memory arrays

    def _gather(self, message: LoadGrains) -> FromWorker:
        table = self._source.table
        assert table is not None
        _, nbytes = table.layout.offsets(message.row_count)
        if message.block is None or message.block.size < nbytes:
            self._slot_writer.hold(message.task, Held(0, message.row_count, message.indices, table.layout, None))
            return Unplaced(message.task, nbytes, table.layout)
        return self._gather_into(message.task, message.indices, message.block, message.row_count)

    def _gather_into(self, task: TaskId, indices: Any, block: Block, row_count: int) -> FromWorker:
        """Copy rows of the arrays into a block."""
        table = self._source.table
        assert table is not None
        try:
            table.gather(indices, self._slot_writer.memory(block), block.offset, row_count)
        except Exception as error:  # out of range, or not a valid index
            bad = self._missing_rows(indices) if self._spec.handles_bad_samples and isinstance(error, IndexError) else ()
            return LoadFailed(task, Failure.of(error, "gathering rows of the dataset"), bad=bad)
        if self._recorder.is_fine:
            self._recorder.loaded(0, ())
        return RowsLoaded(task, perf_counter_ns() - self._slot_writer.began_ns, row_count, table.layout, [])

    def _missing_rows(self, indices: Any) -> tuple[tuple[int, Failure], ...]:
        table = self._source.table
        assert table is not None
        return tuple(
            (
                row,
                Failure.of(
                    IndexError(f"index {index} is out of bounds for a dataset of length {table.length}"),
                    "loading sample",
                    index=index,
                ),
            )
            for row, index in enumerate(plain_indices(indices))
            if not -table.length <= index < table.length
        )
