"""How samples are collated: every kind of worker returns the same types and values."""

from __future__ import annotations

import datetime
import fractions
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import infeed
from tests.helpers import Tree, assert_same

torch = pytest.importorskip("torch")


class Point(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", ["a", "b"])


@dataclass
class Record:
    image: Any
    meta: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Tagged(torch.Tensor):  # type: ignore[misc]  # torch is imported only if it is there
    """A tensor subclass of the user."""


def array(*values: Any, dtype: Any = None) -> Any:
    return np.array(values, dtype=dtype)


RAGGED = np.arange(24).reshape(2, 3, 4)


def read_only(index: int) -> Any:
    made = np.full(3, index)
    made.flags.writeable = False
    return made


# A sample, and the batch of three such samples.
LEAVES: list[tuple[str, Callable[[int], Any], Callable[[], Any]]] = [
    ("bool", lambda i: i > 0, lambda: array(False, True, True)),
    ("int", lambda i: i - 1, lambda: array(-1, 0, 1)),
    ("int beyond 64 bits", lambda i: 2**70 + i, lambda: [2**70, 2**70 + 1, 2**70 + 2]),
    ("float", lambda i: i / 2, lambda: array(0.0, 0.5, 1.0)),
    ("complex", lambda i: complex(i, 1), lambda: array(1j, 1 + 1j, 2 + 1j)),
    ("bool and int", lambda i: i if i else True, lambda: array(1, 1, 2)),
    ("int and float", lambda i: i if i % 2 else float(i), lambda: array(0.0, 1.0, 2.0)),
    ("float and complex", lambda i: 1j if i == 1 else 0.5, lambda: array(0.5, 1j, 0.5)),
    ("text", lambda i: "ab" * i, lambda: ["", "ab", "abab"]),
    ("bytes", lambda i: b"x" * i, lambda: [b"", b"x", b"xx"]),
    ("nothing", lambda i: None, lambda: [None, None, None]),
    ("number or nothing", lambda i: None if i == 1 else i, lambda: [0, None, 2]),
    ("number or text", lambda i: "one" if i == 1 else i, lambda: [0, "one", 2]),
    ("any object", lambda i: fractions.Fraction(i, 3), lambda: [fractions.Fraction(i, 3) for i in range(3)]),
    ("date", lambda i: datetime.date(2020, 1, 1 + i), lambda: [datetime.date(2020, 1, 1 + i) for i in range(3)]),
    ("set", lambda i: {i}, lambda: [{0}, {1}, {2}]),
    ("class", lambda i: Fraction, lambda: [Fraction] * 3),
    ("array", lambda i: np.full((2, 2), i, np.uint8), lambda: np.stack([np.full((2, 2), i, np.uint8) for i in range(3)])),
    ("array without axes", lambda i: np.array(i, np.int16), lambda: array(0, 1, 2, dtype=np.int16)),
    ("array of nothing", lambda i: np.empty((0, 4), np.float32), lambda: np.empty((3, 0, 4), np.float32)),
    ("array scalar", lambda i: np.float16(i), lambda: array(0, 1, 2, dtype=np.float16)),
    ("array text scalar", lambda i: np.str_(i), lambda: [np.str_(0), np.str_(1), np.str_(2)]),
    ("arrays of two dtypes", lambda i: np.full(2, i, [np.int8, np.float32, np.int8][i]), lambda: np.array(
        [[0, 0], [1, 1], [2, 2]], np.result_type(np.int8, np.float32),
    )),
    ("array with strides", lambda i: RAGGED[:, ::2, 1:3].T, lambda: np.stack([RAGGED[:, ::2, 1:3].T] * 3)),
    ("array in Fortran order", lambda i: np.asfortranarray(RAGGED[0] + i), lambda: np.stack([RAGGED[0] + i for i in range(3)])),
    ("array, reversed", lambda i: np.arange(4)[::-1], lambda: np.stack([np.arange(4)[::-1]] * 3)),
    ("array, broadcast", lambda i: np.broadcast_to(np.float32(i), (2, 3)), lambda: np.stack(
        [np.full((2, 3), i, np.float32) for i in range(3)]
    )),
    ("array, read-only", read_only, lambda: np.stack([np.full(3, i) for i in range(3)])),
    ("array, big-endian", lambda i: np.full(2, i, ">i4"), lambda: np.array([[0, 0], [1, 1], [2, 2]], ">i4")),
    ("array of text", lambda i: np.array(["a" * (i + 1)]), lambda: np.array([["a"], ["aa"], ["aaa"]])),
    ("array of times", lambda i: np.array([i], "datetime64[s]"), lambda: np.array([[0], [1], [2]], "datetime64[s]")),
    ("array of records", lambda i: np.array([(i, 0.5)], [("n", "i4"), ("f", "f8")]), lambda: np.array(
        [[(i, 0.5)] for i in range(3)], [("n", "i4"), ("f", "f8")]
    )),
    ("array of objects", lambda i: np.array([i, "a"], object), lambda: np.array([[i, "a"] for i in range(3)], object)),
    ("array of bool", lambda i: np.array([True, False]), lambda: np.array([[True, False]] * 3)),
    ("tensor", lambda i: torch.full((2, 2), i), lambda: torch.stack([torch.full((2, 2), i) for i in range(3)])),
    ("tensor without axes", lambda i: torch.tensor(i / 2), lambda: torch.tensor([0.0, 0.5, 1.0])),
    ("tensor of nothing", lambda i: torch.empty(0, 3), lambda: torch.empty(3, 0, 3)),
    ("tensor, bfloat16", lambda i: torch.full((3,), i, dtype=torch.bfloat16), lambda: torch.stack(
        [torch.full((3,), i, dtype=torch.bfloat16) for i in range(3)]
    )),
    ("tensor, bool", lambda i: torch.tensor([True, i > 0]), lambda: torch.tensor([[True, False], [True, True], [True, True]])),
    ("tensor, complex", lambda i: torch.tensor([1j * i]), lambda: torch.tensor([[0j], [1j], [2j]])),
    ("tensor with strides", lambda i: torch.arange(6).view(2, 3).T, lambda: torch.stack([torch.arange(6).view(2, 3).T] * 3)),
    ("tensor that expands", lambda i: torch.tensor(i).expand(2, 2), lambda: torch.stack(
        [torch.full((2, 2), i) for i in range(3)]
    )),
    ("tensor with a gradient", lambda i: torch.ones(2, requires_grad=True), lambda: torch.ones(3, 2)),
    ("tensors of two dtypes", lambda i: torch.tensor([i], dtype=[torch.int8, torch.float16, torch.int8][i]), lambda: (
        torch.tensor([[0], [1], [2]], dtype=torch.float16)
    )),
    ("tensor, sparse", lambda i: torch.eye(2).to_sparse(), lambda: torch.stack([torch.eye(2).to_sparse()] * 3)),
    ("tensor and array", lambda i: torch.ones(1) if i else np.ones(1), lambda: [np.ones(1), torch.ones(1), torch.ones(1)]),
]  # fmt: skip

Fraction = fractions.Fraction

TREES: list[tuple[str, Callable[[int], Any], Callable[[], Any]]] = [
    ("dict", lambda i: {"a": i, "b": "x"}, lambda: {"a": array(0, 1, 2), "b": ["x"] * 3}),
    ("dict in another order", lambda i: {"a": i, "b": -i} if i != 1 else {"b": -i, "a": i}, lambda: {
        "a": array(0, 1, 2), "b": array(0, -1, -2),
    }),
    ("dict of numbers", lambda i: {1: i, None: i}, lambda: {1: array(0, 1, 2), None: array(0, 1, 2)}),
    ("ordered dict", lambda i: OrderedDict(b=i, a=i), lambda: OrderedDict(b=array(0, 1, 2), a=array(0, 1, 2))),
    ("list", lambda i: [i, "x"], lambda: [array(0, 1, 2), ["x"] * 3]),
    ("tuple", lambda i: (i, i * 0.5), lambda: (array(0, 1, 2), array(0, 0.5, 1))),
    ("tuple of one", lambda i: (i,), lambda: (array(0, 1, 2),)),
    ("named tuple", lambda i: Point(i, str(i)), lambda: Point(array(0, 1, 2), ["0", "1", "2"])),
    ("old named tuple", lambda i: Old(i, b=-i), lambda: Old(array(0, 1, 2), array(0, -1, -2))),
    ("dataclass", lambda i: Record(np.full(2, i), "m"), lambda: Record(np.array([[0, 0], [1, 1], [2, 2]]), ["m"] * 3)),
    ("frozen dataclass", lambda i: Frozen(i), lambda: Frozen(array(0, 1, 2))),
    ("empty containers", lambda i: {"a": (), "b": {}, "c": [], "d": i}, lambda: {
        "a": (), "b": {}, "c": [], "d": array(0, 1, 2),
    }),
    ("deep", lambda i: {"a": [(Point(i, {"b": Record(np.full(1, i), [None])}), "t")]}, lambda: {
        "a": [(Point(array(0, 1, 2), {"b": Record(np.array([[0], [1], [2]]), [[None] * 3])}), ["t"] * 3)],
    }),
    ("many fields", lambda i: {f"f{k}": i + k for k in range(60)}, lambda: {
        f"f{k}": array(k, k + 1, k + 2) for k in range(60)
    }),
]  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("make", "batch"), [case[1:] for case in LEAVES + TREES], ids=[case[0] for case in LEAVES + TREES])
def test_three_samples_are_collated_to_this_batch(make: Callable[[int], Any], batch: Callable[[], Any]) -> None:
    """Arrays, tensors and numbers are stacked, everything else is listed."""
    with infeed.DataLoader(Tree(6, lambda i: make(i % 3)), batch_size=3) as loader:
        for got in loader:
            assert_same(got, batch())


@pytest.mark.torch
def test_every_kind_of_sample_is_the_same_from_every_worker(every_engine: dict[str, Any]) -> None:
    """A sample with all kinds of leaves and trees: types, dtypes and values match those without workers (P2)."""
    cases = {name: make for name, make, _ in LEAVES + TREES}

    def sample(index: int) -> dict[str, Any]:
        return {name: make(index % 3) for name, make in cases.items()}

    inline = infeed.DataLoader(Tree(12, sample), batch_size=3)
    with infeed.DataLoader(Tree(12, sample), batch_size=3, **every_engine) as loader:
        for got, expected in zip(loader, inline, strict=True):
            for name in cases:
                assert_same(got[name], expected[name], name)


@pytest.mark.torch
def test_a_tensor_subclass_is_kept(light_engine: dict[str, Any]) -> None:
    """Tensors of a subclass become a batch of that subclass."""

    with infeed.DataLoader(Tree(4, lambda i: torch.full((2,), i).as_subclass(Tagged)), batch_size=2, **light_engine) as loader:
        for got, first in zip(loader, (0, 2), strict=True):
            assert type(got) is Tagged
            assert got.tolist() == [[first] * 2, [first + 1] * 2]


def test_the_layout_may_change_from_batch_to_batch(engine: dict[str, Any]) -> None:
    """Shapes, dtypes and structures have to agree only within a batch."""

    def changing(index: int) -> Any:
        turn = index // 4
        return [
            lambda: np.full(turn + 1, index, np.float32),
            lambda: {"x": np.full((2, turn), index, np.int64)},
            lambda: (index, str(index)),
            lambda: f"text {index}",
        ][turn % 4]()

    inline = infeed.DataLoader(Tree(160, changing), batch_size=4)
    with infeed.DataLoader(Tree(160, changing), batch_size=4, **engine) as loader:
        for _ in range(2):
            for got, expected in zip(loader, inline, strict=True):
                assert_same(got, expected)


def test_keys_have_the_order_of_the_batchs_first_sample(engine: dict[str, Any]) -> None:
    """The order of the keys in the previous batch, which may differ in every run, has no influence."""

    def turning(index: int) -> Any:
        keys = ["a", "b"] if index // 4 % 2 else ["b", "a"]
        return (dict.fromkeys(keys, index), Record(np.zeros(1), {key: {key: index} for key in keys}))

    with infeed.DataLoader(Tree(160, turning), batch_size=4, **engine) as loader:
        for number, (plain_dict, record) in enumerate(loader):
            keys = ["a", "b"] if number % 2 else ["b", "a"]
            assert list(plain_dict) == list(record.meta) == keys


def test_batch_sizes_may_vary(engine: dict[str, Any]) -> None:
    """A slot that held a small batch can take a large one, and vice versa."""
    sizes = [1, 1000, 3, 200_000, 7, 50_000, 1_000_000, 2]
    with infeed.DataLoader(Tree(64, lambda i: np.full(sizes[i // 2 % 8], i)), batch_size=2, **engine) as loader:
        for number, got in enumerate(loader):
            assert got.shape == (2, sizes[number % 8])
            assert (got[0] == 2 * number).all()
            assert (got[1] == 2 * number + 1).all()


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.process
def test_a_type_change_within_a_batch_is_collated_by_one_worker(workers: int) -> None:
    """Rows that do not fit the rest do not split the batch: its type follows from all samples together."""

    def mixed(index: int) -> Any:
        return {"label": index if index % 7 else float(index), "x": np.full(2, index, np.float32 if index % 5 else np.int32)}

    inline = infeed.DataLoader(Tree(120, mixed), batch_size=8)
    with infeed.DataLoader(Tree(120, mixed), batch_size=8, num_workers=workers, grain_size=1, timeout=30) as loader:
        for got, expected in zip(loader, inline, strict=True):
            assert_same(got, expected)


def test_arrays_that_cannot_be_stacked_are_reported(engine: dict[str, Any]) -> None:
    """CollateError shows the field, both shapes, both indices, and the fix."""

    def ragged(index: int) -> Any:
        return {"image": np.zeros((3, 4 + (index == 6))), "label": index}

    with infeed.DataLoader(Tree(8, ragged), batch_size=4, **engine) as loader:
        batches = iter(loader)
        assert next(batches)["image"].shape == (4, 3, 4)
        with pytest.raises(infeed.CollateError) as caught:
            next(batches)
        text = str(caught.value)
        assert "sample['image']" in text
        assert "shape (3, 4) at index=4" in text
        assert "shape (3, 5) at index=6" in text
        assert "collate_fn" in text
        assert isinstance(caught.value, ValueError)
        assert list(batches) == []


@pytest.mark.torch
@pytest.mark.parametrize(
    ("make", "path", "found"),
    [
        pytest.param(lambda i: (1, 2) if i != 2 else (1, 2, 3), "sample:", "tuple of length 3", id="length"),
        pytest.param(lambda i: {"a": 1} if i != 2 else {"b": 1}, "sample:", "dict with keys ['b']", id="keys"),
        pytest.param(lambda i: {"a": [1]} if i != 2 else {"a": (1,)}, "sample['a']:", "tuple of length 1", id="type"),
        pytest.param(lambda i: Point([1], 2) if i != 2 else Point(3, 2), "sample.x:", "int", id="leaf for a container"),
    ],
)
def test_structures_that_differ_are_reported(make: Callable[[int], Any], path: str, found: str) -> None:
    """CollateError shows the path in the sample, the expected and actual structure, and the index."""
    with pytest.raises(infeed.CollateError) as caught:
        list(infeed.DataLoader(Tree(4, make), batch_size=4))
    text = str(caught.value)
    assert path in text
    assert f"{found} at index=2" in text


def test_batches_are_writable(engine: dict[str, Any]) -> None:
    """Users can augment a batch in place, and no other batch changes."""
    with infeed.DataLoader(Tree(40, lambda i: np.full(4, i)), batch_size=2, **engine) as loader:
        for _ in range(2):
            for number, got in enumerate(loader):
                assert got.tolist() == [[2 * number] * 4, [2 * number + 1] * 4]
                assert got.flags.writeable
                got += 1000


@pytest.mark.torch
def test_results_of_collate_fn_are_writable(light_engine: dict[str, Any]) -> None:
    """Tensors and arrays that the user's collate_fn returned too."""

    def collate(samples: list[int]) -> Any:
        return torch.tensor(samples), np.array(samples)

    with infeed.DataLoader(range(8), batch_size=2, collate_fn=collate, **light_engine) as loader:
        for number, (tensor, numbers) in enumerate(loader):
            assert tensor.tolist() == numbers.tolist() == [2 * number, 2 * number + 1]
            tensor += 1000
            numbers += 1000


def test_writing_to_a_batch_does_not_change_the_dataset(engine: dict[str, Any]) -> None:
    """A batch is a copy of the dataset's arrays."""
    samples = [np.full(3, i) for i in range(4)]
    with infeed.DataLoader(samples, batch_size=2, **engine) as loader:
        for _ in range(2):
            for number, got in enumerate(loader):
                assert got.tolist() == [[2 * number] * 3, [2 * number + 1] * 3]
                got[:] = -1
    assert [sample.tolist() for sample in samples] == [[i] * 3 for i in range(4)]


def test_single_array_samples_are_copies_too(engine: dict[str, Any]) -> None:
    """With batch_size=None, writing to a sample does not change the dataset either."""
    samples = [np.full(3, i) for i in range(4)]
    with infeed.DataLoader(samples, batch_size=None, **engine) as loader:
        for _ in range(2):
            for number, got in enumerate(loader):
                assert got.tolist() == [number] * 3
                got[:] = -1


def test_a_memory_mapped_file_is_a_dataset(engine: dict[str, Any], tmp_path: Any) -> None:
    """Rows of a memory map are samples, and their batches are plain arrays."""
    np.save(tmp_path / "rows.npy", np.arange(20).reshape(10, 2))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    with infeed.DataLoader(rows, batch_size=4, **engine) as loader:
        assert [batch.tolist() for batch in loader] == [rows[begin : begin + 4].tolist() for begin in (0, 4, 8)]
        assert {type(batch) for batch in loader} == {np.ndarray}


@pytest.mark.process
def test_instances_of_local_classes_with_slots_are_delivered() -> None:
    """Their class is pickled by value."""

    class Base:
        __slots__ = ("__private", "base")

        def __init__(self) -> None:
            self.base, self.__private = 1, 2

        def private(self) -> int:
            return self.__private

    class Slotted(Base):
        __slots__ = {"value": "documented"}

    @dataclass(slots=True)
    class Local:
        value: Any

    def load(index: int) -> Any:
        slotted = Slotted()
        slotted.value = index
        assert not hasattr(slotted, "__dict__")
        return Local(index), slotted

    with infeed.DataLoader(Tree(3, load), None, num_workers=1) as loader:
        for index, (local, slotted) in enumerate(loader):
            assert local == Local(index)
            assert type(slotted) is Slotted
            assert (slotted.value, slotted.base, slotted.private()) == (index, 1, 2)
