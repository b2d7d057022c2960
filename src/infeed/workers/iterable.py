"""Run tasks of iterable datasets: read the next elements of this worker's share and write them into the slot."""

from __future__ import annotations

from typing import final

from infeed.collate.tree import Sample
from infeed.plan.seeds import derive
from infeed.workers.fetch import Fetcher, LoadError
from infeed.workers.info import introduce, take_was_asked
from infeed.workers.iterable_share import STREAM_FAILURES, StreamShare, open_share
from infeed.workers.protocol import Emptied, FromWorker, LoadNext, OpenStream, PackedLoaded, RowsLoaded
from infeed.workers.spec import Making, Source, WorkerSpec
from infeed.workers.write import SlotWriter


@final
class StreamLoader:
    """Runs ``LoadNext`` tasks for one runner."""

    def __init__(self, spec: WorkerSpec, source: Source, fetcher: Fetcher, slot_writer: SlotWriter) -> None:
        self._spec = spec
        self._source = source
        self._fetcher = fetcher
        self._slot_writer = slot_writer
        self._share: StreamShare | None = None
        self._opened: OpenStream | None = None
        self._is_known = True  # whether the number of reading workers is decided

    def open(self, message: OpenStream) -> None:
        """Set where the next task starts to read. No user code runs here, so that its exceptions belong to a task."""
        introduce(self._spec, self._source.dataset, 1 if message.is_alone else self._spec.worker_count)
        self._share = None
        self._opened = message
        self._is_known = message.is_known
        take_was_asked()

    def load(self, message: LoadNext) -> FromWorker:
        """Run a task.

        Raises:
            LoadError: user code raised.
        """
        samples: list[Sample] = []
        try:
            share = self.begin() if self._share is None else self._share
            self._fetcher.read(share, message.first_position, message.row_count, samples)
            doubt, share.doubt = share.doubt, None
            if doubt is not None and not samples:
                raise doubt
            state = share.state(is_ended=len(samples) < message.row_count)
        except Exception as error:
            if self._share is None:
                self._share = StreamShare()  # opening failed: continue with an ended share
            failed = LoadError("reading the stream", f"element {message.first_position + len(samples)}", None)
            failed.shards_itself = self._take_was_asked()
            raise failed from error
        asked = self._take_was_asked()
        bad = self._fetcher.take_bad_elements()
        is_dropped = self._spec.cut.drop_last and len(samples) < message.row_count
        if not samples or is_dropped:
            return Emptied(message.task, asked, bad, state)
        try:
            answer = self._fill(message, samples)
        except LoadError as error:
            error.shards_itself = asked
            raise
        if isinstance(answer, RowsLoaded | PackedLoaded):
            return answer._replace(shards_itself=asked, stream_state=state, bad=bad)
        held = self._slot_writer.held.get(message.task)
        if held is not None:
            held.shards_itself, held.stream_state, held.bad = asked, state, bad
        return answer

    def _take_was_asked(self) -> bool:
        """Return whether the dataset called ``get_worker_info``. Its first batch decides whether other workers read too."""
        asked = take_was_asked()
        if not self._is_known:
            self._is_known = True
            if not asked:
                # No other worker will read: if the dataset asks later, it must not skip any elements.
                introduce(self._spec, self._source.dataset, 1)
        return asked

    def begin(self) -> StreamShare:
        """Open this worker's share and skip the elements that were already delivered."""
        spec, fetcher = self._spec, self._fetcher
        batch_size = spec.cut.batch_size
        assert self._opened is not None
        fetcher.seed(derive(spec.share))
        on_bad = fetcher.note_bad if spec.handles_bad_samples else None
        share = self._share = open_share(self._source.dataset, spec.cut, self._opened, batch_size, on_bad)
        failures = 0
        # Read the skipped elements batch by batch, as in the first run, so that the random numbers match.
        for begin in share.skipped:
            wanted = min(batch_size, share.skipped.stop - begin)
            forgotten: list[Sample] = []
            try:
                fetcher.read(share, begin, wanted, forgotten)
            except Exception as error:  # raised in place of this batch in the first run too; if not, the data may end here
                share.doubt = error
                failures += 1
                if failures > STREAM_FAILURES:
                    share.end()
                    raise
            else:
                failures = 0
                if len(forgotten) < wanted:
                    break  # fewer elements than in the first run
        fetcher.take_bad_elements()  # already counted in the first run
        return share

    def _fill(self, message: LoadNext, samples: list[Sample]) -> FromWorker:
        slot_writer = self._slot_writer
        is_rows = self._source.making is Making.ROWS
        if is_rows:
            written = slot_writer.write(message, samples, len(samples), 0)
            if written is not None:
                return written
        indices = list(range(message.first_position, message.first_position + len(samples)))
        if not is_rows or (self._source.torch_collate is not None and slot_writer.torch_layout(samples) is None):
            return slot_writer.pack(message, samples, len(samples), indices)
        return slot_writer.write_or_hold(message.task, samples, indices, message.block, len(samples), first_row=0)
