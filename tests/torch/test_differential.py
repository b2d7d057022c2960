"""torch's loader and infeed's, compared: batches, types, lengths, errors, warnings, and the state of the generators.

Each loader gets a new case with the same seeds. Where torch promises that workers make no difference, infeed with workers is
compared with torch without them, which halves the number of processes.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")
collation = pytest.importorskip("torch.utils.data._utils.collate")

from tests.helpers import Stream, Tree  # noqa: E402  # after the lines that skip without torch
from tests.torch.samples import SAMPLES, Opaque, TensorChild  # noqa: E402

# torch warns about complex32 once per process, in whichever test comes first.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]

WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])


# --- comparing


def assert_alike(left: Any, right: Any, path: str = "batch") -> None:
    """Fails unless both are the same, type for type and bit for bit."""
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
    return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _assert_attributes_alike(left: Any, right: Any, path: str) -> None:
    mine, others = getattr(left, "__dict__", {}), getattr(right, "__dict__", {})
    assert mine.keys() == others.keys(), path
    for name in mine:
        if name != "data":  # UserDict and its like: already compared.
            assert_alike(mine[name], others[name], f"{path}.{name}")


@dataclass
class Outcome:
    """What a user observes during a few epochs."""

    length: int | str = ""
    epochs: list[list[Any]] = field(default_factory=list)
    errors: list[tuple[type[BaseException], str]] = field(default_factory=list)
    warnings: list[type[Warning]] = field(default_factory=list)
    draws: dict[str, Any] = field(default_factory=dict)


Case = Callable[[], tuple[Any, dict[str, Any]]]


def outcome(cls: Any, case: Case, *, epochs: int = 2, **options: Any) -> Outcome:
    """Creates the case with this loader class, records everything that it delivers in some epochs, and draws."""
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
    # Python 3.12 and JAX, once imported, warn about every fork that torch makes.
    seen.warnings = [entry.category for entry in caught if "fork" not in str(entry.message)]
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
    seen.errors.append((RecursionError, "an epoch without end"))
    return batches


def assert_equal_outcomes(
    case: Case, num_workers: int, *, reference_workers: int = 0, words: bool = False, warns: bool = True, epochs: int = 2
) -> Outcome:
    """Fails unless both outcomes are equal for a user."""
    expected = outcome(data.DataLoader, case, epochs=epochs, num_workers=reference_workers)
    got = outcome(ours.DataLoader, case, epochs=epochs, num_workers=num_workers)
    text = None
    try:
        _compare(got, expected, words=words, warns=warns)
    except AssertionError as error:
        text = str(error)
    if text is not None:
        # Batches that a traceback references would keep their memory and look like a leak.
        del got, expected
        raise AssertionError(text)
    return got


def _compare(got: Outcome, expected: Outcome, *, words: bool, warns: bool) -> None:
    assert got.length == expected.length
    assert [kind for kind, _ in got.errors] == [kind for kind, _ in expected.errors]
    if words:
        for (_, text), (_, expected_text) in zip(got.errors, expected.errors, strict=True):
            assert expected_text.splitlines()[-1] in text
    assert_alike(got.epochs, expected.epochs)
    if warns:
        assert got.warnings == expected.warnings
    assert_alike(got.draws, expected.draws)


# --- samples


REVERSED: Final = "array of negative strides"
BATCHED = pytest.mark.parametrize("is_batched", [True, False], ids=["batches", "singly"])


@BATCHED
@pytest.mark.filterwarnings("ignore:the matrix subclass is not", "ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("nested tensor", REVERSED)])
def test_samples_of_every_kind_become_the_same_batches(name: str, is_batched: bool) -> None:
    """Or the same error with the same message, for each batch that cannot be made."""
    options = {"batch_size": 2 if is_batched else None}
    assert_equal_outcomes(lambda: (Tree(7, SAMPLES[name]), options), 0, words=True, warns=False, epochs=1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("is_batched", [True, False])
@WORKERS
def test_nested_tensors_are_treated_alike(num_workers: int, is_batched: bool) -> None:
    """An error in batches, delivered unchanged without batching."""
    options = {"batch_size": 2 if is_batched else None}
    case: Case = lambda: (Tree(3, SAMPLES["nested tensor"]), options)  # noqa: E731  # it has a type
    assert_equal_outcomes(case, num_workers, words=True, warns=False, epochs=1)


def make_named(where: Any) -> Any:
    name, number = where
    return SAMPLES[name](number)


class Tried(NamedTuple):
    """A batch, or the error in its place."""

    batch: Any
    error: tuple[type[BaseException], str] | None


def try_all(cls: Any, *, is_batched: bool, num_workers: int) -> dict[str, list[Tried]]:
    """Loads samples of every kind from one loader, one kind after the other, so that workers start only once."""
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
    """By batching: what infeed delivers with workers, and torch without them."""
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
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("nested tensor", "meta tensor", REVERSED)])
def test_samples_of_every_kind_become_the_same_batches_in_workers(
    name: str, is_batched: bool, tried_in_workers: dict[bool, tuple[dict[str, list[Tried]], dict[str, list[Tried]]]]
) -> None:
    """Also if each batch differs in kind from the one before."""
    got, expected = (found[name] for found in tried_in_workers[is_batched])
    for mine, others in zip(got, expected, strict=True):
        assert (mine.error is None) == (others.error is None), (mine.error, others.error)
        if mine.error is not None and others.error is not None:
            assert mine.error[0] is others.error[0]
            assert others.error[1].splitlines()[-1] in mine.error[1]
        assert_alike(mine.batch, others.batch)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_arrays_with_negative_strides_are_delivered(num_workers: int) -> None:
    dataset = Tree(2, SAMPLES[REVERSED])
    with pytest.raises(ValueError, match="negative"):
        list(data.DataLoader(dataset, batch_size=2, num_workers=num_workers))
    (batch,) = ours.DataLoader(dataset, batch_size=2, num_workers=num_workers)
    assert batch.tolist() == [[3, 2, 1, 0], [4, 3, 2, 1]]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation", "ignore:TypedStorage")
def test_quantized_tensors_are_delivered() -> None:
    dataset = [torch.quantize_per_tensor(torch.tensor([float(number)]), 0.5, 0, torch.qint8) for number in range(2)]
    with pytest.raises(RuntimeError, match="Quantized"):
        list(data.DataLoader(dataset, batch_size=2, num_workers=1))
    (batch,) = ours.DataLoader(dataset, batch_size=2, num_workers=1)
    assert batch.is_quantized
    assert batch.dequantize().tolist() == [[0], [1]]


# --- datasets and options


def numbered(number: int) -> Any:
    return torch.tensor([number, -number]), str(number)


class Batched(Tree):
    """Has `__getitems__`, and returns the indices that it received."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(type(indices).__name__, self.make(index)) for index in indices]


class Whole(Tree):
    """Returns complete batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices)


class Filtering(Tree):
    """Omits samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [index for index in indices if index % 3]


def identity(value: Any) -> Any:
    return value


class Columns(Tree):
    """Returns a batch as a dict of columns."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices), "y": [str(index) for index in indices]}


class Static(Tree):
    """Its `__getitems__` is a static method."""

    @staticmethod
    def __getitem__(index: int) -> Any:  # type: ignore[override]
        return numbered(index)


class OfItsClass(Tree):
    """Its `__getitems__` is a class method."""

    @classmethod
    def __getitem__(cls, index: int) -> Any:  # type: ignore[override]
        return cls.__name__, index


class Partial(Tree):
    """Its `__getitems__` is a callable object."""

    __getitem__ = partial(lambda base, index: base + index, 7)  # type: ignore[assignment]


class NotBatched(Tree):
    """Has the attribute, with another meaning."""

    __getitems__ = None


class Random(Tree):
    """Draws from all of the process's generators."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), np.random.random(), random.random()


class TypesOfIndices(Tree):
    """Returns the type of its indices."""

    def __getitem__(self, index: Any) -> Any:
        return f"{type(index).__name__} {index}"


class Keyed:
    """Its indices are not integers."""

    def __init__(self) -> None:
        self.items = {"a": 1, "b": 2, "c": 3}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: str) -> int:
        return self.items[key]


class Unsized:
    """A dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index * 10


class Flow(data.IterableDataset):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
    """An iterable dataset that every worker reads completely."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class SizedFlow(Flow):
    """An iterable dataset with a length."""

    def __init__(self, count: int, said: int | None = None) -> None:
        super().__init__(count)
        self.said = count if said is None else said

    def __len__(self) -> int:
        return self.said


class SharedFlow(Flow):
    """An iterable dataset that shards itself."""

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        return iter(range(first, self.count, step))


class UnevenFlow(Flow):
    """Each worker's part has another length."""

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        number = 0 if info is None else info.id
        return iter([(number, element) for element in range(self.count - 5 * number)])


class Numbers(data.Sampler[int]):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
    """A typical user-defined sampler."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Fresh:
    """A batch sampler that yields different batches each time."""

    def __init__(self) -> None:
        self.round = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.round += 1
        for begin in range(3):
            yield [begin, self.round]


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def total(samples: list[Any]) -> Any:
    return {"n": len(samples), "first": samples[0]}


class Summing:
    """A collate_fn with an attribute."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, samples: list[Any]) -> Any:
        return torch.tensor(samples).sum() + self.offset

    def method(self, samples: list[Any]) -> Any:
        return tuple(sample + self.offset for sample in samples)


def packed_sequence(samples: list[int]) -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.ones(9 - sample) for sample in samples])


def rows(**options: Any) -> tuple[Any, dict[str, Any]]:
    return Tree(10, numbered), options


def tables() -> Any:
    return data.TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10, dtype=torch.bfloat16), torch.arange(10) > 4)


OPTIONS: dict[str, Case] = {
    # batches
    "plain": lambda: rows(),
    "batches": lambda: rows(batch_size=3),
    "drop_last": lambda: rows(batch_size=3, drop_last=True),
    "batches that fit": lambda: rows(batch_size=5),
    "larger than the dataset": lambda: rows(batch_size=50),
    "larger than the dataset, dropped": lambda: rows(batch_size=50, drop_last=True),
    "single samples": lambda: rows(batch_size=None),
    "single samples, shuffled": lambda: rows(batch_size=None, shuffle=True),
    "empty": lambda: ([], {"batch_size": 3}),
    "a NumPy batch size": lambda: rows(batch_size=int(np.int64(3))),
    # order
    "shuffle": lambda: rows(batch_size=3, shuffle=True),
    "shuffle, drop_last": lambda: rows(batch_size=3, shuffle=True, drop_last=True),
    "shuffle, no rest": lambda: rows(batch_size=5, shuffle=True),
    "shuffle with a generator": lambda: rows(batch_size=3, shuffle=True, generator=seeded(3)),
    "shuffle with a generator, drop_last": lambda: rows(batch_size=3, shuffle=True, drop_last=True, generator=seeded(3)),
    "generator without shuffle": lambda: rows(batch_size=3, generator=seeded(3)),
    "shuffle False": lambda: rows(batch_size=3, shuffle=False),
    "shuffled by the default generator": lambda: rows(batch_size=4, shuffle=True, generator=torch.default_generator),
    "RandomSampler": lambda: rows(batch_size=3, sampler=data.RandomSampler(range(10))),
    "RandomSampler, generator": lambda: rows(batch_size=3, sampler=data.RandomSampler(range(10), generator=seeded(4))),
    "RandomSampler, two generators": lambda: rows(
        batch_size=3, sampler=data.RandomSampler(range(10), generator=seeded(4)), generator=seeded(5)
    ),
    "RandomSampler, one generator": lambda: _one_generator(),
    "RandomSampler, few": lambda: rows(batch_size=3, sampler=data.RandomSampler(range(10), num_samples=4)),
    "RandomSampler, many": lambda: rows(batch_size=3, sampler=data.RandomSampler(range(10), num_samples=25)),
    "RandomSampler, replacement": lambda: rows(
        batch_size=3, sampler=data.RandomSampler(range(10), replacement=True, num_samples=40)
    ),
    "RandomSampler of fewer": lambda: rows(batch_size=3, sampler=data.RandomSampler(range(5))),
    "RandomSampler, singly": lambda: rows(batch_size=None, sampler=data.RandomSampler(range(10))),
    "SequentialSampler": lambda: rows(batch_size=3, sampler=data.SequentialSampler(range(10))),
    "SequentialSampler of fewer": lambda: rows(batch_size=3, sampler=data.SequentialSampler(range(4))),
    "SubsetRandomSampler": lambda: rows(batch_size=3, sampler=data.SubsetRandomSampler([1, 3, 5, 7, 7])),
    "SubsetRandomSampler, generator": lambda: rows(
        batch_size=3, sampler=data.SubsetRandomSampler([1, 3, 5, 7, 7], generator=seeded(4))
    ),
    "SubsetRandomSampler of a tensor": lambda: rows(batch_size=3, sampler=data.SubsetRandomSampler(torch.arange(5))),
    "WeightedRandomSampler": lambda: rows(batch_size=3, sampler=data.WeightedRandomSampler([0.1] * 5 + [1.0] * 5, 20)),
    "WeightedRandomSampler, no replacement": lambda: rows(
        batch_size=3, sampler=data.WeightedRandomSampler(torch.ones(10), 8, replacement=False, generator=seeded(1))
    ),
    "DistributedSampler": lambda: rows(
        batch_size=2, sampler=data.DistributedSampler(range(10), num_replicas=3, rank=1, shuffle=True)
    ),
    "DistributedSampler, dropped": lambda: rows(
        batch_size=2, sampler=data.DistributedSampler(range(10), num_replicas=3, rank=2, shuffle=False, drop_last=True)
    ),
    "BatchSampler": lambda: rows(batch_sampler=data.BatchSampler(data.SequentialSampler(range(10)), 3, False)),
    "BatchSampler of random ones": lambda: rows(batch_sampler=data.BatchSampler(data.RandomSampler(range(10)), 3, True)),
    "BatchSampler in a sampler": lambda: rows(batch_size=None, sampler=data.BatchSampler(range(6), 2, False), collate_fn=str),
    "sampler of torch's kind": lambda: rows(batch_size=3, sampler=Numbers([3, 1, 4, 1, 5])),
    "list as sampler": lambda: rows(batch_size=3, sampler=[3, 1, 4, 1, 5]),
    "range as sampler": lambda: rows(batch_size=3, sampler=range(9, 0, -2)),
    "tensor as sampler": lambda: (TypesOfIndices(10, numbered), {"batch_size": 2, "sampler": torch.tensor([3, 1, 4])}),
    "array as sampler": lambda: (TypesOfIndices(10, numbered), {"batch_size": 2, "sampler": np.array([3, 1, 4])}),
    "generator as sampler": lambda: rows(batch_size=3, sampler=(number for number in [3, 1, 4, 1])),
    "endless numbers": lambda: (TypesOfIndices(10, numbered), {"sampler": [True, 2**70, -1, 0.5, np.int8(3)]}),
    "keys as sampler": lambda: (Keyed(), {"sampler": ["b", "a"], "batch_size": 2}),
    "string as batch": lambda: (Keyed(), {"batch_sampler": ["ab", "c"]}),
    "tuples as samples": lambda: (TypesOfIndices(10, numbered), {"sampler": [(1, 2), (3, 4)], "batch_size": 2}),
    "slices": lambda: (torch.arange(10), {"sampler": [slice(0, 3), slice(4, 5)], "batch_size": None}),
    "lists to __getitem__": lambda: (torch.arange(10), {"sampler": [[0, 3], [4, 5, 6]], "batch_size": None}),
    "list as batch_sampler": lambda: rows(batch_sampler=[[0, 1], [2], [3, 4, 5]]),
    "tuples as batches": lambda: rows(batch_sampler=((0, 1), (2,))),
    "tensors as batches": lambda: (TypesOfIndices(10, numbered), {"batch_sampler": [torch.tensor([0, 1]), torch.tensor([2])]}),
    "arrays as batches": lambda: (TypesOfIndices(10, numbered), {"batch_sampler": [np.array([0, 1]), np.array([2])]}),
    "ranges as batches": lambda: (TypesOfIndices(10, numbered), {"batch_sampler": [range(2), range(3, 4)]}),
    "sets as batches": lambda: rows(batch_sampler=[{0}, {1}]),
    "other batches each time": lambda: rows(batch_sampler=Fresh()),
    "generator as batch_sampler": lambda: rows(batch_sampler=([number] for number in range(3))),
    "sampler without dataset length": lambda: (Unsized(), {"sampler": [4, 2], "batch_size": 2}),
    "index out of range": lambda: ([1, 2, 3], {"batch_size": 2, "sampler": [0, 1, 2, 3, 1, 2]}),
    "negative indices": lambda: ([1, 2, 3], {"batch_size": 2, "sampler": [-1, 0]}),
    # datasets
    "list": lambda: ([1, 2, 3], {"batch_size": 2}),
    "list of tensors": lambda: ([torch.ones(2), torch.zeros(2)], {"batch_size": 2}),
    "list of lists": lambda: ([[1, 2], [3, 4]], {"batch_size": 2}),
    "tuple": lambda: ((1.5, 2.5), {"batch_size": 2}),
    "tuple of arrays": lambda: ((np.ones(3), np.zeros(3)), {"batch_size": 2}),
    "range": lambda: (range(10), {"batch_size": 4, "shuffle": True}),
    "string": lambda: ("abcdef", {"batch_size": 4}),
    "dict": lambda: ({0: "a", 1: "b"}, {"batch_size": 2}),
    "dict of arrays": lambda: ({0: np.ones(3), 1: np.zeros(3)}, {"batch_size": 2}),
    "tensor": lambda: (torch.arange(12).view(6, 2), {"batch_size": 4}),
    "tensor that needs a gradient, detached": lambda: (torch.ones(4, 2, requires_grad=True).detach(), {"batch_size": 4}),
    "array": lambda: (np.arange(12.0).reshape(6, 2), {"batch_size": 4, "shuffle": True}),
    "array of one axis": lambda: (np.arange(6, dtype=np.float32), {"batch_size": 4}),
    "array of text": lambda: (np.array(["a", "b"]), {"batch_size": 2}),
    "array of bytes": lambda: (np.array([b"a", b"b"]), {"batch_size": 2}),
    "array of text with axes": lambda: (np.array([["a"], ["b"]]), {"batch_size": 2}),
    "array of objects": lambda: (np.array([1, "b"], dtype=object), {"batch_size": 1}),
    "array of dates": lambda: (np.array([1, 2], dtype="M8[s]"), {"batch_size": 2}),
    "array of uint64": lambda: (np.arange(4, dtype=np.uint64), {"batch_size": 2}),
    "array of uint64 with axes": lambda: (np.ones((4, 2), dtype=np.uint64), {"batch_size": 2}),
    "array of long doubles": lambda: (np.ones((4, 2), dtype=np.longdouble), {"batch_size": 2}),
    "array of big-endians": lambda: (np.ones((4, 2), dtype=">f4"), {"batch_size": 2}),
    "array of records": lambda: (np.zeros(4, dtype=[("a", "i4")]), {"batch_size": 2}),
    "empty array": lambda: (np.empty((0, 2)), {"batch_size": 2}),
    "array without columns": lambda: (np.empty((4, 0)), {"batch_size": 2}),
    "array, indices out of range": lambda: (np.arange(3), {"batch_size": 2, "sampler": [0, 1, 2, 3, -1, 2, -4]}),
    "array, singly": lambda: (np.arange(6.0).reshape(3, 2), {"batch_size": None}),
    "array, collate_fn": lambda: (np.arange(6.0).reshape(3, 2), {"batch_size": 2, "collate_fn": list}),
    "array by tensors": lambda: (np.arange(6.0).reshape(3, 2), {"batch_size": 2, "sampler": torch.tensor([2, 0])}),
    "array by lists": lambda: (np.arange(6.0).reshape(3, 2), {"batch_size": 2, "sampler": [[2, 0], [1, 1]]}),
    "array by bools": lambda: (np.arange(6.0).reshape(3, 2), {"batch_size": 2, "sampler": [1, 2, 0]}),
    "TensorDataset": lambda: (tables(), {"batch_size": 4}),
    "TensorDataset, shuffled": lambda: (tables(), {"batch_size": 4, "shuffle": True}),
    "TensorDataset, drop_last": lambda: (tables(), {"batch_size": 4, "shuffle": True, "drop_last": True}),
    "TensorDataset, WeightedRandomSampler": lambda: (
        tables(),
        {"batch_size": 4, "sampler": data.WeightedRandomSampler(torch.arange(10.0), 8)},
    ),
    "TensorDataset, singly": lambda: (tables(), {"batch_size": None}),
    "TensorDataset, collate_fn": lambda: (tables(), {"batch_size": 4, "collate_fn": len}),
    "TensorDataset, batch_sampler": lambda: (tables(), {"batch_sampler": [[1, 2], [-1], [3, 3, 3]]}),
    "TensorDataset, out of range": lambda: (tables(), {"batch_sampler": [[1, 2], [10], [3]]}),
    "TensorDataset of one": lambda: (data.TensorDataset(torch.arange(4)), {"batch_size": 3}),
    "TensorDataset of views": lambda: (data.TensorDataset(torch.arange(12).view(3, 4).t()), {"batch_size": 3}),
    "TensorDataset of subclasses": lambda: (data.TensorDataset(torch.arange(4).as_subclass(TensorChild)), {"batch_size": 3}),
    "TensorDataset of conjugates": lambda: (data.TensorDataset(torch.ones(4, dtype=torch.cfloat).conj()), {"batch_size": 3}),
    "TensorDataset, empty": lambda: (data.TensorDataset(torch.empty(0, 3)), {"batch_size": 3}),
    "TensorDataset without columns": lambda: (data.TensorDataset(torch.empty(4, 0)), {"batch_size": 3}),
    "TensorDataset of float8": lambda: (
        data.TensorDataset(torch.ones(4, 2).to(torch.float8_e4m3fn)),
        {"batch_size": 3, "shuffle": True},
    ),
    "TensorDataset of complex32": lambda: (data.TensorDataset(torch.ones(4, 2).to(torch.complex32)), {"batch_size": 3}),
    "TensorDataset of uint64": lambda: (data.TensorDataset(torch.ones(4, 2).to(torch.uint64)), {"batch_size": 3}),
    "Subset": lambda: (data.Subset(Tree(10, numbered), [5, 3, 1]), {"batch_size": 2}),
    "Subset of TensorDataset": lambda: (data.Subset(tables(), [5, 3, 1]), {"batch_size": 2, "shuffle": True}),
    "Subset of batches": lambda: (data.Subset(Batched(10, numbered), [5, 3, 1]), {"batch_size": 2}),
    "ConcatDataset": lambda: (data.ConcatDataset([Tree(3, numbered), Tree(4, numbered)]), {"batch_size": 2, "shuffle": True}),
    "StackDataset": lambda: (data.StackDataset(Tree(3, numbered), range(3)), {"batch_size": 2}),
    "StackDataset by name": lambda: (data.StackDataset(a=Tree(3, numbered), b=range(3)), {"batch_size": 2}),
    "random_split": lambda: (data.random_split(range(10), [7, 3], generator=seeded(1))[0], {"batch_size": 2, "shuffle": True}),
    "__getitems__": lambda: (Batched(10, numbered), {"batch_size": 3}),
    "__getitems__, shuffled": lambda: (Batched(10, numbered), {"batch_size": 3, "shuffle": True}),
    "__getitems__, tuples": lambda: (Batched(10, numbered), {"batch_sampler": [(0, 1), (2, 3)]}),
    "__getitems__, singly": lambda: (Batched(10, numbered), {"batch_size": None}),
    "__getitems__ of None": lambda: (NotBatched(10, numbered), {"batch_size": 3}),
    "__getitems__ of another number": lambda: (Filtering(10, numbered), {"batch_size": 4}),
    "__getitems__ of a whole batch": lambda: (Whole(10, numbered), {"batch_size": 4, "collate_fn": total}),
    "__getitems__ of columns": lambda: (Columns(10, numbered), {"batch_size": 4, "collate_fn": identity}),
    "__getitems__ of columns, empty batches": lambda: (
        Columns(10, numbered),
        {"batch_sampler": [[1, 2, 3], []], "collate_fn": identity},
    ),
    "__getitems__ of columns, default": lambda: (Columns(10, numbered), {"batch_size": 4}),
    "__getitem__, static": lambda: (Static(4, numbered), {"batch_size": 3}),
    "__getitem__ of the class": lambda: (OfItsClass(4, numbered), {"batch_size": 3}),
    "__getitem__ that is no function": lambda: (Partial(4, numbered), {"batch_size": 3}),
    "draws": lambda: (Random(10, numbered), {"batch_size": 3}),
    # collate_fn
    "collate_fn": lambda: (range(10), {"batch_size": 3, "collate_fn": total}),
    "collate_fn of torch": lambda: (range(10), {"batch_size": 3, "collate_fn": data.default_collate}),
    "collate_fn that converts": lambda: (range(10), {"batch_size": 3, "collate_fn": data.default_convert}),
    "collate_fn list": lambda: (range(10), {"batch_size": 3, "collate_fn": list}),
    "collate_fn lambda": lambda: (range(10), {"batch_size": 3, "collate_fn": lambda samples: samples[::-1]}),
    "collate_fn object": lambda: (range(10), {"batch_size": 3, "collate_fn": Summing(3)}),
    "collate_fn method": lambda: (range(10), {"batch_size": 3, "collate_fn": Summing(3).method}),
    "collate_fn of None": lambda: (range(10), {"batch_size": 3, "collate_fn": lambda samples: None}),
    "collate_fn of PackedSequence": lambda: (range(8), {"batch_size": 3, "collate_fn": packed_sequence}),
    "collate_fn of sparse tensors": lambda: (
        range(4),
        {"batch_size": 2, "collate_fn": lambda s: torch.eye(2).to_sparse() * s[0]},
    ),
    "collate_fn that fails": lambda: (range(6), {"batch_size": 2, "collate_fn": lambda samples: 1 / samples[0]}),
    "collate_fn, singly": lambda: (range(4), {"batch_size": None, "collate_fn": lambda sample: (sample, sample)}),
    "collate_fn, empty batches": lambda: (range(4), {"batch_sampler": [[0], [], [1, 2]], "collate_fn": list}),
    "empty batches": lambda: (range(4), {"batch_sampler": [[0], [], [1, 2]]}),
    # other
    "in_order False": lambda: rows(batch_size=10, in_order=False),
    "pin_memory": lambda: rows(batch_size=3, pin_memory=True),
}


def _one_generator() -> tuple[Any, dict[str, Any]]:
    generator = seeded(4)
    return rows(batch_size=3, sampler=data.RandomSampler(range(10), generator=generator), generator=generator)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_and_datasets_behave_the_same(name: str) -> None:
    """Two epochs without workers, including draws of random numbers."""
    assert_equal_outcomes(OPTIONS[name], 0)


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "draws"][::3])
def test_options_and_datasets_behave_the_same_in_workers(name: str) -> None:
    """infeed has two workers, torch none. Only a third of the cases: the fuzzer has workers too."""
    assert_equal_outcomes(OPTIONS[name], 2)


STREAMS: dict[str, Case] = {
    "stream": lambda: (Flow(10), {"batch_size": 3}),
    "stream, plain": lambda: (Flow(3), {}),
    "stream that fits": lambda: (Flow(9), {"batch_size": 3}),
    "stream, drop_last": lambda: (Flow(10), {"batch_size": 3, "drop_last": True}),
    "stream, singly": lambda: (Flow(4), {"batch_size": None}),
    "empty stream": lambda: (Flow(0), {"batch_size": 3}),
    "stream with a length": lambda: (SizedFlow(10), {"batch_size": 3}),
    "stream with a length, dropped": lambda: (SizedFlow(10), {"batch_size": 3, "drop_last": True}),
    "stream with a length, singly": lambda: (SizedFlow(10), {"batch_size": None}),
    "stream longer than it said": lambda: (SizedFlow(10, 2), {"batch_size": 2}),
    "stream shorter than it said": lambda: (SizedFlow(3, 10), {"batch_size": 2}),
    "shared stream": lambda: (SharedFlow(11), {"batch_size": 2}),
    "shared stream, singly": lambda: (SharedFlow(5), {"batch_size": None}),
    "shared stream, drop_last": lambda: (SharedFlow(11), {"batch_size": 2, "drop_last": True}),
    "uneven stream": lambda: (UnevenFlow(11), {"batch_size": 2}),
    "chain": lambda: (data.ChainDataset([Flow(3), Flow(2)]), {"batch_size": 2}),
    "sum of streams": lambda: (Flow(3) + Flow(2), {"batch_size": 2}),
    "stream, collate_fn": lambda: (Flow(5), {"batch_size": 2, "collate_fn": tuple}),
    "stream, shuffle False": lambda: (Flow(5), {"batch_size": 2, "shuffle": False}),
    "stream, generator": lambda: (Flow(5), {"batch_size": 2, "generator": seeded(2)}),
}


@WORKERS
@pytest.mark.parametrize("name", STREAMS)
def test_iterable_datasets_are_read_alike(name: str, num_workers: int) -> None:
    """Each worker reads its own copy, with torch and infeed, and batches have the same order."""
    assert_equal_outcomes(STREAMS[name], num_workers, reference_workers=num_workers)


@WORKERS
def test_a_plain_iterable_is_rejected_alike(num_workers: int) -> None:
    """torch takes an iterable that is no IterableDataset for a map-style dataset, and fails on its length."""
    for cls in (data.DataLoader, ours.DataLoader):
        with pytest.raises(TypeError):
            list(cls(Stream(3), num_workers=num_workers))


# --- types registered with default_collate


class Coin:
    """A type that can be registered with default_collate."""

    def __init__(self, value: int) -> None:
        self.value = value


def collate_coins(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.tensor([coin.value for coin in batch]), "coins"


@WORKERS
def test_types_registered_for_default_collate_use_the_registered_function(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in workers that started earlier; at the top level and in containers."""
    monkeypatch.setitem(collation.default_collate_fn_map, Coin, collate_coins)
    assert_equal_outcomes(lambda: (Tree(5, Coin), {"batch_size": 2}), num_workers)
    assert_equal_outcomes(lambda: (Tree(5, lambda i: {"a": Coin(i), "b": [i, "c"]}), {"batch_size": 2}), num_workers)


def collate_sparse(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.stack(list(batch)) if batch[0].is_sparse else "dense"


@WORKERS
def test_a_registered_function_for_tensors_replaces_torchs(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users do to batch sparse tensors."""
    monkeypatch.setitem(collation.default_collate_fn_map, torch.Tensor, collate_sparse)
    assert_equal_outcomes(lambda: (Tree(5, SAMPLES["sparse"]), {"batch_size": 2}), num_workers)
    assert_equal_outcomes(lambda: (Tree(5, SAMPLES["tensor int64"]), {"batch_size": 2}), num_workers)


# --- objects that only the same process can deliver


class Unpicklable:
    """Like an open file or a lock, it cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


GRAD = torch.ones(2, requires_grad=True)


def plain_then_not(kind: str, number: int) -> Any:
    if number < 2:
        return torch.ones(2)
    return torch.ones(2, requires_grad=True) if kind == "gradient" else torch.ones(2, device="meta")


@pytest.mark.parametrize("kind", ["gradient", "meta"])
def test_a_batch_does_not_depend_on_the_one_before(kind: str) -> None:
    """After a batch of plain tensors, one of tensors that require gradients or are on another device."""

    def seen(cls: Any) -> Any:
        return [(batch.requires_grad, batch.device.type) for batch in cls(Tree(4, partial(plain_then_not, kind)), batch_size=2)]

    assert seen(ours.DataLoader) == seen(data.DataLoader)


@pytest.mark.parametrize("dataset", [Tree(4, lambda i: GRAD * i), Tree(4, lambda i: (GRAD, i)), data.TensorDataset(GRAD * 1)])
def test_gradients_flow_through_batches_without_workers(dataset: Any) -> None:
    """torch.stack keeps the graph, so samples may be parameters or depend on them."""
    assert_equal_outcomes(lambda: (dataset, {"batch_size": 2}), 0)


@pytest.mark.parametrize("options", [{"collate_fn": lambda samples: Unpicklable()}, {"batch_size": None}])
def test_nothing_is_pickled_without_workers(options: dict[str, Any]) -> None:
    """With num_workers=0 nothing leaves the process."""
    for cls in (data.DataLoader, ours.DataLoader):
        assert [type(batch) for batch in cls(Tree(2, lambda i: Unpicklable()), **options)] == [Unpicklable, Unpicklable]


def test_without_workers_the_same_object_is_delivered() -> None:
    """For single samples and results of collate_fn, as with torch."""
    samples = [Opaque(), Opaque()]
    for cls in (data.DataLoader, ours.DataLoader):
        for got, sample in zip(cls(samples, batch_size=None), samples, strict=True):
            assert got is sample
        for got, sample in zip(cls(samples, collate_fn=lambda parts: parts[0]), samples, strict=True):
            assert got is sample


@WORKERS
def test_memory_formats_are_kept(num_workers: int) -> None:
    """A channels-last result of collate_fn stays channels-last."""

    def collate(samples: list[int]) -> Any:
        return torch.ones(len(samples), 3, 4, 4).to(memory_format=torch.channels_last)

    for cls in (data.DataLoader, ours.DataLoader):
        loader = cls(range(4), batch_size=2, collate_fn=collate, num_workers=num_workers)
        assert [batch.is_contiguous(memory_format=torch.channels_last) for batch in loader] == [True, True]


@WORKERS
@pytest.mark.parametrize("make", [lambda: torch.ones(2, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(2))])
def test_leaf_tensors_that_require_gradients_are_delivered_as_such(num_workers: int, make: Callable[[], Any]) -> None:
    """As single samples, which torch's workers send too."""
    case: Case = lambda: (Tree(3, lambda i: make()), {"batch_size": None})  # noqa: E731  # it has a type
    assert_equal_outcomes(case, num_workers, reference_workers=num_workers)


def overlapping(samples: list[int]) -> Any:
    base = torch.zeros(8)
    return [base[:5], base[3:], base.untyped_storage(), base.view(2, 4).t()]


@WORKERS
def test_overlapping_tensors_in_a_batch_still_overlap(num_workers: int) -> None:
    """Views of one storage, and the storage itself: writes to one are visible in the others."""
    for cls in (data.DataLoader, ours.DataLoader):
        ((left, right, storage, table),) = cls([0], collate_fn=overlapping, num_workers=num_workers)
        left.fill_(1)
        right[-1] = 9
        assert right.tolist() == [1, 1, 0, 0, 9]
        assert table.tolist() == [[1, 1], [1, 0], [1, 0], [1, 9]]
        assert type(storage) is torch.UntypedStorage
        assert torch.tensor([], dtype=torch.float32).set_(storage).tolist() == [1, 1, 1, 1, 1, 0, 0, 9]


@WORKERS
def test_an_array_of_collate_fn_is_writable(num_workers: int) -> None:
    """An array over bytes from a worker is writable too: it is a copy."""
    make: Any = lambda samples: [np.frombuffer(b"abc", np.uint8), np.array(["2020"], "M8[D]"), np.broadcast_to(1.0, 3)]  # noqa: E731
    for cls in (data.DataLoader, ours.DataLoader):
        ((letters, dates, numbers),) = cls([0], collate_fn=make, num_workers=num_workers)
        assert [letters.flags.writeable, numbers.flags.writeable] == [num_workers > 0] * 2
        assert dates.flags.writeable
        assert letters.tobytes() == b"abc"
        assert numbers.tolist() == [1, 1, 1]


CHANNELS_LAST = torch.arange(120.0).view(2, 4, 5, 3).permute(0, 3, 1, 2)
STRIDED: dict[str, Case] = {
    "channels last": lambda: (list(CHANNELS_LAST), {"batch_size": 2}),
    "channels last, arrays": lambda: (list(CHANNELS_LAST.numpy()), {"batch_size": 2}),
    "channels last, TensorDataset": lambda: (data.TensorDataset(CHANNELS_LAST), {"batch_size": 2}),
    "channels last, one array": lambda: (CHANNELS_LAST.numpy(), {"batch_size": 2}),
    "channels last, from the second batch on": lambda: ([torch.zeros(3, 4, 5), *CHANNELS_LAST], {}),
    "channels last, 4 axes": lambda: ([CHANNELS_LAST], {}),
    "channels last, stream": lambda: (Pictures(2), {"batch_size": 2}),
    "singly": lambda: ([torch.zeros(9)[::3], CHANNELS_LAST, torch.zeros(3, 1).expand(3, 4)], {"batch_size": None}),
    "collate_fn": lambda: ([0], {"collate_fn": lambda samples: [torch.zeros(9)[::3], CHANNELS_LAST]}),
}


class Pictures(data.IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(CHANNELS_LAST[: self.length])


@WORKERS
@pytest.mark.parametrize("name", STRIDED)
def test_tensors_have_the_strides_of_torch(name: str, num_workers: int) -> None:
    """In workers torch stacks into contiguous batches, in the main process it keeps channels-last."""

    def strides(cls: Any) -> list[Any]:
        dataset, options = STRIDED[name]()
        found: list[Any] = []
        for batch in cls(dataset, num_workers=num_workers, **options):
            found += [tensor.stride() for tensor in (batch if isinstance(batch, list) else [batch])]
        return found

    assert strides(ours.DataLoader) == strides(data.DataLoader)


@WORKERS
def test_shared_tensors_stay_shared_within_a_batch(num_workers: int) -> None:
    """Two references to one tensor in a batch stay one tensor."""

    def collate(samples: list[int]) -> Any:
        tensor = torch.zeros(2)
        return tensor, tensor

    for cls in (data.DataLoader, ours.DataLoader):
        for left, right in cls(range(2), collate_fn=collate, num_workers=num_workers):
            left += 1
            assert right.tolist() == [1, 1]


@WORKERS
def test_sparse_batches_are_freed(num_workers: int) -> None:
    """They are freed when the user releases them; otherwise their memory would never be free again."""
    before = len(torch._utils._sparse_tensors_to_validate)
    loader = ours.DataLoader(range(4), collate_fn=lambda samples: torch.eye(2).to_sparse(), num_workers=num_workers)
    assert [batch.is_sparse for batch in loader] == [True] * 4
    kept = len(torch._utils._sparse_tensors_to_validate) - before
    torch._utils._sparse_tensors_to_validate.clear()
    assert kept == 0


# --- generators


BY_DEFAULT: dict[str, Any] = {"shuffle": True, "generator": torch.default_generator}


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        *[(options, size) for options in ({}, {"shuffle": True}) for size in (3, 5, None)],
        *[(BY_DEFAULT, size) for size in (5, None)],
        (BY_DEFAULT, 3),
    ],
)
def test_datasets_draw_the_same_numbers_as_with_torch(options: dict[str, Any], batch_size: int | None) -> None:
    """Bit-identical without workers, also if the sampler draws from the same generator."""
    assert_equal_outcomes(lambda: (Random(10, numbered), {"batch_size": batch_size, **options}), 0, epochs=3)


@WORKERS
def test_two_concurrent_loops_shuffle_as_with_torch(num_workers: int) -> None:
    """Two iterators of one loader, and nested loops, draw in the order in which they start."""

    def seen(cls: Any) -> Any:
        torch.manual_seed(5)
        loader = cls(range(6), batch_size=2, shuffle=True, num_workers=num_workers)
        zipped = [(left, right) for left, right in zip(loader, loader, strict=True)]
        nested = [(left, list(loader)) for left in loader]
        return zipped, nested, torch.rand(1)

    assert_alike(seen(ours.DataLoader), seen(data.DataLoader))


@WORKERS
def test_an_early_end_leaves_the_default_generator_as_with_torch(num_workers: int) -> None:
    """Five epochs are left after one batch."""

    def seen(cls: Any) -> Any:
        torch.manual_seed(5)
        loader = cls(range(100), batch_size=2, shuffle=True, num_workers=num_workers)
        return [next(iter(loader)) for _ in range(3)], torch.rand(1)

    assert_alike(seen(ours.DataLoader), seen(data.DataLoader))


@pytest.mark.process
@pytest.mark.parametrize("options", [{}, {"generator": True}, {"shuffle": True, "generator": True}])
def test_workers_have_the_seeds_of_torch(options: dict[str, Any]) -> None:
    """Base seed plus worker number, so a worker_init_fn that derives its own seeds derives the same."""

    def seen(cls: Any) -> set[int]:
        torch.manual_seed(5)
        given = {**options, "generator": seeded(1)} if options else {}
        return set(torch.cat(list(cls(Tree(20, worker_seed), num_workers=2, **given))).tolist())

    mine, others = seen(ours.DataLoader), seen(data.DataLoader)
    assert mine <= others
    assert len(others) == 2


def worker_seed(index: int) -> int:
    return int(data.get_worker_info().seed)


# --- epochs


@pytest.mark.process
@pytest.mark.parametrize("is_stream", [False, True], ids=["rows", "stream"])
def test_persistent_workers_deliver_the_same_epochs(is_stream: bool) -> None:
    """Three epochs, shuffled where possible."""
    options: dict[str, Any] = {"batch_size": 2, "persistent_workers": True, **({} if is_stream else {"shuffle": True})}
    assert_equal_outcomes(lambda: (SharedFlow(7) if is_stream else range(7), options), 2, reference_workers=2, epochs=3)


@pytest.mark.process
def test_out_of_order_delivers_the_same_batches() -> None:
    """Their order is not compared."""

    def seen(cls: Any) -> Any:
        loader = cls(range(23), batch_size=2, num_workers=2, in_order=False)
        return sorted(batch.tolist() for batch in loader)

    assert seen(ours.DataLoader) == seen(data.DataLoader)


def test_set_epoch_of_a_distributed_sampler_changes_the_order_alike() -> None:
    """It is called on the sampler, as training loops do."""

    def seen(cls: Any) -> Any:
        sampler = data.DistributedSampler(range(20), num_replicas=2, rank=0)
        loader = cls(range(20), batch_size=3, sampler=sampler)
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(list(loader))
        return found

    assert_alike(seen(ours.DataLoader), seen(data.DataLoader))
