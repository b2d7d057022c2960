"""Samples of every kind. Workers import this module, so it imports as little as possible."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclass
class Record:
    """A dataclass, which default_collate does not support."""

    value: int


class Opaque:
    """An unknown type."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


class Box(collections.UserDict[str, Any]):
    """A user-defined mapping with an extra attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = "kept"


class Frozen(Mapping[str, Any]):
    """An immutable mapping."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(Frozen):
    """A mapping that cannot be created from items."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__({"a": a, "b": b})


class Row(collections.UserList[Any]):
    """A user-defined sequence."""


class Fixed(Sequence[Any]):
    """An immutable sequence."""

    def __init__(self, items: Any) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class DictChild(dict[str, Any]):
    """A dict with an attribute."""


class ListChild(list[Any]):
    """A subclass of list."""


class TupleChild(tuple[Any, ...]):
    """A subclass of tuple."""


class StrChild(str):
    """A subclass of str."""


class IntChild(int):
    """A subclass of int."""


class TensorChild(torch.Tensor):
    """A tensor subclass."""


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


def each(kind: str, names: list[str], make: Callable[[str, int], Any]) -> dict[str, Callable[[int], Any]]:
    """Returns a function that makes samples for each of these dtypes."""
    return {f"{kind} {name}": partial(make, name) for name in names}


SAMPLES: dict[str, Callable[[int], Any]] = {
    **each("tensor", TENSOR_DTYPES, lambda name, i: torch.full((2,), i % 2).to(getattr(torch, name))),
    **each("0-d tensor", TENSOR_DTYPES, lambda name, i: torch.tensor(i % 2).to(getattr(torch, name))),
    **each("array", NUMPY_DTYPES, lambda name, i: np.full((2, 2), i, dtype=name)),
    **each("0-d array", NUMPY_DTYPES, lambda name, i: np.array(i, dtype=name)),
    **each("scalar", NUMPY_DTYPES, lambda name, i: np.array([i]).astype(name)[0]),
    **each("array", DATES, lambda name, i: np.array([i, i + 1], dtype=name)),
    **each("scalar", DATES, lambda name, i: np.array([i], dtype=name)[0]),
    "record array": lambda i: np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "empty tensor": lambda i: torch.empty(0, 3),
    "empty array": lambda i: np.empty((2, 0), np.int16),
    "non-contiguous tensor": lambda i: (torch.arange(6.0) + i).view(2, 3).t(),
    "channels last": lambda i: torch.full((1, 2, 3, 4), i).to(memory_format=torch.channels_last)[0],
    "non-contiguous array": lambda i: (np.arange(12.0) + i).reshape(3, 4)[:, ::2],
    "array of negative strides": lambda i: (np.arange(4) + i)[::-1],
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
