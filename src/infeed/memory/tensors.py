"""Tensors and storages of torch in a pickle, with their bytes outside.

Tensors that overlap in one storage overlap again where they arrive, and tensors keep their strides. Only the part of a storage
that its tensors cover is written: a sample may be a view of a storage that holds the whole dataset.
"""

from __future__ import annotations

import pickle
import sys
from bisect import bisect_left, bisect_right
from typing import Any, Final, final

from infeed.memory.inheriting import is_shared_storage, reduce_shared_storage
from infeed.memory.sharedarrays import is_plain_tensor

# To keep its strides, a tensor is written with the gaps between its elements, if it is at most this many times larger so...
_MOST_TIMES: Final = 8
# ...or if all of it is no larger than this. Otherwise (a column of a large table) it is made contiguous.
_MOST_BYTES: Final = 1 << 16
# Regions that tensors share begin at multiples of this: then an offset in bytes is an offset in elements of any dtype.
_ALIGN: Final = 16


@final
class _Region:
    """A range of bytes of a storage. Pickled once, however many tensors are views of it."""

    __slots__ = ("begin", "end", "storage")

    def __init__(self, storage: Any, begin: int, end: int) -> None:
        self.storage, self.begin, self.end = storage, begin, end

    def __reduce__(self) -> Any:
        torch = sys.modules["torch"]
        size = self.end - self.begin
        raw = torch.empty(0, dtype=torch.uint8).set_(self.storage, self.begin, (size,), (1,)).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(raw),)


@final
class TensorReducer:
    """Reduces the tensors and storages of one object. It knows which parts of which storages have been pickled."""

    def __init__(self, *, keeps_shared: bool) -> None:
        """``keeps_shared``: storages in shared memory are not copied; whoever reads the pickle maps the same memory."""
        self._keeps_shared = keeps_shared
        self._regions: dict[int, list[_Region]] = {}  # by the address of torch's own object for the storage
        # Regions that are in the pickle already turned out to overlap: pickle again, now that all regions are known.
        self.must_repeat = False

    def reduce(self, obj: Any) -> Any:
        """The reduction of a tensor or storage of the CPU, or ``NotImplemented``."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if type(obj) is torch.Tensor:
            return self._reduce_tensor(torch, obj)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            if self._keeps_shared and is_shared_storage(torch, obj):
                return reduce_shared_storage(torch, obj)
            return _same, (self._region(obj, 0, obj.nbytes(), 1),)
        if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":  # obj.device warns
            return _rebuild_typed_storage, (obj._untyped_storage, _name(obj.dtype))
        return NotImplemented

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        if not is_plain_tensor(torch, tensor):
            return NotImplemented  # torch's own reduction, which comes to the storage
        tensor = tensor.detach()
        itemsize, name = tensor.element_size(), _name(tensor.dtype)
        if not tensor.numel():
            return _rebuild_empty, (name, tuple(tensor.shape), tensor.stride())
        storage = tensor.untyped_storage()
        if self._keeps_shared and is_shared_storage(torch, storage):
            return _rebuild_tensor, (storage, name, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        span = itemsize * (1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)))
        if span > max(_MOST_BYTES, _MOST_TIMES * tensor.numel() * itemsize):
            tensor = tensor.contiguous()
            storage, span = tensor.untyped_storage(), tensor.numel() * itemsize
        begin = itemsize * tensor.storage_offset()
        region = self._region(storage, begin, begin + span, itemsize)
        offset = (begin - region.begin) // itemsize
        return _rebuild_tensor, (region, name, offset, tuple(tensor.shape), tensor.stride())

    def _region(self, storage: Any, begin: int, end: int, itemsize: int) -> _Region:
        """The region that holds these bytes. Regions of one storage do not overlap."""
        regions = self._regions.setdefault(storage._cdata, [])
        first, last = _touched(regions, begin, end)
        if last - first == 1:
            region = regions[first]
            if region.begin <= begin and end <= region.end and not (begin - region.begin) % itemsize:
                return region
        grown = (first, first)
        while grown != (first, last):
            self.must_repeat = True
            begin = min(begin, regions[first].begin)
            begin -= begin % _ALIGN
            end = max(end, regions[last - 1].end)
            grown, (first, last) = (first, last), _touched(regions, begin, end)
        made = _Region(storage, begin, end)
        regions[first:last] = [made]
        return made


def _touched(regions: list[_Region], begin: int, end: int) -> tuple[int, int]:
    """The range of regions that overlap with these bytes."""
    first = bisect_right(regions, begin, key=lambda region: region.end)
    return first, bisect_left(regions, end, lo=first, key=lambda region: region.begin)


def _name(dtype: Any) -> str:
    """Not the dtype itself: pickle would look for it in every module."""
    return str(dtype).removeprefix("torch.")


def _same(region: Any) -> Any:
    return region


def _rebuild_storage(buffer: Any) -> Any:
    import torch  # the pickle holds a tensor: whoever reads it needs torch

    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed_storage(storage: Any, dtype_name: str) -> Any:
    import torch  # it is one of torch's

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=getattr(torch, dtype_name), _internal=True)


def _rebuild_tensor(storage: Any, dtype_name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch  # it is a tensor

    return torch.empty(0, dtype=getattr(torch, dtype_name)).set_(storage, offset, shape, stride)


def _rebuild_empty(dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch  # it is a tensor

    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype_name))
