"""The work itself: from a message to rows in a slot. The same code in every kind of worker.

Three outcomes of loading rows under an expected layout:

* they fit: written in chunks as they are loaded, and forgotten;
* they do not, and this task is the whole batch: all samples are looked at together and a layout is found for them, or an
  error that names two that do not stack;
* they do not, and other workers have parts of the batch: ``Mismatched``; the scheduler gives the whole batch to one worker.
"""

from __future__ import annotations

from mmap import mmap
from time import perf_counter_ns
from typing import Any, Final, Protocol, TypeAlias, assert_never, final

from infeed.batch.layout import Layout, infer_layout
from infeed.batch.packing import Handed, Packing
from infeed.batch.rows import RowMismatch, RowWriter
from infeed.batch.torchlike import torch_layout
from infeed.batch.tree import Sample
from infeed.errors import CollateError, InternalError
from infeed.memory.arena import Block
from infeed.plan.order import plain_indices
from infeed.plan.seeds import derive
from infeed.scheduler.messages import TaskId
from infeed.workers.board import Cell
from infeed.workers.failures import Failure
from infeed.workers.fetching import Fetcher, LoadError
from infeed.workers.hearers import Hearers, Recalls
from infeed.workers.info import WorkerInfo, set_worker_info, take_was_asked, tell_torch
from infeed.workers.insides import MemoryUse
from infeed.workers.messages import (
    DropTask,
    Emptied,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    Mismatched,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
    Unplaced,
)
from infeed.workers.places import Place, swap_place
from infeed.workers.probing import Probe
from infeed.workers.seeding import lent_generators, seed_generators, show_worker_seed
from infeed.workers.sources import Making, Seeding, Source, WorkerSpec
from infeed.workers.streams import StreamShare, open_share
from infeed.workers.tape import Silence, Tape

# Writers are kept for slots and layouts that come again; the oldest goes when there are more than this.
_WRITERS_KEPT: Final = 256

# Stands for a position where set_epoch draws random numbers.
_TELLING: Final = 1 << 63

Work: TypeAlias = LoadGrains | LoadNext | OpenStream | PlaceTask | DropTask


class Segments(Protocol):
    """Where segments are mapped in this process."""

    def memory(self, segment: int) -> mmap: ...


@final
class _Held:
    """Samples that wait for a place."""

    def __init__(
        self, first_row: int, row_count: int, samples: Any, layout: Layout | None, packing: Packing | Handed | None
    ) -> None:
        self.first_row, self.row_count = first_row, row_count
        self.samples, self.layout, self.packing = samples, layout, packing
        self.elapsed_ns = 0  # what loading took; waiting for a place does not count
        self.shards_itself = False
        self.stream_state: Any = None
        self.bad: tuple[tuple[int, Failure], ...] = ()  # elements of a stream that were left out


@final
class Runner:
    """Does what messages ask, one after another. Belongs to one worker."""

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
        self._segments = segments
        self._held: dict[TaskId, _Held] = {}
        self._writers: dict[tuple[int, int, int, int], RowWriter] = {}
        self._layouts_alive: dict[int, Layout] = {}
        self._share: StreamShare | None = None
        self._opened: OpenStream | None = None
        self._is_stream_known = True
        self._place_now = Place()
        self._cell = cell
        self._tape = tape
        self._fetcher = Fetcher(spec, source, self._place_now, cell, tape)
        self._probe = Probe(tape) if spec.probes else None
        self._hearers = Hearers(source.dataset, source.collate_fn)
        self._recalls = recalls or Recalls()
        self._began = 0
        self._epoch = -1  # the one that tasks were last of

    def start(self) -> None:
        """Make this thread the worker, and run the user's ``worker_init_fn`` in it."""
        spec = self._spec
        self._set_info(spec.worker_count)
        if spec.seeding is Seeding.SET:
            seed_generators(spec.worker_seed)
        if spec.torch_seed is not None and spec.seeding is Seeding.SET:
            show_worker_seed(spec.worker_seed)
        if self._source.worker_init_fn is not None:
            self._source.worker_init_fn(spec.worker)
        if spec.torch_seed is not None and spec.seeding is Seeding.SET:
            self._fetcher.keep_torch_seed()

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
                self._held.pop(task, None)
                return None
            case OpenStream():
                self._open_stream(message)
                return None
            case _:
                assert_never(message)

    def note_usage(self, cpu_ns: int, queued_ns: int) -> None:
        """Of a worker that has no memory of its own."""
        self._cell.note_usage(MemoryUse(), cpu_ns, queued_ns)

    def finish(self) -> None:
        """The worker is about to end."""
        self._tape.flush()

    def forget_segment(self, number: int) -> None:
        """Drop every view into a segment that goes away."""
        for key in [key for key in self._writers if key[0] == number]:
            del self._writers[key]

    # --- indexed datasets

    def _load(self, message: LoadGrains | LoadNext) -> FromWorker:
        self._began = self._cell.begin(message.task)
        self._tape.begin(self._began, message.epoch, message.first_position)
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
            self._fetcher.learn(now_ns - self._began, message.row_count)
            self._tape.end(self._loaded_count(message, answer), now_ns)
            if self._probe is not None:
                self._probe.end(now_ns - self._began)
                self._probe = None if self._probe.is_done else self._probe
            return answer
        except LoadError as error:
            return LoadFailed(message.task, error.failure(), error.row_count, error.bad)
        finally:
            swap_place(before)
            self._cell.rest()

    def _loaded_count(self, message: LoadGrains | LoadNext, answer: FromWorker) -> int:
        """How many samples the dataset has given for a task."""
        if isinstance(message, LoadGrains):
            return len(message.indices)
        if isinstance(answer, Unplaced):
            return self._held[message.task].row_count
        return answer.row_count if isinstance(answer, RowsLoaded | PackedLoaded) else 0

    def _load_now(self, message: LoadGrains | LoadNext) -> FromWorker:
        if message.epoch != self._epoch:
            self._epoch = message.epoch
            self._fetcher.epoch_seed = derive(self._spec.seed, message.epoch)
        if self._hearers:
            with self._recalls.lock:
                if self._recalls.take(message.task):
                    raise LoadError("loading a batch of an epoch that was left", None, None) from LookupError(message.task)
                self._tell_epoch(message.epoch)
        return self._load_grains(message) if isinstance(message, LoadGrains) else self._load_next(message)

    def _tell_epoch(self, epoch: int) -> None:
        for hearer in self._hearers.untold(epoch):
            self._fetcher.seed(_TELLING)
            self._place_now.at_collation(self._fetcher.epoch_seed, _TELLING)
            try:
                self._hearers.tell(hearer, epoch)
            except Exception as error:
                raise LoadError(f"telling it about epoch {epoch} (set_epoch)", None, None) from error

    def _elapsed(self) -> int:
        return perf_counter_ns() - self._began

    def _load_grains(self, message: LoadGrains) -> FromWorker:
        making = self._source.making
        if making is Making.GATHERED:
            return self._gather(message)
        if making is Making.ROWS:
            return self._load_rows(message)
        samples = self._fetcher.grains(message)
        return self._pack(message, samples, message.row_count, plain_indices(message.indices))

    def _gather(self, message: LoadGrains) -> FromWorker:
        table = self._source.table
        assert table is not None
        _, nbytes = table.layout.offsets(message.row_count)
        if message.block is None or message.block.size < nbytes:
            self._held[message.task] = _Held(0, message.row_count, message.indices, table.layout, None)
            return Unplaced(message.task, nbytes, table.layout)
        return self._gather_into(message.task, message.indices, message.block, message.row_count)

    def _gather_into(self, task: TaskId, indices: Any, block: Block, row_count: int) -> FromWorker:
        table = self._source.table
        assert table is not None
        try:
            table.gather(indices, self._segments.memory(block.segment), block.offset, row_count)
        except Exception as error:  # an index that does not exist, or that is none
            bad = self._missing_rows(indices) if self._spec.mends and isinstance(error, IndexError) else ()
            return LoadFailed(task, Failure.of(error, "gathering rows of the dataset"), bad=bad)
        if self._tape.is_fine:
            self._tape.loaded(0, ())
        return RowsLoaded(task, self._elapsed(), row_count, table.layout, [])

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

    def _load_rows(self, message: LoadGrains) -> FromWorker:
        is_torch = self._source.torch_collate is not None
        if is_torch and (self._fetcher.is_together or not len(message.indices)):
            # What __getitems__ returns is what is collated, however many they are; and so is nothing at all.
            samples = self._fetcher.grains(message)
            if len(samples) != message.row_count or not samples:
                return self._pack(message, samples, len(samples), plain_indices(message.indices))
            return self._write_fetched(message, samples)
        writer = self._writer(message.block, message.layout, message.row_count)
        if writer is None:
            samples = self._fetcher.grains(message)
        else:
            beside = writer.new_beside()
            row = message.first_row
            fits = True
            # Where nothing is seeded a sample must not be loaded twice, so none is forgotten before all are known to fit.
            chunk_rows = len(message.indices) if self._spec.seeding is Seeding.LEAVE else writer.chunk_rows
            for samples in self._fetcher.chunks(message, chunk_rows):
                try:
                    writer.write(row, samples, beside)
                except RowMismatch:
                    fits = False
                    break
                if self._tape.is_fine:
                    self._tape.written()
                row += len(samples)
            if fits:
                return RowsLoaded(message.task, self._elapsed(), len(message.indices), None, beside)
            if not message.is_whole:
                return Mismatched(message.task)
            if len(samples) < len(message.indices):
                # Some rows are written and forgotten. Seeds make it harmless to load them again.
                samples = self._fetcher.grains(message)
        return self._place_fetched(message, samples)

    def _write_fetched(self, message: LoadGrains, samples: list[Sample]) -> FromWorker:
        """Write samples that were fetched all together, if they fit."""
        writer = self._writer(message.block, message.layout, message.row_count)
        if writer is not None:
            beside = writer.new_beside()
            try:
                writer.write(message.first_row, samples, beside)
            except RowMismatch:
                pass
            else:
                if self._tape.is_fine:
                    self._tape.written()
                return RowsLoaded(message.task, self._elapsed(), len(samples), None, beside)
        return self._place_fetched(message, samples)

    def _place_fetched(self, message: LoadGrains, samples: list[Sample]) -> FromWorker:
        """Make a batch of samples that do not fit what is expected, or a part of one."""
        indices = plain_indices(message.indices)
        if self._source.torch_collate is not None and torch_layout(samples) is None:
            return self._pack(message, samples, message.row_count, indices) if message.is_whole else Mismatched(message.task)
        block = message.block if message.is_whole else None
        return self._place_or_hold(message.task, samples, indices, block, message.row_count, first_row=message.first_row)

    def _place_or_hold(
        self,
        task: TaskId,
        samples: list[Sample],
        indices: list[Any],
        block: Block | None,
        row_count: int,
        first_row: int,
    ) -> FromWorker:
        """Find a layout for these samples; write them if they may go into this block now, else keep them."""
        try:
            layout = infer_layout(samples, indices) if self._source.torch_collate is None else torch_layout(samples)
        except CollateError as error:
            raise LoadError("collating samples", indices, None) from error
        if self._tape.is_fine:
            self._tape.collated()
        assert layout is not None
        _, nbytes = layout.offsets(row_count)
        held = _Held(first_row, row_count, samples, layout, None)
        held.elapsed_ns = self._elapsed()
        if block is None or block.size < nbytes:
            self._held[task] = held
            return Unplaced(task, nbytes, layout)
        return self._write_held(task, held, block)

    def _write_held(self, task: TaskId, held: _Held, block: Block) -> FromWorker:
        if held.packing is not None:
            held.packing.write(self._segments.memory(block.segment), block.offset)
            if self._tape.is_fine:
                self._tape.written()
            return PackedLoaded(
                task, held.elapsed_ns, held.row_count, held.packing.packed, held.shards_itself, held.stream_state, held.bad
            )
        writer = self._writer(block, held.layout, held.row_count)
        assert writer is not None
        beside = writer.new_beside()
        writer.write_any(held.first_row, held.samples, beside)
        if self._tape.is_fine:
            self._tape.written()
        return RowsLoaded(
            task, held.elapsed_ns, len(held.samples), held.layout, beside, held.shards_itself, held.stream_state, held.bad
        )

    def _place(self, task: TaskId, block: Block, layout: Layout | None) -> FromWorker | None:
        self._tape.begin(self._cell.begin(task), self._epoch, 0)
        held = self._held.pop(task, None)
        if held is None:
            raise InternalError(f"task {task} was placed but is not held; this is a bug in infeed")
        if self._source.making is Making.GATHERED:
            return self._gather_into(task, held.samples, block, held.row_count)
        is_whole = len(held.samples) == held.row_count
        if layout is not None and held.layout != layout and not is_whole:
            return Mismatched(task)
        try:
            answer = self._write_held(task, held, block)
            self._tape.end(0, perf_counter_ns())
            return answer
        except Exception as error:  # no memory, or an object of the user's that refuses
            return LoadFailed(task, Failure.of(error, "writing a batch"), held.row_count)

    def _pack(self, message: LoadGrains | LoadNext, samples: list[Sample], row_count: int, indices: list[Any]) -> FromWorker:
        source, task, block = self._source, message.task, message.block
        tree: Any = samples[0] if source.making is Making.SINGLE else samples
        collate = source.collate_fn or source.torch_collate
        # What goes wrong from here on is the whole batch's, and not the fault of the sample that was loaded last.
        self._cell.begin(task)
        if collate is not None:
            self._place_now.at_collation(self._fetcher.epoch_seed, message.first_position)
            try:
                tree = collate(tree)
            except Exception as error:
                raise LoadError("collate_fn ran on the batch of", indices, None) from error
            if self._tape.is_fine:
                self._tape.collated()
        try:
            # To torch's users what is made in their own process is handed over as it is, with its graph and its identity.
            is_handed = self._spec.torch_seed is not None and self._spec.kind != "process"
            packing = Handed(tree) if is_handed else Packing(tree)
        except Exception as error:  # the user's objects may refuse in any way
            raise LoadError("sending the batch of", indices, None) from error
        if block is None or block.size < packing.nbytes:
            held = self._held[task] = _Held(0, row_count, samples, None, packing)
            held.elapsed_ns = self._elapsed()
            return Unplaced(task, packing.nbytes, None)
        packing.write(self._segments.memory(block.segment), block.offset)
        if self._tape.is_fine:
            self._tape.written()
        return PackedLoaded(task, self._elapsed(), row_count, packing.packed)

    def _writer(self, block: Block | None, layout: Layout | None, row_count: int) -> RowWriter | None:
        if block is None or layout is None:
            return None
        key = (block.segment, block.offset, row_count, id(layout))
        writer = self._writers.get(key)
        if writer is None:
            _, nbytes = layout.offsets(row_count)
            if nbytes > block.size:
                return None
            if len(self._writers) >= _WRITERS_KEPT:
                self._writers.clear()
                self._layouts_alive.clear()
            writer = RowWriter(layout, self._segments.memory(block.segment), block.offset, row_count)
            self._writers[key] = writer
            # Its id is in the key, so it must not be given to another object.
            self._layouts_alive[id(layout)] = layout
        return writer

    # --- streams

    def _open_stream(self, message: OpenStream) -> None:
        self._set_info(1 if message.is_alone else self._spec.worker_count)
        self._share = None
        self._opened = message
        self._is_stream_known = message.is_known
        take_was_asked()

    def _load_next(self, message: LoadNext) -> FromWorker:
        samples: list[Sample] = []
        try:
            if self._share is None:
                assert self._opened is not None
                self._fetcher.seed(derive(self._spec.share))
                self._share = open_share(
                    self._source.dataset, self._spec.cut, self._opened, message.row_count,
                    self._fetcher.note_bad if self._spec.mends else None,
                )  # fmt: skip
                # What was delivered before is read again as it was then, batch by batch: its random numbers must be drawn too.
                for begin in self._share.skipped:
                    wanted = min(message.row_count, self._share.skipped.stop - begin)
                    forgotten: list[Sample] = []
                    self._fetcher.read(self._share, begin, wanted, forgotten)
                    if len(forgotten) < wanted:
                        break  # there is less than there was
                self._fetcher.take_bad_elements()  # they were counted then
            self._fetcher.read(self._share, message.first_position, message.row_count, samples)
            state = self._share.state()
        except Exception as error:
            self._share = StreamShare()  # as a generator that raised: it has ended
            raise LoadError("reading the stream", f"element {message.first_position + len(samples)}", None) from error
        asked = take_was_asked()
        if not self._is_stream_known:
            self._is_stream_known = True
            if not asked:
                self._set_info(1)  # nobody else will read: should it ask later, it must not leave anything out
        bad = self._fetcher.take_bad_elements()
        if not samples:
            return Emptied(message.task, asked, bad)
        try:
            answer = self._make_streamed(message, samples)
        except LoadError as error:
            error.row_count = len(samples)
            raise
        if isinstance(answer, RowsLoaded | PackedLoaded):
            return answer._replace(shards_itself=asked, stream_state=state, bad=bad)
        if message.task in self._held:
            held = self._held[message.task]
            held.shards_itself, held.stream_state, held.bad = asked, state, bad
        return answer

    def _make_streamed(self, message: LoadNext, samples: list[Sample]) -> FromWorker:
        indices = list(range(message.first_position, message.first_position + len(samples)))
        if self._source.making is not Making.ROWS:
            return self._pack(message, samples, len(samples), indices)
        writer = self._writer(message.block, message.layout, len(samples))
        if writer is not None:
            beside = writer.new_beside()
            try:
                writer.write(0, samples, beside)
            except RowMismatch:
                pass
            else:
                if self._tape.is_fine:
                    self._tape.written()
                return RowsLoaded(message.task, self._elapsed(), len(samples), None, beside)
        if self._source.torch_collate is not None and torch_layout(samples) is None:
            return self._pack(message, samples, len(samples), indices)
        return self._place_or_hold(message.task, samples, indices, message.block, len(samples), first_row=0)

    def _set_info(self, worker_count: int) -> None:
        if self._spec.kind == "inline":
            return  # user code is in the main process and is told so
        spec = self._spec
        info = WorkerInfo(spec.worker, worker_count, spec.worker_seed, self._source.dataset)
        set_worker_info(info)
        if spec.torch_seed is not None and spec.seeding is Seeding.SET:
            tell_torch(info)
