"""From samples to a slot: written as rows, or made one object and packed; held while they have no place."""

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
from infeed.workers.protocol import FromWorker, LoadFailed, LoadGrains, LoadNext, Mismatched, PackedLoaded, RowsLoaded, Unplaced
from infeed.workers.recorder import NullRecorder, Recorder
from infeed.workers.rng import Place
from infeed.workers.spec import Making, Source, WorkerSpec
from infeed.workers.status import Cell

# Writers are kept for slots and layouts that come again; when there are more than this, all are forgotten.
_WRITERS_KEPT: Final = 256


class Segments(Protocol):
    """Where segments are mapped in this process."""

    def memory(self, segment: int) -> mmap: ...


@final
class Held:
    """Samples that wait for a place; of arrays that are gathered, their indices."""

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
class SlotWriter:
    """Belongs to one runner."""

    def __init__(
        self,
        spec: WorkerSpec,
        source: Source,
        segments: Segments,
        cell: Cell,
        recorder: Recorder | NullRecorder,
        place: Place,
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
        self._writers: dict[tuple[int, int, int, int], RowWriter] = {}
        self._layouts_alive: dict[int, Layout] = {}
        self.held: dict[TaskId, Held] = {}
        self.began_ns = 0  # when the latest task did; its runner says so

    def memory(self, block: Block) -> mmap:
        """The segment that a block is in."""
        return self._segments.memory(block.segment)

    def forget_segment(self, number: int) -> None:
        """Drop every view into a segment that goes away."""
        for key in [key for key in self._writers if key[0] == number]:
            del self._writers[key]

    def take_held(self, task: TaskId) -> Held:
        """What waits for the place that has been found."""
        held = self.held.pop(task, None)
        if held is None:
            raise InternalError(f"task {task} was placed but is not held; this is a bug in infeed")
        return held

    def place(self, task: TaskId, held: Held, block: Block, layout: Layout | None, *, is_aside: bool = False) -> FromWorker:
        """Write what was held into the place it was given; ``is_aside``: while the runner is at something else."""
        is_part = held.packing is None and len(held.samples) != held.row_count
        if layout is not None and held.layout != layout and is_part:
            return Mismatched(task)
        try:
            answer = self._write_held(task, held, block, is_aside=is_aside)
            if not is_aside:
                self._recorder.end(0, perf_counter_ns())
            return answer
        except Exception as error:  # no memory, or an object of the user's that refuses
            return LoadFailed(task, Failure.of(error, "writing a batch"), held.shards_itself)

    def _write_held(self, task: TaskId, held: Held, block: Block, *, is_aside: bool = False) -> FromWorker:
        is_timed = not is_aside and self._recorder.is_fine
        if held.packing is not None:
            held.packing.write(self._segments.memory(block.segment), block.offset)
            if is_timed:
                self._recorder.written()
            return PackedLoaded(
                task, held.elapsed_ns, held.row_count, held.packing.packed, held.shards_itself, held.stream_state, held.bad
            )
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
        return RowsLoaded(
            task, held.elapsed_ns, len(held.samples), held.layout, beside, held.shards_itself, held.stream_state, held.bad
        )

    # --- rows

    def torch_layout(self, samples: list[Sample]) -> Layout | None:
        """The layout of the batch that torch's ``default_collate`` would make here; ``None``: let that function make it."""
        return torch_layout(samples, keeps_strides=self._keeps_strides)

    def writer(self, block: Block | None, layout: Layout | None, row_count: int) -> RowWriter | None:
        """What writes rows of this layout into this block; ``None`` if either is missing, or the block too small."""
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
            memory = self._segments.memory(block.segment)
            writer = RowWriter(layout, memory, block.offset, row_count, keeps_strides=self._keeps_strides)
            self._writers[key] = writer
            # Its id is in the key, so it must not be given to another object.
            self._layouts_alive[id(layout)] = layout
        return writer

    def write(self, message: LoadGrains | LoadNext, samples: list[Sample], row_count: int, first_row: int) -> RowsLoaded | None:
        """Write samples as they are expected, all together; ``None`` if they are not so."""
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
        """Find a layout for these samples; write them if they may go into this block now, else keep them."""
        try:
            layout = infer_layout(samples, indices) if self._source.torch_collate is None else self.torch_layout(samples)
        except CollateError as error:
            raise LoadError("collating samples", indices, None) from error
        if self._recorder.is_fine:
            self._recorder.collated()
        assert layout is not None
        _, nbytes = layout.offsets(row_count)
        held = Held(first_row, row_count, samples, layout, None)
        held.elapsed_ns = perf_counter_ns() - self.began_ns
        if block is None or block.size < nbytes:
            self.held[task] = held
            return Unplaced(task, nbytes, layout)
        return self._write_held(task, held, block)

    # --- anything else

    def pack(self, message: LoadGrains | LoadNext, samples: Any, row_count: int, indices: list[Any]) -> FromWorker:
        """Let the user make a batch of these samples, whatever it is; pack it into the block, or keep it.

        ``samples`` is a list, or whatever ``__getitems__`` of a torch loader's dataset returned.
        """
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
            finally:
                if self._recorder.is_fine:
                    self._recorder.collated()
        try:
            # To torch's users what is made in their own process is handed over as it is, with its graph and its identity.
            is_handed = self._spec.torch_seed is not None and self._spec.kind != "process"
            packing = Handed(tree) if is_handed else Packing(tree)
        except Exception as error:  # the user's objects may refuse in any way
            raise LoadError("sending the batch of", indices, None) from error
        if block is None or block.size < packing.nbytes:
            held = self.held[task] = Held(0, row_count, samples, None, packing)
            held.elapsed_ns = perf_counter_ns() - self.began_ns
            return Unplaced(task, packing.nbytes, None)
        packing.write(self._segments.memory(block.segment), block.offset)
        if self._recorder.is_fine:
            self._recorder.written()
        return PackedLoaded(task, perf_counter_ns() - self.began_ns, row_count, packing.packed)
