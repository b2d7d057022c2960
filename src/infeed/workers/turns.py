"""In which order a worker does what it is asked: one thing after another. But what it has loaded is written first.

Samples that do not fit where they should go are held until the engine has found a place for them. Its answer comes behind what
was sent ahead, which may take any time, for ever if that waits for what the loop does with the very samples that are held. So
such answers come out of turn; and while the worker is at something long, a thread listens for them and does what they say.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, TypeVar, final

from infeed.workers.messages import DropTask, MapSegment, PlaceTask

# What takes longer is long: then a thread listens. For less it would be in the way.
_LONG_S: Final = 0.005
# For how long it listens before it looks whether it is still needed, of the time that it has listened: so late the worker may
# go on.
_LISTEN_SHARE: Final = 0.02
_LEAST_S: Final = 0.001
_MOST_S: Final = 0.01

T = TypeVar("T")
Placing = PlaceTask | DropTask | MapSegment


@final
class Turns(Generic[T]):
    """Belongs to one worker."""

    def __init__(
        self, receive: Callable[[float | None], T], held_count: Callable[[], int], place: Callable[[Placing], bool]
    ) -> None:
        """
        Args:
            receive: gives the next message, and raises ``TimeoutError`` if none comes within the time.
            held_count: of how many tasks there are samples without a place.
            place: does this in another thread, while the worker is at something else; whether it may be done there.
        """
        self._receive, self._held_count, self._place = receive, held_count, place
        self._put_off: deque[T | Exception] = deque()
        self._thread: threading.Thread | None = None
        # Guards the four below, and tells the thread and the worker of each other.
        self._changed = threading.Condition()
        self._is_needed = self._is_listening = self._is_closed = False
        self._is_new = False  # it is needed for something that the thread has not heard of yet

    def next(self) -> T:
        """What to do next."""
        if self._is_needed:
            self.done()
        if not self._held_count():
            return self._take() if self._put_off else self._receive(None)
        try:
            while True:
                message = self._receive(0.0)
                if isinstance(message, Placing):
                    return message
                self._put_off.append(message)
        except TimeoutError:
            pass
        message = self._take()
        if not isinstance(message, Placing):
            self._need()
        return message

    def done(self) -> None:
        """It is done with what it was at: from here on nobody else sends and receives."""
        if self._is_needed:
            with self._changed:
                self._is_needed = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_listening)

    def close(self) -> None:
        """The worker ends."""
        self.done()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take(self) -> T:
        if not self._put_off:
            return self._receive(None)
        message = self._put_off.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    # --- the thread

    def _need(self) -> None:
        with self._changed:
            self._is_needed = self._is_new = True
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infeed:placing", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._is_needed and self._is_new))
                if self._is_closed:
                    return
                self._is_new = False
                if self._changed.wait_for(lambda: not self._is_needed or self._is_new, _LONG_S):
                    continue
                self._is_listening = True
            try:
                self._listen()
            finally:
                with self._changed:
                    self._is_listening = False
                    self._changed.notify_all()

    def _listen(self) -> None:
        began = monotonic()
        while self._is_needed and self._held_count():
            try:
                message = self._receive(min(_MOST_S, max(_LEAST_S, _LISTEN_SHARE * (monotonic() - began))))
                if not (isinstance(message, Placing) and self._place(message)):
                    self._put_off.append(message)
            except TimeoutError:
                continue
            except (EOFError, OSError):
                return  # the worker will hear of it
            except Exception as error:  # it cannot be read; the worker says so in its turn
                self._put_off.append(error)
