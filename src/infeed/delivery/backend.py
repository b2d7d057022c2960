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


def open_stage(output: str | None, device: Any, convert: Convert | None) -> Stage:
    """What brings batches to this device, as arrays of this library.

    Raises:
        ConfigError: there is no such device here.
    """
    if output == "jax":
        from infeed.delivery.jax import JaxStage

        return JaxStage(device, convert)
    from infeed.delivery.plain import PlainStage  # with torch: whoever names a device means one of its

    backend = find_backend() if is_gpu(device) else None
    return PlainStage(device, convert) if backend is None else backend.open_stage(device, convert)


def is_gpu(device: Any) -> bool:
    """Whether a device of torch's is of a kind that is known here. Where it is not, none is even looked for: that opens it.

    >>> is_gpu("cuda:1"), is_gpu(0), is_gpu("cpu")
    (True, True, False)
    """
    return isinstance(device, int) or str(device).partition(":")[0] == "cuda"


def find_backend() -> Backend | None:
    """The accelerator that this process uses torch with, if it is of a kind that is known here."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        from infeed.delivery.cuda import CudaBackend

        return CudaBackend()
    return None
