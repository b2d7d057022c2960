"""A record of everything that a program can observe of a loader, and batches as plain data that can be compared."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch

from tests.torch.samples import Opaque

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")

Event = tuple[Any, ...]


class Recorder:
    """Events in the order in which the program and the user's objects in this process observe them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.events: list[Event] = []
        self.made: list[Any] = []  # Results of collate_fn, to recognize the same object.

    def note(self, *event: Any) -> None:
        if os.getpid() == self.pid:
            self.events.append(event)


RECORD = Recorder()


def note_error(where: Any, error: Exception) -> None:
    # Its frames hold the iterator in a cycle. torch needs 5 s per worker to stop them when a cycle is collected.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    RECORD.note("error", where, type(error).__name__, _ADDRESS.sub("", str(error)))


def digest(value: Any) -> str:
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=6).hexdigest()


class Describer:
    """Converts a batch to plain data, bit for bit, with identities and overlaps of its parts."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._ranges: list[tuple[int, int]] = []

    def describe(self, value: Any) -> Any:
        description = self._describe(value)
        overlaps = [
            (one, other)
            for (one, left), (other, right) in itertools.combinations(enumerate(self._ranges), 2)
            if left[0] < right[1] and right[0] < left[1]
        ]
        return (description, ("overlaps", overlaps)) if overlaps else description

    def _describe(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return (type(value).__name__, repr(value))
        if id(value) in self._seen:
            return ("the same as", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        kind = type(value).__qualname__
        for number, made in enumerate(RECORD.made):
            if made is value:
                kind += f" that collate_fn returned as object {number}"
        if isinstance(value, torch.Tensor):
            return (kind, *self._tensor(value))
        if isinstance(value, np.ndarray | np.generic):
            return (kind, *self._array(value))
        if isinstance(value, Mapping):
            return (kind, {repr(key): self._describe(value[key]) for key in value}, self._attributes(value))
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | range):
            return (kind, [self._describe(one) for one in value], self._attributes(value))
        if isinstance(value, set | frozenset):
            return (kind, sorted(map(repr, value)))
        if is_dataclass(value) and not isinstance(value, type):
            return (kind, {one.name: self._describe(getattr(value, one.name)) for one in fields(value)})
        if isinstance(value, Opaque):
            return (kind, self._attributes(value))
        return (kind, repr(value) if isinstance(value, str | bytes | bytearray | int | float | range) else "")

    def _attributes(self, value: Any) -> Any:
        attributes = getattr(value, "__dict__", {})
        return {name: self._describe(part) for name, part in attributes.items() if name not in ("data", "_items")}

    def _tensor(self, tensor: Any) -> tuple[Any, ...]:
        form = [str(tensor.dtype), str(tensor.layout), tensor.device.type, tensor.requires_grad, tensor.is_leaf]
        if tensor.is_nested:
            return (*form, [self._describe(part) for part in tensor.unbind()])
        form.append(tuple(tensor.shape))
        if tensor.device.type == "meta":
            return (*form, tensor.stride())
        if tensor.layout is torch.strided:
            if tensor.numel():
                start = tensor.data_ptr()
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                self._ranges.append((start, start + (last + 1) * tensor.element_size()))
            form += [("stride", tensor.stride()), ("conj", tensor.is_conj(), tensor.is_neg())]
        dense = tensor.detach().to_dense().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        flat = dense.clone(memory_format=torch.contiguous_format).reshape(-1)
        return (*form, flat.view(torch.uint8).numpy().tobytes().hex())

    def _array(self, array: Any) -> tuple[Any, ...]:
        form: list[Any] = [array.dtype.str if array.dtype.names is None else str(array.dtype), array.shape]
        if isinstance(array, np.ndarray):
            form += [("strides", array.strides), ("writeable", array.flags.writeable)]
            if isinstance(array, np.ma.MaskedArray):
                form.append(np.ma.getmaskarray(array).tolist())
        if array.dtype.hasobject or array.dtype.char in "gG":  # Long doubles have padding bytes.
            return (*form, repr(array.tolist()))
        return (*form, np.asarray(array).tobytes().hex())


def described(value: Any) -> Any:
    return Describer().describe(value)
