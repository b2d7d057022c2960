"""Datasets, samplers and functions for the programs of the fuzzer. Workers import this module."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils import data

from tests.torch.fuzz.record import RECORD, described, digest
from tests.torch.samples import SAMPLES, Opaque, Pair, TensorChild

Sample = str | tuple[Any, ...]  # A name in SAMPLES, or a container and its contents.


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset: ``bad`` maps indices to the name of the exception that loading them raises."""

    kind: str = "rows"
    length: int = 5
    sample: Sample = "int"
    bad: tuple[tuple[int, str], ...] = ()

    @property
    def is_iterable(self) -> bool:
        return self.kind.startswith("stream")


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler, or a batch sampler that splits ``indices`` into pieces of ``size``."""

    kind: str
    indices: tuple[Any, ...] = ()
    size: int = 2
    generator: str = ""  # "seeded", "loader" (the loader's own object), "default", or none.


# --- samples


def make_sample(spec: Sample, index: int) -> Any:
    if isinstance(spec, str):
        return SAMPLES[spec](index)
    kind, *parts = spec
    made = [make_sample(part, index) for part in parts]
    if kind == "dict":
        return {f"k{number}": part for number, part in enumerate(made)}
    if kind == "named tuple":
        return Pair(made[0], made[-1])
    return tuple(made) if kind == "tuple" else made


class Several(Exception):
    """Takes several arguments."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)


def fail_as(name: str, index: int) -> None:
    if name == "Several":
        raise Several(index, "two")
    made = {"ValueError": ValueError, "KeyError": KeyError, "IndexError": IndexError, "StopIteration": StopIteration}[name]
    raise made(f"bad {index}")


# --- map-style datasets


class Rows:
    """The specification makes sample ``i``; calls in this process are recorded."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec, self.length, self.bad = spec, spec.length, dict(spec.bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        RECORD.note("getitem", described(index))
        return self.load(index)

    def load(self, index: Any) -> Any:
        if isinstance(index, list | tuple):
            return [self.load(one) for one in index]
        number = int(index)
        if not -self.length <= number < self.length:
            raise IndexError(f"index {number} of {self.length}")
        if number in self.bad:
            fail_as(self.bad[number], number)
        return self.make(number)

    def make(self, number: int) -> Any:
        return make_sample(self.spec.sample, number)

    def grow(self) -> None:
        self.length += 1


class Batched(Rows):
    def __getitems__(self, indices: Any) -> Any:
        RECORD.note("getitems", described(indices))
        return [self.load(index) for index in indices]


class BatchedTuple(Rows):
    def __getitems__(self, indices: Any) -> Any:
        return tuple(self.load(index) for index in indices)


class Filtering(Rows):
    """Returns fewer samples than requested."""

    def __getitems__(self, indices: Any) -> Any:
        return [self.load(index) for index in indices if index % 3 != 2]


class NoBatches(Rows):
    __getitems__ = None


class Stored(Rows):
    """Returns the same objects every time, so that writing to a sample changes the dataset."""

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self.items = [make_sample(spec.sample, index) for index in range(spec.length)]

    def make(self, number: int) -> Any:
        return self.items[number % len(self.items)]


class Drawing(Rows):
    """Samples draw from the process's generators."""

    def make(self, number: int) -> Any:
        return {"index": number, "torch": torch.rand(2), "numpy": np.random.random(2), "random": random.random()}


class OwnDrawing(Rows):
    """Samples draw from a generator of the dataset."""

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self.generator: Any = np.random.default_rng(1)

    def make(self, number: int) -> Any:
        return {"index": number, "own": self.generator.random(2)}


class LazyDrawing(OwnDrawing):
    """Each worker's copy creates the generator with the first sample."""

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self.generator = None

    def make(self, number: int) -> Any:
        if self.generator is None:
            info = data.get_worker_info()
            self.generator = np.random.default_rng(0 if info is None else info.seed)
        return super().make(number)


class Located(Rows):
    """Samples contain the worker that loaded them, and a value set by its worker_init_fn."""

    def make(self, number: int) -> Any:
        info = data.get_worker_info()
        sample = {"index": number, "mark": MARK.get("worker", -1), "workers": 0 if info is None else info.num_workers}
        return {**sample, "worker": -1 if info is None else info.id}


class Counted(Rows):
    """Samples contain how many were loaded before by the same copy of the dataset."""

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self.count = 0

    def make(self, number: int) -> Any:
        self.count += 1
        return {"index": number, "count": self.count}


class Unsized:
    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec

    def __getitem__(self, index: Any) -> Any:
        return make_sample(self.spec.sample, index)


COLUMNS: Final = {
    "float32": lambda n: torch.arange(n * 2.0).view(n, 2),
    "bfloat16": lambda n: torch.arange(n, dtype=torch.bfloat16),
    "bool": lambda n: torch.arange(n) % 2 == 0,
    "transposed": lambda n: torch.arange(n * 3).view(3, n).t(),
    "channels last": lambda n: torch.arange(n * 60.0).view(n, 4, 5, 3).permute(0, 3, 1, 2),
    "no columns": lambda n: torch.empty(n, 0),
    "gradient": lambda n: torch.ones(n, 2, requires_grad=True),
    "subclass": lambda n: torch.arange(n).as_subclass(TensorChild),
    "complex": lambda n: torch.ones(n, dtype=torch.cfloat).conj(),
}
ARRAYS: Final = {
    "float32": lambda n: np.arange(n * 2, dtype=np.float32).reshape(n, 2),
    "int64": lambda n: np.arange(n),
    "uint64": lambda n: np.ones((n, 2), np.uint64),
    "str": lambda n: np.array([f"s{i}" for i in range(n)]),
    "strided": lambda n: np.arange(n * 4.0).reshape(n, 4)[:, ::2],
    "big-endian": lambda n: np.ones((n, 2), ">f4"),
    "object": lambda n: np.array([i if i % 2 else str(i) for i in range(n)], dtype=object),
    "bool": lambda n: np.arange(n) % 2 == 0,
}


def column_names(sample: Sample, table: Mapping[str, Any]) -> list[str]:
    """Returns columns by the names in a sample's specification, whatever its type."""
    names = sorted(table)
    return [names[int(digest(part), 16) % len(names)] for part in ([sample] if isinstance(sample, str) else sample)]


def rows_of(spec: DatasetSpec) -> list[Any]:
    return [make_sample(spec.sample, index) for index in range(spec.length)]


# --- iterable datasets


class Elements(data.IterableDataset[Any]):
    """Every worker yields everything."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec, self.bad = spec, dict(spec.bad)

    def numbers(self) -> Iterator[int]:
        return iter(range(self.spec.length))

    def make(self, number: int) -> Any:
        return make_sample(self.spec.sample, number)

    def load(self, number: int) -> Any:
        RECORD.note("element", number)
        if number in self.bad:
            fail_as("ValueError" if self.bad[number] == "StopIteration" else self.bad[number], number)
        return self.make(number)

    def __iter__(self) -> Iterator[Any]:
        RECORD.note("dataset iter")
        return (self.load(number) for number in self.numbers())


class Shards(Elements):
    def numbers(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(0 if info is None else info.id, self.spec.length, 1 if info is None else info.num_workers))


class Uneven(Elements):
    def numbers(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(max(0, self.spec.length - 3 * (0 if info is None else info.id))))


class Sized(Elements):
    def __len__(self) -> int:
        return self.spec.length


class Longer(Elements):
    """Yields more than its length."""

    def __len__(self) -> int:
        return self.spec.length // 3


class Resetting(Elements):
    """Is its own iterator; ``__iter__`` resets it. It continues after an exception."""

    at = 0

    def __iter__(self) -> Any:
        RECORD.note("dataset iter")
        self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at >= self.spec.length:
            raise StopIteration
        self.at += 1
        return self.load(self.at - 1)


class Continuing(Resetting):
    """Is its own iterator; ``__iter__`` changes nothing, so the next epoch starts where the last one was left."""

    def __iter__(self) -> Any:
        RECORD.note("dataset iter")
        return self


class Epochs(Elements):
    """Elements contain how often ``__iter__`` was called on this copy."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter([(self.epoch, number) for number in self.numbers()])


class NextOnly(Elements):
    def __iter__(self) -> Any:
        return OnlyNext(super().__iter__())


class OnlyNext:
    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __next__(self) -> Any:
        return next(self._elements)


class DrawingElements(Elements):
    def make(self, number: int) -> Any:
        return {"index": number, "torch": torch.rand(2), "numpy": np.random.random(2), "random": random.random()}


class Marked(Elements):
    def make(self, number: int) -> Any:
        info = data.get_worker_info()
        return {"index": number, "mark": MARK.get("worker", -1), "worker": -1 if info is None else info.id}


class Endless(Elements):
    def numbers(self) -> Iterator[int]:
        return itertools.count()


class Closed(Elements):
    """Cannot be iterated."""

    def __iter__(self) -> Any:
        raise OSError("cannot be opened")


DATASETS: Final[dict[str, Callable[[DatasetSpec], Any]]] = {
    "rows": Rows,
    "__getitems__": Batched,
    "__getitems__ of a tuple": BatchedTuple,
    "__getitems__ that filters": Filtering,
    "__getitems__ of None": NoBatches,
    "stored": Stored,
    "drawing": Drawing,
    "own rng": OwnDrawing,
    "lazy rng": LazyDrawing,
    "located": Located,
    "counted": Counted,
    "unsized": Unsized,
    "list": rows_of,
    "tuple": lambda spec: tuple(rows_of(spec)),
    "dict": lambda spec: dict(enumerate(rows_of(spec))),
    "range": lambda spec: range(spec.length),
    "str": lambda spec: "abcdefghijklmnop"[: spec.length],
    "Subset": lambda spec: data.Subset(Batched(spec), list(range(spec.length))[::-1]),
    "ConcatDataset": lambda spec: data.ConcatDataset([Rows(spec), Batched(spec)]),
    "StackDataset": lambda spec: data.StackDataset(Rows(spec), Batched(spec)),
    "TensorDataset": lambda spec: data.TensorDataset(
        *(COLUMNS[name](spec.length) for name in column_names(spec.sample, COLUMNS))
    ),
    "tensor": lambda spec: COLUMNS[column_names(spec.sample, COLUMNS)[0]](spec.length),
    "array": lambda spec: ARRAYS[column_names(spec.sample, ARRAYS)[0]](spec.length),
    "stream": Elements,
    "stream, shards": Shards,
    "stream, uneven": Uneven,
    "stream, sized": Sized,
    "stream, longer": Longer,
    "stream, resetting": Resetting,
    "stream, continuing": Continuing,
    "stream, epochs": Epochs,
    "stream, next only": NextOnly,
    "stream, drawing": DrawingElements,
    "stream, marked": Marked,
    "stream, endless": Endless,
    "stream, closed": Closed,
    "stream, chain": lambda spec: data.ChainDataset([Elements(spec), Shards(spec)]),
}


# --- samplers and batch samplers


class Recorded:
    """A generator whose calls are recorded."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        RECORD.note("sampler iter")
        return self._run()

    def _run(self) -> Iterator[Any]:
        for element in self.elements:
            RECORD.note("sampler yields", repr(element))
            yield element
        RECORD.note("sampler ends")

    def __len__(self) -> int:
        return len(self.elements)


class OwnIterator:
    """Is its own iterator, and records also calls after its end."""

    def __init__(self, elements: Sequence[Any], failing: int = -1, *, restarts: bool = True) -> None:
        self.elements, self.failing, self.restarts, self.at = elements, failing, restarts, 0

    def __iter__(self) -> Any:
        RECORD.note("sampler iter")
        if self.restarts:
            self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.elements):
            RECORD.note("sampler ends")
            raise StopIteration
        self.at += 1
        RECORD.note("sampler yields", self.at)
        if self.at - 1 == self.failing:
            raise LookupError(f"sampler at {self.failing}")
        return self.elements[self.at - 1]


class Random:
    """Draws in ``__iter__`` and with every element."""

    def __init__(self, elements: Sequence[Any], *, at_once: bool) -> None:
        self.elements, self.at_once = elements, at_once

    def __iter__(self) -> Iterator[Any]:
        if self.at_once:
            return iter([self.elements[place] for place in torch.randperm(len(self.elements)).tolist()])
        return (self.elements[int(torch.randint(len(self.elements), ()))] for _ in self.elements)


class Adaptive:
    """Yields by the number of batches that the program has received."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        for _ in self.elements:
            yield self.elements[sum(event[0] == "batch" for event in RECORD.events) % len(self.elements)]


class Counter:
    """Yields different elements each time."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements, self.round = elements, 0

    def __iter__(self) -> Iterator[Any]:
        self.round += 1
        yield from (self.elements * 2)[self.round % (len(self.elements) + 1) :][: len(self.elements)]


def make_sampler(spec: SamplerSpec, length: int, generator: Any) -> Any:
    """Creates a sampler. Kinds that begin with ``batch`` yield lists."""
    kind, indices = spec.kind, list(spec.indices)
    if spec.kind.startswith("batches"):
        indices = [indices[begin : begin + spec.size] for begin in range(0, len(indices), spec.size)]
        if kind == "batches, BatchSampler":
            return data.BatchSampler(data.SequentialSampler(range(length)), spec.size, drop_last=False)
        if kind == "batches, random BatchSampler":
            return data.BatchSampler(data.RandomSampler(range(length), generator=generator), spec.size, drop_last=True)
        if kind == "batches, BatchSampler of recorded":
            return data.BatchSampler(Recorded(list(spec.indices)), spec.size, drop_last=False)
        if kind == "batches, empty one":
            return [*indices, [], *indices]
        if kind == "batches, invalid":
            return [*indices, 5, None, *indices]
        if kind == "batches, other types":
            types: list[Callable[[list[Any]], Any]] = [tuple, torch.tensor, np.array, list]
            return [types[place % 4](batch) for place, batch in enumerate(indices)]
        kind = kind.removeprefix("batches, ")
    return _plain_sampler(kind, indices, length, generator)


def _plain_sampler(kind: str, elements: list[Any], length: int, generator: Any) -> Any:
    source = range(length)
    makers: dict[str, Callable[[], Any]] = {
        "list": lambda: elements,
        "tensor": lambda: torch.tensor(elements),
        "array": lambda: np.array(elements),
        "recorded": lambda: Recorded(elements),
        "one-shot": lambda: iter(elements),
        "one-shot generator": lambda: (element for element in elements),
        "own iterator": lambda: OwnIterator(elements),
        "own iterator, continuing": lambda: OwnIterator(elements, restarts=False),
        "failing": lambda: OwnIterator(elements, len(elements) // 2),
        "failing later": lambda: OwnIterator(elements * 3, len(elements) * 2),
        "drawing at once": lambda: Random(elements, at_once=True),
        "drawing": lambda: Random(elements, at_once=False),
        "adaptive": lambda: Adaptive(elements),
        "other each time": lambda: Counter(elements),
        "endless": lambda: Endlessly(elements),
        "sequential": lambda: data.SequentialSampler(source),
        "random": lambda: data.RandomSampler(source, generator=generator),
        "random, few": lambda: data.RandomSampler(source, num_samples=2, generator=generator),
        "random, many": lambda: data.RandomSampler(source, num_samples=2 * length + 1, generator=generator),
        "random, replacement": lambda: data.RandomSampler(source, replacement=True, num_samples=7, generator=generator),
        "subset": lambda: data.SubsetRandomSampler(elements, generator=generator),
        "weighted": lambda: data.WeightedRandomSampler([1.0 + i for i in source], 6, generator=generator),
        "distributed": lambda: data.DistributedSampler(source, 2, 1, shuffle=True),
        "distributed, in order": lambda: data.DistributedSampler(source, 2, 0, shuffle=False, drop_last=True),
    }
    return makers[kind]()


class Endlessly:
    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.elements)


SAMPLERS: Final = (
    "list", "tensor", "array", "recorded", "one-shot", "one-shot generator", "own iterator", "own iterator, continuing",
    "failing", "failing later", "drawing at once", "drawing", "adaptive", "other each time", "endless", "sequential", "random",
    "random, few", "random, many", "random, replacement", "subset", "weighted", "distributed", "distributed, in order",
)  # fmt: skip
BATCH_SAMPLERS: Final = (
    "batches, BatchSampler", "batches, random BatchSampler", "batches, BatchSampler of recorded", "batches, list",
    "batches, other types", "batches, empty one", "batches, invalid", "batches, recorded", "batches, one-shot",
    "batches, one-shot generator", "batches, own iterator", "batches, own iterator, continuing", "batches, failing",
    "batches, failing later", "batches, drawing at once", "batches, drawing", "batches, adaptive", "batches, other each time",
    "batches, endless",
)  # fmt: skip


# --- user functions


MARK: Final[dict[str, int]] = {}


def mark_worker(number: int) -> None:
    MARK["worker"] = number


def seed_worker(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def fail_to_start(number: int) -> None:
    raise OSError(f"worker_init_fn of {number}")


class Made:
    """An unknown type; the record distinguishes two of them."""


def collate_object(samples: Any) -> Any:
    made = Made()
    RECORD.made.append(made)
    RECORD.note("collate", described(samples))
    return made


def collate_dict(samples: Any) -> Any:
    made = {"samples": samples, "count": len(samples), "first": samples[0], "buffer": np.zeros(2)}
    RECORD.made.append(made)
    return made


def collate_overlapping(samples: Any) -> Any:
    base = torch.zeros(8)
    return [base[:5], base[3:], base, base, base.view(2, 4).t()]


def collate_padded(samples: Any) -> Any:
    return torch.nn.utils.rnn.pad_sequence([torch.ones(1 + number) for number in range(len(samples))], batch_first=True)


def collate_failing(samples: Any) -> Any:
    RECORD.note("collate")
    if len(samples) == 2:
        raise ArithmeticError("collate_fn")
    return samples


def collate_shared(samples: Any) -> Any:
    tensor = torch.arange(6.0).view(2, 3)
    return {"a": tensor, "b": (tensor, tensor[0]), "c": np.asfortranarray(np.ones((2, 2))), "d": [Opaque(), None]}


INIT_FNS: Final = {"mark": mark_worker, "seed": seed_worker, "fail": fail_to_start}
COLLATE_FNS: Final[dict[str, Callable[[Any], Any]]] = {
    "list": list,
    "len": len,
    "object": collate_object,
    "dict": collate_dict,
    "overlapping": collate_overlapping,
    "padded": collate_padded,
    "failing": collate_failing,
    "shared": collate_shared,
    "default_collate": data.default_collate,
    "default_convert": data.default_convert,
    "lambda": lambda samples: samples,
    "None": lambda samples: None,
}
