"""One worker's share of a stream, opened at its beginning or where it was left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.errors import StateError
from infeed.plan.batches import steps_of
from infeed.plan.shards import Cut
from infeed.workers.messages import OpenStream

# Whose state it is: the iterator's, which is put right after it was made, or the dataset's, before.
_ITERATOR: Final = "iterator"
_DATASET: Final = "dataset"
# A stream that raises this often without an element between is not going to give any.
STREAM_FAILURES: Final = 100


@final
@dataclass(slots=True)
class StreamShare:
    """The elements that are still to come, and where that is. Without arguments: one that has ended."""

    elements: Iterator[Any] = field(default_factory=lambda: iter(()))
    skipped: range = range(0)  # first elements of batches that are to be read and forgotten
    keeper: Any = None  # who can say where the stream is: its iterator, or the dataset
    keeper_name: str = _DATASET

    def state(self) -> dict[str, Any] | None:
        """Where the stream is, in its own words; ``None`` if it has none."""
        # A copy: user code may go on to change what it returned.
        return None if self.keeper is None else {self.keeper_name: copy.deepcopy(self.keeper.state_dict())}


def open_share(
    dataset: Any, cut: Cut, opened: OpenStream, batch_size: int, on_bad: Callable[[int, Exception], None] | None = None
) -> StreamShare:
    """Begin, or go on after ``opened.state_rows + opened.skip`` elements.

    A stream whose iterator, or which itself, has ``state_dict`` and ``load_state_dict`` is asked where it is after every batch,
    and put there again. Any other is read from its beginning, and what was had before is forgotten.
    """
    skipped = range(opened.state_rows, opened.state_rows + opened.skip, batch_size)
    whose, state = _unwrapped(dataset, opened.state)
    if whose == _DATASET:
        dataset.load_state_dict(state)
    stream = iter(dataset)
    if whose == _ITERATOR:
        stream.load_state_dict(state)
    if cut.shard.world_size > 1:
        # All ranks read all of the stream, a step at a time. It is ahead of what this rank has taken of it, so its state would
        # be that of another element: a shared stream is read again instead.
        return StreamShare(_of_rank(stream if on_bad is None else _Passing(stream, on_bad), cut), skipped)
    if _can_keep(stream):
        return StreamShare(stream, skipped, stream, _ITERATOR)
    return StreamShare(stream, skipped, dataset if _can_keep(dataset) else None, _DATASET)


def _unwrapped(dataset: Any, state: Any) -> tuple[str | None, Any]:
    if state is None:
        return None, None
    if isinstance(state, dict) and len(state) == 1:
        [(whose, content)] = state.items()
        if whose in (_ITERATOR, _DATASET):
            return whose, copy.deepcopy(content)
    raise StateError(f"the state of the stream {type(dataset).__qualname__} is not one that infeed's state_dict() made")


def _can_keep(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


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
