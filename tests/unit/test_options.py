"""Options: which values are rejected, with which message, and which must be accepted."""

import re
from collections import UserDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from infeed.errors import ConfigError
from infeed.options import Options, is_stream


class Unsized:
    """Supports indexing, but has no length."""

    def __getitem__(self, index: int) -> int:
        return index

    def __repr__(self) -> str:
        return "Unsized()"


class Stream:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Wordy:
    """Neither indexed nor iterable, with a long repr."""

    def __repr__(self) -> str:
        return "w" * 1000


def config(dataset: Any = range(10), **options: Any) -> Options:
    return Options(dataset=dataset, **options)


def case(options: dict[str, Any], text: str, *, dataset: Any = range(10), name: str = "") -> Any:
    return pytest.param(dataset, options, text, id=name or ",".join(f"{key}={value!r}" for key, value in options.items()))


REFUSED = [
    case({"batch_size": 0}, "batch_size=0 must be at least 1; use batch_size=None to yield single samples"),
    case({"batch_size": -3}, "batch_size=-3 must be at least 1; use batch_size=None to yield single samples"),
    case({"batch_size": 2.0}, "batch_size=2.0 must be an int; use batch_size=None to yield single samples"),
    case({"batch_size": True}, "batch_size=True must be an int; use batch_size=None to yield single samples"),
    case({"batch_size": "4"}, "batch_size='4' must be an int; use batch_size=None to yield single samples"),
    case({"num_workers": -1}, "num_workers=-1 must be at least 0; use 0 to load in the main process"),
    case({"num_workers": 1.5}, "num_workers=1.5 must be an int; use 0 to load in the main process"),
    case({"num_workers": "all"}, "num_workers='all' must be an int or 'auto'; use 0 to load in the main process"),
    case(
        {"num_workers": "auto", "cpu_limit": 0},
        "cpu_limit=0 must be a number of CPU cores above 0; use None for all available cores",
    ),
    case(
        {"num_workers": "auto", "cpu_limit": True},
        "cpu_limit=True must be a number of CPU cores above 0; use None for all available cores",
    ),
    case(
        {"num_workers": "auto", "cpu_limit": "2"},
        "cpu_limit='2' must be a number of CPU cores above 0; use None for all available cores",
    ),
    case(
        {"num_workers": "auto", "cpu_limit": float("nan")},
        "cpu_limit=nan must be a number of CPU cores above 0; use None for all available cores",
    ),
    case(
        {"num_workers": 2, "cpu_limit": 2},
        "cpu_limit=2 is not supported with num_workers=2, which is already the limit; omit one",
    ),
    case(
        {"worker": "auto", "cpu_limit": 2},
        "cpu_limit=2 is not supported with num_workers=0, which is already the limit; omit one",
    ),
    case(
        {"num_workers": "auto", "worker": "inline"},
        "num_workers='auto' is not supported with worker='inline'; use num_workers=0",
    ),
    case({"num_workers": 4096}, "num_workers=4096 must be at most 1024; did you mean batch_size?"),
    case({"seed": 1.0}, "seed=1.0 must be an int; use seed=None to draw one"),
    case({"seed": "a"}, "seed='a' must be an int; use seed=None to draw one"),
    case({"prefetch": 0}, "prefetch=0 must be at least 1; use num_workers=0 to load without prefetching"),
    case({"prefetch": 2.5}, "prefetch=2.5 must be an int; use num_workers=0 to load without prefetching"),
    case({"grain_size": 0}, "grain_size=0 must be at least 1; use grain_size=1 for one seed per sample"),
    case({"threads_per_worker": 0}, "threads_per_worker=0 must be at least 1; use 1 for one thread per worker"),
    case(
        {"threads_per_worker": None},
        "threads_per_worker=None must be an int; use 1 for one thread per worker",
    ),
    case({"timeout": -1}, "timeout=-1 must be a number of seconds, at least 0; use 0 for no limit"),
    case({"timeout": "5"}, "timeout='5' must be a number of seconds, at least 0; use 0 for no limit"),
    case({"timeout": True}, "timeout=True must be a number of seconds, at least 0; use 0 for no limit"),
    case({"timeout": float("nan")}, "timeout=nan must be a number of seconds, at least 0; use 0 for no limit"),
    case({"memory_limit": "lots"}, "memory_limit='lots' is not a size; pass bytes, or text such as '2GiB'"),
    case({"memory_limit": True}, "memory_limit=True is not a size; pass bytes, or text such as '2GiB'"),
    case({"memory_limit": "-1GB"}, "memory_limit='-1GB' is not a size; pass bytes, or text such as '2GiB'"),
    case({"memory_limit": 0}, "memory_limit=0 must be at least 1 byte; use None for the default"),
    case({"memory_limit": -5}, "memory_limit=-5 must be at least 1 byte; use None for the default"),
    case({"worker": "fork"}, "worker='fork' is not supported; use 'process', 'thread', 'inline', 'auto' or 'ray'"),
    case({"start_method": "fork"}, "start_method='fork' is not supported; use 'auto', 'forkserver' or 'spawn'"),
    case({"shuffle": 1}, "shuffle=1 is not supported; use True, False or 'block'"),
    case({"shuffle": "blok"}, "shuffle='blok' is not supported; use True, False or 'block'"),
    case({"drop_last": None}, "drop_last=None must be a bool; use True or False"),
    case({"in_order": "yes"}, "in_order='yes' must be a bool; use True or False"),
    case({"collate_fn": 3}, "collate_fn=3 must be callable; pass a function or None"),
    case({"worker_init_fn": "f"}, "worker_init_fn='f' must be callable; pass a function or None"),
    case({"sampler": 5}, "sampler=5 must be iterable; pass an iterable of indices"),
    case({"batch_sampler": 5}, "batch_sampler=5 must be iterable; pass an iterable of indices"),
    case({}, "dataset=Stream is a class; pass an instance: Stream(...)", dataset=Stream, name="a class"),
    case(
        {},
        "dataset=None has neither __getitem__ nor __iter__; implement __getitem__ and __len__ (map-style), or __iter__ ",
        dataset=None,
        name="no dataset",
    ),
    case({}, "dataset=Wordy object has neither __getitem__ nor __iter__; ", dataset=Wordy(), name="long repr"),
    case(
        {},
        "dataset=Unsized() has __getitem__ but no __len__; implement it, or pass sampler= or batch_sampler=",
        dataset=Unsized(),
        name="no length",
    ),
    case(
        {"sampler": [1], "shuffle": True},
        "shuffle=True is not supported with sampler, which sets the order; omit one of them",
    ),
    case(
        {"batch_sampler": [[1]], "batch_size": 4},
        "batch_size=4 is not supported with batch_sampler, which defines the batches; omit ",
    ),
    case(
        {"batch_sampler": [[1]], "batch_size": None},
        "batch_size=None is not supported with batch_sampler, which defines the batches; omit ",
    ),
    case(
        {"batch_sampler": [[1]], "shuffle": True},
        "shuffle=True is not supported with batch_sampler, which defines the batches; omit ",
    ),
    case(
        {"batch_sampler": [[1]], "sampler": [1]},
        "sampler=[1] is not supported with batch_sampler, which defines the batches; omit ",
    ),
    case(
        {"batch_sampler": [[1]], "drop_last": True},
        "drop_last=True is not supported with batch_sampler, which defines the batches; omit ",
    ),
    case(
        {"batch_size": None, "drop_last": True},
        "drop_last=True is not supported with batch_size=None, which yields single samples; omit drop_last",
    ),
    case(
        {"shuffle": True},
        "shuffle=True is not supported for iterable datasets; shuffle inside the dataset",
        dataset=Stream(),
        name="shuffled stream",
    ),
    case(
        {"sampler": [1]},
        "sampler is not supported for iterable datasets; select samples inside the dataset",
        dataset=Stream(),
        name="sampled stream",
    ),
    case(
        {"batch_sampler": [[1]]},
        "batch_sampler is not supported for iterable datasets; select samples inside the dataset",
        dataset=Stream(),
        name="batch-sampled stream",
    ),
    case(
        {"worker": "inline", "num_workers": 2},
        "num_workers=2 is not supported with worker='inline'; use num_workers=0 or worker='process'",
    ),
]


@pytest.mark.parametrize(("dataset", "options", "text"), REFUSED)
def test_invalid_options_are_rejected_with_problem_and_fix(dataset: Any, options: dict[str, Any], text: str) -> None:
    """Every message has the option as typed, its value, the problem and the fix."""
    with pytest.raises(ConfigError, match="^" + re.escape(text)):
        config(dataset, **options)


@pytest.mark.parametrize("text", [row.values[2] for row in REFUSED], ids=[row.id for row in REFUSED])
def test_every_message_has_the_standard_form(text: str) -> None:
    """It starts with the name of an option, has a fix after a semicolon, and no exclamation mark or "please"."""
    assert re.match(r"[a-z_]+(=| is not supported)", text)
    assert ";" in text
    assert not re.search(r"!|please|invalid", text, re.IGNORECASE)


ACCEPTED = {
    "numpy batch size": {"batch_size": np.int64(4)},
    "numpy 0-d array": {"batch_size": np.array(4)},
    "single samples": {"batch_size": None},
    "numpy workers": {"num_workers": np.int32(2)},
    "the most workers": {"num_workers": 1024},
    "negative seed": {"seed": -1},
    "huge seed": {"seed": 1 << 100},
    "fractional timeout": {"timeout": 0.5},
    "numpy timeout": {"timeout": np.float64(3)},
    "memory as text": {"memory_limit": "1.5 GiB"},
    "memory as number": {"memory_limit": 1 << 30},
    "list sampler": {"sampler": [3, 1]},
    "range sampler": {"sampler": range(5)},
    "array sampler": {"sampler": np.arange(3)},
    "generator sampler": {"sampler": (index for index in range(3))},
    "old-style sampler": {"sampler": Unsized()},
    "batch sampler": {"batch_sampler": [[1, 2], (3,)]},
    "collate_fn": {"collate_fn": list},
    "threads": {"worker": "thread", "num_workers": 2},
    "inline by name": {"worker": "inline"},
}


@pytest.mark.parametrize("options", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_options_are_accepted(options: dict[str, Any]) -> None:
    """NumPy numbers, and any iterable as sampler, are equivalent to Python's own."""
    made = config(**options)

    assert made.kind == ("inline" if not options.get("num_workers") else options.get("worker", "process"))


@pytest.mark.parametrize("number", [np.int64(5), np.float32(5)], ids=["int64", "float32"])
def test_a_timeout_may_be_a_numpy_number(number: Any) -> None:
    """As for the other numeric options."""
    assert config(timeout=number).timeout == 5


DATASETS: dict[str, tuple[Any, bool]] = {
    "list": ([1, 2], False),
    "range": (range(3), False),
    "dict": ({0: "a"}, False),
    "array": (np.zeros(3), False),
    "custom mapping": (UserDict({0: 1}), False),
    "text": ("abc", False),
    "stream": (Stream(), True),
    "generator": ((n for n in range(3)), True),
    "set": ({1, 2}, True),
    "iterator": (iter([1]), True),
}


@pytest.mark.parametrize(("dataset", "streams"), DATASETS.values(), ids=DATASETS)
def test_an_iterable_without_getitem_is_an_iterable_dataset(dataset: Any, streams: bool) -> None:
    """Anything with `__getitem__` is map-style."""
    assert config(dataset).is_stream is streams


def test_a_dataset_without_length_works_with_a_sampler() -> None:
    """The sampler has the length."""
    assert not config(Unsized(), sampler=[1]).is_stream
    assert not config(Unsized(), batch_sampler=[[1]]).is_stream


def test_memory_sizes_are_converted_to_bytes() -> None:
    """Text is parsed once, by the constructor."""
    assert config(memory_limit="2KiB").memory_limit_bytes == 2048
    assert config(memory_limit=100).memory_limit_bytes == 100
    assert config().memory_limit_bytes is None


def test_num_workers_0_loads_in_the_main_process_whatever_the_kind() -> None:
    """The kind of worker has no effect."""
    assert config(worker="thread", num_workers=0).kind == "inline"


def test_options_are_immutable() -> None:
    """Checked values stay as checked."""
    with pytest.raises(AttributeError):
        config().batch_size = 0  # type: ignore[misc]


@pytest.mark.torch
def test_datasets_and_samplers_of_torch_are_recognized(torch: ModuleType) -> None:
    """An IterableDataset inherits an unusable __getitem__, and samplers are ordinary iterables."""
    from torch.utils import data

    class Numbers(data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    table = data.TensorDataset(torch.zeros(4))
    assert is_stream(Numbers())
    assert not is_stream(table)
    assert not is_stream(data.Subset(table, [0]))
    assert config(table, sampler=data.RandomSampler(table)).sampler is not None
    assert config(table, batch_sampler=data.BatchSampler(range(4), 2, drop_last=False)).batch_sampler is not None
    assert config(table, batch_size=torch.tensor(4)).batch_size == 4
