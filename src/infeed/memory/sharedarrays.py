"""Arrays and tensors in shared memory."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np

from infeed.memory.chunks import Chunks, order_of
from infeed.memory.holding import Extent, Held, find_held, open_extent, pointer_of, private_memory
from infeed.memory.segments import Address


@final
class SharedArray(np.ndarray, Held):
    """A read-only array in shared memory. Its pickle contains only its location.

    Indexing it, or computing with it, returns plain arrays.
    """

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

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self if find_held(pointer_of(self)) else np.array(self)


def share_array(array: np.ndarray[Any, Any]) -> SharedArray:
    """Copy an array into shared memory and keep its memory order."""
    chunks = Chunks()
    begin = chunks.add(np.asarray(array))
    return _as_shared(array_in(chunks.held(), begin, array.dtype, array.shape, order_of(array)))


def array_in(extent: Extent, begin: int, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray[Any, Any]:
    """Return a read-only array over part of an extent."""
    return np.ndarray(shape, dtype, extent.whole_bin(), extent.begin + begin, order=order)


def _as_shared(plain: np.ndarray[Any, Any]) -> SharedArray:
    shared = plain.view(SharedArray)
    shared._plain = plain
    return shared


def reduce_held(obj: Any) -> Any:
    """Reduce a plain array or tensor in shared memory to its location, or return ``NotImplemented``."""
    if type(obj) is np.ndarray:
        return _reduce_array(obj)
    torch = sys.modules.get("torch")
    return _reduce_tensor(obj) if torch is not None and type(obj) is torch.Tensor else NotImplemented


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    # Pickle writable arrays by value: this process may have changed them.
    if array.nbytes == 0 or array.dtype.hasobject or array.flags.writeable:
        return NotImplemented
    found = find_held(pointer_of(array))
    if found is None:
        return NotImplemented
    return _open_array, (*found, array.shape, array.dtype, array.strides, isinstance(array, Held))


def _open_array(
    address: Address, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...], is_shared: bool
) -> np.ndarray[Any, Any]:
    whole = open_extent(address, 0, address.size).whole_bin()
    plain: np.ndarray[Any, Any] = np.ndarray(shape, dtype, whole, begin, strides)
    return _as_shared(plain) if is_shared else plain


# --- tensors


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


def share_tensor(tensor: Any) -> Any:
    """Copy a CPU tensor into shared memory."""
    import torch  # lazy: needed only for tensors

    chunks = Chunks()
    begin = chunks.add(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return _as_shared_tensor(tensor_in(chunks.held(), begin, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))


def tensor_in(extent: Extent, begin: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor over the private mapping of an extent, because torch has no read-only tensors."""
    import torch  # lazy: needed only for tensors

    dtype = getattr(torch, dtype_name)
    count = int(np.prod(shape))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(private_memory(extent), dtype=dtype, count=count, offset=extent.begin + begin).view(shape)


@lru_cache(maxsize=1)
def _tensor_class() -> type[Any]:
    import torch  # lazy: needed only for tensors

    class SharedTensor(torch.Tensor, Held):
        """A tensor in shared memory. Its pickle contains only its location. Computing with it returns plain tensors."""

        __torch_function__: Any = torch._C._disabled_torch_function_impl

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced = _reduce_tensor(self)
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol) if reduced is NotImplemented else reduced

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self.clone()

    return SharedTensor


def is_shared_tensor(value: Any) -> bool:
    return isinstance(value, Held) and type(value) is _tensor_class()


def _as_shared_tensor(tensor: Any) -> Any:
    return tensor.as_subclass(_tensor_class())


def _reduce_tensor(tensor: Any) -> Any:
    if not is_plain_tensor(sys.modules["torch"], tensor) or tensor.numel() == 0:
        return NotImplemented
    if tensor.is_inference() or tensor._version > 0:  # it may have been modified, which only this process sees
        return NotImplemented
    found = find_held(tensor.data_ptr())
    if found is None:
        return NotImplemented
    name = str(tensor.dtype).removeprefix("torch.")
    return _open_tensor, (*found, name, tuple(tensor.shape), tuple(tensor.stride()), isinstance(tensor, Held))


def _open_tensor(
    address: Address, begin: int, dtype_name: str, shape: tuple[int, ...], strides: tuple[int, ...], is_shared: bool
) -> Any:
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    flat = tensor_in(open_extent(address, 0, address.size), begin, dtype_name, (reach,))
    plain = flat.as_strided(shape, strides)
    return _as_shared_tensor(plain) if is_shared else plain
