"""One worker's share of a stream, opened at its beginning or where it was left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.plan.batches import next_only, steps_of
from infeed.plan.shards import Cut
from infeed.plan.stateful import Opened, check_parts
from infeed.workers.protocol import OpenStream

# A stream that raises this often without an element between is not going to give any.
STREAM_FAILURES: Final = 100


@final
@dataclass(slots=True)
class StreamShare:
    """The elements that are still to come, and where that is. Without arguments: one that has ended."""

    elements: Iterator[Any] = field(default_factory=lambda: iter(()))
    skipped: range = range(0)  # first elements of batches that are to be read and forgotten
    opened: Opened | None = None  # knows the states of the dataset and of its iterator
    doubt: Exception | None = None  # raised by what was read and forgotten; if nothing follows it, the stream is incomplete

    def end(self) -> None:
        """The stream has raised ``StopIteration``. It is not asked again: it might begin anew."""
        self.elements = iter(())

    def state(self, *, is_ended: bool) -> dict[str, Any] | None:
        """Where the stream is, or if it has ended, what the next epoch begins from; ``None`` if nothing has a state."""
        if self.opened is None:
            return None
        return self.opened.final_state() if is_ended else self.opened.state()


def open_share(
    dataset: Any, cut: Cut, opened: OpenStream, batch_size: int, on_bad: Callable[[int, Exception], None] | None = None
) -> StreamShare:
    """Begin, or go on after ``opened.state_rows + opened.skip`` elements.

    A stream whose iterator, or which itself, has ``state_dict`` and ``load_state_dict`` is asked where it is after every batch,
    and put there again. Any other is read from its beginning, and what was had before is forgotten.
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
        # All ranks read all of the stream, a step at a time. It is ahead of what this rank has taken of it, so its state would
        # be that of another element: a shared stream is read again instead.
        elements = next_only(stream) if on_bad is None else _Passing(stream, on_bad)
        return StreamShare(_of_rank(elements, cut), skipped)
    return StreamShare(next_only(stream), skipped, begun)


@final
class _Passing(Iterator[Any]):
    """A stream without the elements that raise: below what shares it out, which would end with the first of them."""

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
