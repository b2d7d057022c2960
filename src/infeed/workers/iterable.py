"""Run tasks of iterable datasets: read the next elements of this worker's share and write them into the slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, final

from infeed.collate.tree import Sample
from infeed.plan.batches import next_only, steps_of
from infeed.plan.seeds import derive
from infeed.plan.sharding import Cut
from infeed.plan.stateful import Opened, check_parts
from infeed.workers.exceptions import Failure
from infeed.workers.fetch import Fetcher, LoadError
from infeed.workers.info import introduce, take_was_asked
from infeed.workers.protocol import (
    Emptied,
    FromWorker,
    LoadNext,
    Making,
    OpenStream,
    Source,
    StreamNote,
    WorkerSpec,
)
from infeed.workers.write import SlotWriter

# Give up on an iterable dataset that raises this often in a row without yielding an element.
_MOST_FAILURES: Final = 100


@final
class IterableLoader:
    """Runs ``LoadNext`` tasks for one runner."""

    def __init__(self, spec: WorkerSpec, source: Source, fetcher: Fetcher, slot_writer: SlotWriter) -> None:
        self._spec = spec
        self._source = source
        self._fetcher = fetcher
        self._slot_writer = slot_writer
        self._share: _Share | None = None
        self._opened: OpenStream | None = None
        self._is_known = True  # whether the number of reading workers is decided
        self._bad: list[tuple[int, Failure]] = []  # bad elements since the last answer
        self._doubt: Exception | None = None  # raised by a skipped element; if no element follows, the data is incomplete

    def open(self, message: OpenStream) -> None:
        """Set where the next task starts to read. No user code runs here, so that its exceptions belong to a task."""
        introduce(self._spec, self._source.dataset, 1 if message.is_alone else self._spec.worker_count)
        self._share = self._doubt = None
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
            share = self._share or self.begin()
            self._read(share, message.first_position, message.row_count, samples)
            doubt, self._doubt = self._doubt, None
            if doubt is not None and not samples:
                raise doubt
            state = share.state(is_ended=len(samples) < message.row_count)
        except Exception as error:
            self._share = self._share or _Share()  # opening failed: continue with an ended share
            failed = LoadError("reading the iterable dataset", f"element {message.first_position + len(samples)}", None)
            failed.add(StreamNote(self._take_was_asked()))
            raise failed from error
        note = StreamNote(self._take_was_asked(), state, tuple(self._bad))
        self._bad.clear()
        is_dropped = self._spec.cut.drop_last and len(samples) < message.row_count
        if not samples or is_dropped:
            return Emptied(message.task, note)
        try:
            return self._slot_writer.answer(self._write(message, samples), note)
        except LoadError as error:
            error.add(StreamNote(note.shards_itself))
            raise

    def begin(self) -> _Share:
        """Open this worker's share and skip the elements that were already delivered."""
        spec = self._spec
        batch_size = spec.cut.batch_size
        assert self._opened is not None
        self._fetcher.seed(derive(spec.share))
        on_bad = self._note_bad if spec.handles_bad_samples else None
        share = self._share = _open_share(self._source.dataset, spec.cut, self._opened, batch_size, on_bad)
        failures = 0
        # Read the skipped elements batch by batch, as in the first run, so that the random numbers match.
        for begin in share.skipped:
            wanted = min(batch_size, share.skipped.stop - begin)
            forgotten: list[Sample] = []
            try:
                self._read(share, begin, wanted, forgotten)
            except Exception as error:  # raised in place of this batch in the first run too; if not, the data may end here
                self._doubt = error
                failures += 1
                if failures > _MOST_FAILURES:
                    share.end()
                    raise
            else:
                failures = 0
                if len(forgotten) < wanted:
                    break  # fewer elements than in the first run
        self._bad.clear()  # already counted in the first run
        return share

    def _take_was_asked(self) -> bool:
        """Return whether the dataset called ``get_worker_info``. Its first batch decides whether other workers read too."""
        asked = take_was_asked()
        if not self._is_known:
            self._is_known = True
            if not asked:
                # No other worker will read: if the dataset asks later, it must not skip any elements.
                introduce(self._spec, self._source.dataset, 1)
        return asked

    def _read(self, share: _Share, position: int, count: int, samples: list[Sample]) -> None:
        """Append elements to ``samples``, each grain with its own seed, until there are ``count`` or the iterator ends."""
        fetcher, number = self._fetcher, self._spec.share
        note = fetcher.at_stream(derive(fetcher.epoch_seed, number), position, samples)
        times: list[int] = []
        before = 0 if note is None else note(position)
        while len(samples) < count:
            wanted = min(len(samples) + self._spec.grain_size, count)
            fetcher.seed(derive(position + len(samples), number))
            # Not extend(): elements read before an exception must be counted.
            for sample in islice(share.elements, wanted - len(samples)):
                samples.append(sample)
                if note is not None:
                    now = note(position + len(samples))
                    times.append(now - before)
                    before = now
            if len(samples) < wanted:
                share.end()
                break
        fetcher.record(position, range(position, position + len(samples)), times)

    def _note_bad(self, element: int, error: Exception) -> None:
        failure = Failure.of(error, "reading the iterable dataset", index=f"element {element}", position=element)
        self._bad.append((element, failure))

    def _write(self, message: LoadNext, samples: list[Sample]) -> FromWorker:
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


@final
@dataclass(slots=True)
class _Share:
    """The remaining elements of a worker's share and their state. Without arguments, a share that has ended."""

    elements: Iterator[Any] = field(default_factory=lambda: iter(()))
    skipped: range = range(0)  # first elements of the batches to read and drop
    opened: Opened | None = None  # gives the state of the dataset and of its iterator

    def end(self) -> None:
        """Drop the iterator after ``StopIteration``: another call of ``next`` might restart it."""
        self.elements = iter(())

    def state(self, *, is_ended: bool) -> dict[str, Any] | None:
        """Return the current state or, after the end, the state for the next epoch; ``None`` if nothing is stateful."""
        if self.opened is None:
            return None
        return self.opened.final_state() if is_ended else self.opened.state()


def _open_share(
    dataset: Any, cut: Cut, opened: OpenStream, batch_size: int, on_bad: Callable[[int, Exception], None] | None
) -> _Share:
    """Start a share, or resume it after ``opened.state_rows + opened.skip`` elements.

    If the dataset or its iterator has ``state_dict`` and ``load_state_dict``, its state is saved after every batch and
    restored on resume. Any other dataset is read from the start, and the elements already delivered are dropped.

    Args:
        on_bad: called with the number of each element that raises and is skipped; ``None`` raises the exception.
    """
    skipped = range(opened.state_rows, opened.state_rows + opened.skip, batch_size)
    if opened.state is not None:
        check_parts(opened.state, f"the dataset {type(dataset).__qualname__}")
    begun = Opened(dataset, opened.state, is_over=opened.is_over)
    if opened.is_over or begun.iterator is None:
        return _Share(opened=begun)
    is_beginning = opened.state is not None and not opened.state_rows
    iterator = begun.renewing() if is_beginning else begun.iterator
    elements = next_only(iterator) if on_bad is None else _Good(iterator, opened.state_rows, on_bad)
    if cut.shard.world_size > 1:
        # Every rank reads all elements, one step at a time. The iterator is ahead of this rank's elements, so its state would
        # belong to another element: a resume reads from the start instead.
        return _Share(_of_rank(elements, cut), skipped)
    return _Share(elements, skipped, begun)


@final
class _Good(Iterator[Any]):
    """Skips elements that raise. It runs below the generator that splits elements among ranks, which an exception would end."""

    def __init__(self, iterator: Iterator[Any], count: int, on_bad: Callable[[int, Exception], None]) -> None:
        self._iterator, self._count, self._on_bad = iterator, count, on_bad

    def __next__(self) -> Any:
        failures = 0
        while True:
            self._count += 1
            try:
                return next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                failures += 1
                if failures > _MOST_FAILURES:
                    raise
                self._on_bad(self._count - 1, error)


def _of_rank(elements: Iterator[Any], cut: Cut) -> Iterator[Any]:
    opening: list[Any] = []
    for step in steps_of(elements, cut):
        opening = opening or step[:1]
        first, last = cut.shard.part(len(step))
        yield from step[first:last]
        if cut.pad:
            yield from opening * cut.shard.padding(len(step))
