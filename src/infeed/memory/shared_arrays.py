"""Arrays and tensors in shared memory: any process on this machine can map them while the process that created them is alive.

The memory is divided into bins. A bin is one segment with a separate store. Each process maps it once as a whole, and the bin
is freed when the last view of anything in it is gone. A large object has a separate bin, so that its memory is freed with it.
Small objects share bins, so that a process needs few descriptors however many objects it shares.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from infeed.errors import InfeedError
from infeed.memory.limits import is_commit_limit
from infeed.memory.segments import Address, SegmentStore, find_segment, make_findable, refused, round_up

_FIRST_BIN: Final = 256 << 10
# Largest bin that objects share. It doubles with every 32 bins, up to four times: many systems allow 1000 descriptors.
_LARGEST_BIN: Final = 16 << 20
ALIGN: Final = 64
_HEADER: Final = ALIGN  # contains the name of the bin
# Each process that opens shared tensors maps them copy-on-write, which Windows charges in full.
_PRIVATE_FIX: Final = "share NumPy arrays instead of tensors"
_FIX: Final = "release objects that you no longer need, share smaller parts, or keep the data in files"


class Shared:
    """An object whose contents are in a bin. It is read-only, and its pickle contains only its location."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@final
class _Copying(threading.local):
    depth = 0


_copying: Final = _Copying()


@contextmanager
def copying_shared() -> Iterator[None]:
    """In this thread, pickle shared objects with their contents instead of their location: for other machines."""
    _copying.depth += 1
    try:
        yield
    finally:
        _copying.depth -= 1


def is_copying() -> bool:
    return _copying.depth > 0


_Keeps: TypeAlias = SegmentStore | mmap.mmap | None


@final
@dataclass(frozen=True, slots=True)
class _Bin:
    address: Address
    pointer: int  # address of the mapping
    # The store of a bin that this process created; of a private mapping, the shared one, whose store other processes need.
    keeps: _Keeps
    is_private: bool


@final
class Bins:
    """The bins that this process has mapped. A mapping stays as long as anything references it."""

    def __init__(self, largest_bin: int = _LARGEST_BIN) -> None:
        self._largest_bin = largest_bin
        self._bins: weakref.WeakKeyDictionary[mmap.mmap, _Bin] = weakref.WeakKeyDictionary()
        self.after_fork()

    def after_fork(self) -> None:
        """Do not write to the parent's bins, and replace the lock, which another thread of the parent may have held."""
        self._lock = threading.RLock()  # guards all fields; reentrant, because a garbage collection may open shared objects
        self._open: weakref.ref[mmap.mmap] | None = None  # the current bin for small objects
        self._end = 0

    def __len__(self) -> int:
        return len(self._bins)

    def allocate(self, size: int) -> tuple[mmap.mmap, int]:
        """Return the mapping of a bin, and the offset of ``size`` free bytes in it.

        Raises:
            MemoryLimitError: Not enough memory is available.
        """
        size = round_up(max(size, 1), ALIGN)
        with self._lock:
            largest = self._largest_bin << min(4, len(self._bins) // 32)
            if size > largest // 4:
                return self._create(_HEADER + size), _HEADER
            opened = None if self._open is None else self._open()
            if opened is None or self._end + size > len(opened):
                usual = _FIRST_BIN if opened is None else 2 * len(opened)
                opened = self._create(min(largest, max(usual, round_up(4 * size))))
                self._open = weakref.ref(opened)
                self._end = _HEADER
            self._end += size
            return opened, self._end - size

    def _create(self, size: int) -> mmap.mmap:
        segment, store, name = make_findable(size, fix=_FIX)
        address = Address(name, segment.handle.size, os.getpid(), store.descriptor())
        return self._add(segment.memory, address, store, is_private=False)

    def _add(self, memory: mmap.mmap, address: Address, keeps: _Keeps, *, is_private: bool) -> mmap.mmap:
        self._bins[memory] = _Bin(address, pointer_of(np.frombuffer(memory, np.uint8)), keeps, is_private)
        return memory

    def open(self, address: Address, *, private: bool = False) -> mmap.mmap:
        """Map a bin of this or another process; ``private`` maps it copy-on-write, so no other process sees what is written.

        Raises:
            InfeedError: The bin cannot be opened.
            MemoryLimitError: Windows cannot commit memory for a private mapping.
        """
        with self._lock:
            for memory, entry in self._bins.items():
                if entry.address.name == address.name and entry.is_private == private:
                    return memory
            keeps = self.open(address) if private else None
            try:
                memory = find_segment(address, private=private)
            except OSError as error:
                if is_commit_limit(error):
                    raise refused(address.size, error, _PRIVATE_FIX) from error
                raise InfeedError(
                    f"cannot open a shared object of process {address.pid} ({error.strerror or error}); keep a reference to it "
                    "in that process until it is open here, and run both on one machine, in one container, as one user"
                ) from error
            return self._add(memory, address, keeps, is_private=private)

    def address(self, memory: mmap.mmap) -> Address:
        """Return the address with which another process opens this bin."""
        entry = self._bins[memory]
        if entry.address.fd is None or not isinstance(entry.keeps, SegmentStore):
            return entry.address
        # A forked child has the same descriptor numbers and may outlive its parent, so use its pid.
        return entry.address if entry.address.pid == os.getpid() else replace(entry.address, pid=os.getpid())

    def locate(self, pointer: int) -> tuple[Address, int] | None:
        """Return the address of the bin that contains this memory address, and the offset in it."""
        if is_copying():
            return None
        with self._lock:
            for memory, entry in self._bins.items():
                if entry.pointer <= pointer < entry.pointer + entry.address.size:
                    whole = entry.keeps if entry.is_private and isinstance(entry.keeps, mmap.mmap) else memory
                    return self.address(whole), pointer - entry.pointer
        return None


BINS: Final = Bins()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=BINS.after_fork)


@final
@dataclass(frozen=True, slots=True)
class Extent:
    """A one-dimensional array in a bin. Its pickle contains only its location."""

    memory: mmap.mmap  # the whole bin
    begin: int
    size: int  # in bytes
    code: str = "B"  # type of the elements, as a `struct` format character

    def __reduce__(self) -> Any:
        return _open_extent, (BINS.address(self.memory), self.begin, self.size, self.code)

    def view(self) -> memoryview:
        """Return the read-only elements."""
        data = memoryview(self.memory).toreadonly()[self.begin : self.begin + self.size]
        return data.cast(self.code)  # type: ignore[call-overload, no-any-return]  # any format character

    def array(self) -> np.ndarray[Any, Any]:
        """Return the bytes as a base of other arrays. Over `view` itself, NumPy could make an array writable."""
        return np.frombuffer(self.view(), np.uint8)

    def private_array(self) -> np.ndarray[Any, Any]:
        """Return writable bytes. No other process sees what this process writes."""
        return np.frombuffer(BINS.open(BINS.address(self.memory), private=True), np.uint8, self.size, self.begin)


def _open_extent(address: Address, begin: int, size: int, code: str) -> Extent:
    return Extent(BINS.open(address), begin, size, code)


def allocate(size: int, code: str = "B") -> Extent:
    """Allocate ``size`` bytes in a bin of this process.

    Raises:
        MemoryLimitError: Not enough memory is available.
    """
    return Extent(*BINS.allocate(size), size, code)


def store(array: np.ndarray[Any, Any], code: str = "B") -> Extent:
    """Copy an array into shared memory and keep its memory order."""
    extent = allocate(array.nbytes, code)
    copy_into(extent, 0, array)
    return extent


def copy_into(extent: Extent, offset: int, array: np.ndarray[Any, Any]) -> None:
    np.ndarray(array.shape, array.dtype, extent.memory, extent.begin + offset, order=order_of(array))[...] = array


def order_of(array: np.ndarray[Any, Any]) -> Literal["C", "F"]:
    """Return the memory order that a copy of the array keeps."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def pointer_of(array: np.ndarray[Any, Any]) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def reduce_shared_memory(obj: Any) -> Any:
    """Reduce a plain array or tensor in shared memory to its location, or return ``NotImplemented``."""
    if type(obj) is np.ndarray:
        return _reduce_array(obj)
    torch = sys.modules.get("torch")
    return _reduce_tensor(obj) if torch is not None and type(obj) is torch.Tensor else NotImplemented


@final
class SharedArray(Shared, np.ndarray):
    """A read-only array in shared memory. Indexing it, or computing with it, returns plain arrays."""

    _plain: np.ndarray[Any, Any] | None = None

    def __getitem__(self, index: Any) -> Any:
        plain = self._plain
        return (np.asarray(self) if plain is None else plain)[index]

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        del context
        return array[()] if return_scalar or array.ndim == 0 else np.asarray(array)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = _reduce_array(self)
        return np.asarray(self).__reduce_ex__(protocol) if reduced is NotImplemented else reduced

    def __deepcopy__(self, memo: Any) -> Any:
        return self if BINS.locate(pointer_of(self)) else np.array(self)


def share_array(array: np.ndarray[Any, Any]) -> SharedArray:
    """Copy an array into shared memory and keep its memory order."""
    array = np.asarray(array)
    return _as_shared(np.ndarray(array.shape, array.dtype, store(array).array(), order=order_of(array)))


def _as_shared(plain: np.ndarray[Any, Any]) -> SharedArray:
    shared = plain.view(SharedArray)
    shared._plain = plain
    return shared


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    # Pickle writable arrays by value: this process may have changed them.
    if array.nbytes == 0 or array.dtype.hasobject or array.flags.writeable:
        return NotImplemented
    found = BINS.locate(pointer_of(array))
    if found is None:
        return NotImplemented
    return _open_array, (*found, array.shape, array.dtype, array.strides, isinstance(array, Shared))


def _open_array(address: Address, begin: int, shape: Any, dtype: Any, strides: tuple[int, ...], is_shared: bool) -> Any:
    whole = Extent(BINS.open(address), 0, address.size).array()
    plain: np.ndarray[Any, Any] = np.ndarray(shape, dtype, whole, begin, strides)
    return _as_shared(plain) if is_shared else plain


def is_plain_tensor(torch: Any, tensor: Any) -> bool:
    """Whether values, dtype and shape describe the tensor completely."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not getattr(tensor, "__dict__", None)
    )


def split_tensor(tensor: Any) -> tuple[np.ndarray[Any, Any], str, tuple[int, ...]]:
    """Return the bytes of a plain tensor, the name of its dtype, and its shape."""
    raw = tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return raw, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def tensor_over(memory: Any, begin: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor over writable memory. torch has no read-only tensors, so pass a private mapping."""
    import torch  # lazy: needed only for tensors

    dtype, count = getattr(torch, dtype_name), int(np.prod(shape))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)


def share_tensor(tensor: Any) -> Any:
    """Copy a CPU tensor into shared memory."""
    raw, dtype_name, shape = split_tensor(tensor)
    return tensor_over(store(raw).private_array(), 0, dtype_name, shape).as_subclass(_tensor_class())


@lru_cache(maxsize=1)
def _tensor_class() -> type[Any]:
    import torch  # lazy: needed only for tensors

    class SharedTensor(Shared, torch.Tensor):
        """A tensor in shared memory. Computing with it returns plain tensors."""

        __torch_function__: Any = torch._C._disabled_torch_function_impl

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced = _reduce_tensor(self)
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol) if reduced is NotImplemented else reduced

        def __deepcopy__(self, memo: Any) -> Any:
            return self.clone()

    return SharedTensor


def is_shared_tensor(value: Any) -> bool:
    return isinstance(value, Shared) and type(value) is _tensor_class()


def _reduce_tensor(tensor: Any) -> Any:
    if not is_plain_tensor(sys.modules["torch"], tensor) or tensor.numel() == 0:
        return NotImplemented
    if tensor.is_inference() or tensor._version > 0:  # it may have been modified, which only this process sees
        return NotImplemented
    found = BINS.locate(tensor.data_ptr())
    if found is None:
        return NotImplemented
    name = str(tensor.dtype).removeprefix("torch.")
    return _open_tensor, (*found, name, tuple(tensor.shape), tuple(tensor.stride()), isinstance(tensor, Shared))


def _open_tensor(address: Address, begin: int, dtype_name: str, shape: Any, strides: tuple[int, ...], is_shared: bool) -> Any:
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    plain = tensor_over(BINS.open(address, private=True), begin, dtype_name, (reach,)).as_strided(shape, strides)
    return plain.as_subclass(_tensor_class()) if is_shared else plain
