"""Write samples into a slot: row by row, or collated into one object and packed. Samples without a block are held."""

from __future__ import annotations

from mmap import mmap
from time import perf_counter_ns
from typing import Any, Final, Protocol, final

from infeed.collate.layout import Layout, infer_layout
from infeed.collate.packing import Handed, Packing
from infeed.collate.rows import RowMismatch, RowWriter
from infeed.collate.torch_compat import torch_layout
from infeed.collate.tree import Sample
from infeed.errors import CollateError, InternalError
from infeed.memory.arena import Block
from infeed.scheduler.messages import TaskId
from infeed.workers.exceptions import Failure
from infeed.workers.fetch import Fetcher, LoadError
from infeed.workers.protocol import (
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    Making,
    Mismatched,
    PackedLoaded,
    RowsLoaded,
    Source,
    StreamNote,
    Unplaced,
    WorkerSpec,
)
from infeed.workers.recorder import Recorder
from infeed.workers.rng import EpochPosition
from infeed.workers.status import Cell

# Writers are cached by slot and layout; when the cache reaches this size, it is cleared. With tiny batches there are about 260
# slots, and several layouts may be in use.
_WRITERS_KEPT: Final = 1024


class Segments(Protocol):
    """The segments that are mapped in this process."""

    def memory(self, segment: int) -> mmap: ...


@final
class Held:
    """Samples that wait for a block from the scheduler; for in-memory arrays, the indices to gather."""

    def __init__(
        self, first_row: int, row_count: int, samples: Any, layout: Layout | None, packing: Packing | Handed | None
    ) -> None:
        self.first_row, self.row_count = first_row, row_count
        self.samples, self.layout, self.packing = samples, layout, packing
        self.elapsed_ns = 0  # loading time, without the wait for a block
        self.stream: StreamNote | None = None


@final
class SlotWriter:
    """Writes batches into slots for one runner."""

    def __init__(
        self,
        spec: WorkerSpec,
        source: Source,
        segments: Segments,
        cell: Cell,
        recorder: Recorder,
        place: EpochPosition,
        fetcher: Fetcher,
    ) -> None:
        self._spec = spec
        self._source = source
        self._segments = segments
        self._cell = cell
        self._recorder = recorder
        self._place_now = place
        self._fetcher = fetcher
        self._keeps_strides = spec.kind == "inline" and source.torch_collate is not None
        # A writer references its layout, so Python does not reuse the layout's id, which is part of the key.
        self._writers: dict[tuple[int, int, int, int], RowWriter] = {}
        self._held: dict[TaskId, Held] = {}
        self.began_ns = 0  # start of the current task

    def begin(self, task: TaskId) -> int:
        """Begin a task; return the time."""
        self.began_ns = self._cell.begin(task)
        return self.began_ns

    def memory(self, block: Block) -> mmap:
        """Return the mapped segment of a block."""
        return self._segments.memory(block.segment)

    def forget_segment(self, number: int) -> None:
        """Drop all views of a segment that is about to be unmapped."""
        for key in [key for key in self._writers if key[0] == number]:
            del self._writers[key]

    def hold(self, task: TaskId, held: Held) -> None:
        """Keep samples until the task has a block."""
        held.elapsed_ns = perf_counter_ns() - self.began_ns
        self._held[task] = held

    def answer(self, answer: FromWorker, stream: StreamNote) -> FromWorker:
        """Add a note to the answer of a task of an iterable dataset, or to its held samples."""
        if isinstance(answer, RowsLoaded | PackedLoaded):
            return answer._replace(stream=stream)
        if isinstance(answer, Unplaced):
            self._held[answer.task].stream = stream
        return answer

    def held_count(self) -> int:
        """Return the number of tasks whose samples wait for a block."""
        return len(self._held)

    def held_rows(self, task: TaskId) -> int:
        """Return how many rows the held batch of a task has."""
        return self._held[task].row_count

    def drop(self, task: TaskId) -> None:
        """Discard the held samples of a task, if it has any."""
        self._held.pop(task, None)

    def take_held(self, task: TaskId) -> Held:
        """Remove and return the held samples of a task that now has a block."""
        held = self._held.pop(task, None)
        if held is None:
            raise InternalError(f"task {task} was placed but is not held; this is a bug in infeed, please report it")
        return held

    def place(self, task: TaskId, held: Held, block: Block, layout: Layout | None, *, is_aside: bool = False) -> FromWorker:
        """Write held samples into their block; ``is_aside``: from another thread, while the runner is busy."""
        is_part = held.packing is None and len(held.samples) != held.row_count
        if layout is not None and held.layout != layout and is_part:
            return Mismatched(task)
        try:
            answer = self._write_held(task, held, block, is_aside=is_aside)
            if not is_aside:
                self._recorder.end(0, perf_counter_ns())
            return answer
        except Exception as error:  # out of memory, or a user object that raises
            return LoadFailed(task, Failure.of(error, "writing a batch"), held.stream)

    def _write_held(self, task: TaskId, held: Held, block: Block, *, is_aside: bool = False) -> FromWorker:
        is_timed = not is_aside and self._recorder.is_fine
        if held.packing is not None:
            held.packing.write(self._segments.memory(block.segment), block.offset)
            if is_timed:
                self._recorder.written()
            return PackedLoaded(task, held.elapsed_ns, held.row_count, held.packing.packed, held.stream)
        if is_aside:
            assert held.layout is not None
            writer = RowWriter(held.layout, self._segments.memory(block.segment), block.offset, held.row_count)
        else:
            known = self.writer(block, held.layout, held.row_count)
            assert known is not None
            writer = known
        beside = writer.new_beside()
        writer.write_any(held.first_row, held.samples, beside)
        if is_timed:
            self._recorder.written()
        return RowsLoaded(task, held.elapsed_ns, len(held.samples), held.layout, beside, held.stream)

    # --- rows

    def torch_layout(self, samples: list[Sample]) -> Layout | None:
        """Return the layout of the batch as torch would collate it; ``None`` if ``default_collate`` itself has to run."""
        return torch_layout(samples, keeps_strides=self._keeps_strides)

    def writer(self, block: Block | None, layout: Layout | None, row_count: int) -> RowWriter | None:
        """Return a writer for rows of this layout in this block; ``None`` if either is missing or the block is too small."""
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
            memory = self._segments.memory(block.segment)
            writer = RowWriter(layout, memory, block.offset, row_count, keeps_strides=self._keeps_strides)
            self._writers[key] = writer
        return writer

    def write(self, message: LoadGrains | LoadNext, samples: list[Sample], row_count: int, first_row: int) -> RowsLoaded | None:
        """Write all samples with the expected layout; return ``None`` if they do not fit it."""
        writer = self.writer(message.block, message.layout, row_count)
        if writer is None:
            return None
        beside = writer.new_beside()
        try:
            writer.write(first_row, samples, beside)
        except RowMismatch:
            return None
        if self._recorder.is_fine:
            self._recorder.written()
        return RowsLoaded(message.task, perf_counter_ns() - self.began_ns, len(samples), None, beside)

    def write_or_hold(
        self,
        task: TaskId,
        samples: list[Sample],
        indices: list[Any],
        block: Block | None,
        row_count: int,
        first_row: int,
    ) -> FromWorker:
        """Infer a layout for these samples; write them if the block is large enough, otherwise hold them."""
        try:
            layout = infer_layout(samples, indices) if self._source.torch_collate is None else self.torch_layout(samples)
        except CollateError as error:
            raise LoadError("collating samples", indices, None) from error
        if self._recorder.is_fine:
            self._recorder.collated()
        assert layout is not None
        _, nbytes = layout.offsets(row_count)
        held = Held(first_row, row_count, samples, layout, None)
        if block is None or block.size < nbytes:
            self.hold(task, held)
            return Unplaced(task, nbytes, layout)
        held.elapsed_ns = perf_counter_ns() - self.began_ns
        return self._write_held(task, held, block)

    # --- packed batches

    def pack(self, message: LoadGrains | LoadNext, samples: Any, row_count: int, indices: list[Any]) -> FromWorker:
        """Call ``collate_fn`` if there is one, and pack the result into the block, or hold it.

        ``samples`` is a list; with a torch loader, it is whatever ``__getitems__`` returned.
        """
        source, task, block = self._source, message.task, message.block
        tree: Any = samples[0] if source.making is Making.SINGLE else samples
        collate = source.collate_fn or source.torch_collate
        # From here on, attribute failures to the whole batch and not to the last loaded sample.
        self._cell.begin(task)
        if collate is not None:
            self._place_now.at_collation(self._fetcher.epoch_seed, message.first_position)
            try:
                tree = collate(tree)
            except Exception as error:
                raise LoadError("running collate_fn on the batch of", indices, None) from error
            finally:
                if self._recorder.is_fine:
                    self._recorder.collated()
        try:
            # With a torch loader, deliver a batch made in the main process as is, with its autograd graph and identity.
            is_handed = self._spec.torch_seed is not None and self._spec.kind != "process"
            packing = Handed(tree) if is_handed else Packing(tree)
        except Exception as error:  # pickling user objects may raise anything
            raise LoadError("pickling the batch of", indices, None) from error
        if block is None or block.size < packing.nbytes:
            self.hold(task, Held(0, row_count, samples, None, packing))
            return Unplaced(task, packing.nbytes, None)
        packing.write(self._segments.memory(block.segment), block.offset)
        if self._recorder.is_fine:
            self._recorder.written()
        return PackedLoaded(task, perf_counter_ns() - self.began_ns, row_count, packing.packed)
