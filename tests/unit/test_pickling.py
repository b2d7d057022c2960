"""Pickling with the bytes of arrays and tensors out of band."""

import functools
import io
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.memory.pickling import BUFFER_ALIGN, dump, dump_by_value, is_importable, load, scripts_by_value, spans

Dump = Callable[[object], tuple[bytes, list[memoryview]]]

WAYS: dict[str, Dump] = {"result": dump, "by value": lambda obj: dump_by_value(obj, set())}
way = pytest.mark.parametrize("dumped", WAYS.values(), ids=WAYS)

STRUCTURED = np.dtype([("a", "<i4"), ("b", ">f8", (2,))])
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "contiguous": np.arange(1000.0).reshape(10, 100),
    "strided": np.arange(1000.0)[::3],
    "reversed": np.arange(1000.0)[::-1],
    "transposed part": np.arange(1000.0).reshape(10, 100).T[5:50],
    "Fortran": np.asfortranarray(np.arange(1000.0).reshape(10, 100)),
    "broadcast": np.broadcast_to(np.arange(300.0), (3, 300)),
    "big-endian": np.arange(500, dtype=">i4"),
    "bool": np.arange(1000) % 3 == 0,
    "complex": np.arange(300) * 1j,
    "datetime": np.arange(300).astype("datetime64[ms]"),
    "text": np.array(["abc", "de"] * 200),
    "structured": np.zeros(100, STRUCTURED),
    "float16": np.arange(1000, dtype=np.float16),
    "read-only": np.arange(1000.0),
}
ARRAYS["read-only"].flags.writeable = False
SMALL: dict[str, np.ndarray[Any, Any]] = {
    "zero size": np.zeros((0, 5), np.float32),
    "zero size inside": np.zeros((3, 0, 5)),
    "0-d": np.array(3.5),
    "0-d structured": np.zeros((), STRUCTURED),
    "object": np.array([1, "a", None], dtype=object),
    "object, strided": np.array([1, "a", None, 3], dtype=object)[::2],
    "structured with objects": np.array([(1, "x")], dtype=[("a", int), ("o", object)]),
}


def assert_same(found: Any, expected: np.ndarray[Any, Any]) -> None:
    assert type(found) is np.ndarray
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@way
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_the_bytes_of_an_array_are_out_of_band(dumped: Dump, array: np.ndarray[Any, Any]) -> None:
    """The pickle is short for any size and strides, and the array is restored equal."""
    data, buffers = dumped({"x": array})

    assert len(data) < 900
    assert sum(buffer.nbytes for buffer in buffers) == array.size * array.itemsize
    assert_same(load(data, buffers)["x"], array)


@way
@pytest.mark.parametrize("array", SMALL.values(), ids=SMALL)
def test_arrays_without_their_own_bytes_are_restored_too(dumped: Dump, array: np.ndarray[Any, Any]) -> None:
    """There are no bytes, or they cannot be out of band."""
    assert_same(load(*dumped(array)), array)


@way
def test_an_array_is_built_over_the_given_buffers(dumped: Dump) -> None:
    """The buffers are not copied."""
    data, buffers = dumped([np.arange(10), np.asfortranarray(np.ones((3, 4)))])
    places = [bytearray(buffer) for buffer in buffers]

    numbers, ones = load(data, places)
    places[0][0] = 77
    assert numbers[0] == 77
    assert ones.flags.f_contiguous

    numbers[1] = 88
    assert places[0][8] == 88


@way
def test_two_views_of_one_array_become_two_arrays(dumped: Dump) -> None:
    """An array that occurs twice is sent once; views become separate arrays."""
    whole = np.arange(100.0)
    again = load(*dumped([whole, whole, whole[10:20]]))

    assert again[0] is again[1]
    assert_same(again[2], whole[10:20])


def tensors(torch: Any) -> dict[str, Any]:
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    return {
        "contiguous": base,
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 30),
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "empty inside": torch.empty(3, 0, 2),
        "bfloat16": base.to(torch.bfloat16),
        "float16": base.to(torch.float16),
        "bool": base > 100,
        "complex": base.to(torch.complex64),
        "int8": base.to(torch.int8),
        "uint16": torch.arange(10).to(torch.uint16),
        "float8": base.to(torch.float8_e4m3fn),
        "conjugated": base.to(torch.complex64).conj(),
        "negative view": base.to(torch.complex64).conj().imag,
        "requires grad": base.clone().requires_grad_(),
        "result of a graph, detached": (base.clone().requires_grad_() * 2).detach(),
        "sparse": base.to_sparse(),
        "quantised": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
        "parameter": torch.nn.Parameter(base.clone()),
    }


def comparable(tensor: Any) -> Any:
    """Returns the same values in a form that torch.equal accepts."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.is_sparse else tensor.float() if tensor.itemsize == 1 else tensor


TENSORS = [
    "contiguous", "transposed", "strided", "expanded", "0-d", "empty", "empty inside", "bfloat16", "float16", "bool", "complex",
    "int8", "uint16", "float8", "conjugated", "negative view", "requires grad", "result of a graph, detached", "sparse",
    "quantised", "parameter",
]  # fmt: skip
OUTSIDE = {"contiguous", "transposed", "strided", "bfloat16", "float16", "bool", "complex", "int8", "float8"}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its own quantization.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@way
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_restored_unchanged(torch: ModuleType, dumped: Dump, name: str) -> None:
    """Dtype, shape, values, class and requires_grad; plain tensors with their bytes out of band."""
    tensor = tensors(torch)[name]

    data, buffers = dumped([tensor])
    (again,) = load(data, [bytearray(buffer) for buffer in buffers])

    assert type(again) is type(tensor)
    assert (again.dtype, again.shape, again.layout, again.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.layout,
        tensor.requires_grad,
    )
    assert torch.equal(comparable(again), comparable(tensor))
    if tensor.layout is torch.strided:
        assert again.stride() == tensor.stride()
    if name in OUTSIDE:
        assert len(data) < 300
        gaps = 1872 if name == "strided" else 0  # The bytes between its elements are kept.
        assert sum(buffer.nbytes for buffer in buffers) == tensor.numel() * tensor.element_size() + gaps


@pytest.mark.torch
def test_a_tensor_is_built_over_the_given_buffers(torch: ModuleType) -> None:
    """No copy: a change of the buffer is visible in the tensor."""
    data, buffers = dump(torch.arange(4, dtype=torch.uint8))
    place = bytearray(buffers[0])
    tensor = load(data, [place])
    place[2] = 99

    assert tensor.tolist() == [0, 1, 99, 3]


@pytest.mark.torch
@way
def test_overlapping_tensors_share_one_buffer(torch: ModuleType, dumped: Dump) -> None:
    """In any order, also if they have other dtypes and do not begin at a multiple of each other's size."""
    base = torch.arange(64, dtype=torch.uint8)
    parts = [base[3:10], base[4:12].view(torch.int32), base[30:], base[9:31], base[0:2]]

    data, buffers = dumped(parts)
    again = load(data, [bytearray(buffer) for buffer in buffers])

    assert len(buffers) == 1
    again[0][6] = 99
    base[9] = 99
    for mine, others in zip(again, parts, strict=True):
        assert torch.equal(mine, others)


@pytest.mark.torch
@way
def test_only_the_needed_part_of_a_large_storage_is_written(torch: ModuleType, dumped: Dump) -> None:
    """A row, a column, and a thousand rows that do not overlap."""
    table = torch.arange(1_000_000).view(1000, 1000)

    for parts in ([table[5]], [table[:, 5]], list(table[:, :10].unbind())):
        data, buffers = dumped(parts)
        again = load(data, [bytearray(buffer) for buffer in buffers])
        assert sum(buffer.nbytes for buffer in buffers) == sum(part.nbytes for part in parts)
        assert all(map(torch.equal, again, parts))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@way
def test_storages_are_restored(torch: ModuleType, dumped: Dump) -> None:
    """Untyped and typed ones, empty ones, and those shared with tensors."""
    tensor = torch.arange(3.0)

    again, storage, typed, empty = load(*dumped([tensor, tensor.untyped_storage(), tensor.storage(), torch.UntypedStorage(0)]))

    assert [type(storage), type(typed)] == [torch.UntypedStorage, torch.storage.TypedStorage]
    assert again.untyped_storage().data_ptr() == storage.data_ptr() == typed.data_ptr()
    assert list(typed) == [0.0, 1.0, 2.0]
    assert empty.nbytes() == 0


@pytest.mark.torch
def test_a_tensor_keeps_its_attributes(torch: ModuleType) -> None:
    """Attributes set by the user are pickled too."""
    tensor = torch.zeros(3)
    tensor.source = "camera 1"

    assert load(*dump(tensor)).source == "camera 1"


@way
def test_objects_that_cannot_be_imported_are_pickled_by_value(dumped: Dump) -> None:
    """Classes of a local scope, lambdas and closures."""
    base = 10

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    again = load(*dumped([Local(3), lambda x: x + base, np.arange(3)]))

    assert again[0].value == 3
    assert again[1](5) == 15
    assert again[2].tolist() == [0, 1, 2]


@way
def test_callables_of_functools_are_pickled_by_value(dumped: Dump) -> None:
    """Cached functions, also recursive ones, cached properties and generic functions, as in a script."""

    @functools.lru_cache(maxsize=7, typed=True)
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    fibonacci.note = "kept"  # type: ignore[attr-defined]

    @functools.singledispatch
    def name(value: Any) -> str:
        return f"any {value}"

    @name.register
    def _(value: int) -> str:
        return f"int {name(str(value))}"

    class Local:
        @functools.cached_property
        def number(self) -> int:
            return 5

        @functools.singledispatchmethod
        def kind(self, value: Any) -> str:
            return "any"

        @kind.register
        def _(self, value: int) -> str:
            return "int"

        @functools.cache  # noqa: B019  # that is what is tested
        def cached(self, value: int) -> int:
            return value + self.number

    again_fibonacci, again_name, again = load(*dumped([fibonacci, name, Local()]))

    assert again_fibonacci is not fibonacci
    assert again_fibonacci(30) == 832040
    assert again_fibonacci.cache_info().hits > 0
    assert again_fibonacci.cache_parameters() == {"maxsize": 7, "typed": True}
    assert again_fibonacci.note == "kept"
    assert [again_name(3), again_name(2.5)] == ["int any 3", "any 2.5"]
    assert (again.number, again.kind(3), again.kind("x"), again.cached(1)) == (5, "int", "any", 6)
    assert vars(again)["number"] == 5


@way
def test_an_importable_cached_function_is_pickled_by_reference(dumped: Dump) -> None:
    """With the values that it has cached."""
    assert load(*dumped(importable)) is importable


@functools.lru_cache
def importable(value: int) -> int:
    return value


def test_required_modules_are_listed() -> None:
    """The fork server imports them ahead."""
    import json

    modules: set[str] = set()
    dump_by_value([json.dumps, json.JSONDecoder, lambda: json.loads("1")], modules)

    assert {"json", "json.decoder"} <= modules


@pytest.mark.parametrize(
    ("obj", "library", "is_needed"),
    [
        ({"format": "torch"}, "datasets.arrow_dataset", True),
        ({"format": "torches"}, "datasets.arrow_dataset", False),
        ({"format": "torch"}, "pandas", False),
    ],
)
def test_torch_is_a_required_module_of_hugging_face_datasets_that_name_it(obj: object, library: str, is_needed: bool) -> None:
    """They import it in workers, after `with_format("torch")`. Elsewhere it is only a string."""
    modules = {library}

    dump_by_value(obj, modules)

    assert ("torch" in modules) == is_needed


def test_a_class_of_a_module_that_is_not_imported_is_pickled_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy imports ``numpy.rec`` on first use only. Another class of its name fails in ``super()``."""
    monkeypatch.delitem(sys.modules, "numpy.rec", raising=False)
    assert pickle.loads(dump_by_value(np.recarray, set())[0]) is np.recarray


@pytest.mark.parametrize("mode", ["r", "rb", "w"])
def test_an_open_file_is_rejected(tmp_path: Path, mode: str) -> None:
    """The error names the file; a pickled file would be another file, or its text."""
    path = tmp_path / "f"
    path.write_text("text")
    with open(path, mode) as file, pytest.raises(TypeError, match=r"cannot pickle '\w+' object: it is an open file"):
        dump_by_value({"file": file}, set())


def test_in_memory_text_and_bytes_are_not_open_files() -> None:
    """StringIO and BytesIO contain their data."""
    text, data = load(*dump_by_value([io.StringIO("abc"), io.BytesIO(b"de")], set()))

    assert (text.getvalue(), data.getvalue()) == ("abc", b"de")


# --- functions of random modules


@pytest.mark.parametrize(
    "function", [random.choice, random.random, random.shuffle, random.gauss, random.getrandbits, random.seed]
)
def test_a_function_of_random_is_pickled_by_reference(function: Callable[..., Any]) -> None:
    """Not as a method of a copy of this process's generator, from which all workers would draw the same numbers."""
    data, _ = dump_by_value(function, set())

    assert pickle.loads(data) == function
    assert len(data) < 200


@pytest.mark.parametrize("name", ["rand", "randn", "randint", "choice", "shuffle", "random_sample", "normal", "permutation"])
def test_a_function_of_numpy_random_is_pickled_by_reference(name: str) -> None:
    """The same for NumPy's legacy generator."""
    data, _ = dump_by_value(getattr(np.random, name), set())

    assert pickle.loads(data).__self__ is getattr(np.random, name).__self__
    assert len(data) < 200


def test_a_generator_of_the_user_is_pickled_with_its_state() -> None:
    """Only the global ones are special."""
    own = random.Random(5)
    draw, generator = load(*dump_by_value([own.random, np.random.RandomState(5)], set()))

    assert draw() == random.Random(5).random()
    assert generator.rand() == np.random.RandomState(5).rand()


# --- memory maps


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Returns the path of a file of ten thousand integers.

    A fixture that held the map would keep its descriptor open too long.
    """
    path = tmp_path / "numbers.bin"
    np.arange(10_000, dtype=np.int32).tofile(path)
    return path


def opened(path: Path, mode: Any = "r") -> Any:
    return np.memmap(path, dtype=np.int32, mode=mode)


SLICES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda m: m,
    "slice": lambda m: m[100:200],
    "slice of a slice": lambda m: m[1000:][50:60],
    "reshaped": lambda m: m.reshape(100, 100),
    "rows": lambda m: m.reshape(100, 100)[7:9],
    "other dtype": lambda m: m[3:].view(np.uint8),
    "one element": lambda m: m[5:6],
}


@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES)
def test_a_memory_map_is_opened_again_by_the_receiver(numbers: Path, cut: Callable[[Any], Any]) -> None:
    """By its path: its contents are neither read nor sent, also for a slice."""
    part = cut(opened(numbers))
    data, buffers = dump_by_value(part, set())
    again = load(data, buffers)

    assert buffers == []
    assert len(data) < 500
    assert isinstance(again, np.memmap)
    assert again.dtype == part.dtype
    assert np.array_equal(again, part)


@pytest.mark.parametrize(
    "cut", [lambda m: m[::2], lambda m: m.reshape(100, 100).T, lambda m: m[5:5]], ids=["strided", "T", "empty"]
)
def test_a_part_of_a_memory_map_that_cannot_be_opened_again_is_copied(numbers: Path, cut: Callable[[Any], Any]) -> None:
    """Correctness comes before speed."""
    part = cut(opened(numbers))

    assert np.array_equal(load(*dump_by_value(part, set())), part)


def test_a_memory_map_with_a_header_is_opened_after_it(tmp_path: Path) -> None:
    """As np.load(mmap_mode="r") returns it: data begins at an offset that is no multiple of a page."""
    np.save(tmp_path / "a.npy", np.arange(5000).reshape(50, 100))
    part = np.load(tmp_path / "a.npy", mmap_mode="r")[10:20]

    again = load(*dump_by_value(part, set()))

    assert isinstance(again, np.memmap)
    assert np.array_equal(again, part)


def test_a_result_computed_from_a_memory_map_is_an_array(numbers: Path) -> None:
    """A copy has no file, and must not be read from one."""
    mapped = opened(numbers)
    copy = mapped.copy()
    copy[0] = -5

    assert load(*dump_by_value(copy, set()))[0] == -5
    assert load(*dump_by_value(mapped + 1, set()))[0] == 1


def test_changes_in_a_copy_on_write_map_are_not_lost(numbers: Path) -> None:
    """They exist only in memory, so the file must not be opened instead."""
    private = opened(numbers, "c")
    private[0] = -5

    assert load(*dump_by_value(private, set()))[0] == -5


@given(st.lists(st.integers(0, 10_000)))
def test_spans_are_aligned_and_disjoint(sizes: list[int]) -> None:
    """Buffers are contiguous and aligned to cache lines, and the total contains them."""
    offsets, total = spans(sizes)

    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % BUFFER_ALIGN == 0 for offset in offsets)
    assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
    assert total == (ends[-1] if ends else 0)


def test_concurrent_pickling_does_not_interfere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of a spawned process is pickled by value until the last of them is done, in any thread."""
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("__mp_main__"))
    with scripts_by_value():
        with scripts_by_value():
            pass
        assert "__mp_main__" in cloudpickle.list_registry_pickle_by_value()
    assert "__mp_main__" not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_the_user_pickles_by_value_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """cloudpickle's registry is the program's as well."""
    module = ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        with scripts_by_value():
            pass
        assert "__mp_main__" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class LazyModule(ModuleType):
    """Libraries replace themselves with such objects in `sys.modules`."""


def test_a_module_with_its_own_class_is_imported_by_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.ops` is one; a function of the script that names it as a global must still reach workers."""
    lazy = LazyModule("lazy_module_of_a_test")
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    data, buffers = dump_by_value([lazy], set())

    assert load(data, buffers) == [lazy]


@pytest.mark.parametrize(("module", "expected"), [("installed", True), ("__main__", False), ("__mp_main__", False)])
def test_definitions_in_scripts_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, module: str, expected: bool) -> None:
    """In a process of multiprocessing, the script has another name, which other processes may not have."""
    cls = type("Sample", (), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(Sample=cls))

    assert is_importable(cls) is expected
