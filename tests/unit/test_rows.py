"""Writing samples into rows and reading the batch restores them, however the batch was split."""

import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infeed.collate.layout import Layout, infer_layout
from infeed.collate.rows import RowMismatch, RowReader, RowWriter
from infeed.memory.arena import LeaseBook
from infeed.scheduler.messages import SlotId

OFFSET = 128  # Of the block in its segment: not zero, so that it matters.
STRUCTURED = np.dtype([("a", "i4"), ("b", "f8", (2,))])


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    image: Any
    label: Any


class Slot:
    """Memory for one batch of a layout, exactly as large as necessary."""

    def __init__(self, layout: Layout, row_count: int) -> None:
        self.layout, self.row_count = layout, row_count
        _, size = layout.offsets(row_count)
        # Blocks are multiples of a cache line and never empty; mappings are whole pages.
        self.size = max(size, 64)
        self.memory = mmap.mmap(-1, OFFSET + self.size)
        self.memory[:] = b"\xff" * len(self.memory)
        self.writer = RowWriter(layout, self.memory, OFFSET, row_count)

    def read(self, beside: list[list[list[Any]]]) -> Any:
        lease = LeaseBook().grant(self.memory, OFFSET, self.size, SlotId(0))
        return RowReader(self.layout, self.row_count).read(lease, beside)


def through_slot(samples: list[Any], cuts: list[int] | None = None, *, exact: bool = True) -> Any:
    """Returns the batch of samples that several tasks wrote, each its consecutive rows."""
    layout = infer_layout(samples, range(len(samples)))
    slot = Slot(layout, len(samples))
    edges = [0, *sorted(cuts or []), len(samples)]
    parts = []
    for begin, end in pairwise(edges):
        if begin < end:
            beside = slot.writer.new_beside()
            (slot.writer.write if exact else slot.writer.write_any)(begin, samples[begin:end], beside)
            parts.append(beside)
    return slot.read(parts)


def stacked(samples: list[Any]) -> Any:
    """Returns the expected batch, with the simplest possible code."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, Record):
        return Record(stacked([s.image for s in samples]), stacked([s.label for s in samples]))
    if isinstance(first, tuple | list):
        columns = [stacked(list(column)) for column in zip(*samples, strict=True)]
        return first._make(columns) if isinstance(first, Pair) else type(first)(columns)
    if isinstance(first, np.ndarray | np.generic):
        return np.stack(samples).astype(first.dtype)  # np.stack converts big-endian to native.
    if isinstance(first, bool | int | float | complex):
        return np.array(samples)
    return samples


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, Record):
        assert_same((found.image, found.label), (expected.image, expected.label))
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


DTYPES = ["u1", "i2", "f4", "f8", ">i4", "c8", "?", "M8[s]", "m8[D]", "S3", "U2", STRUCTURED]


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """Returns a leaf as a function of the row's number."""
    kind = draw(st.sampled_from(["array", "array", "scalar", "number", "object"]))
    if kind == "array":
        dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        count = int(np.prod(shape)) * dtype.itemsize
        way = draw(st.sampled_from(["plain", "Fortran", "strided"]))

        def array(row: int) -> Any:
            raw = np.random.default_rng(row).integers(0, 2 if dtype == "?" else 100, count, dtype=np.uint8)
            made = np.frombuffer(raw.tobytes(), dtype).reshape(shape) if dtype.kind != "U" else np.full(shape, f"{row}", dtype)
            if way == "Fortran":
                return np.asfortranarray(made)
            return np.repeat(made, 2, axis=-1)[..., ::2] if way == "strided" and shape else made

        return array
    if kind == "scalar":
        scalar = draw(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]))
        return lambda row: scalar(row % 7)
    if kind == "number":
        number = draw(st.sampled_from([bool, int, float, complex]))
        return lambda row: number(row)
    return draw(st.sampled_from([lambda row: f"text {row}", lambda row: None, lambda row: b"x" * row]))


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> Any:
    """Returns a sample as a function of the row's number."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(leaves())
    children = draw(st.lists(trees(depth - 1), max_size=3))
    match draw(st.sampled_from(["tuple", "list", "dict", "record", "pair"])):
        case "tuple":
            return lambda row: tuple(child(row) for child in children)
        case "list":
            return lambda row: [child(row) for child in children]
        case "dict":
            return lambda row: {f"k{number}": child(row) for number, child in enumerate(children)}
        case kind:
            left, right = draw(leaves()), draw(trees(depth - 1))
            cls = Record if kind == "record" else Pair
            return lambda row: cls(left(row), right(row))


@given(make=trees(), count=st.integers(1, 9), cuts=st.lists(st.integers(0, 9), max_size=4))
@settings(max_examples=200)
def test_rows_written_in_any_split_are_the_stacked_batch(make: Any, count: int, cuts: list[int]) -> None:
    """Samples of one layout are written unchanged, in tasks and chunks of any size, and read as np.stack would return them."""
    samples = [make(row) for row in range(count)]

    assert_same(through_slot(samples, [cut for cut in cuts if cut < count]), stacked(samples))


@given(make=trees(), count=st.integers(1, 9))
@settings(max_examples=100)
def test_the_general_writer_gives_the_same_result(make: Any, count: int) -> None:
    """The user cannot see which of the two writers was used."""
    samples = [make(row) for row in range(count)]

    assert_same(through_slot(samples, exact=False), stacked(samples))


UNUSUAL = {
    "0-d arrays": [np.array(1.5), np.array(2.5)],
    "0-d big-endian": [np.array(1, ">i4"), np.array(2, ">i4")],
    "structured scalars": [np.zeros((), STRUCTURED)[()], np.ones((), STRUCTURED)[()]],
    "read-only": [np.broadcast_to(np.arange(3), (2, 3)), np.broadcast_to(np.arange(3), (2, 3))],
}


@pytest.mark.parametrize("samples", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("cuts", [[], [1]], ids=["together", "one by one"])
def test_unusual_arrays_are_written_like_any_other(samples: list[Any], cuts: list[int]) -> None:
    """Equal samples fit the layout derived from them: otherwise each batch would be loaded twice."""
    assert_same(through_slot(samples, cuts), stacked(samples))


@pytest.mark.parametrize("cuts", [[], [1, 2]], ids=["together", "one by one"])
def test_rows_of_a_memory_map_are_written_like_any_other(tmp_path: Path, cuts: list[int]) -> None:
    """np.load(mmap_mode="r")[index] is the most common large dataset."""
    np.save(tmp_path / "a.npy", np.arange(12.0).reshape(3, 4))
    rows = np.load(tmp_path / "a.npy", mmap_mode="r")

    assert_same(through_slot([rows[0], rows[1], rows[2]], cuts), np.arange(12.0).reshape(3, 4))


PROMOTED: dict[str, tuple[list[Any], Any]] = {
    "int and float": ([1, 2.5], np.array([1.0, 2.5])),
    "bool and int": ([True, 3], np.array([1, 3])),
    "float32 and int64": ([np.ones(2, "f4"), np.full(2, 3)], np.array([[1.0, 1], [3, 3]])),
    "endians": ([np.ones(2, ">f4"), np.ones(2, "<f4")], np.ones((2, 2), "f4")),
    "units of time": ([np.datetime64(1, "s"), np.datetime64(1, "ms")], np.array([1000, 1], "M8[ms]")),
    "lengths of text": ([np.array("a"), np.array("abc")], np.array(["a", "abc"])),
    "scalars": ([np.float32(1), np.int64(2)], np.array([1.0, 2.0])),
}


@pytest.mark.parametrize(("samples", "batch"), PROMOTED.values(), ids=PROMOTED)
def test_samples_of_different_dtypes_are_promoted(samples: list[Any], batch: Any) -> None:
    """As np.stack does; the exact writer rejects them, so the dtype does not depend on the split."""
    assert_same(through_slot(samples, exact=False), batch)
    with pytest.raises(RowMismatch):
        through_slot(samples)


# The samples that the layout is derived from, and later ones that do not fit it.
DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "structure": ((1, 2), [1, 2]),
    "length": ((1, 2), (1, 2, 3)),
    "keys": ({"a": 1}, {"b": 1}),
    "shape": (np.zeros(3), np.zeros(4)),
    "number of axes": (np.zeros(3), np.zeros((3, 1))),
    "shape with as many elements": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtype": (np.zeros(3, "f4"), np.zeros(3, "f8")),
    "narrower dtype": (np.zeros(3, "f8"), np.zeros(3, "f4")),
    "endian": (np.zeros(3, "<f4"), np.zeros(3, ">f4")),
    "text length": (np.array(["ab"]), np.array(["abc"])),
    "unit of time": (np.zeros(3, "M8[s]"), np.zeros(3, "M8[ms]")),
    "unit of time, scalars": (np.datetime64(1, "s"), np.datetime64(1500, "ms")),
    "unit of time difference, scalars": (np.timedelta64(1, "D"), np.timedelta64(1, "h")),
    "structured fields": (np.zeros(2, STRUCTURED), np.zeros(2, [("a", "i4")])),
    "structured scalars": (np.zeros((), STRUCTURED)[()], np.zeros((), [("a", "f8"), ("b", "f4", (2,))])[()]),
    "raw bytes": (np.void(b"ab"), np.void(b"abc")),
    "scalar type": (np.float32(1), np.float64(1)),
    "scalar and array": (np.float64(1), np.zeros(1)),
    "number and scalar": (1.0, np.float64(1)),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "float and int": (1.0, 1),
    "int beyond 64 bits": (1, 1 << 70),
    "number and text": (1, "a"),
    "number and None": (1, None),
    "array and None": (np.zeros(3), None),
    "None and number": (None, 1),
    "None and array": (None, np.zeros(3)),
    "None and scalar": (None, np.float32(1)),
    "None and tuple": (None, (1, 2)),
    "None and dict": (None, {"a": 1}),
    "text and number": ("a", 5),
    "text and object array": ("a", np.array([1], object)),
    "object array and text": (np.array([1], object), "a"),
    "object array and array": (np.array([1], object), np.array([1])),
    "subclass of array": (np.zeros(3), np.ma.masked_array(np.zeros(3))),
    "huge int and int": (1 << 70, 1),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENCES.values(), ids=DIFFERENCES)
@pytest.mark.parametrize("count", [1, 2], ids=["single", "several"])
def test_any_difference_is_a_mismatch(one: Any, other: Any, count: int) -> None:
    """Nothing is cast, truncated or listed silently: a batch must not depend on the previous batch."""
    layout = infer_layout([one, one], [0, 1])
    slot = Slot(layout, 4)
    slot.writer.write_any(0, [one, one], slot.writer.new_beside())

    with pytest.raises(RowMismatch):
        slot.writer.write(2, [other] * count, slot.writer.new_beside())


def test_a_huge_integer_does_not_turn_later_ones_into_lists() -> None:
    """After integers that only a list can hold, the writer still recognizes those that fit an array."""
    slot = Slot(infer_layout([1 << 70], [0]), 4)
    slot.writer.write(0, [1 << 70, 1 << 80], slot.writer.new_beside())

    with pytest.raises(RowMismatch):
        slot.writer.write(2, [1, 2], slot.writer.new_beside())


def test_one_sample_that_differs_among_many_is_a_mismatch() -> None:
    """Wherever in the chunk it is."""
    slot = Slot(infer_layout([np.zeros(3)], [0]), 5)
    for at in range(5):
        chunk = [np.zeros(3)] * 5
        chunk[at] = np.zeros(3, "f4")
        with pytest.raises(RowMismatch):
            slot.writer.write(0, chunk, slot.writer.new_beside())


def test_unwritten_rows_are_unchanged() -> None:
    """Tasks of one batch write in parallel, each only its own rows."""
    slot = Slot(infer_layout([(np.zeros(2, "u1"), 0)], [0]), 4)
    slot.writer.write(1, [(np.full(2, 7, "u1"), 5), (np.full(2, 8, "u1"), 6)], slot.writer.new_beside())

    array, number = slot.read([])

    assert array.tolist() == [[255, 255], [7, 7], [8, 8], [255, 255]]
    assert number.tolist() == [-1, 5, 6, -1]


def test_nothing_is_written_outside_of_the_block() -> None:
    """Other blocks lie directly before and after."""
    samples = [(np.full(5, 1, "u1"), 2.0) for _ in range(7)]
    layout = infer_layout(samples, range(7))
    _, size = layout.offsets(7)
    memory = mmap.mmap(-1, OFFSET + size + 64)
    memory[:] = b"\xee" * len(memory)
    RowWriter(layout, memory, OFFSET, 7).write(0, samples, [])

    assert set(memory[:OFFSET]) == set(memory[OFFSET + size :]) == {0xEE}


def test_a_batch_is_a_view_of_the_slot() -> None:
    """Reading copies nothing: arrays are views, and keep the lease."""
    book = LeaseBook()
    samples = [(np.zeros(3), 1), (np.zeros(3), 2)]
    slot = Slot(infer_layout(samples, [0, 1]), 2)
    slot.writer.write(0, samples, [])
    lease = book.grant(slot.memory, OFFSET, slot.size, SlotId(7))
    array, number = RowReader(slot.layout, 2).read(lease, [])
    del lease
    slot.memory[OFFSET : OFFSET + 8] = np.float64(9).tobytes()

    assert array[0, 0] == 9
    del array
    assert book.ended() == []
    del number
    assert book.ended() == [7]


@pytest.mark.torch
@pytest.mark.parametrize("cuts", [[], [1], [1, 2]], ids=["together", "in two", "one by one"])
def test_tensors_are_written_and_read_as_torch_stacks_them(torch: ModuleType, cuts: list[int]) -> None:
    """Of any dtype, memory layout and class, with and without a graph."""

    class Image(torch.Tensor):  # type: ignore[name-defined,misc]
        pass

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    columns: dict[str, list[Any]] = {
        "plain": [base, base + 1, base + 2],
        "0-d": [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
        "empty": [torch.empty(0, 3)] * 3,
        "transposed": [base.t(), base.t() + 1, base.t()],
        "expanded": [torch.ones(1, 3).expand(4, 3)] * 3,
        "bfloat16": [base.to(torch.bfloat16)] * 3,
        "bool": [base > 5, base > 10, base > 15],
        "complex": [base.to(torch.complex64) * 1j] * 3,
        "conjugated": [(base.to(torch.complex64) * 1j).conj()] * 3,
        "requires grad": [base.clone().requires_grad_() for _ in range(3)],
        "subclass": [(base + n).as_subclass(Image) for n in range(3)],
    }
    for name, tensors in columns.items():
        found = through_slot(tensors, cuts)
        expected = torch.stack([tensor.detach() for tensor in tensors]).resolve_conj()
        assert (name, type(found), found.dtype, found.requires_grad) == (name, type(tensors[0].detach()), expected.dtype, False)
        assert torch.equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor)), name


@pytest.mark.torch
def test_different_tensors_are_a_mismatch_and_are_promoted_together(torch: ModuleType) -> None:
    """As for arrays: nothing is cast silently, and the general writer casts as torch does."""
    plain = torch.zeros(3)
    others = {
        "dtype": torch.zeros(3, dtype=torch.float64),
        "shape": torch.zeros(4),
        "sparse": torch.zeros(3).to_sparse(),
        "array": np.zeros(3, "f4"),
        "subclass": torch.nn.Parameter(torch.zeros(3)),
        "None": None,
    }
    for name, other in others.items():
        for one, two in ((plain, other), (other, plain)):
            slot = Slot(infer_layout([one, one], [0, 1]), 2)
            try:
                slot.writer.write(0, [two, two], slot.writer.new_beside())
            except RowMismatch:
                continue
            # The one difference that does not count: a parameter becomes a tensor in the batch.
            assert (name, one is other) == ("subclass", True)
    assert through_slot([torch.zeros(2), torch.ones(2, dtype=torch.int64)], exact=False).dtype == torch.float32
