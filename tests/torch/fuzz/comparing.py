"""Compares what a program observes of torch's loader and of infeed's, and lists the intended differences."""

from __future__ import annotations

import collections
import gc
import re
from collections.abc import Callable
from multiprocessing import resource_sharer
from typing import Any, Final, NamedTuple

import numpy as np
from torch.utils import data

import infeed.torch as ours
from tests.torch.fuzz.objects import COLUMNS, DatasetSpec, SamplerSpec, column_names
from tests.torch.fuzz.programs import Operation, OptionsSpec, Program, Run
from tests.torch.fuzz.record import Event
from tests.torch.samples import SAMPLES

_SHOWN: Final = 600  # Characters of an event.

Records = tuple[list[Event], list[Event]]  # torch's and infeed's.


class Difference(NamedTuple):
    """An intended difference, as documented in docs/migration.md.

    ``weaken`` replaces the strict comparison. It returns the parts of both records that must be equal, and raises
    `AssertionError` if the difference is not the documented one.
    """

    section: str
    documented: str  # The words of that section.
    applies: Callable[[Program], bool]
    weaken: Callable[[Program, Records], Records]
    example: Program  # Shows this difference and no other.
    is_timed: bool = False  # Whether a program shows it depends on timing.


def records_of(program: Program, loader_class: Any = ours.DataLoader) -> Records:
    """Returns what the program observes of torch's loader and of another."""
    expected = Run(program, data.DataLoader).events()
    got = Run(program, loader_class).events()
    if program.options.num_workers:
        gc.collect()  # An iterator in a cycle would keep its workers.
        resource_sharer.stop()  # Started by torch if the sampler yields tensors.
    return expected, got


def first_difference(records: Records) -> int | None:
    expected, got = records
    if expected == got:
        return None
    pairs = zip(expected, got, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))


def report(program: Program, records: Records) -> str:
    place = first_difference(records)
    assert place is not None
    before = [repr(event)[:_SHOWN] for event in records[0][max(0, place - 3) : place]]
    found = [repr(record[place])[:_SHOWN] if place < len(record) else "nothing more" for record in records]
    return "\n  ".join([f"event {place} differs in\n  {program}", *before, f"torch:  {found[0]}", f"infeed: {found[1]}"])


def assert_same_record(program: Program, loader_class: Any = ours.DataLoader) -> list[str]:
    """Fails unless a program observes the same of both loaders. Returns the names of the intended differences that it shows."""
    records = records_of(program, loader_class)
    if first_difference(records) is None:
        return []
    names = [name for name, one in DIFFERENCES.items() if one.applies(program)]
    weak = _weakened(program, records, names)
    assert first_difference(weak) is None, report(program, weak)
    return [name for name in names if not _is_equal(program, records, [other for other in names if other != name])]


def _weakened(program: Program, records: Records, names: list[str]) -> Records:
    for name in names:
        records = DIFFERENCES[name].weaken(program, records)
    return records


def _is_equal(program: Program, records: Records, names: list[str]) -> bool:
    try:
        return first_difference(_weakened(program, records, names)) is None
    except AssertionError:
        return False


# --- weaker comparisons


def in_both(change: Callable[[list[Event]], list[Event]]) -> Callable[[Program, Records], Records]:
    return lambda _program, records: (change(records[0]), change(records[1]))


def without_warnings(*beginnings: str) -> Callable[[Program, Records], Records]:
    """torch warns more often than infeed, and never less often."""

    def is_one(event: Event) -> bool:
        return event[0] == "warning" and event[2].startswith(beginnings)

    def weaken(_program: Program, records: Records) -> Records:
        counts = [sum(map(is_one, events)) for events in records]
        assert counts[0] >= counts[1], f"infeed warns {counts[1]} times, torch {counts[0]} times: {beginnings}"
        expected, got = ([event for event in events if not is_one(event)] for events in records)
        return expected, got

    return weaken


def asked_once_at_the_end(_program: Program, records: Records) -> Records:
    """An own iterator that two iterations share may continue when torch calls it again; from there the program differs."""
    weak = _without_second_ends(records[0]), _without_second_ends(records[1])
    place = first_difference(weak)
    if place is None or place >= len(weak[0]) or not weak[0][place][0].startswith("sampler"):
        return weak
    return _cut(weak, place) if ("sampler ends",) in weak[0][:place] else weak


def _without_second_ends(events: list[Event]) -> list[Event]:
    kept: list[Event] = []
    last = ""
    for event in events:
        if event[0] == "sampler ends" and last == event[0]:
            continue
        if event[0].startswith("sampler"):
            last = event[0]
        kept.append(event)
    return kept


_CAUGHT: Final = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\n")


def original_errors(_program: Program, records: Records) -> Records:
    """The last line of the worker's traceback has the type and message of the exception that infeed raises."""
    return [_original(event) for event in records[0]], records[1]


def _original(event: Event) -> Event:
    if event[0] != "error" or not _CAUGHT.match(event[3]):
        return event
    _, where, kind, text = event
    caught = _CAUGHT.match(text)
    assert caught is not None
    name = caught[1]
    assert kind in (name, "RuntimeError")  # torch cannot create an exception that takes several arguments.
    _, _, message = text.rpartition(f"\n{name}")[2].partition(": ")
    if name == "Several":
        _, _, message = text.rpartition("Several")[2].partition(": ")
    return ("error", where, name, message.removesuffix("\n"))


def up_to_stop_iteration(_program: Program, records: Records) -> Records:
    """torch ends the iteration without an error, infeed raises; from there the program differs."""
    place = first_difference(records)
    if place is None or not _has(records[1], place, "error") or "StopIteration" not in records[1][place][3]:
        return records
    assert records[1][place][2] == "RuntimeError"
    return _cut(records, place)


# What the programs' worker_init_fn and iterable dataset raise in a worker.
_START_ERRORS: Final = ("worker_init_fn of", "cannot be opened")


def up_to_failed_start(_program: Program, records: Records) -> Records:
    """infeed raises the exception of a worker and stops. torch calls the sampler first, and raises if it has a batch."""
    errors = [
        [
            place
            for place, event in enumerate(events)
            if event[0] == "error" and any(words in event[3] for words in _START_ERRORS)
        ]
        for events in records
    ]
    if not errors[1]:
        return records
    place = errors[1][0]
    assert not errors[0] or errors[0][0] >= place, "torch raises before infeed"
    return _cut(records, place)


def up_to_failed_sampler(_program: Program, records: Records) -> Records:
    """torch raises in place of a batch that it has, or of its error; infeed raises after it."""
    place = first_difference(records)
    if place is None or not _has(records[0], place, "error") or records[0][place][2] != "LookupError":
        return records
    assert _has(records[1], place, "batch") or _has(records[1], place, "error")
    return _cut(records, place)


# Of functions that torch's workers call to collate into shared memory.
_IN_SHARED_MEMORY: Final = (
    "has no attribute 'numel'",
    "stack(): functions with out=",
    "doesn't correspond to a device",
    "Trying to resize storage that is not resizable",
    "can't be cast to the desired output type",
)


def up_to_collation(_program: Program, records: Records) -> Records:
    """torch's workers collate into shared memory, which fails differently; infeed's workers behave as num_workers=0 does."""
    place = first_difference(records)
    if place is None or not _has(records[0], place, "error"):
        return records
    if not any(words in records[0][place][3] for words in _IN_SHARED_MEMORY):
        return records
    assert _has(records[1], place, "error") or _has(records[1], place, "batch")
    return _cut(records, place)


def up_to_negative_strides(_program: Program, records: Records) -> Records:
    """torch rejects an array that infeed delivers; from there the program differs."""
    place = first_difference(records)
    if place is None or not _has(records[0], place, "error") or "array is negative" not in records[0][place][3]:
        return records
    # "element": `zip` asks its second iterator before the program sees the batch of the first.
    assert any(_has(records[1], place, kind) for kind in ("batch", "error", "element"))
    return _cut(records, place)


def up_to_hang(_program: Program, records: Records) -> Records:
    """infeed sends a tensor as a leaf; torch's workers cannot send it, and its loader waits until the time-out."""
    place = first_difference(records)
    if place is None or not _has(records[0], place, "error") or "timed out after" not in records[0][place][3]:
        return records
    assert _has(records[1], place, "batch")
    return _cut(records, place)


def up_to_growth(_program: Program, records: Records) -> Records:
    """torch's sampler has indices left where infeed's has none."""
    place = first_difference(records)
    if place is None or ("operation", "grow") not in [(event[0], event[-1]) for event in records[0][:place]]:
        return records
    is_torch_longer = any(_has(records[0], place, kind) for kind in _LOADING)
    is_over = any(_has(records[1], place, kind) for kind in ("stop", *_LOADING))
    return _cut(records, place) if is_torch_longer and is_over else records


_LOADING: Final = ("getitem", "getitems", "collate", "batch")


def up_to_left_iteration(_program: Program, records: Records) -> Records:
    """After an earlier abandoned iteration, a worker's copy of the dataset has loaded fewer samples than torch's."""
    place = first_difference(records)
    if place is None:
        return records
    kinds = {events[place][0] if place < len(events) else "" for events in records}
    # "generators": what a program records after `break` from a loop that had no batch.
    return _cut(records, place) if kinds <= {"batch", "stop", "generators"} else records


def _has(events: list[Event], place: int, kind: str) -> bool:
    return place < len(events) and events[place][0] == kind


def _cut(records: Records, place: int) -> Records:
    return records[0][:place], records[1][:place]


def up_to_revived_iterator(_program: Program, records: Records) -> Records:
    """torch asks the dataset again after its end; infeed does not."""
    place = first_difference(records)
    if place is None or not _has(records[1], place, "stop") or records[1][place] not in records[1][:place]:
        return records
    return _cut(records, place)


def blanked(names: tuple[str, ...]) -> Callable[[list[Event]], list[Event]]:
    """Replaces these items of a dict by their form: types, dtypes and shapes."""

    def form(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(form(part) for part in value if not (isinstance(part, str) and _NUMBERS.fullmatch(part)))
        return value

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: form(part) if key.strip("'") in names else blank(part) for key, part in value.items()}
        return type(value)(map(blank, value)) if isinstance(value, tuple | list) else value

    return lambda events: [(*event[:-1], blank(event[-1])) if event[0] in ("batch", "kept") else event for event in events]


_NUMBERS: Final = re.compile(r"-?[0-9a-f.]+(e-?\d+)?")


def in_native_order(events: list[Event]) -> list[Event]:
    """Converts big-endian arrays to little-endian."""

    def native(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: native(part) for key, part in value.items()}
        if isinstance(value, tuple) and len(value) > 3 and isinstance(value[1], str) and _BIG.fullmatch(value[1]):
            size = int(value[1][2:])
            raw = bytes.fromhex(value[-1])
            swapped = b"".join(raw[begin : begin + size][::-1] for begin in range(0, len(raw), size))
            return (value[0], f"<{value[1][1:]}", *value[2:-1], swapped.hex())
        return type(value)(map(native, value)) if isinstance(value, tuple | list) else value

    return [native(event) for event in events]


_BIG: Final = re.compile(r">[fiu]\d+")


def without_signs(events: list[Event]) -> list[Event]:
    """Replaces conjugate and negative views by their absolute values."""

    def unsigned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: unsigned(part) for key, part in value.items()}
        if isinstance(value, tuple) and len(value) > 2 and isinstance(value[-2], tuple) and value[-2][:1] == ("conj",):
            numbers = np.frombuffer(bytes.fromhex(value[-1]), np.float32 if value[1] in _OF_FLOATS else np.uint8)
            return (*value[:-2], np.abs(numbers).tobytes().hex())
        return type(value)(map(unsigned, value)) if isinstance(value, tuple | list) else value

    return [unsigned(event) for event in events]


_OF_FLOATS: Final = ("torch.complex64", "torch.float32")


def in_any_order(_program: Program, records: Records) -> Records:
    """Compares all batches of a complete iteration, and the number of batches of others.

    An exception ends a loop, so programs may differ from the operation that raises one.
    """
    errors = [place for events in records for place, event in enumerate(events) if event[0] == "error" and event[1] in _LOOPS]
    if errors:
        begins = [place for place, event in enumerate(records[0][: min(errors)]) if event[0] == "operation"]
        records = _cut(records, begins[-1] if begins else 0)
    return _sorted_batches(records[0]), _sorted_batches(records[1])


_LOOPS: Final = ("epoch", "break", "zip", "nest")


def _sorted_batches(events: list[Event]) -> list[Event]:
    batches: dict[Any, list[int]] = collections.defaultdict(list)
    result = list(events)
    for place, event in enumerate(events):
        if event[0] in ("batch", "error"):
            batches[event[1]].append(place)
        elif event[0] == "stop":
            places = batches.pop(event[1], [])
            for target, source in zip(places, sorted((events[one] for one in places), key=repr), strict=True):
                result[target] = source
        elif event[0] == "operation":
            for slot in [slot for slot in batches if isinstance(slot, str)]:
                _blank_batches(result, batches.pop(slot))
        elif event[0] == "kept":
            result[place] = event[:2]
    for places in batches.values():
        _blank_batches(result, places)
    return result


def _blank_batches(events: list[Event], places: list[int]) -> None:
    for place in places:
        events[place] = ("batch or error",)


# --- the differences


def has_workers(program: Program) -> bool:
    return program.options.num_workers > 0


def is_bound(program: Program) -> bool:
    """Whether worker ``i % n`` loads batch ``i``: it may have generators of its own."""
    may_draw = program.options.worker_init_fn or program.dataset.kind in ("located", "own rng", "lazy rng")
    return bool(may_draw) and program.options.in_order


def has_sampler(program: Program, *words: str) -> bool:
    samplers = (program.options.sampler, program.options.batch_sampler)
    return any(word in sampler.kind for sampler in samplers if sampler is not None for word in words)


_DRAIN: Final = (Operation("drain"),)
_TWO: Final = OptionsSpec(num_workers=2)
# A name for which `column_names` chooses the column that requires a gradient.
_GRADIENT: Final = next(name for name in SAMPLES if column_names(name, COLUMNS) == ["gradient"])
# Operations that may leave an iteration before its end.
_LEAVING: Final = ("break", "take", "open", "drop", "zip", "nest")

# In the order in which they are applied: those that truncate the records come last.
DIFFERENCES: Final[dict[str, Difference]] = {
    "warning of many workers": Difference(
        "What differs",
        "infeed warns about more workers than CPU cores when you create the loader; torch warns again at each `iter()`.",
        lambda program: program.options.num_workers > 2,
        without_warnings("This DataLoader will create"),
        Program(options=OptionsSpec(num_workers=3)),
    ),
    "warnings of collation": Difference(
        "What differs",
        "infeed calls torch less often to create a batch, so torch issues fewer warnings about `complex32` and sparse tensors.",
        lambda program: any(word in repr(program.dataset.sample) for word in ("complex32", "sparse")),
        without_warnings("ComplexHalf support is experimental", "Sparse "),
        Program(DatasetSpec(sample="tensor complex32")),
    ),
    "exceptions of workers": Difference(
        "What differs",
        "infeed raises an exception from a worker with its own type and arguments",
        has_workers,
        original_errors,
        Program(DatasetSpec(bad=((1, "Several"),)), _TWO, _DRAIN),
    ),
    "random numbers of workers": Difference(
        "Random numbers",
        "They are not torch's numbers.",
        lambda program: has_workers(program) and "drawing" in program.dataset.kind,
        in_both(blanked(("torch", "numpy", "random"))),
        Program(DatasetSpec("drawing"), _TWO),
    ),
    "byte order": Difference(
        "What differs",
        "Arrays keep their byte order.",
        lambda program: has_workers(program) and (program.dataset.kind == "array" or ">" in repr(program.dataset.sample)),
        in_both(in_native_order),
        Program(DatasetSpec("list", sample="array >f4"), OptionsSpec(batch_size=None, collate_fn="lambda", num_workers=1)),
    ),
    "conjugate views": Difference(
        "What differs",
        "Conjugate views (`tensor.conj()`) and their imaginary parts keep their sign; torch's workers lose it.",
        lambda program: (
            has_workers(program)
            and (
                any(word in repr(program.dataset.sample) for word in ("'conjugate'", "'negative'"))
                or (
                    program.dataset.kind in ("TensorDataset", "tensor")
                    and "complex" in column_names(program.dataset.sample, COLUMNS)
                )
            )
        ),
        in_both(without_signs),
        Program(DatasetSpec(sample="conjugate"), OptionsSpec(batch_size=None, num_workers=1)),
    ),
    "which worker": Difference(
        "What differs",
        "The worker that loads a sample may differ.",
        lambda program: (
            program.options.num_workers > 1
            and program.dataset.kind in ("located", "counted", "own rng", "lazy rng")
            and not is_bound(program)
        ),
        in_both(blanked(("worker", "count", "own"))),
        Program(DatasetSpec("counted"), _TWO),
        is_timed=True,
    ),
    "failed start": Difference(
        "What differs",
        "If `worker_init_fn` or `__iter__` of an iterable dataset raises in a worker, infeed raises the exception once",
        lambda program: (
            has_workers(program) and (program.options.worker_init_fn == "fail" or program.dataset.kind == "stream, closed")
        ),
        up_to_failed_start,
        Program(options=OptionsSpec(num_workers=1, worker_init_fn="fail"), operations=_DRAIN),
    ),
    "in_order=False": Difference(
        "What differs",
        "With `in_order=False`, the order of batches differs.",
        lambda program: program.options.num_workers > 1 and not program.options.in_order,
        in_any_order,
        Program(DatasetSpec(length=9), OptionsSpec(num_workers=2, in_order=False)),
        is_timed=True,
    ),
    "ended sampler": Difference(
        "What differs",
        "Within an iteration, infeed does not call `next` on the sampler again after `StopIteration`.",
        lambda program: has_sampler(program, "own iterator", "failing"),
        asked_once_at_the_end,
        Program(
            options=OptionsSpec(batch_sampler=SamplerSpec("batches, own iterator", (0,))),
            operations=(Operation("take", count=1), Operation("take", count=1)),
        ),
    ),
    "revived iterator": Difference(
        "What differs",
        "After the end of an iteration, `next` on its iterator always raises `StopIteration`.",
        lambda program: (
            not has_workers(program) and program.options.batch_size is None and program.dataset.kind == "stream, resetting"
        ),
        up_to_revived_iterator,
        Program(
            DatasetSpec("stream, resetting", length=2),
            OptionsSpec(batch_size=None),
            (Operation("take", count=2), Operation("open", slot=1), Operation("take")),
        ),
    ),
    "negative strides": Difference(
        "What differs",
        "Default collation copies arrays with negative strides (`array[::-1]`); torch raises `ValueError`.",
        lambda program: "negative strides" in repr(program.dataset.sample),
        up_to_negative_strides,
        Program(DatasetSpec(sample="array of negative strides")),
    ),
    "collation in workers": Difference(
        "What differs",
        "Workers collate samples as the main process does with `num_workers=0`.",
        lambda program: has_workers(program) and program.options.collate_fn in ("", "default_collate"),
        up_to_collation,
        Program(DatasetSpec(sample="tensor and number"), OptionsSpec(batch_size=2, num_workers=1)),
    ),
    "gradients from workers": Difference(
        "What differs",
        "Tensors that require gradients arrive from workers as leaf tensors. torch's loader hangs if they are not.",
        lambda program: program.hangs_with_torch,
        up_to_hang,
        Program(DatasetSpec("tensor", sample=_GRADIENT), OptionsSpec(batch_size=None, num_workers=1), (Operation("take"),)),
    ),
    "left iteration": Difference(
        "What differs",
        "If you leave an iteration early, infeed's persistent workers drop the samples in flight; torch's workers load them.",
        lambda program: (
            has_workers(program)
            and program.options.persistent_workers
            and program.dataset.kind in ("counted", "own rng", "lazy rng", "stream, continuing", "stream, epochs")
            and any(operation.name in _LEAVING for operation in program.operations)
        ),
        up_to_left_iteration,
        Program(
            DatasetSpec("stream, continuing", length=9),
            OptionsSpec(num_workers=1, persistent_workers=True),
            (Operation("zip"),),
        ),
        is_timed=True,
    ),
    "growing dataset": Difference(
        "What differs",
        "If the dataset grows during an epoch with `RandomSampler` (`shuffle=True`), torch yields old indices again",
        lambda program: (
            any(operation.name == "grow" for operation in program.operations)
            and (bool(program.options.shuffle) or has_sampler(program, "random"))
        ),
        up_to_growth,
        Program(
            DatasetSpec(length=2),
            OptionsSpec(shuffle=True),
            (Operation("take"), Operation("grow"), Operation("take", count=1)),
        ),
    ),
    "failing sampler": Difference(
        "What differs",
        "A sampler error does not lose a batch.",
        lambda program: has_workers(program) and has_sampler(program, "failing"),
        up_to_failed_sampler,
        Program(
            options=OptionsSpec(
                batch_sampler=SamplerSpec("batches, failing later", (0, 1, 2), 1), num_workers=1, prefetch_factor=1
            ),
            operations=_DRAIN,
        ),
    ),
    "StopIteration": Difference(
        "What differs",
        "`StopIteration` from `__getitem__` becomes a `RuntimeError`; torch ends the epoch without an error.",
        lambda program: "StopIteration" in dict(program.dataset.bad).values(),
        up_to_stop_iteration,
        Program(DatasetSpec(bad=((1, "StopIteration"),))),
    ),
}
