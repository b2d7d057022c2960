"""Pickling with the bytes of arrays and tensors left outside, to be put into shared memory.

``dump`` gives a short pickle and a list of buffers; ``load`` builds the object again over buffers that lie elsewhere, without
copying them. NumPy does this by itself (protocol 5); ``tensors`` does it for tensors of torch.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import cloudpickle
import numpy as np

from infeed.memory.callables import reduce_callable
from infeed.memory.inheriting import reduce_shared
from infeed.memory.sharedarrays import reduce_held
from infeed.memory.tensors import TensorReducer

_PROTOCOL: Final = 5
BUFFER_ALIGN: Final = 64
# Hugging Face datasets refer to torch by its name alone, after with_format("torch"), and import it when they load a sample.
_CHOOSES_TORCH: Final = "datasets"
_TORCH_BY_NAME: Final = pickle.SHORT_BINUNICODE + b"\x05torch"
# The module that is pickled by value, once for each pickling in progress. An RLock: finalizers run anywhere, and may pickle.
_BY_VALUE: Final[list[ModuleType]] = []
_BY_VALUE_LOCK: Final = threading.RLock()

BufferCallback = Callable[[pickle.PickleBuffer], Any]


def dump(obj: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a result: by reference where that works, which is fast, else by value.

    By reference fails for classes of ``__main__`` or of a local scope, which are not importable in a worker.
    """
    try:
        return _dump_result(_ResultPickler, obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _dump_result(_ByValueResultPickler, obj)


def load(data: bytes, buffers: Sequence[Any]) -> Any:
    """The object, over ``buffers``, which it keeps alive as long as it looks into them."""
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        settle_sparse()


def settle_sparse() -> None:
    """Let torch check sparse tensors that were unpickled. It keeps each in a list until ``torch.load`` does so."""
    utils: Any = sys.modules.get("torch._utils")
    if utils is not None and getattr(utils, "_sparse_tensors_to_validate", None):
        utils._validate_loaded_sparse_tensors()


def dump_by_value(obj: object, modules: set[str], *, keeps_shared: bool = False) -> tuple[bytes, list[memoryview]]:
    """Pickle what the user gave, so that a process that never saw their ``__main__`` can build it.

    Args:
        modules: names of the modules that it refers to are added to it.
        keeps_shared: tensors in shared memory are not copied; for processes that are being started (see ``inheriting``).
    """
    tensors = TensorReducer(keeps_shared=keeps_shared)

    def pickler(stream: io.BytesIO, on_buffer: BufferCallback) -> ByValuePickler:
        return ByValuePickler(stream, on_buffer, modules, tensors)

    with main_by_value():
        data, buffers = _dump(pickler, tensors, obj)
    if _TORCH_BY_NAME in data and any(name.partition(".")[0] == _CHOOSES_TORCH for name in modules):
        modules.add("torch")
    return data, buffers


def dumps_by_value(obj: object) -> bytes:
    """The same, in one piece: for small things that go to workers."""
    with main_by_value():
        data: bytes = cloudpickle.dumps(obj, _PROTOCOL)
    return data


@contextmanager
def main_by_value() -> Iterator[None]:
    """In a process that ``multiprocessing`` spawned, the user's script is the module ``__mp_main__``: no more importable."""
    module = sys.modules.get("__mp_main__")
    if module is None:
        yield
        return
    with _BY_VALUE_LOCK:
        _BY_VALUE.append(module)
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with _BY_VALUE_LOCK:  # threads pickle at the same time: the last to leave takes it back
            _BY_VALUE.remove(module)
            if module not in _BY_VALUE:
                cloudpickle.unregister_pickle_by_value(module)


def spans(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets at which buffers of these sizes are laid one behind the other, and the bytes they take together.

    >>> spans([100, 1])
    ([0, 128], 129)
    """
    offsets = []
    end = 0
    for size in sizes:
        begin = -(-end // BUFFER_ALIGN) * BUFFER_ALIGN
        offsets.append(begin)
        end = begin + size
    return offsets, end


def _dump_result(cls: type[Any], obj: object) -> tuple[bytes, list[memoryview]]:
    tensors = TensorReducer(keeps_shared=False)
    return _dump(lambda stream, on_buffer: cls(stream, on_buffer, tensors), tensors, obj)


def _dump(
    pickler: Callable[[io.BytesIO, BufferCallback], Any], tensors: TensorReducer, obj: object
) -> tuple[bytes, list[memoryview]]:
    while True:
        stream = io.BytesIO()
        buffers: list[memoryview] = []
        pickler(stream, lambda buffer, buffers=buffers: buffers.append(buffer.raw())).dump(obj)  # type: ignore[misc]
        if not tensors.must_repeat:
            return stream.getvalue(), buffers
        tensors.must_repeat = False


def _reduce_array(obj: Any) -> Any:
    """Reduction of an array to its raw bytes, or ``NotImplemented`` to go on as usual."""
    if type(obj) is not np.ndarray:
        return NotImplemented
    if obj.dtype.kind in "mM":
        # Dates have no buffer of their own; as integers they have.
        return _rebuild_dates, (np.ascontiguousarray(obj).view(np.int64), obj.dtype)
    # A view with strides would be copied into the pickle; made contiguous, its bytes stay outside.
    if obj.flags.forc or obj.dtype.hasobject:
        return NotImplemented
    return np.ascontiguousarray(obj).__reduce_ex__(_PROTOCOL)


def _rebuild_dates(numbers: Any, dtype: np.dtype[Any]) -> Any:
    return numbers.view(dtype)


def _reduce_result_array(obj: Any) -> Any:
    """The same for what a worker returns, which can always be written to. pickle would keep a read-only buffer read-only."""
    if type(obj) is np.ndarray and not obj.flags.writeable and not obj.dtype.hasobject:
        obj = obj.copy(order="K")
        reduced = _reduce_array(obj)
        return obj.__reduce_ex__(_PROTOCOL) if reduced is NotImplemented else reduced
    return _reduce_array(obj)


@final
class _ResultPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, on_buffer: BufferCallback, tensors: TensorReducer) -> None:
        super().__init__(stream, _PROTOCOL, buffer_callback=on_buffer)
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce_result_array(obj)
        return self._tensors.reduce(obj) if reduced is NotImplemented else reduced


@final
class _ByValueResultPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    def __init__(self, stream: io.BytesIO, on_buffer: BufferCallback, tensors: TensorReducer) -> None:
        super().__init__(stream, _PROTOCOL, buffer_callback=on_buffer)
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        for reduce in (_reduce_result_array, self._tensors.reduce, reduce_callable):
            reduced = reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


@final
class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """Pickles datasets and functions, and notes which modules they need."""

    def __init__(self, stream: io.BytesIO, on_buffer: BufferCallback | None, modules: set[str], tensors: TensorReducer) -> None:
        super().__init__(stream, _PROTOCOL, buffer_callback=on_buffer)
        self._modules = modules
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            # cloudpickle would read a text file to its end and send the text along.
            raise TypeError(f"cannot pickle {type(obj).__name__!r} object: it is an open file")
        if isinstance(obj, ModuleType):
            self._modules.add(obj.__name__)
            if type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)  # cloudpickle knows plain modules only, not torch.ops and lazy ones
        elif isinstance(obj, type | FunctionType) and obj.__module__ is not None:
            self._modules.add(obj.__module__)
        for reduce in (
            _reduce_draw,
            _reduce_memmap,
            reduce_held,
            _reduce_array,
            self._tensors.reduce,
            reduce_callable,
            reduce_shared,
        ):
            reduced = reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


def _reduce_draw(obj: Any) -> Any:
    """``from random import choice`` is a method of the module's generator: where it arrives it must be of the generator there.

    Pickled as it is, it would take a copy of this process's generator along, and all workers would draw the same numbers.
    """
    if isinstance(obj, BuiltinMethodType | MethodType):
        for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand)):
            if obj.__self__ is generator:
                return getattr, (module, obj.__name__)
    return NotImplemented


def _reduce_memmap(array: Any) -> Any:
    """A memory-mapped file is mapped again where it arrives; pickled as an array, all of it would be read and sent."""
    if type(array) is not np.memmap or array.filename is None or not array.flags.c_contiguous:
        return NotImplemented
    if array.mode not in ("r", "r+"):
        return NotImplemented  # a private map ("c") may have been written to, and the file does not know of it
    begin = array.__array_interface__["data"][0]
    whole = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    offset = whole.offset + begin - whole.__array_interface__["data"][0]
    return np.memmap, (str(array.filename), array.dtype, array.mode, offset, array.shape)
