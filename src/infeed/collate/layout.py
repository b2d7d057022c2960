"""Positions of a batch's rows in its slot.

Each in-slot leaf has one contiguous run of rows that starts on a cache line; runs are in the order of the leaves. Offsets
depend only on the layout and the number of rows, so workers can fill different rows of one batch without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.collate.leaves import Leaf, UnequalShapes, leaf_of
from infeed.collate.tree import Column, Node, Sample, StructureMismatch, structure_of
from infeed.errors import CollateError

_ALIGN: Final = 64
# Maximum number of row counts with cached offsets. A loader has one or two, unless a batch sampler varies them.
_OFFSETS_KEPT: Final = 64
_LAYOUTS_KEPT: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Structure and leaves of a batch, independent of its number of rows. Compares by value."""

    node: Node
    leaves: tuple[Leaf, ...]
    _known_offsets: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def row_bytes(self) -> int:
        return sum(leaf.row_bytes for leaf in self.leaves)

    def offsets(self, row_count: int) -> tuple[tuple[int, ...], int]:
        """Return each leaf's offset in the slot (0 for leaves sent outside it), and the size of the batch in bytes."""
        known = self._known_offsets.get(row_count)
        if known is None:
            if len(self._known_offsets) >= _OFFSETS_KEPT:
                self._known_offsets.clear()
            known = self._known_offsets[row_count] = self._offsets(row_count)
        return known

    def _offsets(self, row_count: int) -> tuple[tuple[int, ...], int]:
        offsets = []
        end = 0
        for leaf in self.leaves:
            offsets.append(end if leaf.is_in_slot else 0)
            end += -(-leaf.row_bytes * row_count // _ALIGN) * _ALIGN
        return tuple(offsets), end


@final
class LayoutPool:
    """Interns equal layouts, because workers identify layouts by object. Holds a limited number of them."""

    def __init__(self) -> None:
        self._layouts: dict[Layout, Layout] = {}

    def interned(self, layout: Layout) -> Layout:
        if len(self._layouts) >= _LAYOUTS_KEPT:
            self._layouts.clear()
        return self._layouts.setdefault(layout, layout)


def infer_layout(samples: Sequence[Sample], indices: Sequence[Any]) -> Layout:
    """Return the layout that fits all samples; error messages use ``indices``, the samples' indices.

    Raises:
        CollateError: The samples differ in structure, or arrays of one field differ in shape.
    """
    node = structure_of(samples[0])
    columns: list[Column] = []
    try:
        node.split(samples, columns)
    except StructureMismatch as mismatch:
        raise CollateError(
            f"samples of one batch differ in structure at sample{mismatch.path}: {mismatch.expected}, but {mismatch.found} "
            f"at index={indices[mismatch.row]!r}; return the same structure for every index, or pass collate_fn"
        ) from None
    leaves = []
    for path, column in zip(node.paths(), columns, strict=True):
        try:
            leaves.append(leaf_of(column))
        except UnequalShapes as unequal:
            raise CollateError(
                f"arrays do not stack at sample{path}: shape {unequal.shape} at index={indices[unequal.row]!r} and shape "
                f"{unequal.other_shape} at index={indices[unequal.other_row]!r}; resize or pad them to one shape, or "
                "pass collate_fn"
            ) from None
    return Layout(node, tuple(leaves))
