"""One iteration of a loader: takes an engine for the first batch and returns it to the cache at the end."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any, Final, NoReturn, final

from infeed.delivery.backend import DevicePrefetch, open_stage
from infeed.engine.engine import NOTHING, Engine, EpochEnd
from infeed.engine.progress import Progress
from infeed.engine.session import Session, call_unasked
from infeed.metrics.progress_bar import ProgressDisplay
from infeed.workers.exceptions import kept
from infeed.workers.launcher import Process

_MSG_ALREADY: Final = (
    "next() was called inside next() of the same iterator (by a callback, a signal handler or the dataset); call it afterwards"
)

_FOREVER_S: Final = 3600.0


@final
class EpochIterator(Iterator[Any]):
    """One iteration of a loader. Starts nothing before the training loop asks for the first batch."""

    def __init__(self, session: Session, owner: object = None, asked: Iterator[Any] | None = None) -> None:
        """Create an iteration, which references ``owner``: `for batch in DataLoader(...)` has no other reference to it.

        Args:
            asked: The sampler's iterator, if ``iter`` was already called on the sampler.
        """
        self._session = session
        self._config = session.config  # a snapshot: a torch loader's options may change before the first batch
        self._asked = asked
        if session.engine_cache.is_closed and _is_python_exiting():
            _stop_here()
        self._offered = session.offer(self)
        self._owner = owner
        self._progress: Progress | None = None
        self._lock = threading.Lock()  # only one thread at a time drives the engine
        self._driver = 0  # ident of that thread
        self._engine: Engine | None = None
        self._is_over = False
        self._ahead: DevicePrefetch | None = None
        self._show: ProgressDisplay | None = None
        self._has_given = False
        self._is_drained = False  # all batches are in device prefetch
        self._finalizer: weakref.finalize[[Callable[[], None], Iterable[Engine]], EpochIterator] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._driver == threading.get_ident():
            raise RuntimeError(_MSG_ALREADY)
        with self._lock:
            self._driver = threading.get_ident()
            try:
                return self._next()
            except Exception as error:
                if isinstance(error, StopIteration) or not _is_python_exiting():
                    raise
            finally:
                self._driver = 0
        _stop_here()

    def _next(self) -> Any:
        if self._is_over:
            raise StopIteration
        engine = self._engine or self._begin_once()
        if self._show is not None:
            if self._has_given:
                self._show.step()  # the training loop has finished a batch
            self._has_given = True
        try:
            return engine.next_batch() if self._ahead is None else self._next_ahead(engine, self._ahead)
        except EpochEnd:
            if self._progress is not None:
                self._progress.end()
            show = self._show
            self._end()
            if show is not None:
                show.report()
            raise StopIteration from None
        except BaseException:
            if engine.is_between_epochs and self._ahead is None and self._progress is not None:
                self._progress.end()  # the epoch yielded only this error
                self._end()
            if not engine.is_usable:
                self._end()
            raise

    def _next_ahead(self, engine: Engine, ahead: DevicePrefetch) -> Any:
        """Return the next batch on the device, and keep further batches in transfer."""
        asked_ns = perf_counter_ns()
        engine.metrics.asked(asked_ns)
        try:
            return self._take_ahead(engine, ahead, asked_ns)
        finally:
            engine.metrics.stop_waiting()

    def _take_ahead(self, engine: Engine, ahead: DevicePrefetch, asked_ns: int) -> Any:
        assert self._progress is not None
        while not ahead.is_full and not self._is_drained:
            try:
                batch = engine.next_batch(waits=ahead.is_empty)
            except EpochEnd:
                self._is_drained = True
                break
            except Exception as error:
                ahead.push_error(kept(error), self._progress.reached())
                self._is_drained = not engine.is_usable or engine.is_between_epochs
                break
            if batch is NOTHING:
                break
            try:
                ahead.push(batch, self._progress.reached())
            except Exception as error:  # from the user's `convert`, or the device is out of memory
                ahead.push_error(kept(error), self._progress.reached())
            except BaseException:
                engine.close()  # as for any interrupt: a batch in transfer is lost, so no later batch may follow
                raise
        if ahead.is_empty:
            engine.metrics.end_epoch(asked_ns)
            raise EpochEnd
        try:
            batch, reached = ahead.pop()
            engine.count_delivery(asked_ns, perf_counter_ns())
        except BaseException as error:
            if not isinstance(error, Exception):
                engine.close()  # an interrupt: this batch is lost, so no later batch may follow
            raise
        self._progress.show(reached)
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _begin_once(self) -> Engine:
        """Begin. If the sampler or dataset raises before the first batch, the iteration ends, as a generator does."""
        try:
            return self.begin()
        except Exception:
            self._end()
            raise

    def begin(self) -> Engine:
        """Take an engine and begin the epoch. The first ``next`` calls this automatically."""
        asked_ns = perf_counter_ns()
        session, config = self._session, self._config
        engine_cache = session.engine_cache
        delivery = config.delivery
        stage = None if delivery is None else open_stage(delivery.output, delivery.target, delivery.convert)
        session.restore_dataset(self._offered)
        engine = engine_cache.take(partial(session.build, config))
        progress = session.begin(self._offered)
        try:
            show = session.show(progress)
            engine.begin_epoch(progress, self._asked, is_polled=stage is not None)
        except BaseException:
            session.take_back(progress)
            engine_cache.give_back(engine)
            raise
        self._progress = progress
        self._show = show
        if stage is not None and delivery is not None:
            progress.show(progress.start)
            self._ahead = DevicePrefetch(stage, delivery.prefetch)
        self._engine = engine
        # A training loop left by `break`, `return` or an exception drops this object, which releases the engine.
        leave = partial(_leave, session, engine, self._ahead)
        self._finalizer = weakref.finalize(self, call_unasked, leave, [engine])
        self._finalizer.atexit = False
        engine.metrics.changed_over(asked_ns, perf_counter_ns())
        return engine

    def worker_pids(self) -> list[int]:
        """Return the PIDs of the workers of this iteration."""
        return [process.pid for process in self.worker_processes()]

    def worker_processes(self) -> list[Process]:
        """Return the worker processes of this iteration."""
        return [] if self._engine is None else self._engine.worker_processes()

    def leave(self, *, stops_workers: bool = False) -> None:
        """End the iteration and abandon the rest of the epoch. A thread that waits in ``next`` gets an exception.

        Args:
            stops_workers: Whether to stop the workers now instead of keeping them for another epoch or loader.
        """
        engine = self._engine
        if not self._lock.acquire(blocking=False):
            if engine is not None:
                # Another thread is in `next`, or this thread is and a signal handler called: `next` ends the epoch on exit.
                engine.close()
                return
            self._lock.acquire()  # `next` is still beginning the epoch
        try:
            if stops_workers and self._engine is not None:
                self._engine.close()
            self._end()
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._is_over = True
        if self._progress is not None:
            self._progress.error_budget.end_epoch()
        self._ahead = None
        show, self._show = self._show, None
        if show is not None:
            show.close()
        finalizer = None if self._finalizer is None else self._finalizer.detach()
        if finalizer is not None:
            leave = finalizer[2][0]
            leave()
        self._engine = None


def _is_python_exiting() -> bool:
    """Whether Python is exiting and this is a daemon thread, which it does not wait for."""
    return not threading.main_thread().is_alive() and threading.current_thread() is not threading.main_thread()


def _stop_here() -> NoReturn:
    """Block until the process ends, as daemon threads do: an exception would be printed and could not be handled."""
    while True:
        time.sleep(_FOREVER_S)


def _leave(session: Session, engine: Engine, ahead: DevicePrefetch | None) -> None:
    began_ns = perf_counter_ns()
    if ahead is not None:
        ahead.close()
    if engine.is_usable:
        engine.leave_epoch()
        session.learn(engine)
    session.engine_cache.give_back(engine)
    engine.metrics.changed_over(began_ns, perf_counter_ns())
