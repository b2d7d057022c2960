"""Pickling with the bytes of arrays and tensors out-of-band, so that they can be placed in shared memory.

``dump`` returns a short pickle and a list of buffers. ``load`` re-creates the object over buffers elsewhere in memory, without
a copy. NumPy supports this natively (protocol 5); ``TensorReducer`` adds it for torch tensors. ``reduce_callable`` pickles
cached functions, cached properties and generic functions by value.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import random
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import cloudpickle
import numpy as np
from cloudpickle.cloudpickle import _lookup_module_and_qualname, _make_skeleton_class

from infeed.memory.inheriting import is_shared_storage, reduce_shared, reduce_shared_storage
from infeed.memory.mappings import SharedMappings
from infeed.memory.reopening import reduce_handle
from infeed.memory.scripts import SCRIPTS
from infeed.memory.shared_arrays import is_plain_tensor, reduce_shared_memory

_DISPATCHER: Final[CodeType] = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]


def reduce_callable(obj: Any) -> Any:
    """Reduce a cached function, cached property or generic function by value, or return ``NotImplemented``."""
    if isinstance(obj, functools._lru_cache_wrapper):
        return NotImplemented if is_importable(obj) else _reduce_cached(obj)
    if isinstance(obj, functools.cached_property):
        state = {name: value for name, value in vars(obj).items() if name != "lock"}
        return copyreg.__newobj__, (type(obj),), (state, "lock" in vars(obj)), None, None, _set_cached_property  # type: ignore[attr-defined]
    if isinstance(obj, functools.singledispatchmethod) and "_method_cache" in vars(obj):
        state = {name: value for name, value in vars(obj).items() if name != "_method_cache"}
        return copyreg.__newobj__, (type(obj),), state, None, None, _set_generic_method  # type: ignore[attr-defined]
    if isinstance(obj, FunctionType) and obj.__code__ is _DISPATCHER and not is_importable(obj):
        return _reduce_generic(obj)
    return NotImplemented


def is_importable(obj: Any) -> bool:
    """Whether another process can import this class or function by name."""
    if obj.__module__ in SCRIPTS or obj.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    return _lookup_module_and_qualname(obj) is not None


def _reduce_cached(obj: Any) -> Any:
    parameters = obj.cache_parameters()
    return _rebuild_cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), vars(obj)


def _rebuild_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _set_cached_property(obj: Any, state: tuple[dict[str, Any], bool]) -> None:
    attributes, has_lock = state
    vars(obj).update(attributes)
    if has_lock:  # Python 3.11 has a lock, which cannot be pickled
        obj.lock = threading.RLock()


def _set_generic_method(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)
    obj._method_cache = weakref.WeakKeyDictionary()  # since Python 3.13; weak references cannot be pickled


def _reduce_generic(obj: Any) -> Any:
    registry = obj.registry
    others = {cls: function for cls, function in registry.items() if cls is not object}
    return functools.singledispatch, (registry[object],), others, None, None, _register


def _register(generic: Any, functions: dict[type, Callable[..., Any]]) -> None:
    for cls, function in functions.items():
        generic.register(cls, function)


# To preserve strides, a tensor is written with the gaps between its elements if that is at most this many times larger...
_MOST_TIMES: Final = 8
# ...or if the total is at most this many bytes. Otherwise (a column of a large table) it is made contiguous.
_MOST_BYTES: Final = 1 << 16
# Alignment of regions that tensors share, so that a byte offset is a whole number of elements of any dtype.
_ALIGN: Final = 16


@final
class _Region:
    """A byte range of a storage. It is pickled once, however many tensors are views of it."""

    __slots__ = ("begin", "end", "mappings", "storage")

    def __init__(self, storage: Any, begin: int, end: int, mappings: SharedMappings | None) -> None:
        self.storage, self.begin, self.end, self.mappings = storage, begin, end, mappings

    def __reduce__(self) -> Any:
        mapped = None if self.mappings is None else self.mappings.find_storage(self.storage, self.begin, self.end)
        if mapped is not None:
            return _storage_over, (*mapped, self.end - self.begin)
        torch = sys.modules["torch"]
        size = self.end - self.begin
        raw = torch.empty(0, dtype=torch.uint8).set_(self.storage, self.begin, (size,), (1,)).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(raw),)


@final
class TensorReducer:
    """Reduces the tensors and storages of one object, and records which parts of which storages have been pickled.

    Also reduces arrays in shared mappings.
    """

    def __init__(self, *, keeps_shared: bool) -> None:
        """Create a reducer. With ``keeps_shared``, the receiver maps storages in shared memory instead of copying them."""
        self._keeps_shared = keeps_shared
        self._mappings = SharedMappings() if keeps_shared and sys.platform == "linux" else None
        self._regions: dict[int, list[_Region]] = {}  # by the address of torch's C++ storage object
        # Regions already in the pickle turned out to overlap: pickle again, now that all regions are known.
        self.must_repeat = False

    def reduce(self, obj: Any) -> Any:
        """Reduce a CPU tensor, a storage or an array in a shared mapping, or return ``NotImplemented``."""
        if isinstance(obj, np.ndarray):
            return NotImplemented if self._mappings is None else self._mappings.reduce_array(obj)
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if type(obj) is torch.Tensor:
            return self._reduce_tensor(torch, obj)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            if self._keeps_shared and is_shared_storage(torch, obj):
                return reduce_shared_storage(torch, obj)
            return _same, (self._region(obj, 0, obj.nbytes(), 1),)
        if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":  # obj.device emits a warning
            return _rebuild_typed_storage, (obj._untyped_storage, _name(obj.dtype))
        return NotImplemented

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        if not is_plain_tensor(torch, tensor):
            return NotImplemented  # use torch's reduction, which then pickles the storage
        tensor = tensor.detach()
        itemsize, name = tensor.element_size(), _name(tensor.dtype)
        if not tensor.numel():
            return _rebuild_empty, (name, tuple(tensor.shape), tensor.stride())
        storage = tensor.untyped_storage()
        if self._keeps_shared and is_shared_storage(torch, storage):
            return _rebuild_tensor, (storage, name, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        span = itemsize * (1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)))
        begin = itemsize * tensor.storage_offset()
        is_mapped = self._mappings is not None and self._mappings.find_storage(storage, begin, begin + span) is not None
        if span > max(_MOST_BYTES, _MOST_TIMES * tensor.numel() * itemsize) and not is_mapped:
            tensor = tensor.contiguous()
            storage, begin, span = tensor.untyped_storage(), 0, tensor.numel() * itemsize
        region = self._region(storage, begin, begin + span, itemsize)
        offset = (begin - region.begin) // itemsize
        return _rebuild_tensor, (region, name, offset, tuple(tensor.shape), tensor.stride())

    def _region(self, storage: Any, begin: int, end: int, itemsize: int) -> _Region:
        """Return the region that contains these bytes. Regions of one storage do not overlap."""
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
        made = _Region(storage, begin, end, self._mappings)
        regions[first:last] = [made]
        return made


def _touched(regions: list[_Region], begin: int, end: int) -> tuple[int, int]:
    """Return the range of regions that overlap these bytes."""
    first = bisect_right(regions, begin, key=lambda region: region.end)
    return first, bisect_left(regions, end, lo=first, key=lambda region: region.begin)


def _name(dtype: Any) -> str:
    """Return the dtype's name. pickle would search every module for the dtype itself."""
    return str(dtype).removeprefix("torch.")


def _same(region: Any) -> Any:
    return region


def _rebuild_storage(buffer: Any) -> Any:
    import torch  # lazy: the pickle contains a tensor

    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _storage_over(memory: Any, begin: int, size: int) -> Any:
    import torch  # lazy: needed only for torch storages

    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin).untyped_storage()


def _rebuild_typed_storage(storage: Any, dtype_name: str) -> Any:
    import torch  # lazy: needed only for torch storages

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=getattr(torch, dtype_name), _internal=True)


def _rebuild_tensor(storage: Any, dtype_name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch  # lazy: needed only for tensors

    return torch.empty(0, dtype=getattr(torch, dtype_name)).set_(storage, offset, shape, stride)


def _rebuild_empty(dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch  # lazy: needed only for tensors

    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype_name))


_PROTOCOL: Final = 5
BUFFER_ALIGN: Final = 64
# After with_format("torch"), Hugging Face datasets refer to torch only by name and import it when they load a sample.
_CHOOSES_TORCH: Final = "datasets"
_TORCH_BY_NAME: Final = pickle.SHORT_BINUNICODE + b"\x05torch"
# The modules pickled by value, one entry per pickling in progress. An RLock, because finalizers run anywhere and may pickle.
_BY_VALUE: Final[list[ModuleType]] = []
_BY_VALUE_LOCK: Final = threading.RLock()

BufferCallback = Callable[[pickle.PickleBuffer], Any]


def dump(obj: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a result by reference, which is fast, or by value if that fails.

    Pickling by reference fails for classes of ``__main__`` or a local scope, which a worker cannot import.
    """
    try:
        return _dump_result(_ResultPickler, obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _dump_result(_ByValueResultPickler, obj)


def load(data: bytes, buffers: Sequence[Any]) -> Any:
    """Re-create the object over ``buffers``. The object keeps them alive while it references them."""
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        settle_sparse()


def settle_sparse() -> None:
    """Let torch validate unpickled sparse tensors. Otherwise torch keeps each of them in a list until ``torch.load``."""
    utils: Any = sys.modules.get("torch._utils")
    if utils is not None and getattr(utils, "_sparse_tensors_to_validate", None):
        utils._validate_loaded_sparse_tensors()


def dump_by_value(obj: object, modules: set[str], *, keeps_shared: bool = False) -> tuple[bytes, list[memoryview]]:
    """Pickle user objects so that a process without the user's ``__main__`` can re-create them.

    Args:
        modules: Set to which the names of all referenced modules are added.
        keeps_shared: Do not copy tensors in shared memory. Only for worker start-up (see ``inheriting``).
    """
    tensors = TensorReducer(keeps_shared=keeps_shared)

    def pickler(stream: io.BytesIO, on_buffer: BufferCallback) -> ByValuePickler:
        return ByValuePickler(stream, on_buffer, modules, tensors)

    with scripts_by_value():
        data, buffers = _dump(pickler, tensors, obj)
    if _TORCH_BY_NAME in data and any(name.partition(".")[0] == _CHOOSES_TORCH for name in modules):
        modules.add("torch")
    return data, buffers


def dumps_by_value(obj: object) -> bytes:
    """Pickle a small object by value, with its buffers in the pickle."""
    with scripts_by_value():
        data: bytes = cloudpickle.dumps(obj, _PROTOCOL)
    return data


@contextmanager
def scripts_by_value() -> Iterator[None]:
    """Pickle functions and classes of scripts by value. cloudpickle does so only for ``__main__``."""
    found = [sys.modules[name] for name in SCRIPTS - {"__main__"} if name in sys.modules]
    with _BY_VALUE_LOCK:
        users = cloudpickle.list_registry_pickle_by_value() - {module.__name__ for module in _BY_VALUE}
        # Not packages: cloudpickle would also pickle their submodules by value, which workers can import.
        modules = [module for module in found if module.__name__ not in users and not hasattr(module, "__path__")]
        _BY_VALUE.extend(modules)
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with _BY_VALUE_LOCK:  # threads pickle concurrently: the last one to finish unregisters
            for module in modules:
                _BY_VALUE.remove(module)
                if module not in _BY_VALUE:
                    cloudpickle.unregister_pickle_by_value(module)


def spans(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for consecutive buffers of these sizes, and the total number of bytes.

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
    """Reduce an array to its raw bytes, or return ``NotImplemented`` to use the default reduction."""
    if type(obj) is not np.ndarray:
        return NotImplemented
    if obj.dtype.kind in "mM":
        # datetime64 and timedelta64 arrays do not export a buffer; integer views of them do.
        return _rebuild_dates, (np.ascontiguousarray(obj).view(np.int64), obj.dtype)
    # A strided view would be copied into the pickle. A contiguous copy keeps the bytes out-of-band.
    if obj.flags.forc or obj.dtype.hasobject:
        return NotImplemented
    return np.ascontiguousarray(obj).__reduce_ex__(_PROTOCOL)


def _rebuild_dates(numbers: Any, dtype: np.dtype[Any]) -> Any:
    return numbers.view(dtype)


def _reduce_result_array(obj: Any) -> Any:
    """Reduce an array of a worker's result, which must be writable. pickle would keep a read-only buffer read-only."""
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
        return _keep_slots(obj, super().reducer_override(obj))


@final
class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """Pickles datasets and functions, and records the modules that they need."""

    def __init__(self, stream: io.BytesIO, on_buffer: BufferCallback | None, modules: set[str], tensors: TensorReducer) -> None:
        super().__init__(stream, _PROTOCOL, buffer_callback=on_buffer)
        self._modules = modules
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            # cloudpickle would read a text file to its end and pickle the text.
            raise TypeError(f"cannot pickle {type(obj).__name__!r} object: it is an open file")
        if isinstance(obj, ModuleType):
            self._modules.add(obj.__name__)
            if type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)  # cloudpickle supports plain modules only, not torch.ops or lazy modules
        elif isinstance(obj, type | FunctionType) and obj.__module__ is not None:
            _import_public_module(obj.__module__)
            self._modules.add(obj.__module__)
        for reduce in (
            _reduce_draw,
            _reduce_memmap,
            reduce_handle,
            reduce_shared_memory,
            self._tensors.reduce,
            _reduce_array,
            reduce_callable,
            reduce_shared,
        ):
            reduced = reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        return _keep_slots(obj, super().reducer_override(obj))


def _import_public_module(name: str) -> None:
    """Import the submodule that a class belongs to, as pickle does. cloudpickle would pickle ``numpy.recarray`` by value."""
    if name not in sys.modules and "." in name and name.partition(".")[0] in sys.modules:
        with suppress(ImportError):
            import_module(name)


def _keep_slots(obj: Any, reduced: Any) -> Any:
    """Create a class that is pickled by value with its ``__slots__``. cloudpickle sets them later, when they have no effect."""
    slots = vars(obj).get("__slots__") if isinstance(obj, type) else None
    if slots and isinstance(reduced, tuple) and reduced[0] is _make_skeleton_class:
        reduced[1][3]["__slots__"] = slots
    return reduced


def _reduce_draw(obj: Any) -> Any:
    """Reduce ``from random import choice`` and similar methods, so that they use the receiving process's global generator.

    The default reduction would copy this process's generator, and all workers would draw the same numbers.
    """
    if isinstance(obj, BuiltinMethodType | MethodType):
        for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand)):
            if obj.__self__ is generator:
                return getattr, (module, obj.__name__)
    return NotImplemented


def _reduce_memmap(array: Any) -> Any:
    """Reduce a memory-mapped file to its path. The default reduction would read and pickle the whole file."""
    if type(array) is not np.memmap or array.filename is None or not array.flags.c_contiguous:
        return NotImplemented
    if array.mode not in ("r", "r+"):
        return NotImplemented  # a private mapping ("c") may contain changes that are not in the file
    begin = array.__array_interface__["data"][0]
    whole = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    offset = whole.offset + begin - whole.__array_interface__["data"][0]
    return np.memmap, (str(array.filename), array.dtype, array.mode, offset, array.shape)
