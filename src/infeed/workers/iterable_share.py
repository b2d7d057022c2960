"""One worker's share of an iterable dataset, opened at the start or at a saved position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.plan.batches import next_only, steps_of
from infeed.plan.shards import Cut
from infeed.plan.stateful import Opened, check_parts
from infeed.workers.protocol import OpenStream

# Give up on an iterable dataset that raises this often in a row without yielding an element.
STREAM_FAILURES: Final = 100


@final
@dataclass(slots=True)
class StreamShare:
    """The remaining elements and their state. Without arguments, a share that has ended."""

    elements: Iterator[Any] = field(default_factory=lambda: iter(()))
    skipped: range = range(0)  # first elements of the batches to read and drop
    opened: Opened | None = None  # gives the state of the dataset and of its iterator
    doubt: Exception | None = None  # raised by a skipped element; if no element follows, the data is incomplete

    def end(self) -> None:
        """Drop the iterator after ``StopIteration``: another call of ``next`` might restart it."""
        self.elements = iter(())

    def state(self, *, is_ended: bool) -> dict[str, Any] | None:
        """Return the current state or, after the end, the state for the next epoch; ``None`` if nothing is stateful."""
        if self.opened is None:
            return None
        return self.opened.final_state() if is_ended else self.opened.state()


def open_share(
    dataset: Any, cut: Cut, opened: OpenStream, batch_size: int, on_bad: Callable[[int, Exception], None] | None = None
) -> StreamShare:
    """Start a share, or resume it after ``opened.state_rows + opened.skip`` elements.

    If the dataset or its iterator has ``state_dict`` and ``load_state_dict``, its state is saved after every batch and
    restored on resume. Any other dataset is read from the start, and the elements already delivered are dropped.
    """
    skipped = range(opened.state_rows, opened.state_rows + opened.skip, batch_size)
    if opened.state is not None:
        check_parts(opened.state, f"the dataset {type(dataset).__qualname__}")
    begun = Opened(dataset, opened.state, is_over=opened.is_over)
    if opened.is_over or begun.iterator is None:
        return StreamShare(opened=begun)
    is_beginning = opened.state is not None and not opened.state_rows
    stream = begun.renewing() if is_beginning else begun.iterator
    if cut.shard.world_size > 1:
        # Every rank reads all elements, one step at a time. The iterator is ahead of this rank's elements, so its state would
        # belong to another element: a resume reads from the start instead.
        elements = next_only(stream) if on_bad is None else _Passing(stream, on_bad)
        return StreamShare(_of_rank(elements, cut), skipped)
    return StreamShare(next_only(stream), skipped, begun)


@final
class _Passing(Iterator[Any]):
    """Skips elements that raise. It runs below the generator that splits elements among ranks, which an exception would end."""

    def __init__(self, stream: Iterator[Any], on_bad: Callable[[int, Exception], None]) -> None:
        self._stream, self._on_bad = stream, on_bad
        self._count = 0

    def __next__(self) -> Any:
        failures = 0
        while True:
            self._count += 1
            try:
                return next(self._stream)
            except StopIteration:
                raise
            except Exception as error:
                failures += 1
                if failures > STREAM_FAILURES:
                    raise
                self._on_bad(self._count - 1, error)


def _of_rank(stream: Iterator[Any], cut: Cut) -> Iterator[Any]:
    opening: list[Any] = []
    for step in steps_of(stream, cut):
        opening = opening or step[:1]
        first, last = cut.shard.part(len(step))
        yield from step[first:last]
        if cut.pad:
            yield from opening * cut.shard.padding(len(step))
