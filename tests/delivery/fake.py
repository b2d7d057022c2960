"""A simulated device: streams are queues, and nothing is copied before something runs them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from infeed.delivery.backend import Backend, BackendError, Convert, DeviceEvent, Sent, Stage, map_leaves


class FakeStream:
    """Work in order. It runs when a test advances the device or when something waits for it."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.done_count = 0
        self.asked_count = 0

    def ask(self, work: Callable[[], None]) -> None:
        self.asked_count += 1
        self.work.append(work)

    def run(self, count: int | None = None) -> None:
        while self.work and (count is None or count > 0):
            self.work.popleft()()
            self.done_count += 1
            if count is not None:
                count -= 1


class FakeMark(DeviceEvent):
    def __init__(self, stream: FakeStream) -> None:
        self._stream, self._at = stream, stream.asked_count

    def is_done(self) -> bool:
        return self._stream.done_count >= self._at

    def wait(self) -> None:
        self._stream.run(self._at - self._stream.done_count)


class FakeBackend(Backend):
    """A backend with the user's stream and a copy stream; records which memory is registered."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.user, self.copies = FakeStream(), FakeStream()
        self.registered: dict[int, int] = {}
        self.ever_registered = 0
        self._refuses = refuses

    def register(self, address: int, nbytes: int) -> None:
        if self._refuses:
            raise BackendError("the limit of locked memory is reached")
        assert not any(begin < address + nbytes and address < begin + size for begin, size in self.registered.items())
        self.registered[address] = nbytes
        self.ever_registered += 1
        ctypes.memmove(address, address, nbytes)  # The whole segment is mapped.

    def unregister(self, address: int) -> None:
        ctypes.memmove(address, address, self.registered.pop(address))

    def mark(self) -> DeviceEvent:
        return FakeMark(self.user)

    def open_stage(self, device: Any, convert: Convert | None) -> Stage:
        return FakeStage(self, convert)

    def copy_later(self, array: np.ndarray) -> np.ndarray:
        """Requests a copy, as a user does; it happens when the device reaches it."""
        target = np.empty_like(array)
        address, nbytes = array.ctypes.data, array.nbytes
        # By address: the device does not reference the host's array.
        self.user.ask(lambda: ctypes.memmove(target.ctypes.data, address, nbytes) and None)
        return target


class FakeStage(Stage):
    def __init__(self, backend: FakeBackend, convert: Convert | None) -> None:
        self._backend, self._convert = backend, convert

    def send(self, batch: Any) -> Sent:
        moved = map_leaves(batch, self._move)
        return FakeSent(moved if self._convert is None else self._convert(moved), FakeMark(self._backend.copies))

    def _move(self, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        target = np.full_like(leaf, -1)
        address, nbytes = leaf.ctypes.data, leaf.nbytes
        self._backend.copies.ask(lambda: ctypes.memmove(target.ctypes.data, address, nbytes) and None)
        return target


class FakeSent(Sent):
    def __init__(self, batch: Any, copied: DeviceEvent) -> None:
        self._batch, self.copied = batch, copied

    def adopt(self) -> Any:
        self.copied.wait()  # The user's stream waits for the copy; here the host waits.
        return self._batch
