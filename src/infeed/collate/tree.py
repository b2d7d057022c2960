"""The structure of a sample: nested containers and leaves.

Trees are processed by column: all samples of a chunk are split together. The Python cost is then per node, not per sample;
the work per sample runs in C (``zip``, ``map``, ``set``).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, final

Sample: TypeAlias = Any
Column: TypeAlias = Sequence[Any]


class StructureMismatch(Exception):
    """A sample does not have this structure. Internal; contains the details for the error message."""

    def __init__(self, path: str, row: int, expected: str, found: str) -> None:
        super().__init__(path, row, expected, found)
        self.path, self.row, self.expected, self.found = path, row, expected, found


class Node(ABC):
    """One container or leaf of the tree. Compares and pickles by value."""

    @abstractmethod
    def split(self, samples: Column, columns: list[Column]) -> None:
        """Append one column per leaf, from left to right.

        Raises:
            StructureMismatch: Not all samples have this structure.
        """

    @abstractmethod
    def join(self, values: Iterator[Any]) -> Any:
        """Build the tree and take its leaves from ``values``."""

    @abstractmethod
    def is_ordered_as(self, sample: Sample) -> bool:
        """Whether a sample of this structure also has the same key order."""

    @abstractmethod
    def paths(self, prefix: str = "") -> list[str]:
        """Return the path of each leaf, as written after ``sample``: ``[0]``, ``['image']``, ``.label``."""


@final
@dataclass(frozen=True, slots=True)
class LeafNode(Node):
    def split(self, samples: Column, columns: list[Column]) -> None:
        columns.append(samples)

    def join(self, values: Iterator[Any]) -> Any:
        return next(values)

    def is_ordered_as(self, sample: Sample) -> bool:  # noqa: ARG002  # leaves have no keys
        return True

    def paths(self, prefix: str = "") -> list[str]:
        return [prefix]


@final
@dataclass(frozen=True, slots=True)
class SequenceNode(Node):
    """A tuple, named tuple or list of fixed length."""

    cls: type[Any]
    children: tuple[Node, ...]
    path: str
    made: type[Any] | None = None  # type of the batch, if it differs from the sample's

    def split(self, samples: Column, columns: list[Column]) -> None:
        if set(map(type, samples)) != {self.cls} or set(map(len, samples)) != {len(self.children)}:
            _explain(self.path, samples, lambda sample: type(sample) is self.cls and len(sample) == len(self.children))
        for child, column in zip(self.children, zip(*samples, strict=True), strict=True):
            child.split(column, columns)

    def join(self, values: Iterator[Any]) -> Any:
        items = [child.join(values) for child in self.children]
        cls = self.made or self.cls
        if cls is list:
            return items
        return tuple(items) if cls is tuple else cls._make(items)

    def is_ordered_as(self, sample: Sample) -> bool:
        return all(child.is_ordered_as(value) for child, value in zip(self.children, sample, strict=True))

    def paths(self, prefix: str = "") -> list[str]:
        names: Sequence[str] = getattr(self.cls, "_fields", ())
        steps = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(self.children))]
        return [p for step, child in zip(steps, self.children, strict=True) for p in child.paths(prefix + step)]


@final
@dataclass(frozen=True, slots=True)
class MappingNode(Node):
    cls: type[Any]  # type of the batch: the sample's type if its constructor accepts a dict, otherwise dict
    sample_cls: type[Any]
    keys: tuple[Any, ...]
    children: tuple[Node, ...]
    path: str

    def split(self, samples: Column, columns: list[Column]) -> None:
        if set(map(type, samples)) != {self.sample_cls} or set(map(len, samples)) != {len(self.keys)}:
            _explain(self.path, samples, lambda sample: type(sample) is self.sample_cls and sample.keys() == set(self.keys))
        if self.sample_cls is not dict and not all(sample.keys() == set(self.keys) for sample in samples):
            # Other mappings may create missing keys on access, as defaultdict does.
            _explain(self.path, samples, lambda sample: sample.keys() == set(self.keys))
        for key, child in zip(self.keys, self.children, strict=True):
            try:
                column = list(map(itemgetter(key), samples))
            except KeyError:
                _explain(self.path, samples, lambda sample: sample.keys() == set(self.keys))
            child.split(column, columns)

    def join(self, values: Iterator[Any]) -> Any:
        items = {key: child.join(values) for key, child in zip(self.keys, self.children, strict=True)}
        return items if self.cls is dict else self.cls(items)

    def is_ordered_as(self, sample: Sample) -> bool:
        return tuple(sample) == self.keys and all(
            child.is_ordered_as(sample[key]) for key, child in zip(self.keys, self.children, strict=True)
        )

    def paths(self, prefix: str = "") -> list[str]:
        return [path for key, child in zip(self.keys, self.children, strict=True) for path in child.paths(f"{prefix}[{key!r}]")]


@final
@dataclass(frozen=True, slots=True)
class RecordNode(Node):
    """A dataclass. The batch has the same class, with columns as fields; its ``__init__`` is not called again."""

    cls: type[Any]
    names: tuple[str, ...]
    children: tuple[Node, ...]
    path: str

    def split(self, samples: Column, columns: list[Column]) -> None:
        if set(map(type, samples)) != {self.cls}:
            _explain(self.path, samples, lambda sample: type(sample) is self.cls)
        for name, child in zip(self.names, self.children, strict=True):
            child.split(list(map(attrgetter(name), samples)), columns)

    def join(self, values: Iterator[Any]) -> Any:
        record = object.__new__(self.cls)
        for name, child in zip(self.names, self.children, strict=True):
            object.__setattr__(record, name, child.join(values))
        return record

    def is_ordered_as(self, sample: Sample) -> bool:
        return all(child.is_ordered_as(getattr(sample, name)) for name, child in zip(self.names, self.children, strict=True))

    def paths(self, prefix: str = "") -> list[str]:
        return [path for name, child in zip(self.names, self.children, strict=True) for path in child.paths(f"{prefix}.{name}")]


def structure_of(sample: Sample, path: str = "") -> Node:
    """Return the structure of a sample."""
    cls = type(sample)
    if cls is tuple or cls is list or (isinstance(sample, tuple) and _is_named_tuple(cls)):
        names: Sequence[str] = getattr(cls, "_fields", ())
        steps = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(sample))]
        children = tuple(structure_of(child, path + step) for step, child in zip(steps, sample, strict=True))
        return SequenceNode(cls, children, path)
    if isinstance(sample, Mapping):
        keys = tuple(sample)
        nodes = tuple(structure_of(sample[key], f"{path}[{key!r}]") for key in keys)
        return MappingNode(_mapping_type(sample), cls, keys, nodes, path)
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        fields = tuple(field.name for field in dataclasses.fields(sample))
        nodes = tuple(structure_of(getattr(sample, name), f"{path}.{name}") for name in fields)
        return RecordNode(cls, fields, nodes, path)
    return LeafNode()


def _is_named_tuple(cls: type[Any]) -> bool:
    return isinstance(getattr(cls, "_fields", None), tuple) and callable(getattr(cls, "_make", None))


def _mapping_type(sample: Mapping[Any, Any]) -> type[Any]:
    cls = type(sample)
    if cls is dict:
        return dict
    try:
        made = cls(dict(sample))  # type: ignore[call-arg]  # a user-defined constructor
    except Exception:  # user code may raise anything; a plain dict always works
        return dict
    return cls if isinstance(made, cls) and set(made) == set(sample) else dict


def _explain(path: str, samples: Column, fits: Any) -> None:
    row = next((row for row, sample in enumerate(samples) if not fits(sample)), 0)
    reference = next((other for other, sample in enumerate(samples) if fits(sample)), row)
    raise StructureMismatch(path, row, _describe(samples[reference]), _describe(samples[row]))


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {sorted(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
