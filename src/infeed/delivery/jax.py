"""Batches as JAX arrays, on JAX's default device or on a given one. Imported only for ``infeed.Device(output="jax")``."""

from __future__ import annotations

from typing import Any, final

import jax
import numpy as np

from infeed.delivery.backend import Convert, DeviceEvent, Sent, Stage, map_leaves


@final
class JaxStage(Stage):
    """Passes arrays to JAX, which copies them in the background; on the CPU it may use them without a copy."""

    def __init__(self, device: Any, convert: Convert | None) -> None:
        self._device = device
        self._convert = convert

    def send(self, batch: Any) -> Sent:
        moved: list[Any] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
                return leaf
            moved.append(jax.device_put(leaf, self._device))
            return moved[-1]

        tree = map_leaves(batch, move)
        return _JaxSent(tree if self._convert is None else self._convert(tree), _Ready(moved))


@final
class _Ready(DeviceEvent):
    """Done when JAX has all arrays.

    JAX itself keeps the host arrays that it still reads. The host batch is held until then, so that its slot need not be
    searched for again.
    """

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = arrays

    def is_done(self) -> bool:
        return all(array.is_deleted() or array.is_ready() for array in self._arrays)

    def wait(self) -> None:
        for array in self._arrays:
            if not array.is_deleted():  # donated to a function that may reuse its memory
                array.block_until_ready()


@final
class _JaxSent(Sent):
    def __init__(self, batch: Any, copied: DeviceEvent) -> None:
        self._batch, self.copied = batch, copied

    def adopt(self) -> Any:
        return self._batch  # JAX orders computations after the copy
