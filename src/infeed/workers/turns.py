"""In which order a worker does what it is asked: one thing after another. But what it has loaded is written first.

Samples that do not fit where they should go are held until the engine has found a place for them. Its answer comes behind what
was sent ahead, which may take any time, for ever if that waits for what the loop does with the very samples that are held. So a
worker waits for a moment; if the loop is away and does not answer, a thread waits and writes while the worker goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, TypeVar, final

from infeed.workers.messages import DropTask, MapSegment, PlaceTask

# How long a worker waits for a place before it goes on with something else. A loop that waits answers within a tenth of it.
_PLACE_S: Final = 0.002
# How long its thread listens before it looks whether it is still needed, by what the worker is at: so late that may go on.
_LISTEN_S: Final = 0.001
_LISTEN_SHARE: Final = 0.1
_LONGEST_S: Final = 0.01

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
        self._receive, self._count_held, self._place = receive, held_count, place
        self._put_off: deque[T | Exception] = deque()
        self._held_count = 0
        self._deadline = 0.0
        self._thread: threading.Thread | None = None
        self._is_needed = False

    def next(self) -> T:
        """What to do next."""
        self.done()
        held_count = self._count_held()
        if held_count > self._held_count:
            self._deadline = monotonic() + _PLACE_S
        self._held_count = held_count
        if not held_count:
            return self._take()
        try:
            while True:
                message = self._receive(max(0.0, self._deadline - monotonic()))
                if isinstance(message, Placing):
                    return message
                self._put_off.append(message)
        except TimeoutError:
            pass
        message = self._take()
        if not isinstance(message, Placing):
            self._is_needed = True
            self._thread = threading.Thread(target=self._listen, name="infeed:placing", daemon=True)
            self._thread.start()
        return message

    def done(self) -> None:
        """It is done with what it was at: from here on nobody else sends and receives."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_needed = False
            thread.join()

    def _take(self) -> T:
        if not self._put_off:
            return self._receive(None)
        message = self._put_off.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def _listen(self) -> None:
        began = monotonic()
        while self._is_needed and self._count_held():
            try:
                message = self._receive(min(_LONGEST_S, max(_LISTEN_S, _LISTEN_SHARE * (monotonic() - began))))
                if not (isinstance(message, Placing) and self._place(message)):
                    self._put_off.append(message)
            except TimeoutError:
                continue
            except (EOFError, OSError):
                return  # the worker will hear of it
            except Exception as error:  # it cannot be read; the worker says so in its turn
                self._put_off.append(error)
