"""Leaves: how a column is collated, for each row of the table."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from infeed.collate.leaves import Kind, UnequalShapes, finish_beside, leaf_of

STRUCTURED = np.dtype([("a", "i4"), ("b", "f8")])
OTHER_STRUCTURED = np.dtype([("c", "i4")])


class Matrix(np.ndarray[Any, Any]):
    """A subclass is a user-defined type and is not stacked like its base class."""


COLUMNS: dict[str, tuple[list[Any], Kind, Any, tuple[int, ...]]] = {
    "bool": ([True, False], Kind.NUMBER, "bool", ()),
    "int": ([1, -5], Kind.NUMBER, "int64", ()),
    "float": ([1.0, 2.5], Kind.NUMBER, "float64", ()),
    "complex": ([1j, 2j], Kind.NUMBER, "complex128", ()),
    "int and float": ([1, 2.5], Kind.NUMBER, "float64", ()),
    "bool and int": ([True, 2], Kind.NUMBER, "int64", ()),
    "bool and float": ([True, 2.5], Kind.NUMBER, "float64", ()),
    "float and complex": ([1.5, 1j], Kind.NUMBER, "complex128", ()),
    "the largest int": ([(1 << 63) - 1, -(1 << 63)], Kind.NUMBER, "int64", ()),
    "int beyond 64 bits": ([1, 1 << 63], Kind.OBJECT, None, ()),
    "int below 64 bits": ([-(1 << 63) - 1], Kind.OBJECT, None, ()),
    "int beyond float": ([1.5, 10**400], Kind.OBJECT, None, ()),
    "str": (["a", "b"], Kind.OBJECT, None, ()),
    "bytes": ([b"a", b"b"], Kind.OBJECT, None, ()),
    "None": ([None, None], Kind.OBJECT, None, ()),
    "mixed": ([1, "a", None], Kind.OBJECT, None, ()),
    "number and array": ([1, np.zeros(3)], Kind.OBJECT, None, ()),
    "any object": ([object(), len], Kind.OBJECT, None, ()),
    "set": ([{1}, {2}], Kind.OBJECT, None, ()),
    "np.str_": ([np.str_("a"), np.str_("b")], Kind.OBJECT, None, ()),
    "np.bytes_": ([np.bytes_(b"a")], Kind.OBJECT, None, ()),
    "array": ([np.zeros((2, 3), "f4")] * 2, Kind.ARRAY, "float32", (2, 3)),
    "0-d array": ([np.array(1.0), np.array(2.0)], Kind.ARRAY, "float64", ()),
    "empty array": ([np.zeros((0, 3))], Kind.ARRAY, "float64", (0, 3)),
    "promoted": ([np.zeros(3, "f4"), np.zeros(3, "i8")], Kind.ARRAY, "float64", (3,)),
    "promoted bytes": ([np.zeros(3, "u1"), np.zeros(3, "i1")], Kind.ARRAY, "int16", (3,)),
    "big-endian": ([np.zeros(3, ">f4")] * 2, Kind.ARRAY, ">f4", (3,)),
    "both endians": ([np.zeros(3, ">f4"), np.zeros(3, "<f4")], Kind.ARRAY, "float32", (3,)),
    "numpy scalars": ([np.float32(1), np.float32(2)], Kind.ARRAY, "float32", ()),
    "promoted scalars": ([np.float32(1), np.int64(2)], Kind.ARRAY, "float64", ()),
    "np.bool_": ([np.True_, np.False_], Kind.ARRAY, "bool", ()),
    "datetime64": ([np.datetime64("2020-01-01", "D")] * 2, Kind.ARRAY, "datetime64[D]", ()),
    "datetime64, units": ([np.datetime64(1, "s"), np.datetime64(1, "ms")], Kind.ARRAY, "datetime64[ms]", ()),
    "timedelta64 array": ([np.zeros(3, "m8[us]")], Kind.ARRAY, "m8[us]", (3,)),
    "structured": ([np.zeros(2, STRUCTURED)] * 2, Kind.ARRAY, STRUCTURED, (2,)),
    "structured scalars": ([np.zeros((), STRUCTURED)[()]] * 2, Kind.ARRAY, STRUCTURED, ()),
    "two structures": ([np.zeros(2, STRUCTURED), np.zeros(2, OTHER_STRUCTURED)], Kind.OBJECT, None, ()),
    "text arrays": ([np.array(["a"]), np.array(["abc"])], Kind.ARRAY, "U3", (1,)),
    "datetime and number": ([np.zeros(2, "M8[s]"), np.zeros(2)], Kind.OBJECT, None, ()),
    "object arrays": ([np.array([1, "a"], object)] * 2, Kind.STACKED, None, ()),
    "masked arrays": ([np.ma.masked_array([1, 2], [0, 1])] * 2, Kind.OBJECT, None, ()),
    "subclass of array": ([np.zeros(3).view(Matrix)] * 2, Kind.OBJECT, None, ()),
}


@pytest.mark.parametrize(("column", "kind", "dtype", "shape"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_is_collated_as_in_the_table(column: list[Any], kind: Kind, dtype: Any, shape: tuple[int, ...]) -> None:
    """Kind, dtype and shape of a row, for every row of the table and its edges."""
    leaf = leaf_of(column)

    assert leaf.kind is kind
    assert leaf.shape == shape
    assert leaf.dtype == (None if dtype is None else np.dtype(dtype))
    assert leaf.is_in_slot is (kind in (Kind.ARRAY, Kind.NUMBER))
    if leaf.is_in_slot:
        assert leaf.row_bytes == np.zeros(shape, leaf.dtype).nbytes


def test_a_memory_map_is_an_array(tmp_path: Any) -> None:
    """Its rows are stacked like any other's."""
    np.save(tmp_path / "a.npy", np.zeros((4, 3), "f4"))
    rows = np.load(tmp_path / "a.npy", mmap_mode="r")

    leaf = leaf_of([rows[0], np.zeros(3, "f4")])

    assert (leaf.kind, leaf.dtype, leaf.shape) == (Kind.ARRAY, np.float32, (3,))


@pytest.mark.parametrize("column", [[np.zeros(3), np.zeros(3), np.zeros(4)], [np.zeros(3), np.zeros(3), np.zeros((3, 1))]])
def test_arrays_that_cannot_be_stacked_are_reported_with_rows_and_shapes(column: list[Any]) -> None:
    """The message names both samples."""
    with pytest.raises(UnequalShapes) as caught:
        leaf_of(column)

    assert (caught.value.row, caught.value.shape) == (0, (3,))
    assert (caught.value.other_row, caught.value.other_shape) == (2, column[2].shape)


def test_object_arrays_are_stacked_and_objects_listed() -> None:
    """Values outside of the slot are collated as NumPy would, or listed."""
    stacked = finish_beside(leaf_of([np.array([1, None], object)]), [np.array([1, None], object), np.array(["a", 2], object)])

    assert stacked.tolist() == [[1, None], ["a", 2]]
    assert finish_beside(leaf_of(["a"]), ["a", "b"]) == ["a", "b"]


@pytest.mark.torch
def test_tensors_have_their_own_table(torch: ModuleType) -> None:
    """Promotion as in torch, subclasses kept, parameters and graphs dropped, sparse ones stacked."""

    class Image(torch.Tensor):  # type: ignore[name-defined,misc]
        pass

    image = torch.zeros(2, 3).as_subclass(Image)
    columns: dict[str, tuple[list[Any], Kind, Any, tuple[int, ...], Any]] = {
        "plain": ([torch.zeros(2, 3)] * 2, Kind.TENSOR, "float32", (2, 3), None),
        "0-d": ([torch.tensor(1)] * 2, Kind.TENSOR, "int64", (), None),
        "promoted": ([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], Kind.TENSOR, "float32", (2,), None),
        "bfloat16": ([torch.zeros(2, dtype=torch.bfloat16)], Kind.TENSOR, "bfloat16", (2,), None),
        "bfloat16 and float16": (
            [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)], Kind.TENSOR, "float32", (2,), None,
        ),
        "requires grad": ([torch.zeros(2, requires_grad=True)], Kind.TENSOR, "float32", (2,), None),
        "parameter": ([torch.nn.Parameter(torch.zeros(2))], Kind.TENSOR, "float32", (2,), None),
        "subclass": ([image, image], Kind.TENSOR, "float32", (2, 3), Image),
        "subclass and plain": ([image, torch.zeros(2, 3)], Kind.TENSOR, "float32", (2, 3), None),
        "sparse": ([torch.eye(3).to_sparse()] * 2, Kind.STACKED, None, (), None),
        "tensor and array": ([torch.zeros(2), np.zeros(2)], Kind.OBJECT, None, (), None),
        "tensor and number": ([torch.zeros(2), 1], Kind.OBJECT, None, (), None),
    }  # fmt: skip
    for name, (column, kind, dtype, shape, cls) in columns.items():
        leaf = leaf_of(column)
        assert (name, leaf.kind, leaf.dtype, leaf.shape, leaf.cls) == (name, kind, dtype, shape, cls)

    with pytest.raises(UnequalShapes):
        leaf_of([torch.zeros(2), torch.zeros(3)])
    sparse = [torch.eye(3).to_sparse()] * 2
    assert torch.equal(finish_beside(leaf_of(sparse), sparse).to_dense(), torch.stack([torch.eye(3)] * 2))
