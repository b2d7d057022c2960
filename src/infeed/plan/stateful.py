"""Save and restore stateful user objects: datasets, samplers and their iterators. The protocol is torchdata's.

NOTE [order of restoring]
  As in torchdata: load the state of the dataset or sampler, call ``iter``, then load the state of the iterator.

  An iterator that has ended is not used again, but loading its state may change what it iterates (a sampler's generator). So if
  the object itself has no state, the final state of its iterator is loaded and dropped (``"finished"``). After that the next
  iterator is created.

  An object may interpret the state of an ended iteration in two ways. Either the next iteration begins there, or the iteration
  has nothing left (torchdata's ``StatefulDistributedSampler``). In the second case the next iterator yields nothing, and the
  one after it begins the next iteration. So an iterator that is created from such a state and yields nothing is created again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, final

from infeed.errors import StateError
from infeed.plan.batches import BatchPlan
from infeed.plan.state import Cursor

_SOURCE: Final = "source"
_ITERATOR: Final = "iterator"
_FINISHED: Final = "finished"
_PARTS: Final = frozenset({_SOURCE, _ITERATOR, _FINISHED})


def is_stateful(value: Any) -> bool:
    """Whether the object has ``state_dict()`` and ``load_state_dict(state)``.

    Methods with these names that require other arguments (litdata, MosaicML Streaming) belong to another protocol.
    """
    save = getattr(value, "state_dict", None)
    return save is not None and _takes(save, 0) and _takes(getattr(value, "load_state_dict", None), 1)


def _takes(method: Any, count: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # implemented in C, without a signature
        return True
    return True


def own_state(value: Any) -> Any:
    """Return a copy of the object's state, because user code may modify the returned object later."""
    return copy.deepcopy(value.state_dict())


def load_own_state(value: Any, state: Any) -> None:
    """Load a copy of the state into the object.

    Raises:
        StateError: the object has no ``load_state_dict(state)``.
    """
    if not is_stateful(value):
        name = type(value).__qualname__
        raise StateError(f"state contains a state for {name}, but {name} has no load_state_dict(state); implement it")
    value.load_state_dict(copy.deepcopy(state))


def source_state(source: Any) -> dict[str, Any] | None:
    """Return the state of a dataset or sampler that is not being iterated; ``None`` if it has none."""
    return {_SOURCE: own_state(source)} if is_stateful(source) else None


def restore(source: Any, state: Mapping[str, Any] | None) -> Iterator[Any] | None:
    """Load the states that precede ``iter(source)``, and return the ended iterator, if any.

    See NOTE [order of restoring].
    """
    if state is not None and _SOURCE in state:
        load_own_state(source, state[_SOURCE])
    if state is None or _FINISHED not in state:
        return None
    finished: Iterator[Any] = iter(source)
    load_own_state(finished, state[_FINISHED])
    return finished


def check_parts(state: Any, whose: str) -> None:
    """Check that ``Opened`` created this state.

    Raises:
        StateError: it did not.
    """
    if not isinstance(state, dict) or not state or not state.keys() <= _PARTS:
        raise StateError(f"state has an invalid state of {whose}; pass the result of state_dict()")


@final
class Opened:
    """An iteration over a dataset or sampler, from its beginning or from a state.

    Args:
        iterator: iterator of ``source``, if the caller has called ``restore`` and ``iter``.
        is_over: the state belongs to an ended iteration, so nothing is left to iterate.
    """

    def __init__(
        self, source: Any, state: Mapping[str, Any] | None, *, iterator: Iterator[Any] | None = None, is_over: bool = False
    ) -> None:
        self._source = source
        self.iterator = iterator
        if iterator is None:
            finished = restore(source, state)
            self.iterator = finished if is_over else iter(source)
        if is_over and state is not None and _SOURCE in state:
            self._settle(state[_SOURCE])
        if state is not None and _ITERATOR in state and not is_over:
            load_own_state(self.iterator, state[_ITERATOR])
        self._keeps_source = self.iterator is not source and is_stateful(source)
        self._keeps_iterator = is_stateful(self.iterator)

    def _settle(self, state: Any) -> None:
        """Consume the empty iteration if the source interprets its state that way; otherwise reload the state."""
        try:
            next(iter(self._source))
        except StopIteration:
            return
        except Exception:
            pass  # the next epoch will raise it
        load_own_state(self._source, state)

    def renewing(self, again: Callable[[], Iterator[Any]] | None = None) -> Iterator[Any]:
        """Return the iterator; if it yields nothing, it continues with ``again()``."""
        return _Renewing(self, again or partial(iter, self._source))

    @property
    def keeps_iterator(self) -> bool:
        return self._keeps_iterator

    @property
    def is_stateful(self) -> bool:
        return self._keeps_source or self._keeps_iterator

    def state(self) -> dict[str, Any] | None:
        """Return the state of the iteration; ``None`` if neither object has a state."""
        parts = {}
        if self._keeps_source:
            parts[_SOURCE] = own_state(self._source)
        if self._keeps_iterator:
            parts[_ITERATOR] = own_state(self.iterator)
        return parts or None

    def final_state(self) -> dict[str, Any] | None:
        """Return the state from which the next iteration begins, after this one has ended."""
        if self._keeps_source or (self._keeps_iterator and self.iterator is self._source):
            return {_SOURCE: own_state(self._source)}
        return {_FINISHED: own_state(self.iterator)} if self._keeps_iterator else None


@final
class _Renewing(Iterator[Any]):
    def __init__(self, opened: Opened, again: Callable[[], Iterator[Any]]) -> None:
        self._opened, self._again = opened, again
        self._has_begun = False

    def __next__(self) -> Any:
        opened = self._opened
        assert opened.iterator is not None
        if self._has_begun:
            return next(opened.iterator)
        self._has_begun = True
        try:
            return next(opened.iterator)
        except StopIteration:
            opened.iterator = self._again()
            return next(opened.iterator)


@final
class SamplerReader:
    """Reads a sampler for one epoch, starting from a state, and stores the sampler's state after each batch.

    Iterating it yields the sampler's elements from the state on; the first ``skip`` of them were delivered before.

    Args:
        record: the result of ``state`` for the first batch.
        readings: tracks this reader if it tracks its epoch.
        iterator: iterator of the sampler, if the caller has called ``restore`` and ``iter``. Then ``before`` is the sampler's
            ``source_state``, and ``again`` creates another iterator.
        is_kept: whether a state can be saved after every batch. If not, the epoch is read again from its beginning.
        full_size: size of all batches but the last; a smaller batch has exhausted the sampler.
    """

    def __init__(
        self,
        sampler: Any,
        cursor: Cursor,
        record: Mapping[str, Any] | None,
        readings: SamplerStates,
        *,
        iterator: Iterator[Any] | None = None,
        before: dict[str, Any] | None = None,
        again: Callable[[], Iterator[Any]] | None = None,
        is_kept: bool = True,
        full_size: int | None = None,
    ) -> None:
        self._sampler, self._cursor = sampler, cursor
        self._record = record
        self._shift = 0 if self._record is None else int(self._record["position"])
        self._iterator, self._before, self._again = iterator, before, again
        self._is_kept, self._full_size = is_kept, full_size
        self._step = cursor.step
        self._first: dict[str, Any] | None = None
        self._states: dict[int, dict[str, Any]] = {}
        self._opened: Opened | None = None
        self._reached = readings.follow(cursor, self)

    @property
    def skip(self) -> int:
        return self._cursor.position - self._shift

    def __iter__(self) -> Iterator[Any]:
        record = self._record or {}
        is_over = bool(record.get("ended"))
        before = source_state(self._sampler) if self._iterator is None and self._record is None else self._before
        opened = self._opened = Opened(self._sampler, record.get("state"), iterator=self._iterator, is_over=is_over)
        if self._record is not None:
            self._first = dict(self._record)
        elif opened.is_stateful:
            # Use the sampler's state from before `iter`, which may have changed it and will do so again.
            self._first = {"state": {**(opened.state() or {}), **(before or {})}, "position": 0}
        if is_over or opened.iterator is None:
            return iter(())
        if self._record is not None and not self._cursor.position:
            return opened.renewing(self._again)
        return opened.iterator

    def watched(self, batches: Iterator[BatchPlan | Exception]) -> Iterator[BatchPlan | Exception]:
        """Return the batches with their positions in the epoch, storing the sampler's state after each."""
        return map(self._watch, batches)  # not a generator, which would end at the first exception

    def _watch(self, plan: BatchPlan | Exception) -> BatchPlan | Exception:
        if isinstance(plan, Exception):
            return plan
        indices, first_position, stop, _ = plan
        self._step += 1
        opened = self._opened
        if opened is not None and opened.is_stateful and (self._is_kept or opened.keeps_iterator):
            is_ended = self._full_size is not None and len(indices) < self._full_size
            self._keep(self._step, stop + self._shift, is_ended=is_ended)
        return BatchPlan(indices, first_position + self._shift, stop + self._shift)

    def _keep(self, step: int, position: int, *, is_ended: bool) -> None:
        assert self._opened is not None
        reached = self._reached()
        for old in [kept for kept in self._states if kept < reached]:
            del self._states[old]
        if is_ended:
            self._states[step] = {"state": self._opened.final_state(), "position": position, "ended": True}
        else:
            self._states[step] = {"state": self._opened.state(), "position": position}

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the sampler's state after the batches before ``step``; ``None`` if it has none."""
        return self._states.get(step, self._first)

    def final_state(self) -> dict[str, Any] | None:
        """Return the sampler's state after the epoch."""
        state = None if self._opened is None else self._opened.final_state()
        return None if state is None else {"state": state, "position": 0}


@final
class SamplerStates:
    """Tracks the ``SamplerReader`` of the latest epoch, to return the states of the loader's sampler."""

    def __init__(self) -> None:
        self._start: Cursor | None = None
        self._reached: Callable[[], int] = int
        self._reading: SamplerReader | None = None

    def begin(self, start: Cursor, reached: Callable[[], int]) -> None:
        """Track the epoch that begins at ``start``; ``reached`` returns the next step of the training loop."""
        self._start, self._reached = start, reached

    def are_of(self, start: Cursor) -> bool:
        """Whether the tracked epoch began at ``start``."""
        return start is self._start

    def follow(self, cursor: Cursor, reading: SamplerReader) -> Callable[[], int]:
        """Register the reader of an epoch, if it is the tracked one. The reader drops states older than the returned step."""
        if cursor is not self._start:
            return int  # 0: keep all
        self._reading = reading
        return self._reached

    def state(self, sampler: Any, cursor: Cursor, start: Cursor | None) -> dict[str, Any] | None:
        """Return the sampler's state at ``cursor``, in the epoch that began at ``start`` or between epochs (``None``)."""
        reading = self._reading
        if start is not None:
            return reading.state(cursor.step) if reading is not None and start is self._start else start.sampler
        if cursor.sampler is not None:
            record: dict[str, Any] = cursor.sampler
            return record
        state = source_state(sampler)
        if state is not None:
            return {"state": state, "position": 0}
        return None if reading is None else reading.final_state()


def check_reading(record: Any, cursor: Cursor, sampler: Any) -> dict[str, Any] | None:
    """Validate a value that ``SamplerStates.state`` returned.

    Raises:
        StateError: the value is invalid, or the loader has no sampler.
    """
    if record is None:
        return None
    if not isinstance(record, dict) or not record.keys() <= {"state", "position", "ended"}:
        raise StateError("state has an invalid sampler; pass the result of state_dict()")
    check_parts(record.get("state"), "the sampler")
    if sampler is None:
        raise StateError("state has a sampler, but this loader has none; pass the same sampler")
    position = record.get("position")
    if type(position) is not int or not 0 <= position <= cursor.position or type(record.get("ended", False)) is not bool:
        raise StateError("state has a sampler position outside the epoch; pass the result of state_dict()")
    return record
