"""The interface between delivery and an accelerator. Each kind of accelerator has one module; ``find_backend`` selects it.

The terms are CUDA's: page-locking, streams, events. Other accelerators have the same concepts under other names.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

Convert: TypeAlias = Callable[[Any], Any]


class BackendError(Exception):
    """Raised when the accelerator refuses a request. Internal: logged once, then delivery continues without it."""


class Mark(ABC):
    """A point in the accelerator's queue, like a CUDA event: done when all work submitted before it is done."""

    @abstractmethod
    def is_done(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None: ...


class Sent(ABC):
    """A batch that is being copied to the device."""

    copied: Mark  # when done, the device no longer reads the host memory

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
    def mark(self) -> Mark:
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
