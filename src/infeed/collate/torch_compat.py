"""Batches identical to those of torch's ``default_collate``, but written row by row.

Only for samples whose result is known exactly: tensors, arrays, numbers and text in tuples, lists, named tuples and dicts,
all alike. For anything else (user-defined types, sparse or nested tensors, samples that differ) there is no layout, and
``default_collate`` itself makes the batch. A returned layout must be correct; returning none is always safe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from infeed.collate.layout import Layout
from infeed.collate.leaves import Kind, Leaf, UnequalShapes, has_own_strides, leaf_of
from infeed.collate.tree import Column, LeafNode, MappingNode, Node, Sample, SequenceNode, StructureMismatch, structure_of

# NumPy dtypes that torch.as_tensor accepts unchanged, and their torch names. Not uint64: torch rejects its scalars.
_TENSOR_DTYPES: Final = {
    np.dtype(name): name
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
_NUMBERS: Final = {bool, int, float}
_TEXTS: Final = {str, bytes}


def collate_as_torch(samples: list[Sample]) -> Any:
    """Call torch's ``default_collate``. A wrapper, because unpickling the function itself would import torch in the worker."""
    from torch.utils.data import default_collate
    from torch.utils.data._utils import worker

    # In a worker, default_collate would allocate shared memory and a descriptor per tensor. The arena is already shared.
    info, worker._worker_info = worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        worker._worker_info = info


def torch_layout(samples: Sequence[Sample], *, keeps_strides: bool = False) -> Layout | None:
    """Return the layout of the batch that ``default_collate`` would make of these samples, or ``None``.

    In the main process, torch stacks channels-last samples into a channels-last batch (``keeps_strides``); in a worker, into
    a contiguous one.
    """
    node = _torch_node(structure_of(samples[0]))
    if node is None:
        return None
    columns: list[Column] = []
    try:
        node.split(samples, columns)
    except StructureMismatch:
        return None
    parents = _parents(node, is_in_sequence=False)
    leaves = [_torch_leaf(column, is_in_sequence) for column, is_in_sequence in zip(columns, parents, strict=True)]
    found = [leaf for leaf in leaves if leaf is not None]
    if len(found) < len(leaves) or (keeps_strides and any(map(has_own_strides, columns))):
        return None
    return Layout(node, tuple(found))


def torch_table_layout(layout: Layout) -> Layout | None:
    """Return the layout of batches gathered from a table with this layout, or ``None``."""
    node = _torch_node(layout.node)
    leaves = [_as_tensor(leaf) for leaf in layout.leaves]
    found = [leaf for leaf in leaves if leaf is not None]
    return Layout(node, tuple(found)) if node is not None and len(found) == len(leaves) else None


def _torch_node(node: Node) -> Node | None:
    """Return the node with the containers that torch builds (a list for a tuple), or ``None``."""
    if isinstance(node, LeafNode):
        return node
    if isinstance(node, SequenceNode):
        children = _torch_nodes(node.children)
        made = list if node.cls is tuple else None
        # An empty container has no column to compare, so torch collates such samples.
        return None if not children else SequenceNode(node.cls, children, node.path, made)
    if isinstance(node, MappingNode) and node.sample_cls is dict:
        children = _torch_nodes(node.children)
        return None if not children else MappingNode(dict, dict, node.keys, children, node.path)
    return None


def _torch_nodes(children: Sequence[Node]) -> tuple[Node, ...]:
    made = [_torch_node(child) for child in children]
    found = [child for child in made if child is not None]
    return tuple(found) if len(found) == len(made) else ()


def _parents(node: Node, *, is_in_sequence: bool) -> list[bool]:
    """Return for each leaf whether its parent is a sequence: torch returns text there as a tuple, elsewhere as a list."""
    if isinstance(node, SequenceNode):
        return [flag for child in node.children for flag in _parents(child, is_in_sequence=True)]
    if isinstance(node, MappingNode):
        return [flag for child in node.children for flag in _parents(child, is_in_sequence=False)]
    return [is_in_sequence]


def _torch_leaf(column: Column, is_in_sequence: bool) -> Leaf | None:
    types = set(map(type, column))
    if len(types) != 1:
        return None
    (cls,) = types
    if cls in _TEXTS:
        return Leaf(Kind.OBJECT, dtype=cls, cls=tuple if is_in_sequence else None)
    if cls not in _NUMBERS and not issubclass(cls, np.ndarray | np.number | np.bool_) and not _is_plain_tensor(cls, column):
        return None
    try:
        leaf = leaf_of(column)
    except UnequalShapes:
        return None
    if leaf.kind is Kind.TENSOR:
        return replace(leaf, read_as=leaf.dtype) if len({tensor.dtype for tensor in column}) == 1 else None
    if leaf.kind is Kind.ARRAY and len({value.dtype for value in column}) > 1:
        return None
    return _as_tensor(leaf)


def _as_tensor(leaf: Leaf) -> Leaf | None:
    if leaf.kind is Kind.TENSOR:
        return leaf
    name = _TENSOR_DTYPES.get(leaf.dtype) if leaf.kind in (Kind.ARRAY, Kind.NUMBER) else None
    return None if name is None or not leaf.dtype.isnative else replace(leaf, read_as=name)


def _is_plain_tensor(cls: type[Any], column: Column) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or cls is not torch.Tensor:
        return False
    return not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in column)
