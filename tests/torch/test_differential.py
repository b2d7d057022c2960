"""torch's loader and ours, side by side: the same batches, types, lengths, errors, warnings, and generators left as they were.

A case is made anew for each of both, under the same seeds. Ours with workers is compared to torch's without them wherever torch
promises that it makes no difference, which halves the processes that are started.
"""

from __future__ import annotations

import collections
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")
collation = pytest.importorskip("torch.utils.data._utils.collate")

from tests.helpers import Tree  # noqa: E402  # after the lines that skip without torch

pytestmark = pytest.mark.torch

WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])


# --- comparing


def assert_alike(left: Any, right: Any, path: str = "batch") -> None:
    """Fail unless both are the same, type for type, down to the last bit."""
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        _assert_tensors_alike(left, right, path)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        np.testing.assert_array_equal(left, right, err_msg=path)
    elif isinstance(left, Mapping):
        assert list(left) == list(right), path
        for key in left:
            assert_alike(left[key], right[key], f"{path}[{key!r}]")
        _assert_attributes_alike(left, right, path)
    elif isinstance(left, Sequence) and not isinstance(left, str | bytes | range):
        assert len(left) == len(right), path
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_alike(one, other, f"{path}[{number}]")
        _assert_attributes_alike(left, right, path)
    elif isinstance(left, float):
        assert left == right or (left != left and right != right), path
    else:
        assert left == right, path


def _assert_tensors_alike(left: Any, right: Any, path: str) -> None:
    for name in ("dtype", "layout", "device", "is_nested", "requires_grad", "is_leaf"):
        assert getattr(left, name) == getattr(right, name), f"{path}.{name}: {getattr(left, name)} and {getattr(right, name)}"
    if left.is_nested:
        for number, (one, other) in enumerate(zip(left.unbind(), right.unbind(), strict=True)):
            assert_alike(one, other, f"{path}<{number}>")
        return
    assert left.shape == right.shape, f"{path}: {left.shape} and {right.shape}"
    if left.device.type != "meta":
        assert torch.equal(_bytes(left), _bytes(right)), f"{path}: {left} and {right}"


def _bytes(tensor: Any) -> Any:
    dense = tensor.detach().to_dense().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return dense.contiguous().reshape(-1).view(torch.uint8)


def _assert_attributes_alike(left: Any, right: Any, path: str) -> None:
    mine, others = getattr(left, "__dict__", {}), getattr(right, "__dict__", {})
    assert mine.keys() == others.keys(), path
    for name in mine:
        if name != "data":  # of UserDict and its like: compared already
            assert_alike(mine[name], others[name], f"{path}.{name}")


@dataclass
class Outcome:
    """What a user sees of a few epochs."""

    length: int | str = ""
    epochs: list[list[Any]] = field(default_factory=list)
    errors: list[tuple[type[BaseException], str]] = field(default_factory=list)
    warnings: list[type[Warning]] = field(default_factory=list)
    draws: dict[str, Any] = field(default_factory=dict)


Case = Callable[[], tuple[Any, dict[str, Any]]]


def outcome(cls: Any, case: Case, *, epochs: int = 2, **options: Any) -> Outcome:
    """Make the case with this class of loader, look at everything that it gives for some epochs, and draw."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    dataset, given = case()
    options = {**given, **options}
    seen = Outcome()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = cls(dataset, **options)
        try:
            seen.length = len(loader)
        except TypeError:
            seen.length = "TypeError"
        for _ in range(epochs):
            seen.epochs.append(_epoch(loader, seen))
        del loader
    seen.warnings = [entry.category for entry in caught]
    seen.draws = {"torch": torch.rand(3), "random": random.random(), "numpy": np.random.random()}
    if isinstance(options.get("generator"), torch.Generator):
        seen.draws["given"] = torch.rand(3, generator=options["generator"])
    return seen


def _epoch(loader: Any, seen: Outcome) -> list[Any]:
    batches: list[Any] = []
    iterator = iter(loader)
    for _ in range(200):
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches
        except Exception as error:
            seen.errors.append((type(error), str(error)))
    raise AssertionError("an epoch without end")


def assert_equal_outcomes(
    case: Case, num_workers: int, *, reference_workers: int = 0, words: bool = False, warns: bool = True, epochs: int = 2
) -> Outcome:
    """Fail unless a user cannot tell ours from torch's."""
    expected = outcome(data.DataLoader, case, epochs=epochs, num_workers=reference_workers)
    got = outcome(ours.DataLoader, case, epochs=epochs, num_workers=num_workers)
    assert got.length == expected.length
    assert [kind for kind, _ in got.errors] == [kind for kind, _ in expected.errors]
    if words:
        for (_, text), (_, expected_text) in zip(got.errors, expected.errors, strict=True):
            assert expected_text.splitlines()[-1] in text
    assert_alike(got.epochs, expected.epochs)
    if warns:
        assert got.warnings == expected.warnings
    assert_alike(got.draws, expected.draws)
    return got


# --- samples


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclass
class Record:
    """A dataclass, of which default_collate knows nothing."""

    value: int


class Opaque:
    """Nothing that anybody knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


class Box(collections.UserDict[str, Any]):
    """A mapping of the user's own, with something beside its items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = "kept"


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(Frozen):
    """A mapping that cannot be made from items."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__({"a": a, "b": b})


class Row(collections.UserList[Any]):
    """A sequence of the user's own."""


class Fixed(Sequence[Any]):
    """A sequence that cannot be changed."""

    def __init__(self, items: Any) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class DictChild(dict[str, Any]):
    """A dict with an attribute."""


class ListChild(list[Any]):
    """A list, almost."""


class TupleChild(tuple[Any, ...]):
    """A tuple, almost."""


class StrChild(str):
    """A string, almost."""


class IntChild(int):
    """A number, almost."""


class TensorChild(torch.Tensor):  # type: ignore[misc]  # torch is imported only if it is there
    """A tensor of the user's own class."""


def marked(number: int) -> DictChild:
    made = DictChild(a=number)
    made.mark = "m"  # type: ignore[attr-defined]
    return made


def complicated(number: int) -> Any:
    return {
        "image": torch.full((2, 3), number, dtype=torch.uint8),
        "boxes": [np.full(4, number, np.float32), (number, float(number), str(number))],
        "meta": {"name": f"n{number}", "raw": b"x", "pair": Pair(number, [True, None is None])},
    }


TENSOR_DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
]  # fmt: skip
NUMPY_DTYPES = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "g", "F", "D", "G", ">f4", ">i8", "U3", "S3", "O"]
DATES = ["M8[s]", "m8[s]"]

SAMPLES: dict[str, Callable[[int], Any]] = {
    **{f"tensor {name}": lambda i, name=name: torch.full((2,), i % 2).to(getattr(torch, name)) for name in TENSOR_DTYPES},
    **{f"0-d tensor {name}": lambda i, name=name: torch.tensor(i % 2).to(getattr(torch, name)) for name in TENSOR_DTYPES},
    **{f"array {name}": lambda i, name=name: np.full((2, 2), i, dtype=name) for name in NUMPY_DTYPES},
    **{f"0-d array {name}": lambda i, name=name: np.array(i, dtype=name) for name in NUMPY_DTYPES},
    **{f"scalar {name}": lambda i, name=name: np.array([i]).astype(name)[0] for name in NUMPY_DTYPES},
    **{f"array {name}": lambda i, name=name: np.array([i, i + 1], dtype=name) for name in DATES},
    **{f"scalar {name}": lambda i, name=name: np.array([i], dtype=name)[0] for name in DATES},
    "record array": lambda i: np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "empty tensor": lambda i: torch.empty(0, 3),
    "empty array": lambda i: np.empty((2, 0), np.int16),
    "non-contiguous tensor": lambda i: (torch.arange(6.0) + i).view(2, 3).t(),
    "channels last": lambda i: torch.full((1, 2, 3, 4), i).to(memory_format=torch.channels_last)[0],
    "non-contiguous array": lambda i: (np.arange(12.0) + i).reshape(3, 4)[:, ::2],
    "array of negative strides": lambda i: (np.arange(4) + i)[::-1].copy()[:],
    "fortran array": lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i),
    "expanded tensor": lambda i: torch.tensor([float(i)]).expand(3),
    "conjugate": lambda i: torch.tensor([complex(i, 1)]).conj(),
    "negative": lambda i: torch.tensor([complex(i, 1)]).conj().imag,
    "nan": lambda i: torch.tensor([float("nan"), float("inf"), -0.0]),
    "bool": lambda i: i % 2 == 0,
    "int": lambda i: i,
    "negative int": lambda i: -i - 1,
    "float": lambda i: i / 3,
    "complex": lambda i: complex(i, 1),
    "largest int": lambda i: 2**63 - 1 - i,
    "int of 64 bits": lambda i: 2**63 + i,
    "int of 65 bits": lambda i: 2**64 + i,
    "int, float": lambda i: i if i % 2 == 0 else i / 2,
    "float, int": lambda i: i if i % 2 == 1 else i / 2,
    "bool, int": lambda i: i if i % 2 == 1 else True,
    "int, bool": lambda i: i if i % 2 == 0 else True,
    "bool, float": lambda i: i / 2 if i % 2 == 1 else True,
    "int, scalar": lambda i: i if i % 2 == 0 else np.int32(i),
    "scalar, int": lambda i: i if i % 2 == 1 else np.int32(i),
    "float, scalar": lambda i: float(i) if i % 2 == 0 else np.float32(i),
    "scalars of two dtypes": lambda i: np.int32(i) if i % 2 == 0 else np.int64(i),
    "int subclass": lambda i: IntChild(i),
    "str": lambda i: f"s{i}",
    "str subclass": lambda i: StrChild(i),
    "bytes": lambda i: b"b%d" % i,
    "bytearray": lambda i: bytearray(b"ab"),
    "str, bytes": lambda i: "a" if i % 2 else b"a",
    "None": lambda i: None,
    "tuple of text": lambda i: ("a", b"b", i),
    "list of text": lambda i: ["a", b"b", i],
    "dict of text": lambda i: {"s": "a", "b": b"b", "n": i},
    "named tuple of text": lambda i: Pair("a", b"b"),
    "nested text": lambda i: {"a": [("x", "y"), {"z": "z"}]},
    "str and number": lambda i: "a" if i % 2 == 0 else 1,
    "tuple with None": lambda i: (i, None),
    "dict with None": lambda i: {"a": None, "b": i},
    "tuple": lambda i: (i, float(i), torch.tensor(i)),
    "tuple of one": lambda i: (i,),
    "list": lambda i: [i, float(i), np.float32(i)],
    "empty tuple": lambda i: (),
    "empty list": lambda i: [],
    "empty dict": lambda i: {},
    "tuple with empty": lambda i: (i, (), []),
    "dict with empty": lambda i: {"a": {}, "b": i},
    "dict": lambda i: {"a": i, "b": torch.ones(2) * i},
    "dict with keys of other kinds": lambda i: {1: i, (2, 3): i, None: i},
    "dict in another order": lambda i: {"a": i, "b": -i} if i % 2 else {"b": -i, "a": i},
    "dict with more keys later": lambda i: {"a": i} if i % 2 == 0 else {"a": i, "b": i},
    "dict with fewer keys later": lambda i: {"a": i} if i % 2 == 1 else {"a": i, "b": i},
    "dict with another key": lambda i: {"a": i} if i % 2 else {"b": i},
    "named tuple": lambda i: Pair(i, torch.tensor([i])),
    "named tuples in a list": lambda i: [Pair(i, 1), Pair((i,), {"a": i})],
    "complicated": complicated,
    "OrderedDict": lambda i: collections.OrderedDict(b=i, a=torch.tensor(i)),
    "defaultdict": lambda i: collections.defaultdict(int, {"a": i}),
    "Counter": lambda i: collections.Counter({"a": i}),
    "UserDict": lambda i: Box(a=i, b=np.float32(i)),
    "frozen mapping": lambda i: Frozen({"a": i}),
    "stubborn mapping": lambda i: Stubborn(i, i + 1),
    "dict subclass": marked,
    "UserList": lambda i: Row([i, "a", torch.ones(1)]),
    "fixed sequence": lambda i: Fixed([i, "a"]),
    "list subclass": lambda i: ListChild([i, "a"]),
    "tuple subclass": lambda i: TupleChild([i, "a"]),
    "deque": lambda i: collections.deque([i, 2]),
    "range": lambda i: range(i, i + 3),
    "set": lambda i: {i},
    "dataclass": lambda i: Record(i),
    "dataclass in a tuple": lambda i: (i, Record(i)),
    "object": lambda i: Opaque(),
    "function": lambda i: len,
    "tensor subclass": lambda i: torch.full((2,), float(i)).as_subclass(TensorChild),
    "tensor subclass in a tuple": lambda i: (torch.full((2,), float(i)).as_subclass(TensorChild), i),
    "tensor, then subclass": lambda i: torch.ones(2) if i % 2 == 0 else torch.ones(2).as_subclass(TensorChild),
    "subclass, then tensor": lambda i: torch.ones(2) if i % 2 == 1 else torch.ones(2).as_subclass(TensorChild),
    "sparse": lambda i: torch.eye(2).to_sparse(),
    "sparse csr": lambda i: torch.eye(2).to_sparse_csr(),
    "sparse in a dict": lambda i: {"a": torch.eye(2).to_sparse()},
    "nested tensor": lambda i: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta tensor": lambda i: torch.empty(2, device="meta"),
    "ragged tensors": lambda i: torch.ones(2 + i % 2),
    "ragged arrays": lambda i: np.ones(2 + i % 2),
    "ragged in a dict": lambda i: {"a": {"b": np.ones((2 + i % 2, 2))}},
    "tensors of other ranks": lambda i: torch.ones((2,) * (1 + i % 2)),
    "broadcastable": lambda i: torch.ones(1 if i % 2 else 2),
    "lists of unequal length": lambda i: [1] * (1 + i % 2),
    "tuples of unequal length": lambda i: (1,) * (1 + i % 2),
    "named tuple and tuple": lambda i: Pair(i, 1) if i % 2 == 0 else (i, 1),
    "tuple and list": lambda i: (i, 1) if i % 2 == 0 else [i, 1],
    "list and tuple": lambda i: (i, 1) if i % 2 == 1 else [i, 1],
    "tensor and number": lambda i: torch.tensor(i) if i % 2 == 0 else i,
    "number and tensor": lambda i: torch.tensor(i) if i % 2 == 1 else i,
    "tensor and array": lambda i: torch.ones(2) if i % 2 == 0 else np.ones(2),
    "array and tensor": lambda i: torch.ones(2) if i % 2 == 1 else np.ones(2),
    "array and list": lambda i: np.ones(2) if i % 2 == 0 else [1.0, 1.0],
    "list and array": lambda i: np.ones(2) if i % 2 == 1 else [1.0, 1.0],
    "tensors of two dtypes": lambda i: torch.ones(2, dtype=torch.float32 if i % 2 else torch.int64),
    "tensors of two floats": lambda i: torch.ones(2, dtype=torch.float32 if i % 2 else torch.float16),
    "arrays of two dtypes": lambda i: np.ones(2, np.float32 if i % 2 else np.int64),
    "number and None": lambda i: i if i % 2 == 0 else None,
    "dtype changes within the epoch": lambda i: torch.ones(2, dtype=torch.float32 if i < 5 else torch.int64),
    "numbers change within the epoch": lambda i: i if i < 4 else float(i),
    "shape changes within the epoch": lambda i: torch.ones(2 if i < 4 else 3),
    "shape changes within a batch": lambda i: torch.ones(2 if i < 5 else 3),
    "structure changes within the epoch": lambda i: (i, i) if i < 4 else {"a": i},
    "list becomes tuple within the epoch": lambda i: (i, "a") if i < 4 else [i, "a"],
    "text becomes number within the epoch": lambda i: "a" if i < 4 else i,
    "array becomes tensor within the epoch": lambda i: np.ones(2) if i < 4 else torch.ones(2, dtype=torch.float64),
    "tensor becomes array within the epoch": lambda i: np.ones(2) if i >= 4 else torch.ones(2, dtype=torch.float64),
    "subclass within the epoch": lambda i: torch.ones(2) if i < 4 else torch.ones(2).as_subclass(TensorChild),
    "None within the epoch": lambda i: i if i != 5 else None,
    "memory map row": lambda i: np.arange(4).view(np.memmap) + i,
    "masked array": lambda i: np.ma.masked_array([1.0, 2.0], [False, i % 2 == 0]),
    "matrix": lambda i: np.matrix([[i, 1]]),
    "scalar of object": lambda i: np.array([object], dtype=object)[0],
}


BATCHED = pytest.mark.parametrize("is_batched", [True, False], ids=["batches", "singly"])


@BATCHED
@pytest.mark.filterwarnings("ignore:the matrix subclass is not", "ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_every_kind_become_the_same_batches(name: str, is_batched: bool) -> None:
    """Or the same error, in the same words, for each batch that cannot be made."""
    options = {"batch_size": 2 if is_batched else None}
    assert_equal_outcomes(lambda: (Tree(7, SAMPLES[name]), options), 0, words=True, warns=False, epochs=1)


def make_named(where: tuple[str, int]) -> Any:
    name, number = where
    return SAMPLES[name](number)


class Tried(NamedTuple):
    """A batch, or the error in its place."""

    batch: Any
    error: tuple[type[BaseException], str] | None


def try_all(cls: Any, *, is_batched: bool, num_workers: int) -> dict[str, list[Tried]]:
    """Samples of every kind from one loader, one kind after the other, so that workers need to be started only once."""
    pairs = [[(name, number) for number in range(begin, min(begin + 2, 7))] for name in SAMPLES for begin in range(0, 7, 2)]
    if is_batched:
        loader = cls(Tree(7, make_named), batch_sampler=pairs, num_workers=num_workers)
    else:
        loader = cls(Tree(7, make_named), batch_size=None, sampler=[pair[0] for pair in pairs], num_workers=num_workers)
    found: dict[str, list[Tried]] = {}
    iterator = iter(loader)
    for pair in pairs:
        try:
            tried = Tried(next(iterator), None)
        except Exception as error:
            tried = Tried(None, (type(error), str(error)))
        found.setdefault(pair[0][0], []).append(tried)
    with pytest.raises(StopIteration):
        next(iterator)
    return found


@pytest.fixture(scope="module")
def tried_in_workers() -> dict[bool, tuple[dict[str, list[Tried]], dict[str, list[Tried]]]]:
    """By whether there are batches: what ours gives with workers, and what torch gives without them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            is_batched: (
                try_all(ours.DataLoader, is_batched=is_batched, num_workers=2),
                try_all(data.DataLoader, is_batched=is_batched, num_workers=0),
            )
            for is_batched in (True, False)
        }


@BATCHED
@pytest.mark.process
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_every_kind_become_the_same_batches_in_workers(
    name: str, is_batched: bool, tried_in_workers: dict[bool, tuple[dict[str, list[Tried]], dict[str, list[Tried]]]]
) -> None:
    """Also when each batch is unlike the one before."""
    got, expected = (found[name] for found in tried_in_workers[is_batched])
    for mine, others in zip(got, expected, strict=True):
        assert (mine.error is None) == (others.error is None), (mine.error, others.error)
        if mine.error is not None and others.error is not None:
            assert mine.error[0] is others.error[0]
            assert others.error[1].splitlines()[-1] in mine.error[1]
        assert_alike(mine.batch, others.batch)
