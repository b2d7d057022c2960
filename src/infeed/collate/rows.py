"""Write samples into the rows of a slot, and read the batch from it.

The writer processes columns in chunks. A chunk is as many samples as fit in the CPU cache: it writes large samples one by one
while they are cached, and many small ones at a time to amortize the cost of a NumPy call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from mmap import mmap
from operator import attrgetter
from typing import Any, Final, final

import numpy as np

from infeed.collate.layout import Layout
from infeed.collate.leaves import ARRAY_TYPES, Kind, Leaf, LeafMismatch, UnequalShapes, finish_beside, has_own_strides, leaf_of
from infeed.collate.tree import Column, LeafNode, Sample, SequenceNode, StructureMismatch, structure_of
from infeed.memory.arena import Lease

# Bytes of samples held in memory until they are written. Larger chunks leave the L2 cache before the copy; smaller ones
# only add NumPy call overhead.
_CHUNK_BYTES: Final = 1 << 18


_shape_of: Final = attrgetter("shape")


class RowMismatch(Exception):
    """Samples do not fit the layout. Internal: the caller tries another layout or gives up."""


class _Cell(ABC):
    """All rows of one in-slot leaf."""

    @abstractmethod
    def write(self, row: int, column: Column) -> None:
        """Write consecutive rows that match the leaf exactly.

        Raises:
            LeafMismatch: They do not match.
        """

    @abstractmethod
    def write_any(self, row: int, column: Column) -> None:
        """Write consecutive rows that are known to fit, and cast them to the leaf's dtype where needed."""


@final
class _ArrayCell(_Cell):
    def __init__(self, leaf: Leaf, memory: mmap, offset: int, row_count: int) -> None:
        self._shape = leaf.shape
        self._dtype = leaf.dtype
        self._rows = np.ndarray((row_count, *leaf.shape), leaf.dtype, memory, offset)
        if leaf.shape:
            self._length = leaf.shape[0]
            self._flat = self._rows.reshape(row_count * leaf.shape[0], *leaf.shape[1:])

    def write(self, row: int, column: Column) -> None:
        types = set(map(type, column))
        if types == {self._dtype.type} or not self._shape:
            self._write_scalars(row, column, types)
            return
        if not types <= ARRAY_TYPES:
            raise LeafMismatch
        if len(column) == 1:
            array = column[0]
            if array.shape != self._shape or array.dtype != self._dtype:
                raise LeafMismatch
            self._rows[row] = array
            return
        if set(map(_shape_of, column)) != {self._shape}:
            raise LeafMismatch
        begin = row * self._length
        try:
            np.concatenate(column, out=self._flat[begin : begin + len(column) * self._length], casting="no")
        except TypeError:  # another dtype
            raise LeafMismatch from None

    def _write_scalars(self, row: int, column: Column, types: set[type[Any]]) -> None:
        if self._shape or not (types == {self._dtype.type} or types <= ARRAY_TYPES):
            raise LeafMismatch
        if {(value.dtype, value.shape) for value in column} != {(self._dtype, ())}:
            raise LeafMismatch
        if self._dtype.kind == "V":
            self.write_any(row, column)  # NumPy would read a list of records as a list of their fields
        else:
            self._rows[row : row + len(column)] = column

    def write_any(self, row: int, column: Column) -> None:
        for offset, value in enumerate(column):
            self._rows[row + offset] = value


@final
class _NumberCell(_Cell):
    _TYPES: Final = {"b": bool, "i": int, "f": float, "c": complex}

    def __init__(self, leaf: Leaf, memory: mmap, offset: int, row_count: int) -> None:
        self._types = {self._TYPES[leaf.dtype.kind]}
        self._rows = np.ndarray((row_count,), leaf.dtype, memory, offset)

    def write(self, row: int, column: Column) -> None:
        if set(map(type, column)) != self._types:
            raise LeafMismatch
        try:
            self._rows[row : row + len(column)] = column
        except OverflowError:
            raise LeafMismatch from None

    def write_any(self, row: int, column: Column) -> None:
        self._rows[row : row + len(column)] = column


@final
class _TensorCell(_Cell):
    def __init__(self, leaf: Leaf, memory: mmap, offset: int, row_count: int) -> None:
        import torch  # lazy: needed only for tensors, so it is already imported

        self._torch = torch
        self._cls = leaf.cls or torch.Tensor
        self._is_strict = leaf.read_as is not None  # in a torch loader, torch must stack tensors that require gradients
        self._shape = torch.Size(leaf.shape)
        self._dtype = getattr(torch, leaf.dtype)
        self._rows = _tensor(memory, leaf, offset, row_count)

    def write(self, row: int, column: Column) -> None:
        if set(map(type, column)) != {self._cls}:
            raise LeafMismatch
        torch = self._torch
        for tensor in column:
            if tensor.shape != self._shape or tensor.dtype != self._dtype or tensor.layout is not torch.strided:
                raise LeafMismatch
        is_plain = not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in column)
        if self._is_strict and not is_plain:
            raise LeafMismatch
        if len(column) == 1 or self._cls is not torch.Tensor:
            self.write_any(row, column)
            return
        rows = column
        if not is_plain:
            rows = [tensor.detach().cpu() for tensor in column]
        torch.stack(tuple(rows), out=self._rows[row : row + len(column)])

    def write_any(self, row: int, column: Column) -> None:
        for offset, tensor in enumerate(column):
            self._rows[row + offset].copy_(tensor.detach().as_subclass(self._torch.Tensor))


def _tensor(buffer: Any, leaf: Leaf, offset: int, row_count: int) -> Any:
    import torch  # lazy: needed only for tensors

    dtype = getattr(torch, leaf.read_as or leaf.dtype)
    shape = (row_count, *leaf.shape)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = leaf.row_bytes * row_count // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


_CELLS: Final[dict[Kind, Callable[[Leaf, mmap, int, int], _Cell]]] = {
    Kind.ARRAY: _ArrayCell,
    Kind.NUMBER: _NumberCell,
    Kind.TENSOR: _TensorCell,
}


@final
class RowWriter:
    """Writes rows of one slot with one layout. A worker reuses it while the slot and the layout stay the same."""

    def __init__(self, layout: Layout, memory: mmap, block_offset: int, row_count: int, *, keeps_strides: bool = False) -> None:
        """Create a writer. With ``keeps_strides``, samples that torch stacks into a non-contiguous batch do not fit."""
        offsets, _ = layout.offsets(row_count)
        self._layout, self._node = layout, layout.node
        self._keeps_strides = keeps_strides and any(len(leaf.shape) > 2 for leaf in layout.leaves)
        self._cells: list[_Cell | None] = [
            _CELLS[leaf.kind](leaf, memory, block_offset + offset, row_count) if leaf.is_in_slot else None
            for leaf, offset in zip(layout.leaves, offsets, strict=True)
        ]
        self._beside_leaves = [leaf for leaf in layout.leaves if not leaf.is_in_slot]
        self.chunk_rows = max(1, _CHUNK_BYTES // max(1, layout.row_bytes))

    def write(self, row: int, samples: Sequence[Sample], beside: list[list[Any]]) -> None:
        """Write samples that should match exactly, and append the values sent outside the slot to ``beside``.

        Raises:
            RowMismatch: They do not match; rows of this chunk may be partially written.
        """
        columns: list[Column] = []
        number = 0
        try:
            self._node.split(samples, columns)
            # The key order of a batch is that of its first sample, independent of the previous batch.
            if row == 0 and not self._node.is_ordered_as(samples[0]):
                raise RowMismatch
            if self._keeps_strides and any(map(has_own_strides, columns)):
                raise RowMismatch
            for cell, column in zip(self._cells, columns, strict=True):
                if cell is None:
                    _check_beside(self._beside_leaves[number], column)
                    beside[number].extend(column)
                    number += 1
                else:
                    cell.write(row, column)
        except (StructureMismatch, LeafMismatch):
            raise RowMismatch from None

    def write_any(self, row: int, samples: Sequence[Sample], beside: list[list[Any]]) -> None:
        """Write samples from which the layout was inferred, and cast them to the common dtype where they differ."""
        columns: list[Column] = []
        self._node.split(samples, columns)
        number = 0
        for cell, column in zip(self._cells, columns, strict=True):
            if cell is None:
                beside[number].extend(column)
                number += 1
            else:
                cell.write_any(row, column)

    def new_beside(self) -> list[list[Any]]:
        return [[] for cell in self._cells if cell is None]


# Types known to be plain objects, so that checking a column of text takes one set operation. Cleared when it grows too large.
_PLAIN_TYPES: Final[set[type[Any]]] = set()
_PLAIN_TYPES_KEPT: Final = 256


def _check_beside(leaf: Leaf, column: Column) -> None:
    """Reject values that would get another kind of leaf if they came first: a batch must not depend on the previous one."""
    types = set(map(type, column))
    kind = leaf.kind
    if leaf.dtype is not None:
        if types != {leaf.dtype}:
            raise LeafMismatch
        return
    if kind is Kind.OBJECT and types <= _PLAIN_TYPES:
        return
    if not all(isinstance(structure_of(value), LeafNode) for value in column):
        raise LeafMismatch
    try:
        found = leaf_of(column).kind
    except UnequalShapes:
        raise LeafMismatch from None
    if found is not kind:
        raise LeafMismatch
    if len(_PLAIN_TYPES) > _PLAIN_TYPES_KEPT:
        _PLAIN_TYPES.clear()
    # Exclude int: only ints of more than 64 bits are objects.
    _PLAIN_TYPES.update(type(value) for value in column if type(value) is not int and leaf_of([value]).kind is Kind.OBJECT)


@final
class RowReader:
    """Builds the batch over a lease: arrays and tensors that are views of the slot, and lists."""

    def __init__(self, layout: Layout, row_count: int) -> None:
        offsets, self.nbytes = layout.offsets(row_count)
        self._layout, self._node = layout, layout.node
        self._beside_leaves = [leaf for leaf in layout.leaves if not leaf.is_in_slot]
        self._makers: list[Callable[[Lease], Any] | None] = [
            _maker(leaf, offset, row_count) if leaf.is_in_slot else None
            for leaf, offset in zip(layout.leaves, offsets, strict=True)
        ]
        # Fast path for the most common sample, a tuple of arrays: it halves the cost of reading a small batch.
        node = layout.node
        self._flat_cls = node.made or node.cls if isinstance(node, SequenceNode) else None
        self._is_flat = (
            isinstance(node, SequenceNode)
            and self._flat_cls in (tuple, list)
            and not self._beside_leaves
            and all(isinstance(child, LeafNode) for child in node.children)
        )

    def read(self, lease: Lease, beside: list[list[list[Any]]]) -> Any:
        """Return the batch; ``beside`` contains the values sent outside the slot, per task in row order."""
        if self._is_flat:
            values = [maker(lease) for maker in self._makers if maker is not None]
            return values if self._flat_cls is list else tuple(values)
        columns = iter(
            [
                finish_beside(leaf, list(chain.from_iterable(part[number] for part in beside)))
                for number, leaf in enumerate(self._beside_leaves)
            ]
        )
        values = [next(columns) if maker is None else maker(lease) for maker in self._makers]
        return self._node.join(iter(values))


def _maker(leaf: Leaf, offset: int, row_count: int) -> Callable[[Lease], Any]:
    shape = (row_count, *leaf.shape)
    array: Any = np.ndarray  # its type hints do not accept ctypes arrays as buffers
    if leaf.kind is Kind.TENSOR or leaf.read_as is not None:
        cls = leaf.cls
        dtype = _numpy_dtype(leaf)
        if cls is not None:
            return lambda lease: _tensor(lease, leaf, offset, row_count).as_subclass(cls)
        if dtype is None or 0 in shape:
            return lambda lease: _tensor(lease, leaf, offset, row_count)
        from torch import from_numpy  # lazy: needed only for tensors

        # An array of the final shape costs less than half of a flat tensor plus a view.
        return lambda lease: from_numpy(array(shape, dtype, lease, offset))
    dtype = leaf.dtype
    return lambda lease: array(shape, dtype, lease, offset)


def _numpy_dtype(leaf: Leaf) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a tensor, or ``None`` if there is none, as for bfloat16."""
    try:
        dtype = np.dtype(leaf.read_as or leaf.dtype)
    except TypeError:
        return None
    return dtype if dtype.kind in "biufc" else None
