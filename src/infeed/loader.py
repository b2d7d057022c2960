"""``DataLoader``: from arguments to an engine, and from an engine to the user's loop."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Final, final

from infeed.assembly import build_engine, dataset_length
from infeed.config import LoaderConfig, StartMethod, WorkerKind
from infeed.engine import Engine, EpochEnd
from infeed.errors import LoaderClosedError
from infeed.plan.batches import batch_count

_MSG_CLOSED: Final = "this loader is closed; make another, or do not close the one you iterate"


@final
class DataLoader:
    """Loads a dataset in batches, in parallel, in the same order and with the same contents whatever the workers.

    Iterating gives one epoch; the next iteration gives the next. Workers start with the first epoch and stay until ``close``,
    the end of a ``with`` block, or the end of the loader. No ``if __name__ == "__main__"`` is needed.

    Samples are trees of dicts, lists, tuples, named tuples and dataclasses. Arrays, tensors and numbers in them are stacked,
    all else becomes lists. A batch belongs to the caller for as long as anything looks into it.

    Args:
        dataset: has ``__getitem__`` and ``__len__`` (and ``__getitems__``, if it can load several at once), or ``__iter__`` for
            a stream. NumPy arrays, and tuples and dicts of arrays of one length, are datasets whose rows are samples.
        batch_size: samples in a batch; ``None`` yields single samples as they are.
        shuffle: a new order every epoch, from ``seed``.
        sampler: yields indices, in the order in which they are to come.
        batch_sampler: yields lists of indices, a batch each.
        num_workers: how many load at the same time; 0 loads in this process, when asked.
        worker: what a worker is: ``"process"``; ``"thread"`` for datasets that leave the GIL; ``"inline"`` for none.
        collate_fn: makes a batch of a list of samples, in the worker. By default arrays are stacked.
        drop_last: leave out a last batch that is not full.
        seed: of the order and of all random numbers in the dataset; ``None`` draws one, shown in ``repr``.
        in_order: ``False`` gives batches as they are ready.
        prefetch: how many batches may be in flight. By default enough to keep workers busy, within ``memory_limit``.
        timeout: seconds to wait for a batch before ``LoadTimeoutError``; 0 waits for as long as workers live.
        worker_init_fn: called with the worker's number in each worker when it starts.
        memory_limit: bytes, or text such as ``"2GiB"``: the most that batches in flight and batches kept may take together.
            By default half of what is free when the loader starts.
        grain_size: samples that share one seed and are loaded by one worker; by default a fourth of a batch. With 1, what is
            random about a sample does not depend on the batch size.
        start_method: how processes are made: ``"forkserver"`` from a clean process of our own, ``"spawn"`` each afresh,
            ``"auto"`` the first where it is safe.

    Raises:
        ConfigError: arguments that cannot work.
    """

    __module__ = "infeed"

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        num_workers: int = 0,
        worker: WorkerKind = "process",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        in_order: bool = True,
        prefetch: int | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        memory_limit: int | str | None = None,
        grain_size: int | None = None,
        start_method: StartMethod = "auto",
    ) -> None:
        self._config = LoaderConfig(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            worker=worker,
            collate_fn=collate_fn,
            drop_last=drop_last,
            seed=seed,
            in_order=in_order,
            prefetch=prefetch,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            memory_limit=memory_limit,
            grain_size=grain_size,
            start_method=start_method,
        )
        self._seed = int.from_bytes(os.urandom(8)) >> 1 if seed is None else int(seed)
        # Counted when an epoch's first batch is asked for: `iter` alone, as frameworks call it to look, begins nothing.
        self._epochs = count()
        self._garage = _Garage()
        # The net under `close`: takes the engines, not the loader, and runs at the latest when Python ends.
        self._finalizer = weakref.finalize(self, self._garage.close)

    def __iter__(self) -> Iterator[Any]:
        if self._garage.is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        return _Epoch(self)

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: the dataset, sampler or batch sampler has no length.
        """
        config = self._config
        if config.batch_sampler is not None:
            return _length(config.batch_sampler, "batch_sampler")
        if config.sampler is not None:
            length = _length(config.sampler, "sampler")
        else:
            _length(config.dataset, "dataset")
            length = dataset_length(config)
        return length if config.batch_size is None else batch_count(length, config.batch_size, drop_last=config.drop_last)

    @property
    def dataset(self) -> Any:
        return self._config.dataset

    @property
    def batch_size(self) -> int | None:
        return self._config.batch_size

    @property
    def seed(self) -> int:
        """What the order and the dataset's random numbers are made from: as given, or as drawn."""
        return self._seed

    def close(self) -> None:
        """Stop workers and give memory back. Batches that are kept stay as they are. Idempotent, safe from any thread."""
        self._finalizer()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._config
        dataset = type(config.dataset).__qualname__
        return (
            f"DataLoader({dataset}, batch_size={config.batch_size}, shuffle={config.shuffle}, "
            f"num_workers={config.num_workers}, worker={config.kind!r}, seed={self._seed})"
        )


def _length(value: Any, name: str) -> int:
    if not callable(getattr(type(value), "__len__", None)):
        raise TypeError(f"{name} of type {type(value).__qualname__} has no len(), so the loader has none; add __len__ to it")
    return len(value)


@final
class _Garage:
    """Where a loader's engines are between epochs.

    One stays, with its workers warm. An epoch that begins while another of the same loader is still being iterated (nested
    loops, ``zip(loader, loader)``) gets an engine of its own, which is closed when both are not needed.
    """

    def __init__(self) -> None:
        # Guards both. Reentrant, because an epoch that the garbage collector finds is given back from wherever it runs.
        self._lock = threading.RLock()
        self._parked: Engine | None = None
        self._out: set[Engine] = set()
        self.is_closed = False

    def take(self, make: Callable[[], Engine]) -> Engine:
        """An engine for one epoch.

        Raises:
            LoaderClosedError: the loader was closed, before or while an engine was made.
        """
        with self._lock:
            if self.is_closed:
                raise LoaderClosedError(_MSG_CLOSED)
            engine, self._parked = self._parked, None
        if engine is None or not engine.is_usable:
            engine = make()
        with self._lock:
            if not self.is_closed:
                self._out.add(engine)
                return engine
        engine.close()
        raise LoaderClosedError(_MSG_CLOSED)

    def give_back(self, engine: Engine) -> None:
        with self._lock:
            self._out.discard(engine)
            if self._parked is None and engine.is_usable and not self.is_closed:
                self._parked = engine
                return
        if engine.is_usable:
            engine.close()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            engines = [engine for engine in (self._parked, *self._out) if engine is not None]
            self._parked = None
        for engine in engines:
            if engine.is_usable:
                engine.close()


@final
class _Epoch(Iterator[Any]):
    """One iteration of a loader. Starts nothing before the first batch is asked for."""

    def __init__(self, loader: DataLoader) -> None:
        # Holds the loader: `for batch in DataLoader(...)` has no other reference to it.
        self._loader = loader
        self._lock = threading.Lock()  # one thread at a time drives the engine
        self._engine: Engine | None = None
        self._is_over = False
        self._finalizer: weakref.finalize[[_Garage, Engine], _Epoch] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._is_over:
                raise StopIteration
            engine = self._engine or self._begin()
            try:
                return engine.next_batch()
            except EpochEnd:
                self._end()
                raise StopIteration from None
            except BaseException:
                if not engine.is_usable:
                    self._end()
                raise

    def _begin(self) -> Engine:
        loader = self._loader
        garage = loader._garage
        engine = self._engine = garage.take(lambda: build_engine(loader._config, loader._seed))
        engine.begin_epoch(next(loader._epochs))
        # A loop that is left by `break`, an exception or `return` drops this object: then the engine is free for the next.
        self._finalizer = weakref.finalize(self, _leave, garage, engine)
        self._finalizer.atexit = False
        return engine

    def _end(self) -> None:
        self._is_over = True
        if self._finalizer is not None:
            self._finalizer()
        self._engine = None


def _leave(garage: _Garage, engine: Engine) -> None:
    if engine.is_usable:
        engine.leave_epoch()
    garage.give_back(engine)
