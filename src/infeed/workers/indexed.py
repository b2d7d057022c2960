"""Run tasks of map-style datasets: load grains, or gather rows from in-memory arrays, and write them into the slot.

Loading rows with an expected layout has three outcomes:

* The rows fit. The worker writes them in chunks while it loads, and keeps no samples.
* They do not fit, and the task is the whole batch. The worker infers a layout from all samples, or raises an error that names
  two samples that do not stack.
* They do not fit, and other workers load parts of the batch. The worker answers ``Mismatched``, and the scheduler assigns the
  whole batch to one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, final

from infeed.collate.rows import RowMismatch
from infeed.collate.tree import Sample
from infeed.memory.arena import Block
from infeed.plan.order import plain_indices
from infeed.scheduler.messages import TaskId
from infeed.workers.exceptions import Failure
from infeed.workers.fetch import Fetcher
from infeed.workers.protocol import (
    FromWorker,
    LoadFailed,
    LoadGrains,
    Making,
    Mismatched,
    RowsLoaded,
    Seeding,
    Source,
    Unplaced,
    WorkerSpec,
)
from infeed.workers.recorder import NullRecorder, Recorder
from infeed.workers.write import Held, SlotWriter


@final
class IndexedLoader:
    """Runs ``LoadGrains`` tasks for one runner."""

    def __init__(
        self, spec: WorkerSpec, source: Source, recorder: Recorder | NullRecorder, fetcher: Fetcher, slot_writer: SlotWriter
    ) -> None:
        self._spec = spec
        self._source = source
        self._recorder = recorder
        self._fetcher = fetcher
        self._slot_writer = slot_writer
        # Runs a task; raises LoadError if user code raises.
        self.load: Callable[[LoadGrains], FromWorker] = {Making.GATHERED: self._gather, Making.ROWS: self._load_rows}.get(
            source.making, self._load_packed
        )

    # --- samples

    def _load_packed(self, message: LoadGrains) -> FromWorker:
        samples = self._fetcher.grains(message)
        return self._slot_writer.pack(message, samples, message.row_count, plain_indices(message.indices))

    def _load_rows(self, message: LoadGrains) -> FromWorker:
        slot_writer = self._slot_writer
        is_torch = self._source.torch_collate is not None
        if is_torch and (self._fetcher.is_together or not len(message.indices)):
            # Like torch, collate whatever __getitems__ returns, and also an empty batch.
            samples = self._fetcher.grains(message)
            if type(samples) is not list or len(samples) != message.row_count or not samples:
                return slot_writer.pack(message, samples, message.row_count, plain_indices(message.indices))
            written = slot_writer.write(message, samples, message.row_count, message.first_row)
            return self._place_fetched(message, samples) if written is None else written
        writer = slot_writer.writer(message.block, message.layout, message.row_count)
        if self._recorder.is_fine:
            self._recorder.written()  # mapping a new segment may take as long as writing into it
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
                if self._recorder.is_fine:
                    self._recorder.written()
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
            self._slot_writer.held[message.task] = Held(0, message.row_count, message.indices, table.layout, None)
            return Unplaced(message.task, nbytes, table.layout)
        return self.gather_into(message.task, message.indices, message.block, message.row_count)

    def gather_into(self, task: TaskId, indices: Any, block: Block, row_count: int) -> FromWorker:
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
