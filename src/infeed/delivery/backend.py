"""Delivery to a device: the interface that each kind of accelerator implements, its selection, and the queue of copies.

The terms are CUDA's: page-locking, streams, events. Other accelerators have the same concepts under other names.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias, final

Convert: TypeAlias = Callable[[Any], Any]


class BackendError(Exception):
    """Raised when the accelerator refuses a request. Internal: logged once, then delivery continues without it."""


class DeviceEvent(ABC):
    """A point in the accelerator's queue, like a CUDA event: done when all work submitted before it is done."""

    @abstractmethod
    def is_done(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None: ...


class Sent(ABC):
    """A batch that is being copied to the device."""

    copied: DeviceEvent  # when done, the device no longer reads the host memory

    @abstractmethod
    def adopt(self) -> Any:
        """Return the batch on the device, with the caller's current stream ordered after its copy."""


class Stage(ABC):
    """Copies batches to one device, on a separate stream."""

    @abstractmethod
    def send(self, batch: Any) -> Sent:
        """Start the copy without waiting for it."""


class Backend(ABC):
    """One kind of accelerator."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory of this process, so that the device can read it directly.

        Raises:
            BackendError: the accelerator refuses.
        """

    @abstractmethod
    def unregister(self, address: int) -> None: ...

    @abstractmethod
    def mark(self) -> DeviceEvent:
        """Mark the end of all work submitted to the caller's stream so far."""

    @abstractmethod
    def open_stage(self, device: Any, convert: Convert | None) -> Stage:
        """
        Raises:
            ConfigError: there is no such device.
        """


def open_stage(output: str | None, device: Any, convert: Convert | None) -> Stage:
    """Return a stage that copies batches to this device, as arrays of the ``output`` library.

    Raises:
        ConfigError: there is no such device here.
    """
    if output == "jax":
        from infeed.delivery.jax import JaxStage

        return JaxStage(device, convert)
    from infeed.delivery.plain import PlainStage  # imports torch: the device is a torch device

    backend = find_backend() if is_gpu(device) else None
    return PlainStage(device, convert) if backend is None else backend.open_stage(device, convert)


def is_gpu(device: Any) -> bool:
    """Whether a torch device has a backend here. If not, do not call ``find_backend``, which initializes the accelerator.

    >>> is_gpu("cuda:1"), is_gpu(0), is_gpu("cpu")
    (True, True, False)
    """
    return isinstance(device, int) or str(device).partition(":")[0] == "cuda"


def find_backend() -> Backend | None:
    """Return the backend of the accelerator that torch uses in this process; ``None`` if it is not supported."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        from infeed.delivery.cuda import CudaBackend

        return CudaBackend()
    return None


@final
class DevicePrefetch:
    """A queue of batches in transfer to the device. The note of each is the loader's progress after its delivery."""

    def __init__(self, stage: Stage, depth: int) -> None:
        self._stage = stage
        self._depth = depth
        self._queue: deque[tuple[Sent | BaseException, Any]] = deque()
        self._copying: deque[tuple[DeviceEvent, Any]] = deque()  # host batches, held until their copy is done

    @property
    def is_full(self) -> bool:
        return len(self._queue) > self._depth

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def push(self, batch: Any, note: Any) -> None:
        self._release()
        while len(self._copying) > self._depth:
            # A training loop that does not wait for the device would fill all memory with pending copies. Fewer slots also stay
            # in the CPU cache: with 15 slots instead of 52, an H200 received 45 GB/s instead of 20.
            self._copying.popleft()[0].wait()
        sent = self._stage.send(batch)
        self._queue.append((sent, note))
        self._copying.append((sent.copied, batch))

    def push_error(self, error: BaseException, note: Any) -> None:
        """Queue an error that is returned in place of a batch."""
        self._queue.append((error, note))

    def pop(self) -> tuple[Any, Any]:
        """Return the next batch on the device, or the error in its place, and its note."""
        self._release()
        sent, note = self._queue.popleft()
        return (sent if isinstance(sent, BaseException) else sent.adopt()), note

    def close(self) -> None:
        """Drop all queued batches, and wait until the device no longer reads host memory."""
        self._queue.clear()
        while self._copying:
            self._copying.popleft()[0].wait()

    def _release(self) -> None:
        while self._copying and self._copying[0][0].is_done():
            self._copying.popleft()


_leaf_types: Final[weakref.WeakSet[type]] = weakref.WeakSet()  # a cache, because isinstance(tree, Mapping) is slow


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with the same types and every leaf changed. A container that cannot be rebuilt is a leaf.

    >>> map_leaves({"a": [1, (2, 3)]}, lambda leaf: leaf * 10)
    {'a': [10, (20, 30)]}
    """
    kind = type(tree)
    if kind in _leaf_types or isinstance(tree, str | bytes):
        return change(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_leaves(value, change) for key, value in tree.items()}
        if type(tree) is dict:
            return changed
        return _rebuilt_mapping(tree, changed, change)
    if isinstance(tree, tuple):
        parts = [map_leaves(value, change) for value in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return tuple(parts) if type(tree) is tuple else _or_leaf(lambda: type(tree)(parts), tree, change)
    if isinstance(tree, list):
        parts = [map_leaves(value, change) for value in tree]
        return parts if type(tree) is list else _or_leaf(lambda: type(tree)(parts), tree, change)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        parts = {name: map_leaves(value, change) for name, value in fields.items()}  # type: ignore[assignment]
        return _or_leaf(lambda: dataclasses.replace(tree, **parts), tree, change)  # type: ignore[arg-type]
    if not isinstance(tree, type):
        _leaf_types.add(kind)
    return change(tree)


def _rebuilt_mapping(tree: Mapping[Any, Any], changed: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, MutableMapping):
        clone = copy.copy(tree)  # keeps attributes of a defaultdict or a user-defined type
        clone.update(changed)
        return clone
    return _or_leaf(lambda: type(tree)(changed), tree, change)  # type: ignore[call-arg]


def _or_leaf(build: Callable[[], Any], tree: Any, change: Callable[[Any], Any]) -> Any:
    try:
        return build()
    except Exception:  # a user-defined constructor with other arguments
        return change(tree)
