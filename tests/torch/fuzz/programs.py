"""Programs that use a ``DataLoader``: a dataset, options, and operations such as an epoch or two interleaved iterators."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from tests.torch.fuzz.objects import (
    COLLATE_FNS,
    COLUMNS,
    DATASETS,
    INIT_FNS,
    DatasetSpec,
    SamplerSpec,
    column_names,
    make_sampler,
)
from tests.torch.fuzz.record import RECORD, Event, described, digest, note_error

# No operation takes more batches than this, so endless samplers can be used.
MOST_BATCHES: Final = 24
# Time-outs of loaders with workers: where torch's loader is known to hang, and elsewhere.
_HANG_S: Final = 2.0
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class OptionsSpec:
    """Arguments of the loader, except for objects: these are created by name."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: SamplerSpec | None = None
    batch_sampler: SamplerSpec | None = None
    drop_last: bool = False
    generator: str = ""
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    worker_init_fn: str = ""
    in_order: bool = True
    collate_fn: str = ""
    timeout: int = 0
    pin_memory: bool = False


class Operation(NamedTuple):
    """One step of a program. ``slot`` names an iterator, ``count`` is a number of batches, a seed or an epoch."""

    name: str
    slot: int = 0
    count: int = 0


@dataclass(frozen=True)
class Program:
    """Input of the fuzzer. Its ``repr`` is Python and can be pasted into a test."""

    dataset: DatasetSpec = field(default_factory=DatasetSpec)
    options: OptionsSpec = field(default_factory=OptionsSpec)
    operations: tuple[Operation, ...] = (Operation("epoch"),)

    @property
    def hangs_with_torch(self) -> bool:
        """Returns whether torch's workers cannot send a batch, or die when they are reused; its loader waits forever."""
        if not self.options.num_workers:
            return False
        columns = column_names(self.dataset.sample, COLUMNS)
        columns = columns if self.dataset.kind == "TensorDataset" else columns[:1] if self.dataset.kind == "tensor" else []
        is_reopened = self.dataset.kind == "stream, closed" and self.options.persistent_workers
        return "gradient" in columns or is_reopened

    def __repr__(self) -> str:
        return f"Program({_short(self.dataset)}, {_short(self.options)}, ({', '.join(map(_short, self.operations))},))"

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:
        printer.text(repr(self))  # For Hypothesis.


def _short(value: Any) -> str:
    """``repr`` without default values."""
    if isinstance(value, Operation):
        parts = [repr(value.name), *(f"{name}={getattr(value, name)}" for name in ("slot", "count") if getattr(value, name))]
        return f"Operation({', '.join(parts)})"
    parts = [f"{one.name}={getattr(value, one.name)!r}" for one in fields(value) if getattr(value, one.name) != one.default]
    return f"{type(value).__name__}({', '.join(parts)})"


# --- running a program


class Run:
    """One run of a program with one loader class."""

    def __init__(self, program: Program, loader_class: Any) -> None:
        self._program = program
        self._class = loader_class
        self._generator: Any = None
        self._loader: Any = None
        self._iterators: dict[int, Any] = {}
        self._kept: list[Any] = []

    def events(self) -> list[Event]:
        """Returns everything that the program observed, in order."""
        RECORD.events, RECORD.made = [], []
        torch.manual_seed(11)
        random.seed(12)
        np.random.seed(13)
        # Two cores: more workers than cores are tried on every machine.
        with warnings.catch_warnings(record=True) as caught, patch("torch._utils.cpu_count", lambda: 2, create=True):
            warnings.simplefilter("always")
            before = torch.is_warn_always_enabled()
            torch.set_warn_always(True)  # Otherwise the second loader does not repeat the first one's warning.
            try:
                self._run()
            finally:
                torch.set_warn_always(before)
        for entry in caught:
            if "fork" not in str(entry.message):  # Python 3.12 and JAX warn about every fork that torch makes.
                RECORD.note("warning", entry.category.__name__, str(entry.message).partition(":")[0][:40])
        return RECORD.events

    def _run(self) -> None:
        dataset = self._guarded("dataset", self._make)
        if self._loader is None:
            return
        for number, operation in enumerate(self._program.operations):
            RECORD.note("operation", number, operation.name)
            self._guarded(operation.name, getattr(self, f"_{operation.name}"), operation)
            RECORD.note("generators", *self._generator_states())
        for place, batch in enumerate(self._kept):
            RECORD.note("kept", place, described(batch))
        if self._program.dataset.kind in ("stored", "list", "tensor", "array"):
            RECORD.note("dataset", described(getattr(dataset, "items", dataset)))
        self._iterators.clear()
        self._kept.clear()
        self._loader = None

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            note_error(name, error)
            return None

    def _make(self) -> Any:
        spec, chosen = self._program.dataset, self._program.options
        dataset = DATASETS[spec.kind](spec)
        self._generator = make_generator(chosen.generator, 3)
        options: dict[str, Any] = {
            "shuffle": chosen.shuffle,
            "drop_last": chosen.drop_last,
            "generator": self._generator,
            "num_workers": chosen.num_workers,
            "prefetch_factor": chosen.prefetch_factor,
            "persistent_workers": chosen.persistent_workers,
            "in_order": chosen.in_order,
            "timeout": self._timeout(),
            "pin_memory": chosen.pin_memory,
        }
        if chosen.worker_init_fn:
            options["worker_init_fn"] = INIT_FNS[chosen.worker_init_fn]
        if chosen.collate_fn:
            options["collate_fn"] = COLLATE_FNS[chosen.collate_fn]
        if chosen.sampler is not None:
            options["sampler"] = self._sampler(chosen.sampler)
        if chosen.batch_sampler is not None:
            options["batch_sampler"] = self._sampler(chosen.batch_sampler)
        if chosen.batch_size != 1:
            options["batch_size"] = chosen.batch_size
        self._loader = self._class(dataset, **options)
        return dataset

    def _timeout(self) -> float:
        """Makes torch's loader raise where it would hang."""
        chosen = self._program.options
        if not chosen.num_workers:
            return 0
        if self._program.hangs_with_torch:
            return _HANG_S
        return chosen.timeout if "infeed" in self._class.__module__ else _PATIENCE_S

    def _sampler(self, spec: SamplerSpec) -> Any:
        generator = self._generator if spec.generator == "loader" else make_generator(spec.generator, 4)
        return make_sampler(spec, self._program.dataset.length, generator)

    def _generator_states(self) -> list[str]:
        states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()]
        if self._generator is not None:
            states.append(self._generator.get_state().numpy().tobytes())
        return [digest(state) for state in states]

    def _receive(self, batch: Any, slot: Any) -> None:
        RECORD.note("batch", slot, described(batch))
        self._kept.append(batch)

    def _next(self, slot: int) -> bool:
        """Returns whether there may be more."""
        try:
            batch = next(self._iterators[slot])
        except StopIteration:
            RECORD.note("stop", slot)
            return False
        except Exception as error:
            note_error(slot, error)
        else:
            self._receive(batch, slot)
        return True

    # --- operations

    def _epoch(self, _operation: Operation) -> None:
        for number, batch in enumerate(self._loader):
            self._receive(batch, "epoch")
            if number == MOST_BATCHES:
                return
        RECORD.note("stop", "epoch")

    def _break(self, operation: Operation) -> None:
        for number, batch in enumerate(self._loader):
            self._receive(batch, "break")
            if number == operation.count:
                break

    def _open(self, operation: Operation) -> None:
        self._iterators[operation.slot] = iter(self._loader)

    def _take(self, operation: Operation) -> None:
        if operation.slot not in self._iterators:
            self._open(operation)
        for _ in range(operation.count + 1):
            self._next(operation.slot)

    def _drain(self, operation: Operation) -> None:
        if operation.slot not in self._iterators:
            self._open(operation)
        for _ in range(MOST_BATCHES):
            if not self._next(operation.slot):
                break

    def _drop(self, operation: Operation) -> None:
        self._iterators.pop(operation.slot, None)

    def _zip(self, _operation: Operation) -> None:
        for left, right in itertools.islice(zip(self._loader, self._loader, strict=False), MOST_BATCHES):
            self._receive(left, "left")
            self._receive(right, "right")
        RECORD.note("stop", "zip")

    def _nest(self, operation: Operation) -> None:
        for batch in itertools.islice(self._loader, operation.count + 1):
            self._receive(batch, "outer")
            for inner in itertools.islice(self._loader, operation.count + 1):
                self._receive(inner, "inner")

    def _length(self, _operation: Operation) -> None:
        RECORD.note("length", len(self._loader))

    def _mutate(self, operation: Operation) -> None:
        if self._kept:
            write_to(self._kept[operation.count % len(self._kept)])

    def _forget(self, _operation: Operation) -> None:
        self._kept.clear()

    def _draw(self, _operation: Operation) -> None:
        RECORD.note("draws", torch.rand(2).tolist(), random.random(), float(np.random.random()))

    def _seed(self, operation: Operation) -> None:
        torch.manual_seed(operation.count)

    def _set_epoch(self, operation: Operation) -> None:
        self._loader.sampler.set_epoch(operation.count)

    def _grow(self, _operation: Operation) -> None:
        self._loader.dataset.grow()

    def _copy(self, _operation: Operation) -> None:
        self._loader = copy.copy(self._loader)

    def _change_collate_fn(self, _operation: Operation) -> None:
        self._loader.collate_fn = list


OPERATIONS: Final = (
    "epoch", "break", "take", "drain", "open", "drop", "zip", "nest", "length", "mutate", "forget", "draw", "seed", "set_epoch",
    "grow", "copy", "change_collate_fn",
)  # fmt: skip


def make_generator(name: str, seed: int) -> Any:
    return {"": None, "seeded": torch.Generator().manual_seed(seed), "default": torch.default_generator}[name]


def write_to(value: Any) -> bool:
    """Changes the first tensor or array in place."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu" and not value.is_nested:
        with torch.no_grad():
            value.zero_()
        return True
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value[...] = 0
        return True
    parts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    return any(write_to(part) for part in parts)
