"""Where a loader's engines are between epochs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from infeed.engine import Engine
from infeed.errors import LoaderClosedError

MSG_CLOSED: Final = "this loader is closed; make another, or do not close the one you iterate"


@final
class Garage:
    """Keeps one engine, gives it to an epoch and takes it back.

    One stays, with its workers warm. An epoch that begins while another of the same loader is still being iterated (nested
    loops, ``zip(loader, loader)``) gets an engine of its own, which is closed when both are not needed.
    """

    def __init__(self) -> None:
        self.is_keeping = True  # whether an engine waits for the next epoch, with its workers
        # Guards both. Reentrant, because an epoch that the garbage collector finds is given back from wherever it runs.
        self._lock = threading.RLock()
        self._parked: Engine | None = None
        self._out: set[Engine] = set()
        self._outdated: set[Engine] = set()  # of those that are out: not to be parked again
        self.is_closed = False

    def take(self, make: Callable[[], Engine]) -> Engine:
        """An engine for one epoch.

        Raises:
            LoaderClosedError: the loader was closed, before or while an engine was made.
        """
        with self._lock:
            if self.is_closed:
                raise LoaderClosedError(MSG_CLOSED)
            engine, self._parked = self._parked, None
        if engine is None or not engine.is_usable:
            engine = make()
        with self._lock:
            if not self.is_closed:
                self._out.add(engine)
                return engine
        engine.close()
        raise LoaderClosedError(MSG_CLOSED)

    def give_back(self, engine: Engine) -> None:
        with self._lock:
            self._out.discard(engine)
            is_good = engine not in self._outdated
            self._outdated.discard(engine)
            if self._parked is None and engine.is_usable and is_good and self.is_keeping and not self.is_closed:
                self._parked = engine
                return
        if engine.is_usable:
            engine.close(keeps_workers=True)

    @property
    def has_engines_out(self) -> bool:
        """Whether another epoch is in progress."""
        return bool(self._out)

    def retire(self, engine: Engine) -> None:
        """Let no later epoch have this engine."""
        with self._lock:
            self._outdated.add(engine)

    def clear(self, *, keeps_workers: bool = True) -> None:
        """Let no later epoch have the engine that waits for one."""
        with self._lock:
            parked, self._parked = self._parked, None
            self._outdated |= self._out
        if parked is not None and parked.is_usable:
            parked.close(keeps_workers=keeps_workers)

    def close(self) -> None:
        self.is_closed = True
        self.stop()

    def close_unasked(self) -> None:
        """Close for a finalizer: where the loader was forgotten, or Python ends.

        Ctrl+C ends the wait for workers here as well, but there is nobody to raise it to: Python would print it and go on.
        """
        with suppress(KeyboardInterrupt):
            self.is_closed = True
            # When Python ends there is no next loader, and finalizers may have closed the pipes already.
            self.stop(keeps_workers=threading.main_thread().is_alive())

    def stop(self, *, keeps_workers: bool = False) -> None:
        """Close all engines, also those of epochs in progress; another epoch may begin."""
        with self._lock:
            engines = [engine for engine in (self._parked, *self._out) if engine is not None]
            self._parked = None
        for engine in engines:
            if engine.is_usable:
                engine.close(keeps_workers=keeps_workers)
