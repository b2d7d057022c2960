"""Leaves: how a column of values is represented in a batch.

| in the sample                        | in the batch                                                        |
|--------------------------------------|---------------------------------------------------------------------|
| NumPy array or scalar                | array with an additional first axis, in the slot                    |
| torch tensor                         | tensor with an additional first axis, in the slot                   |
| bool, int, float, complex            | array of bool, int64, float64, complex128, in the slot              |
| object array, sparse tensor          | stacked by NumPy or torch; sent outside the slot                    |
| str, bytes, None, any other object   | list; sent outside the slot                                         |
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from infeed.collate.tree import Column
from infeed.memory.shared_arrays import Shared, SharedArray


class Kind(enum.Enum):
    ARRAY = "array"
    NUMBER = "number"
    TENSOR = "tensor"
    STACKED = "stacked"  # sent outside the slot, then np.stack or torch.stack
    OBJECT = "object"


_NUMBERS: Final[dict[type[Any], np.dtype[Any]]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}


_PICTURE_AXES: Final = (3, 4)


class LeafMismatch(Exception):
    """A column does not fit its leaf. Internal."""


class UnequalShapes(Exception):
    """Arrays of one column differ in shape. Internal; contains the rows for the error message."""

    def __init__(self, row: int, shape: tuple[int, ...], other_row: int, other_shape: tuple[int, ...]) -> None:
        super().__init__(row, shape, other_row, other_shape)
        self.row, self.shape, self.other_row, self.other_shape = row, shape, other_row, other_shape


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the layout: describes one row.

    ``dtype`` is a NumPy dtype, the name of a torch dtype for tensors, or the required type of objects, if any. ``cls`` is
    the class of the tensor or of the list of objects. ``read_as`` names the torch dtype of a leaf that is read as a tensor.
    """

    kind: Kind
    dtype: Any = None
    shape: tuple[int, ...] = ()
    row_bytes: int = 0
    cls: type[Any] | None = None
    read_as: str | None = None

    @property
    def is_in_slot(self) -> bool:
        return self.kind in (Kind.ARRAY, Kind.NUMBER, Kind.TENSOR)


def has_own_strides(column: Column) -> bool:
    """Whether torch may stack this column into a non-contiguous batch: channels-last samples with 3 or 4 axes."""
    return any(getattr(value, "ndim", 0) in _PICTURE_AXES and not _is_contiguous(value) for value in column)


def _is_contiguous(value: Any) -> bool:
    return bool(value.flags.c_contiguous) if isinstance(value, np.ndarray) else bool(value.is_contiguous())


def leaf_of(column: Column) -> Leaf:
    """Return the leaf that fits all values of a column.

    Raises:
        UnequalShapes: Arrays or tensors differ in shape.
    """
    types = set(map(type, column))
    if types <= _NUMBERS.keys():
        return _number_leaf(column, types)
    if all(cls in _NUMBERS or issubclass(cls, np.number | np.bool_) for cls in types) and not types.isdisjoint(_NUMBERS):
        # For example, a label that is sometimes the literal 0 and sometimes a result of argmax.
        dtype = np.result_type(*(_NUMBERS.get(type(value)) or value.dtype for value in column))
        return Leaf(Kind.ARRAY, dtype, (), dtype.itemsize)
    if all(issubclass(cls, np.generic) and not issubclass(cls, str | bytes) for cls in types) or types <= ARRAY_TYPES:
        return _array_leaf(column)
    torch = sys.modules.get("torch")
    if torch is not None and all(issubclass(cls, torch.Tensor) for cls in types):
        return _tensor_leaf(torch, column)
    return Leaf(Kind.OBJECT)


ARRAY_TYPES: Final[set[type[Any]]] = {np.ndarray, np.memmap, SharedArray}


def _number_leaf(column: Column, types: set[type[Any]]) -> Leaf:
    dtype = _NUMBERS[next(iter(types))] if len(types) == 1 else np.result_type(*(_NUMBERS[cls] for cls in types))
    try:
        np.asarray(column, dtype=dtype)
    except OverflowError:  # an int of more than 64 bits
        return Leaf(Kind.OBJECT)
    return Leaf(Kind.NUMBER, dtype, (), dtype.itemsize)


def _array_leaf(column: Column) -> Leaf:
    _check_shapes(column)
    shape = tuple(column[0].shape)
    dtypes = {value.dtype for value in column}
    if any(dtype.hasobject for dtype in dtypes):
        return Leaf(Kind.STACKED)
    try:
        dtype = np.result_type(*dtypes) if len(dtypes) > 1 else next(iter(dtypes))
    except TypeError:  # no common dtype, for example structured, text and numbers mixed
        return Leaf(Kind.OBJECT)
    return Leaf(Kind.ARRAY, dtype, shape, dtype.itemsize * math.prod(shape))


def _tensor_leaf(torch: Any, column: Column) -> Leaf:
    if any(t.layout is not torch.strided or t.is_quantized or t.is_nested for t in column):
        return Leaf(Kind.STACKED)
    _check_shapes(column)
    dtype = column[0].dtype
    for tensor in column[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    classes = {type(tensor) for tensor in column}
    cls = classes.pop() if len(classes) == 1 else torch.Tensor
    if cls is torch.nn.Parameter or issubclass(cls, Shared):
        cls = torch.Tensor
    shape = tuple(column[0].shape)
    row_bytes = dtype.itemsize * math.prod(shape)
    return Leaf(Kind.TENSOR, str(dtype).removeprefix("torch."), shape, row_bytes, None if cls is torch.Tensor else cls)


def _check_shapes(column: Column) -> None:
    first = tuple(column[0].shape)
    for row, value in enumerate(column):
        if tuple(value.shape) != first:
            raise UnequalShapes(0, first, row, tuple(value.shape))


def finish_beside(leaf: Leaf, values: list[Any]) -> Any:
    """Return the batch value of a column that was sent outside the slot."""
    if leaf.kind is Kind.OBJECT:
        return values if leaf.cls is None else leaf.cls(values)
    if isinstance(values[0], np.ndarray | np.generic):
        return np.stack(values)
    import torch  # lazy: needed only for tensors

    return torch.stack(values)
