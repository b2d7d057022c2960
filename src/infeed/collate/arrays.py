"""Datasets of in-memory arrays: gathered with one ``take`` per field and batch, directly into the slot.

Supports NumPy arrays, tuples, named tuples and dicts of them, and torch's ``TensorDataset``, all with default collation.
A worker could not be faster than the copy itself, so the main process reads them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from copy import copy
from mmap import mmap
from typing import Any, Final, final

import numpy as np

from infeed.collate.layout import Layout
from infeed.collate.leaves import Kind, Leaf
from infeed.collate.tree import LeafNode, MappingNode, Node, SequenceNode
from infeed.memory.shared_arrays import SharedArray, is_shared_tensor
from infeed.plan.order import Indices

_TABLE_DTYPES: Final = "biufcmMSUV?"


@final
class ArrayTable:
    """Columns of equal length that form the rows of a dataset."""

    def __init__(self, node: Node, columns: Sequence[Any]) -> None:
        self.length = len(columns[0])
        self._columns = [_as_array(column) for column in columns]
        self.layout = Layout(node, tuple(map(_leaf, columns)))

    def with_layout(self, layout: Layout) -> ArrayTable:
        """Return a table of the same columns whose batches have another layout."""
        table = copy(self)
        table.layout = layout
        return table

    def gather(self, indices: Indices | list[Any], memory: mmap, block_offset: int, row_count: int) -> None:
        """Write rows ``indices``, which are the whole batch, into a slot.

        Raises:
            IndexError: An index is out of bounds.
        """
        offsets, _ = self.layout.offsets(row_count)
        where = _checked(indices, self.length)
        for column, leaf, offset in zip(self._columns, self.layout.leaves, offsets, strict=True):
            begin = block_offset + offset
            if isinstance(column, np.ndarray):
                rows = np.ndarray((row_count, *column.shape[1:]), column.dtype, memory, begin)
                if column.flags.c_contiguous:
                    # Bounds are already checked; mode="raise" would check again and copy through a temporary buffer.
                    column.take(where, axis=0, out=rows, mode="wrap")
                else:
                    rows[...] = column[where]  # `take` would first make a contiguous copy of the whole column
            else:
                _gather_tensor(column, where, leaf, memory, begin, row_count)


def _checked(indices: Indices | list[Any], length: int) -> Indices:
    where = np.asarray(indices)
    if where.dtype.kind not in "iu" and where.size:
        raise IndexError(f"indices of a dataset of arrays must be integers, not {where.dtype}")
    where = where.astype(np.int64, copy=False)
    # As unsigned numbers, negative indices exceed any length, so a single max() finds both kinds of bad index.
    if where.size and where.view(np.uint64).max() >= length and (where.min() < -length or where.max() >= length):
        bad = int(where[(where < -length) | (where >= length)][0])
        raise IndexError(f"index {bad} is out of bounds for a dataset of length {length}")
    return where


def _gather_tensor(column: Any, where: Indices, leaf: Leaf, memory: mmap, offset: int, row_count: int) -> None:
    import torch  # lazy: needed only for tensors

    if leaf.row_bytes == 0:
        return
    count = math.prod(leaf.shape) * row_count
    rows = torch.frombuffer(memory, dtype=column.dtype, count=count, offset=offset).view(row_count, *leaf.shape)
    torch.index_select(column.detach(), 0, torch.from_numpy(where % len(column)), out=rows)


def _as_array(column: Any) -> Any:
    """View a tensor as an array of integers of the same width, without a copy: NumPy gathers faster than torch."""
    if isinstance(column, np.ndarray):
        return np.asarray(column)  # views a SharedArray as a plain array over the same memory
    import torch  # lazy: needed only for tensors

    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(column.dtype.itemsize)
    if width is None or column.dim() == 0:
        return column
    return column.detach().view(width).numpy()


def _leaf(column: Any) -> Leaf:
    shape = tuple(column.shape[1:])
    if isinstance(column, np.ndarray):
        return Leaf(Kind.ARRAY, column.dtype, shape, column.dtype.itemsize * math.prod(shape))
    return Leaf(Kind.TENSOR, str(column.dtype).removeprefix("torch."), shape, column.dtype.itemsize * math.prod(shape))


def table_of(dataset: Any) -> ArrayTable | None:
    """Return the dataset as a table, or ``None`` if it is not one."""
    if _is_column(dataset):
        return ArrayTable(LeafNode(), [dataset])
    columns = _columns_of(dataset)
    if columns is None:
        return _tensor_table(dataset)
    if not all(map(_is_column, columns)):
        return None
    leaves = (LeafNode(),) * len(columns)
    if type(dataset) is dict:
        return ArrayTable(MappingNode(dict, dict, tuple(dataset), leaves, ""), columns)
    return ArrayTable(SequenceNode(type(dataset), leaves, ""), columns)


@final
class RowView:
    """A row dataset over columns of equal length that cannot be gathered: ``collate_fn``, object arrays, memory maps."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns

    def __len__(self) -> int:
        columns = self._columns
        return len(next(iter(columns.values() if isinstance(columns, dict) else columns)))

    def __getitem__(self, index: Any) -> Any:
        columns = self._columns
        if isinstance(columns, dict):
            return {key: column[index] for key, column in columns.items()}
        row = [column[index] for column in columns]
        return tuple(row) if type(columns) is tuple else type(columns)._make(row)


def as_rows(dataset: Any) -> Any:
    """Wrap a tuple, named tuple or dict of equally long arrays as a dataset of rows; return anything else unchanged."""
    return dataset if _columns_of(dataset) is None else RowView(dataset)


def _columns_of(dataset: Any) -> list[Any] | None:
    """Return the values of a tuple, named tuple or dict if they are equally long arrays."""
    cls = type(dataset)
    if cls is dict:
        columns = list(dataset.values())
    elif cls is tuple or (isinstance(dataset, tuple) and isinstance(getattr(cls, "_fields", None), tuple)):
        columns = list(dataset)
    else:
        return None
    are_arrays = bool(columns) and all(isinstance(column, np.ndarray) and column.ndim > 0 for column in columns)
    return columns if are_arrays and len({len(column) for column in columns}) == 1 else None


def _tensor_table(dataset: Any) -> ArrayTable | None:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or type(dataset) is not torch_data.TensorDataset:
        return None
    torch = sys.modules["torch"]
    tensors = dataset.tensors
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and not is_shared_tensor(tensor):
            return None
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
    return ArrayTable(SequenceNode(tuple, (LeafNode(),) * len(tensors), ""), tensors) if tensors else None


def _is_column(value: Any) -> bool:
    # Exclude memory maps: their rows come from disk, and workers can read them in parallel.
    is_array = type(value) is np.ndarray or type(value) is SharedArray
    return is_array and value.ndim > 0 and value.dtype.kind in _TABLE_DTYPES and not value.dtype.hasobject
