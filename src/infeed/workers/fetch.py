"""Fetch samples from the dataset: seed each grain, retry on errors, and record progress on the status board.

If a sample raises, the worker retries its whole grain, because the samples of a grain draw from one sequence of random numbers.
The result is bit for bit the same as without the failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import getitem, length_hint
from time import perf_counter_ns
from types import FunctionType, MethodType
from typing import Any, Final, final

from infeed.collate.tree import Sample
from infeed.errors import InternalError
from infeed.plan.batches import GivenIndices
from infeed.plan.order import plain_indices
from infeed.plan.seeds import derive, mix
from infeed.workers.exceptions import Failure
from infeed.workers.protocol import LoadGrains, Making, Seeding, Source, StreamNote, WorkerSpec
from infeed.workers.recorder import Recorder
from infeed.workers.rng import EpochPosition, seed_generators
from infeed.workers.status import Cell

# Samples slower than this are recorded individually. Recording costs 0.2 µs, which is significant for tiny samples.
_NOTED_NS: Final = 20_000


class LoadError(Exception):
    """Raised when user code raises; ``__cause__`` is the original exception. Internal."""

    def __init__(self, doing: str, index: Any, position: int | None) -> None:
        super().__init__(doing, index, position)
        self.doing, self.index, self.position = doing, index, position
        self.stream: StreamNote | None = None
        self.bad: tuple[tuple[int, Failure], ...] = ()  # rows of the task that cannot be loaded, if bad samples are handled

    def add(self, stream: StreamNote | None = None, bad: tuple[tuple[int, Failure], ...] = ()) -> None:
        """Add what else to report with the exception."""
        self.stream, self.bad = stream, bad

    def failure(self) -> Failure:
        cause = self.__cause__
        assert cause is not None
        return Failure.of(cause, self.doing, index=self.index, position=self.position)


@final
class Fetcher:
    """Calls the dataset for one runner."""

    def __init__(self, spec: WorkerSpec, source: Source, place: EpochPosition, cell: Cell, recorder: Recorder) -> None:
        self._spec = spec
        self._source = source
        self._place = place
        self._cell = cell
        self._recorder = recorder
        self._get: Callable[[Any], Sample] = _not_indexed if source.is_stream else _getter(source.dataset)
        self.is_together = source.is_batched and source.making is not Making.SINGLE
        # Like torch, pass the result of __getitems__ to the collate function unchanged: it need not be a list.
        self.is_passed_on = self.is_together and spec.torch_seed is not None
        self._fetch: Callable[[list[Any], int], Any] = self._fetch_together if self.is_together else self._fetch_singly
        self._is_forgiving = spec.retries > 0 or spec.handles_bad_samples
        self.epoch_seed = 0  # of the epoch of the latest task
        self._batch_position = 0
        # The sample time is unknown before the first task, so record its samples individually.
        self._row_ns = _NOTED_NS + 1
        self._is_noting = True

    def begin_epoch(self, epoch: int) -> None:
        self.epoch_seed = derive(self._spec.seed, epoch)

    def seed(self, place: int) -> None:
        """Seed the grain that starts at ``place`` with ``derive(seed, epoch, place)``; ``epoch_seed`` caches the epoch part."""
        if self._spec.seeding is not Seeding.LEAVE:
            seed_generators(mix(self.epoch_seed ^ place))

    def at_stream(self, key: int, position: int, samples: list[Sample]) -> Callable[[int], int] | None:
        """Begin to read elements of an iterable dataset from ``position`` on, which the caller appends to ``samples``.

        Returns:
            A function to call before each element with its position; it returns the time. ``None`` if samples are tiny.
        """
        self._place.at_stream(key, position, samples)
        return self._cell.at if self._spec.is_watched or self._row_ns > _NOTED_NS else None

    def record(self, position: int, indices: Sequence[Any], times: list[int] | None = None) -> None:
        """Record that the dataset has returned these samples."""
        if self._recorder.is_fine:
            self._recorder.loaded(position, indices, times)

    def learn(self, elapsed_ns: int, row_count: int) -> None:
        """Update the time per sample from a finished task."""
        self._row_ns = elapsed_ns // max(1, row_count)

    # --- indexed datasets

    def chunks(self, message: LoadGrains, chunk_rows: int) -> Iterator[list[Sample]]:
        """Yield the samples of a task in order, about ``chunk_rows`` at a time, each grain with its own seed."""
        indices, position = self._begin(message)
        grain_size = self._spec.grain_size
        if self._is_forgiving:
            for begin in range(0, len(indices), grain_size):
                yield self._fetch_forgiving(indices, begin, min(begin + grain_size, len(indices)), position)
            return
        # __getitems__ is called once per grain, whatever the chunk size of the writer is.
        fetch_rows = grain_size if self.is_together else chunk_rows
        chunk: list[Sample] = []
        for begin in range(0, len(indices), grain_size):
            self.seed(position + begin)
            stop = min(begin + grain_size, len(indices))
            for start in range(begin, stop, fetch_rows):
                chunk += self._fetch(indices[start : min(start + fetch_rows, stop)], position + start)
                if len(chunk) >= chunk_rows:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk

    def grains(self, message: LoadGrains) -> Any:
        """Return a list of all samples of a task; if ``is_passed_on``, the unchanged result of ``__getitems__``."""
        if self.is_passed_on:
            indices, position = self._begin(message)
            return self._fetch_forgiving(indices, 0, len(indices), position)
        return [sample for chunk in self.chunks(message, len(message.indices)) for sample in chunk]

    def _begin(self, message: LoadGrains) -> tuple[list[Any], int]:
        """Return the indices of a task and the position of the first one."""
        position = message.first_position + message.first_row
        self._batch_position = message.first_position
        self._place.begin(None if message.rows is None else (position, message.first_position, message.rows))
        self._is_noting = message.is_careful or self._spec.is_watched or self._row_ns > _NOTED_NS
        return plain_indices(message.indices), position

    def _fetch_singly(self, indices: list[Any], position: int) -> list[Sample]:
        # map() runs in C; after an exception, the length hint of the iterator gives the failing row.
        rest = iter(indices)
        self._place.at_rows(self.epoch_seed, position, len(indices), rest)
        times: list[int] | None = None
        try:
            if self._is_noting:
                times = []
                samples = self._noted(rest, position, times)
            else:
                self._cell.among(position - self._batch_position, len(indices))
                samples = list(map(self._get, rest))
            if len(samples) != len(indices):
                raise RuntimeError("the dataset raised StopIteration")
        except Exception as error:
            row = len(indices) - length_hint(rest) - 1
            if self._recorder.is_fine:  # count the time of the failing sample too
                self._recorder.loaded(position, indices[: row + 1], times)
            raise LoadError("loading sample", indices[row], position + row) from error
        if self._recorder.is_fine:
            self._recorder.loaded(position, indices, times)
        return samples

    def _noted(self, rest: Iterator[Any], position: int, times: list[int]) -> list[Sample]:
        note, get, noted = self._cell.at, self._get, times.append
        samples: list[Sample] = []
        row = position - self._batch_position
        before = 0
        try:
            for index in rest:
                now = note(row)
                if samples:
                    noted(now - before)
                before = now
                row += 1
                samples.append(get(index))
        except StopIteration:
            pass  # map() treats StopIteration the same way
        finally:
            noted(perf_counter_ns() - before)
        return samples

    def _fetch_together(self, indices: list[Any], position: int) -> Any:
        self._place.at_rows(self.epoch_seed, position, len(indices), None)
        try:
            samples = self._source.dataset.__getitems__(indices.given if isinstance(indices, GivenIndices) else indices)
            if not self.is_passed_on and len(samples := list(samples)) != len(indices):
                raise RuntimeError(f"__getitems__ returned {len(samples)} samples for {len(indices)} indices")
        except Exception as error:
            raise LoadError("loading samples", indices, position) from error
        if self._recorder.is_fine:
            self._recorder.loaded(position, indices)
        return samples

    def _fetch_forgiving(self, indices: list[Any], begin: int, stop: int, position: int) -> Any:
        """Fetch one grain of a task. If a sample raises, retry the grain until one sample exceeds ``retries``."""
        tries: Counter[int | None] = Counter()
        while True:
            self.seed(position + begin)
            try:
                return self._fetch(indices[begin:stop], position + begin)
            except LoadError as error:
                tries[error.position] += 1
                if tries[error.position] <= self._spec.retries:
                    self._recorder.retried()
                    continue
                if self._spec.handles_bad_samples:
                    error.add(bad=self._bad_rows(error, indices, begin, position))
                raise

    def _bad_rows(self, error: LoadError, indices: list[Any], begin: int, position: int) -> tuple[tuple[int, Failure], ...]:
        """Return all rows of the task, from this grain on, that fail to load, so that the batch is repaired only once."""
        first = position - self._batch_position
        bad: list[tuple[int, Failure]] = []
        known = None
        if not self.is_together and error.position is not None:
            known = error.position - position
            bad.append((first + known, error.failure()))
        for row in range(begin if known is None else known + 1, len(indices)):
            failure = self._try_alone(indices[row], position + row)
            if failure is not None:
                bad.append((first + row, failure))
        return tuple(bad)

    def _try_alone(self, index: Any, position: int) -> Failure | None:
        for attempt in range(self._spec.retries + 1):
            if attempt:
                self._recorder.retried()
            self.seed(position)
            try:
                self._alone(index, position)
            except LoadError as error:
                failure = error.failure()
            else:
                return None
        return failure

    def _alone(self, index: Any, position: int) -> None:
        if not self.is_together:
            self._fetch_singly([index], position)
            return
        try:
            self._fetch_together([index], position)
        except LoadError as error:
            raise LoadError("loading sample", index, position) from error.__cause__


def _getter(dataset: Any) -> Callable[[Any], Sample]:
    """Return ``dataset[index]`` as a function. Binding a plain ``__getitem__`` once saves one call per sample."""
    found = next((vars(cls)["__getitem__"] for cls in type(dataset).__mro__ if "__getitem__" in vars(cls)), None)
    return MethodType(found, dataset) if isinstance(found, FunctionType) else partial(getitem, dataset)


def _not_indexed(_index: Any) -> Sample:
    raise InternalError("an iterable dataset has no indices; this is a bug in infeed, please report it")
