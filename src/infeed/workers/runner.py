"""The work itself: does what messages ask, one after another. The same code in every kind of worker."""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any, Final, TypeAlias, assert_never, final

from infeed.batch.layout import Layout
from infeed.memory.arena import Block
from infeed.plan.seeds import derive
from infeed.scheduler.messages import TaskId
from infeed.workers.board import Cell
from infeed.workers.fetching import Fetcher, LoadError
from infeed.workers.filling import Filler, Segments
from infeed.workers.hearers import Hearers, Recalls
from infeed.workers.indexed import IndexedLoader
from infeed.workers.info import introduce
from infeed.workers.insides import MemoryUse
from infeed.workers.messages import (
    DropTask,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
    Unplaced,
)
from infeed.workers.places import Place, swap_place
from infeed.workers.probing import Probe
from infeed.workers.seeding import keep_user_seeds, lent_generators, seed_worker, show_worker_seed
from infeed.workers.silence import Silence
from infeed.workers.sources import Making, Seeding, Source, WorkerSpec
from infeed.workers.streamed import StreamLoader
from infeed.workers.tape import Tape

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
        tape: Tape | Silence,
        recalls: Recalls | None = None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._place_now = Place()
        self._cell = cell
        self._tape = tape
        self._fetcher = Fetcher(spec, source, self._place_now, cell, tape)
        self._filler = Filler(spec, source, segments, cell, tape, self._place_now, self._fetcher)
        self._indexed = IndexedLoader(spec, source, tape, self._fetcher, self._filler)
        self._streamed = StreamLoader(spec, source, self._fetcher, self._filler)
        self._probe = Probe(tape, looks_at_gil=spec.probes_gil) if spec.probes else None
        self._hearers = Hearers(*([source.dataset, source.collate_fn] if spec.tells_epochs else []))
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
                self._filler.held.pop(task, None)
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
        self._tape.begin(began, epoch, position)
        table.gather(indices, self._filler.memory(block), block.offset, row_count)
        now_ns = perf_counter_ns()
        if self._tape.is_fine:
            self._tape.loaded(0, ())
        self._tape.end(row_count, now_ns)
        return now_ns - began

    def held_count(self) -> int:
        """Of how many tasks it has the samples, and waits for a place to put them."""
        return len(self._filler.held)

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
        return self._filler.place(task, self._filler.take_held(task), block, layout, is_aside=True)

    def note_usage(self, cpu_ns: int, queued_ns: int) -> None:
        """Of a worker that has no memory of its own."""
        self._cell.note_usage(MemoryUse(), cpu_ns, queued_ns)

    def finish(self) -> None:
        """The worker is about to end."""
        self._tape.flush()

    def forget_segment(self, number: int) -> None:
        """Drop every view into a segment that goes away."""
        self._filler.forget_segment(number)

    def _load(self, message: LoadGrains | LoadNext) -> FromWorker:
        began = self._filler.began_ns = self._cell.begin(message.task)
        self._tape.begin(began, message.epoch, message.first_position)
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
            self._tape.end(self._loaded_count(message, answer), now_ns)
            if isinstance(answer, Unplaced):
                self._tape.flush()  # it has yet to write: nobody else is to be judged by its parts
            if self._probe is not None:
                self._probe.end(now_ns - began)
            return answer
        except LoadError as error:
            self._tape.failed(perf_counter_ns())
            return LoadFailed(message.task, error.failure(), error.shards_itself, error.bad)
        finally:
            swap_place(before)
            self._cell.rest()

    def _loaded_count(self, message: LoadGrains | LoadNext, answer: FromWorker) -> int:
        """How many samples the dataset has given for a task."""
        if isinstance(message, LoadGrains):
            return len(message.indices)
        if isinstance(answer, Unplaced):
            return self._filler.held[message.task].row_count
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
        if self._hearers:
            with self._recalls.lock:
                if task is not None and self._recalls.take(task):
                    raise LoadError("loading a batch of an epoch that was left", None, None) from LookupError(task)
                self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for hearer in self._hearers.untold(epoch):
            self._fetcher.seed(_TELLING)
            self._place_now.at_collation(self._fetcher.epoch_seed, _TELLING)
            try:
                self._hearers.tell(hearer, epoch)
            except Exception as error:
                raise LoadError(f"telling it about epoch {epoch} (set_epoch)", None, None) from error

    def _place(self, task: TaskId, block: Block, layout: Layout | None) -> FromWorker:
        self._tape.begin(self._cell.begin(task), self._epoch, 0)
        held = self._filler.take_held(task)
        if self._source.making is Making.GATHERED:
            return self._indexed.gather_into(task, held.samples, block, held.row_count)
        return self._filler.place(task, held, block, layout)
