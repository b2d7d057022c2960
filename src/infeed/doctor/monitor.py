"""Monitors a program's loaders in process: when each is iterated, and how long the training loop waits for each batch.

The loader classes are patched in place, so every loader is recorded wherever the program imported it from. This module starts
no thread, because that thread would itself be alive while torch forks.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from infeed.doctor.evidence import Journal
from infeed.doctor.thread_owners import PYTHON, find_owners
from infeed.import_hooks import when_imported

# Maximum nesting depth when searching a batch for arrays and tensors.
_DEPTH: Final = 6


def settings_of(loader: Any) -> dict[str, Any]:
    """Return a loader's options under the field names of ``LoaderSeen``."""
    from infeed.options import is_torch_stream  # not earlier: it imports NumPy, which the program has imported by now

    is_torch = type(loader).__module__ != "infeed"
    config = loader if is_torch else loader._session.config
    is_ours = not is_torch or any(cls.__module__.startswith("infeed.") for cls in type(loader).__mro__)
    is_installed = is_torch and "infeed" in getattr(type(loader)._get_iterator, "__module__", "")
    count = config.num_workers
    worker = getattr(config, "worker", "process")
    worker = worker if isinstance(worker, str) else "ray"  # RayWorkers(...)
    is_open = str(count) == "auto"  # the integer value is then the maximum
    is_auto = bool(count) and (is_open or worker == "auto")
    kind = f", worker='{worker}'" if worker in ("auto", "thread", "ray") else ""
    asked = ("'auto'" if is_open else str(count)) + kind
    context = getattr(config, "multiprocessing_context", None)
    method = ""
    if is_torch and not is_ours and not is_installed and count:
        import multiprocessing

        method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    return {
        "library": "infeed" if not is_torch else "infeed.torch" if is_ours or is_installed else "torch",
        "dataset": type(loader.dataset).__qualname__,
        # Initial value for "auto", which starts with few worker processes; "workers" events update it.
        "kind": "inline" if not count else "process" if worker in ("auto", "ray") else worker,
        "num_workers": 1 if is_auto else int(count),
        "asked": asked,
        "is_auto": is_auto,
        "is_stream": is_torch_stream(loader.dataset) if is_torch else config.is_stream,
        "batch_size": loader.batch_size,
        # infeed.DataLoader always keeps its workers between epochs.
        "is_persistent": not is_torch or bool(loader.persistent_workers),
        "is_pinned": bool(config.pin_memory) or getattr(config, "device", None) is not None,
        "has_init": config.worker_init_fn is not None,
        "start_method": method,
    }


def workers_of(iterator: Any) -> dict[str, Any] | None:
    """Return the workers of an infeed iteration, now or at its end, as arguments of ``see_workers``; ``None`` for torch's."""
    session = getattr(iterator, "_session", None)
    if session is None:
        return None
    seen = session.statistics()
    pids = pids_of(iterator)
    # With "auto", report the target count: some workers may still be starting, or may have just died.
    kind, count = seen.kind, session.worker_tuning.count or seen.worker_count
    is_gathered = seen.loads_by == "gathering rows"
    if kind == "inline" and session.config.kind != "inline" and not is_gathered:
        # Statistics show no workers: start-up failed, or observe="off" records nothing.
        if getattr(iterator, "_epoch", iterator)._engine is None:
            return None
        kind, count = session.config.kind, session.config.most_workers
    return {"kind": kind, "count": count, "is_gathered": is_gathered, "is_settled": seen.is_settled, "pids": pids}


def measure(batch: Any, depth: int = 0) -> tuple[int, int, bool]:
    """Return a batch's bytes in arrays and tensors, the first dimension's length, and whether any is on a device."""
    if hasattr(batch, "nbytes") and hasattr(batch, "shape"):
        device = getattr(getattr(batch, "device", None), "type", "cpu")
        return int(batch.nbytes), int(batch.shape[0]) if len(batch.shape) else 0, device != "cpu"
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    size, rows, is_on_device = 0, 0, False
    if depth < _DEPTH:
        for part in parts:
            part_size, part_rows, part_on_device = measure(part, depth + 1)
            size, rows, is_on_device = size + part_size, rows or part_rows, is_on_device or part_on_device
    return size, rows, is_on_device


def pids_of(iterator: Any) -> list[int]:
    """Return the PIDs of an iteration's workers, torch's or infeed's."""
    ask = getattr(iterator, "worker_pids", None)
    if ask is not None:
        return list(ask())
    return [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid is not None]


# Attribute of an iterator that holds its current _Epoch.
_MARK: Final = "_infeed_doctor"
_FLUSH_S: Final = 0.25
_MOST_LOADERS: Final = 16


@final
class Watched:
    """The parts of an iterated loader that a later probe needs, without a reference to the loader itself."""

    def __init__(self, number: int, loader: Any) -> None:
        self.number = number
        self.dataset = loader.dataset
        self.settings = settings_of(loader)
        self.sampler = getattr(loader, "sampler", None)
        config = getattr(getattr(loader, "_session", None), "config", loader)
        self.collate_fn = config.collate_fn
        self.worker_init_fn = config.worker_init_fn
        self.batch_rows = 0
        self.workers: dict[str, Any] | None = None  # as last written to the journal


@final
class _Epoch:
    def __init__(self, watched: Watched, asked: float) -> None:
        self.watched = watched
        self.began = asked
        self.left: float | None = None  # when the training loop got its latest batch
        self.is_inside = False
        self.waits: list[float] = []
        self.aways: list[float] = []
        self.flushed = asked
        # Process CPU time when the training loop got its latest batch, and its latest batch in the journal.
        self.cpu = self.cpu_flushed = 0.0


@final
class Watcher:
    """Records loader activity in the journal; when time is up, calls ``stop``, which does not return."""

    def __init__(self, journal: Journal, seconds: float, stop: Callable[[], None]) -> None:
        self._journal = journal
        self._seconds = seconds
        self._stop = stop
        self._deadline: float | None = None
        self._loaders: dict[Any, Watched] = {}
        self._starting: Watched | None = None  # the loader whose workers are starting
        self._waiting: tuple[_Epoch, Any, float] | None = None
        # Epochs with unwritten batches. An epoch left by `break` or an exception gets no further call that could flush it.
        self._unwritten: dict[_Epoch, None] = {}

    @property
    def loaders(self) -> list[Watched]:
        return list(self._loaders.values())

    def install(self) -> None:
        """Monitor all loaders of torch, torchdata and infeed, from the moment their modules are imported."""
        for module, loader, iterator in (
            ("torch.utils.data.dataloader", "DataLoader", "_BaseDataLoaderIter"),
            ("infeed.loader", "DataLoader", ""),
            ("infeed.engine.epoch_iterator", "", "EpochIterator"),
            ("infeed.torch.iterator", "", "EngineIter"),
            (
                "torchdata.stateful_dataloader.stateful_dataloader",
                "StatefulDataLoader",
                "_StatefulBaseDataLoaderIter",
            ),
        ):
            when_imported(module, functools.partial(self._change, module, loader, iterator))
        if sys.platform != "win32":
            os.register_at_fork(before=self._before_fork)

    def flush(self) -> None:
        """Write pending batches of all epochs to the journal."""
        for epoch in tuple(self._unwritten):
            self._flush(epoch, time.monotonic())

    def note_waiting(self) -> None:
        """Record the batch that the training loop is waiting for."""
        if self._waiting is None:
            return
        epoch, iterator, since = self._waiting
        waited = time.monotonic() - since
        self._journal.write("waiting", loader=epoch.watched.number, seconds=waited, pids=pids_of(iterator))

    def _change(self, module: str, loader: str, iterator: str) -> None:
        there: Any = importlib.import_module(module)
        if loader:
            cls = getattr(there, loader)
            _wrap(cls, "__iter__", self._begin)
        if iterator:
            cls = getattr(there, iterator)
            _wrap(cls, "__next__", self._next)

    def _begin(self, loader: Any, call: Callable[[], Any]) -> Any:
        if self._starting is not None or not self._journal.is_here:
            return call()  # a subclass called the inherited method, or a worker iterates another loader
        watched = self._find(loader)
        if watched is None:
            return call()
        asked = time.monotonic()
        if self._deadline is None:
            self._deadline = asked + self._seconds
        self.flush()  # the reader assigns batches to the latest epoch event
        self._journal.write("epoch", loader=watched.number, at=asked)
        self._starting = watched
        try:
            iterator = call()
        finally:
            self._starting = None
        setattr(iterator, _MARK, _Epoch(watched, asked))
        return iterator

    def _next(self, iterator: Any, call: Callable[[], Any]) -> Any:
        epoch: _Epoch | None = getattr(iterator, _MARK, None)
        if epoch is None or epoch.is_inside or not self._journal.is_here:
            return call()
        asked = time.monotonic()
        if self._deadline is not None and asked > self._deadline:
            self._flush(epoch, asked)
            self._note_workers(epoch, iterator)
            self._stop()
        epoch.is_inside = True
        before, self._waiting = self._waiting, (epoch, iterator, asked)
        try:
            batch = call()
        except BaseException:
            self._flush(epoch, asked)
            self._note_workers(epoch, iterator)
            raise
        finally:
            epoch.is_inside = False
            self._waiting = before
        got = time.monotonic()
        if epoch.left is None:
            self._note_first(epoch, iterator, batch, got)
            self._note_workers(epoch, iterator)
            epoch.cpu = epoch.cpu_flushed = time.process_time()
        else:
            epoch.cpu = time.process_time()
            epoch.waits.append(got - asked)
            epoch.aways.append(asked - epoch.left)
            self._unwritten[epoch] = None
            if got - epoch.flushed > _FLUSH_S:
                self._flush(epoch, got)
                self._note_workers(epoch, iterator)
        epoch.left = time.monotonic()
        return batch

    def _find(self, loader: Any) -> Watched | None:
        # Not by identity: programs re-create loaders and datasets for each epoch.
        dataset = loader.dataset
        size = len(dataset) if hasattr(dataset, "__len__") else None
        key = (type(dataset), size, tuple(sorted(settings_of(loader).items(), key=str)))
        watched = self._loaders.get(key)
        if watched is not None:
            watched.dataset = dataset  # keep only the latest, so earlier ones can be freed
        elif len(self._loaders) < _MOST_LOADERS:
            watched = self._loaders[key] = Watched(len(self._loaders), loader)
            self._journal.write("loader", number=watched.number, at=time.monotonic(), **watched.settings)
        return watched

    def _note_first(self, epoch: _Epoch, iterator: Any, batch: Any, got: float) -> None:
        size, rows, is_on_device = measure(batch)
        epoch.watched.batch_rows = max(epoch.watched.batch_rows, rows)
        self._journal.write(
            "first",
            loader=epoch.watched.number,
            start_s=got - epoch.began,
            pids=pids_of(iterator),
            batch_bytes=size,
            batch_rows=rows,
            is_on_device=is_on_device,
        )

    def _note_workers(self, epoch: _Epoch, iterator: Any) -> None:
        workers = workers_of(iterator)
        if workers is not None and workers != epoch.watched.workers:
            epoch.watched.workers = workers
            self._journal.write("workers", loader=epoch.watched.number, **workers)

    def _flush(self, epoch: _Epoch, now: float) -> None:
        self._unwritten.pop(epoch, None)
        if epoch.waits:
            cpu_s = epoch.cpu - epoch.cpu_flushed
            self._journal.write("batches", loader=epoch.watched.number, waits=epoch.waits, aways=epoch.aways, cpu_s=cpu_s)
            epoch.cpu_flushed = epoch.cpu
        epoch.waits, epoch.aways, epoch.flushed = [], [], now

    def _before_fork(self) -> None:
        watched = self._starting
        if watched is None or not self._journal.is_here:
            return
        names = [f"{thread.name} ({type(thread).__module__})" for thread in threading.enumerate()]
        names.remove(f"{threading.current_thread().name} ({type(threading.current_thread()).__module__})")
        libraries: dict[str, int] = {}
        for owner in find_owners().values():
            if owner != PYTHON:
                libraries[owner] = libraries.get(owner, 0) + 1
        self._journal.write("fork", loader=watched.number, python_threads=names, libraries=libraries)


def _wrap(cls: Any, name: str, around: Callable[[Any, Callable[[], Any]], Any]) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any) -> Any:
        return around(self, functools.partial(original, self))

    setattr(cls, name, wrapped)
