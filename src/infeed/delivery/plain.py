"""Delivery to any torch device without using streams: MPS, XPU, CPU. Imported only if torch is installed."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from infeed.delivery.backend import Convert, DeviceEvent, Sent, Stage, map_leaves
from infeed.errors import ConfigError


def usable_device(device: Any) -> torch.device:
    """
    Raises:
        ConfigError: there is no such device here.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(f"device={device!r} cannot be used: {error}") from error


def as_tensor(leaf: Any) -> torch.Tensor | None:
    """Return a numeric leaf as a tensor, over the same memory where torch allows it; ``None`` for other leaves."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.dtype.kind in "biufc":
        try:
            return torch.from_numpy(leaf)
        except (TypeError, ValueError):  # foreign byte order, negative strides, or a dtype that torch does not have
            native = leaf.dtype.newbyteorder("=")
            try:
                return torch.from_numpy(np.ascontiguousarray(leaf, dtype=native))
            except TypeError:
                return None
    return None


@final
class PlainStage(Stage):
    """Copies synchronously, in order with the work of the training loop."""

    def __init__(self, device: Any, convert: Convert | None) -> None:
        self._device = usable_device(device)
        self._convert = convert

    def send(self, batch: Any) -> Sent:
        moved = map_leaves(batch, self._move)
        return _Moved(moved if self._convert is None else self._convert(moved))

    def _move(self, leaf: Any) -> Any:
        tensor = as_tensor(leaf)
        return leaf if tensor is None else tensor.to(self._device)


@final
class _Immediate(DeviceEvent):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


@final
class _Moved(Sent):
    def __init__(self, batch: Any) -> None:
        self._batch, self.copied = batch, _Immediate()

    def adopt(self) -> Any:
        return self._batch
