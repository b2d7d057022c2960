"""Batches as torch's ``default_collate`` makes them, written row by row all the same.

Only for samples of which it is known exactly what torch makes: tensors, arrays, numbers, text, in tuples, lists, named tuples
and dicts, all alike. For anything else (types of the user's own, sparse or nested tensors, samples that differ) there is no
layout, and torch's function itself makes the batch. So this must be right where it answers, and need not answer.
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

# NumPy's dtypes that torch.as_tensor takes as they are, and what they are there. Not uint64: its scalars are refused.
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
    """Torch's ``default_collate`` itself. Not that function by name, because a worker would import torch to find it."""
    from torch.utils.data import default_collate
    from torch.utils.data._utils import worker

    # In a worker it would make shared memory, and a descriptor, for each tensor. The arena is that already.
    info, worker._worker_info = worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        worker._worker_info = info


def torch_layout(samples: Sequence[Sample], *, keeps_strides: bool = False) -> Layout | None:
    """The layout of the batch that ``default_collate`` would make of these samples, or ``None``.

    In the main process it stacks samples that are laid out with channels last into a batch that is so too (``keeps_strides``),
    in a worker into a contiguous one.
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
    """The layout of batches that are gathered from a table with this layout."""
    node = _torch_node(layout.node)
    leaves = [_as_tensor(leaf) for leaf in layout.leaves]
    found = [leaf for leaf in leaves if leaf is not None]
    return Layout(node, tuple(found)) if node is not None and len(found) == len(leaves) else None


def _torch_node(node: Node) -> Node | None:
    """The same node, building what torch builds: a list of a tuple."""
    if isinstance(node, LeafNode):
        return node
    if isinstance(node, SequenceNode):
        children = _torch_nodes(node.children)
        made = list if node.cls is tuple else None
        # An empty one has no column to be told from: torch decides.
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
    """For each leaf, whether it stands directly in a sequence: there torch leaves text in a tuple, elsewhere in a list."""
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
