"""Where the rows of a batch are, and the error if samples do not fit together."""

import pickle
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.collate.layout import infer_layout
from infeed.errors import CollateError


class Sample(NamedTuple):
    image: Any
    label: Any


@given(
    st.lists(st.tuples(st.sampled_from(["u1", "f8", "i2"]), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6),
    st.integers(1, 300),
)
def test_blocks_of_rows_are_aligned_and_disjoint(leaves: list[tuple[str, list[int]]], row_count: int) -> None:
    """The rows of each leaf are contiguous, begin on a cache line and end before the next leaf."""
    layout = infer_layout([tuple(np.zeros(shape, dtype) for dtype, shape in leaves)], [0])
    offsets, total = layout.offsets(row_count)

    ends = [offset + leaf.row_bytes * row_count for offset, leaf in zip(offsets, layout.leaves, strict=True)]
    assert all(offset % 64 == 0 for offset in offsets)
    assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
    assert max(ends) <= total


def test_leaves_outside_of_the_slot_take_no_space_in_it() -> None:
    """Text has no rows in the slot."""
    layout = infer_layout([("text", np.zeros(4, "u1"), None)], [0])

    assert layout.offsets(10) == ((0, 0, 0), 64)
    assert layout.row_bytes == 4


def test_layouts_are_compared_and_pickled_by_value() -> None:
    """Two workers that see the same kind of samples find the same layout, whatever they have computed from it."""
    one = infer_layout([{"x": np.zeros(3), "y": [1, "a"]}], [0])
    other = infer_layout([{"x": np.ones(3), "y": [2, "b"]}], [5])
    one.offsets(7)

    assert one == other == pickle.loads(pickle.dumps(one))
    assert len({one, other, pickle.loads(pickle.dumps(one))}) == 1
    assert one != infer_layout([{"x": np.zeros(3, "f4"), "y": [1, "a"]}], [0])


def test_offsets_are_right_for_any_number_of_different_row_counts() -> None:
    """Cached and recomputed offsets agree."""
    layout = infer_layout([(np.zeros(3), np.zeros(1))], [0])
    for _ in range(2):
        for rows in range(1, 200):
            assert layout.offsets(rows)[0][1] == -(-rows * 24 // 64) * 64


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (
            [(1, 2), (1, 2), (1,)],
            "samples of one batch differ in structure at sample: tuple of length 2, but tuple of length 1 at index=30; return "
            "the same structure for every index, or pass collate_fn",
        ),
        (
            [{"a": {"b": 1}}, {"a": {"b": 1}}, {"a": None}],
            "samples of one batch differ in structure at sample['a']: dict with keys ['b'], but NoneType at index=30; return",
        ),
        (
            [Sample(np.zeros((3, 4)), 1), Sample(np.zeros((3, 5)), 1), Sample(np.zeros((3, 4)), 1)],
            "arrays do not stack at sample.image: shape (3, 4) at index=10 and shape (3, 5) at index='twenty'; resize or pad "
            "them to one shape, or pass collate_fn",
        ),
        (
            [np.zeros(2), np.zeros(2), np.zeros(())],
            "arrays do not stack at sample: shape (2,) at index=10 and shape () at index=30; resize or pad",
        ),
    ],
    ids=["structure", "structure inside", "shape inside", "shape"],
)
def test_samples_that_do_not_fit_together_are_reported(samples: list[Any], text: str) -> None:
    """The path in the sample, both sides, both indices, and the fix."""
    with pytest.raises(CollateError, match="^" + re.escape(text)):
        infer_layout(samples, [10, "twenty", 30])
