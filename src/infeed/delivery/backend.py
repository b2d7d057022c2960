"""What delivery asks of an accelerator. One file for each kind; ``find_backend`` knows them.

The words are CUDA's, because other kinds have the same things under other names: page-locking, streams, events.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

Convert: TypeAlias = Callable[[Any], Any]


class BackendError(Exception):
    """The accelerator refuses. Internal: the log says it once, and all goes on without."""


class Mark(ABC):
    """A moment in the accelerator's work: everything that it was given before is done, or not yet."""

    @abstractmethod
    def is_done(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None: ...


class Sent(ABC):
    """A batch on its way to the device."""

    copied: Mark  # from then on nothing reads the host's memory any more

    @abstractmethod
    def adopt(self) -> Any:
        """The batch on the device, ordered behind its copy on the stream that the caller uses now."""


class Stage(ABC):
    """Copies batches to one device, on a stream of its own."""

    @abstractmethod
    def send(self, batch: Any) -> Sent:
        """Begin to copy; returns at once."""


class Backend(ABC):
    """One kind of accelerator."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Lock pages of this process in memory, so that the device can read them by itself.

        Raises:
            BackendError: it is refused.
        """

    @abstractmethod
    def unregister(self, address: int) -> None: ...

    @abstractmethod
    def mark(self) -> Mark:
        """All that the caller's stream has been given so far."""

    @abstractmethod
    def open_stage(self, device: Any, convert: Convert | None) -> Stage:
        """
        Raises:
            ConfigError: there is no such device.
        """


def open_stage(device: Any, convert: Convert | None) -> Stage:
    """What brings batches to this device.

    Raises:
        ConfigError: there is no such device here.
    """
    import torch  # whoever names a device means one of torch's

    from infeed.delivery.plain import PlainStage, usable_device

    backend = find_backend()
    if backend is not None and usable_device(device).type == torch.device("cuda").type:
        return backend.open_stage(device, convert)
    return PlainStage(device, convert)


def find_backend() -> Backend | None:
    """The accelerator that this process uses torch with, if it is of a kind that is known here."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        from infeed.delivery.cuda import CudaBackend

        return CudaBackend()
    return None
