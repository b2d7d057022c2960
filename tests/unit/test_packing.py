"""Writes any object to a slot and reads it back."""

import mmap
from collections import OrderedDict
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from infeed.collate.packing import Packing, unpack
from infeed.memory.arena import LeaseBook
from infeed.scheduler.messages import SlotId

OFFSET = 192


@dataclass
class Boxes:
    corners: Any
    names: list[str]


def through_slot(obj: Any, book: LeaseBook | None = None) -> Any:
    packing = Packing(obj)
    size = max(64, packing.nbytes)
    memory = mmap.mmap(-1, OFFSET + size)
    packing.write(memory, OFFSET)
    return unpack(packing.packed, (book or LeaseBook()).grant(memory, OFFSET, size, SlotId(1)))


@pytest.mark.parametrize(
    "obj",
    [None, 5, "text", [1, (2, {"a": None})], {}, OrderedDict(a=1), Boxes([1], ["a"]), b"", b"x" * 1000],
    ids=["None", "int", "str", "tree", "empty", "OrderedDict", "dataclass", "no bytes", "bytes"],
)
def test_objects_without_arrays_are_restored(obj: Any) -> None:
    """The pickle is everything; the slot stays empty."""
    again = through_slot(obj)

    assert again == obj
    assert type(again) is type(obj)


def test_arrays_anywhere_in_a_tree_are_restored_over_the_slot() -> None:
    """Of all sizes, in user-defined classes, with a short pickle outside the slot."""
    arrays = [np.arange(n, dtype=dtype) for n in (0, 1, 63, 1000) for dtype in ("u1", "f8", ">i2")]
    obj = {"boxes": Boxes(arrays, ["a"]), "more": (np.asfortranarray(np.ones((5, 7))), np.arange(100)[::3])}
    packing = Packing(obj)

    again = through_slot(obj)

    assert len(packing.packed.data) < 3000
    for found, expected in zip(again["boxes"].corners, arrays, strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    assert np.array_equal(again["more"][0], np.ones((5, 7)))
    assert np.array_equal(again["more"][1], np.arange(100)[::3])


def test_a_restored_object_keeps_the_lease_and_is_writable() -> None:
    """Like a batch that was written row by row."""
    book = LeaseBook()
    batch = through_slot({"x": np.zeros(10), "deep": [(np.ones(3),)]}, book)
    batch["x"][:] = 5
    kept = batch["deep"][0][0][1:]
    del batch
    assert book.ended() == []
    assert kept.tolist() == [1.0, 1.0]

    del kept
    assert book.ended() == [1]


def test_a_batch_without_arrays_does_not_hold_its_slot() -> None:
    """Nothing references the slot, so it is free at once."""
    book = LeaseBook()
    batch = through_slot(["text"], book)

    assert book.ended() == [1]
    assert batch == ["text"]


def test_nothing_is_written_outside_of_the_block() -> None:
    """Other blocks lie directly before and after."""
    packing = Packing([np.full(100, 1, "u1"), np.full(30, 2, "u1")])
    memory = mmap.mmap(-1, OFFSET + packing.nbytes + 64)
    memory[:] = b"\xee" * len(memory)
    packing.write(memory, OFFSET)

    assert set(memory[:OFFSET]) == set(memory[OFFSET + packing.nbytes :]) == {0xEE}


def test_objects_of_local_classes_are_packed_by_value() -> None:
    """A collate_fn in a script may return objects that only the script defines."""

    class Local:
        def __init__(self) -> None:
            self.x = np.arange(3)

    assert through_slot(Local()).x.tolist() == [0, 1, 2]


def test_an_object_that_cannot_be_pickled_raises_its_own_error() -> None:
    """The worker reports it as the batch's failure."""
    with pytest.raises(TypeError, match="pickle"):
        Packing({"generator": (n for n in range(3))})


@pytest.mark.torch
def test_tensors_are_restored_over_the_slot(torch: ModuleType) -> None:
    """Detection models collate lists of tensors of different shapes."""
    book = LeaseBook()
    tensors = [torch.arange(n * 3, dtype=torch.float32).reshape(n, 3) for n in (0, 1, 5)] + [
        torch.ones(4, dtype=torch.bfloat16)
    ]
    batch = through_slot(tensors, book)

    assert all(torch.equal(found, expected) for found, expected in zip(batch, tensors, strict=True))
    batch[1][:] = 9
    kept = batch[2][1]
    del batch
    assert book.ended() == []
    del kept
    assert book.ended() == [1]
