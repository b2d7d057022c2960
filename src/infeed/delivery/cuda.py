"""The CUDA backend, through torch; also ROCm, which torch exposes under the same names. Imported only if one is available."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Final, final

import torch

from infeed.delivery.backend import Backend, BackendError, Convert, DeviceEvent, Sent, Stage, map_leaves
from infeed.delivery.plain import as_tensor, usable_device

_cuda: Any = torch.cuda  # mostly untyped

_RUNTIMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "cudart64_12.dll", "libamdhip64.so")


@final
class _Events(DeviceEvent):
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def is_done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


@final
class CudaBackend(Backend):
    def register(self, address: int, nbytes: int) -> None:
        code = int(_cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            _forget_error()
            raise BackendError(f"cudaHostRegister of {nbytes} bytes failed with error {code}")

    def unregister(self, address: int) -> None:
        if int(_cuda.cudart().cudaHostUnregister(address)):
            _forget_error()

    def mark(self) -> DeviceEvent:
        if not _cuda.is_initialized():
            return _Events([])  # this process has not used CUDA yet
        return _Events([_recorded(_cuda.current_stream(device)) for device in _used_devices()])

    def open_stage(self, device: Any, convert: Convert | None) -> Stage:
        return _CudaStage(device, convert)


@final
class _CudaStage(Stage):
    def __init__(self, device: Any, convert: Convert | None) -> None:
        self._device = usable_device(device)
        self._stream = _cuda.Stream(self._device)
        self._context = _cuda.stream(self._stream)
        self._convert = convert

    def send(self, batch: Any) -> Sent:
        try:
            with self._context:
                return self._send(batch)
        except BaseException:
            self._stream.synchronize()  # the caller releases the batch, but a part may still be copying
            raise

    def _send(self, batch: Any) -> Sent:
        tensors: list[Any] = []
        moved = map_leaves(batch, partial(self._move, tensors))
        copied = ready = _recorded(self._stream)
        if self._convert is not None:
            moved = self._convert(moved)
            tensors = []
            map_leaves(moved, tensors.append)
            ready = _recorded(self._stream)
        return _CudaSent(moved, tensors, _Events([copied]), ready, self._device.index)

    def _move(self, tensors: list[Any], leaf: Any) -> Any:
        tensor = as_tensor(leaf)
        if tensor is None:
            return leaf
        moved = tensor.to(self._device, non_blocking=True)
        tensors.append(moved)
        return moved


@final
class _CudaSent(Sent):
    def __init__(self, batch: Any, leaves: list[Any], copied: DeviceEvent, ready: Any, device: int) -> None:
        self._batch, self._leaves, self.copied = batch, leaves, copied
        self._ready, self._device = ready, device

    def adopt(self) -> Any:
        stream = _cuda.current_stream(self._device)  # by index: torch takes 10 µs to look up a device
        stream.wait_event(self._ready)
        for leaf in self._leaves:
            # The memory was allocated on the copy stream: the allocator must not reuse it while this stream reads it.
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)
        return self._batch


def _recorded(stream: Any) -> Any:
    event = _cuda.Event(blocking=True)  # a waiting thread sleeps instead of using a CPU core
    event.record(stream)
    return event


def _used_devices() -> list[int]:
    """Return the devices on which this process has allocated memory. Querying any other device would allocate some."""
    current = _cuda.current_device()
    if _cuda.device_count() == 1:
        return [current]
    return [one for one in range(_cuda.device_count()) if one == current or _cuda.memory_reserved(one)]


def _forget_error() -> None:
    """Clear the last error of the CUDA runtime; otherwise torch would report it for its next kernel."""
    for name in _RUNTIMES:
        try:
            ctypes.CDLL(name).cudaGetLastError()
        except (OSError, AttributeError):  # another version, or ROCm instead of CUDA
            continue
        return
