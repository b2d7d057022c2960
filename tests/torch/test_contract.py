"""The contract of torch's DataLoader, which infeed keeps: signature, error messages, behavior, state."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import random
import signal
import time
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import (
    DEADLINE_S,
    Blocking,
    Journal,
    Pids,
    Tree,
    assert_clean,
    assert_faster_than,
    collected,
    flat,
    run_script,
    start_script,
    wait_until,
    worker_processes,
)

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")

METHODS = multiprocessing.get_all_start_methods()
# Two cores are fewer than the workers of some tests.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
TIMEOUT: dict[str, Any] = {"timeout": DEADLINE_S}


def identity(value: Any) -> Any:
    return value


def workers(count: int) -> dict[str, Any]:
    return {"num_workers": count, **(TIMEOUT if count else {})}


def load(dataset: Any, **options: Any) -> Any:
    return ours.DataLoader(dataset, **options)


def live_workers() -> set[int]:
    """Returns the process ids of live workers of infeed."""
    return {process.pid for process in worker_processes() if process.name().startswith("infeed:worker")}


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """Starts it before the leak guard counts processes: primitives of multiprocessing start it for good."""
    from multiprocessing import resource_tracker as tracker

    tracker.ensure_running()


# --- signature and attributes


def test_the_signature_begins_with_torchs() -> None:
    """Names, order, kinds and defaults; infeed's options follow as keyword-only arguments."""
    mine = inspect.signature(ours.DataLoader.__init__).parameters
    for name, parameter in inspect.signature(data.DataLoader.__init__).parameters.items():
        assert mine[name].default == parameter.default, name
        assert mine[name].kind == parameter.kind, name
    positional = [name for name, parameter in mine.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
        "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    ]  # fmt: skip


def test_it_is_a_subclass_of_torchs_loader() -> None:
    """Frameworks check isinstance."""
    assert issubclass(ours.DataLoader, data.DataLoader)
    assert isinstance(load([1]), data.DataLoader)
    assert ours.DataLoader is not data.DataLoader
    assert ours.DataLoader.__name__ == "DataLoader"


def test_it_can_be_subscripted() -> None:
    """In annotations and in calls."""
    assert typing.get_origin(ours.DataLoader[list[int]]) is ours.DataLoader
    loader = ours.DataLoader[list[int]]([1, 2])
    assert flat(collected(loader)) == [1, 2]

    class Own(ours.DataLoader[int]):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
        pass

    assert flat(collected(Own([1, 2]))) == [1, 2]


@WORKERS
def test_attributes_after_construction_are_torchs(num_workers: int) -> None:
    """Frameworks re-create loaders from them."""
    generator = torch.Generator()
    given: dict[str, Any] = {"num_workers": num_workers, "batch_size": 3, "shuffle": True, "generator": generator}
    mine, others = load(range(5), **given), data.DataLoader(range(5), **given)
    for name in inspect.signature(data.DataLoader.__init__).parameters:
        if name in ("self", "shuffle"):
            continue
        left, right = getattr(mine, name), getattr(others, name)
        if name in ("sampler", "batch_sampler"):
            assert type(left) is type(right)
        else:
            assert left == right, name
    assert mine.prefetch_factor == (2 if num_workers else None)
    assert mine.multiprocessing_context is None
    assert mine._auto_collation
    assert mine._index_sampler is mine.batch_sampler


@pytest.mark.parametrize("name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"])
def test_attributes_that_decide_cannot_be_set(name: str) -> None:
    """Objects derived from them would not notice the change."""
    loader = load(range(5))
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, None)


def test_other_attributes_can_be_set() -> None:
    """As with torch, they take effect with the next epoch."""
    loader = load(range(4), batch_size=2)
    loader.collate_fn = list
    assert list(loader) == [[0, 1], [2, 3]]
    loader.own = 1
    assert loader.own == 1


def test_batch_samplers_set_batch_size_to_none() -> None:
    """As in torch."""
    loader = load(range(4), batch_sampler=[[0, 1]])
    assert (loader.batch_size, loader.drop_last) == (None, False)
    assert len(loader) == 1


def test_importing_it_does_not_change_torch(tmp_path: Path) -> None:
    """Only install() does."""
    code = """
    import torch.utils.data as data
    from torch.utils.data import dataloader
    def seen():
        modules = (data, dataloader, data._utils.collate, data._utils.worker)
        return [{name: id(value) for name, value in vars(module).items()} for module in modules]
    before = seen()
    import infeed.torch
    assert seen() == before
    assert data.DataLoader is not infeed.torch.DataLoader
    """
    assert_clean(run_script(tmp_path, inspect.cleandoc(code)))


# --- errors and warnings


class Numbers(data.IterableDataset):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
    """An iterable dataset without a length."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "num_workers": ([1], {"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
    "timeout": ([1], {"timeout": -1}, ValueError, "timeout option should be non-negative"),
    "prefetch without workers": ([1], {"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be specified"),
    "prefetch below 0": ([1], {"prefetch_factor": -1, "num_workers": 2}, ValueError, "should be non-negative"),
    "persistent without workers": ([1], {"persistent_workers": True}, ValueError, "persistent_workers option needs"),
    "drop_last without batches": (
        [1], {"batch_size": None, "drop_last": True}, ValueError,
        "batch_size=None option disables auto-batching and is mutually exclusive",
    ),
    "context without workers": (
        [1], {"multiprocessing_context": "spawn"}, ValueError, r"multi-process loading \(num_workers > 0\), but got",
    ),
    "bad context": (
        [1], {"multiprocessing_context": "bad", "num_workers": 1}, ValueError, "should specify a valid start method in",
    ),
    "no context": (
        [1], {"multiprocessing_context": object(), "num_workers": 1}, TypeError,
        "multiprocessing_context option should be a valid context",
    ),
    "sampler, shuffle": (
        [1], {"sampler": [0], "shuffle": True}, ValueError, "sampler option is mutually exclusive with shuffle",
    ),
    "sampler, shuffle, batch_sampler": (
        [1], {"sampler": [0], "shuffle": True, "batch_sampler": [[0]]}, ValueError,
        "sampler option is mutually exclusive with shuffle",
    ),
    "batch_sampler, batch_size": (
        [1], {"batch_sampler": [[0]], "batch_size": 2}, ValueError, "batch_sampler option is mutually exclusive with",
    ),
    "batch_sampler, batch_size None": (
        [1], {"batch_sampler": [[0]], "batch_size": None}, ValueError, "batch_sampler option is mutually exclusive with",
    ),
    "batch_sampler, shuffle": (
        [1], {"batch_sampler": [[0]], "shuffle": True}, ValueError, "batch_sampler option is mutually exclusive with",
    ),
    "batch_sampler, drop_last": (
        [1], {"batch_sampler": [[0]], "drop_last": True}, ValueError, "batch_sampler option is mutually exclusive with",
    ),
    "batch_sampler, sampler": (
        [1], {"batch_sampler": [[0]], "sampler": [0]}, ValueError, "batch_sampler option is mutually exclusive with",
    ),
    "stream, shuffle": (
        Numbers(), {"shuffle": True}, ValueError, "DataLoader with IterableDataset: expected unspecified shuffle option",
    ),
    "stream, sampler": (
        Numbers(), {"sampler": [0]}, ValueError, "DataLoader with IterableDataset: expected unspecified sampler option",
    ),
    "stream, batch_sampler": (
        Numbers(), {"batch_sampler": [[0]]}, ValueError,
        "DataLoader with IterableDataset: expected unspecified batch_sampler option",
    ),
    "batch_size 0": ([1], {"batch_size": 0}, ValueError, "batch_size should be a positive integer value"),
    "batch_size of another type": ([1], {"batch_size": "2"}, (ValueError, TypeError), "batch_size should be"),  # type: ignore[dict-item]
    "drop_last of another type": ([1], {"drop_last": 1}, ValueError, "drop_last should be a boolean value"),
    "shuffle of nothing": ([], {"shuffle": True, "batch_size": -1}, ValueError, "should be a positive integer value"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_usage_errors_have_torchs_messages(name: str) -> None:
    """In both loaders."""
    dataset, options, error, words = ERRORS[name]
    for cls in (data.DataLoader, ours.DataLoader):
        with pytest.raises(error, match=words):
            cls(dataset, **options)


def test_a_missing_length_raises_the_same_type() -> None:
    """len(loader) of an iterable dataset without a length."""
    for cls in (data.DataLoader, ours.DataLoader):
        with pytest.raises(TypeError):
            len(cls(Numbers()))


def sleep_long(index: int) -> int:
    time.sleep(60)
    return index


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_timeout_raises_torchs_message(persistent_workers: bool) -> None:
    """It has torch's type too."""
    loader = load(Tree(4, sleep_long), num_workers=1, timeout=1, persistent_workers=persistent_workers)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iter(loader))


def die(index: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return index


def leave(index: int) -> int:
    os._exit(3)


@pytest.mark.process
def test_a_worker_killed_repeatedly_raises_torchs_message() -> None:
    """After retries."""
    loader = load(Tree(4, die), **workers(1))
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: "):
        list(loader)


@pytest.mark.process
def test_a_worker_that_exits_raises_torchs_message() -> None:
    """Without a signal."""
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        list(load(Tree(4, leave), **workers(1)))


class Sized(Numbers):
    """An iterable dataset with a length."""

    said = 4

    def __len__(self) -> int:
        return self.said


@WORKERS
def test_a_dataset_longer_than_its_length_warns_only_if_len_was_called(num_workers: int) -> None:
    """After len(loader) and not before."""
    loader = load(Sized(6), num_workers=num_workers)
    list(loader)  # len has not been called.
    assert len(loader) == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    text = str(caught[0].message)
    assert caught[0].category is UserWarning
    assert "Length of IterableDataset" in text
    assert "was reported to be 4" in text
    assert "but 5 samples have been fetched" in text
    assert len(caught) == (2 if num_workers == 0 else 8)


# Checked here, not in the test: where there is an accelerator, the check opens files that stay open.
@pytest.mark.skipif(hasattr(torch, "accelerator") and torch.accelerator.is_available(), reason="there is one")
def test_pin_memory_without_an_accelerator_delivers_plain_batches() -> None:
    """With torch's warning, and no other."""
    with pytest.warns(UserWarning, match="no accelerator is found"):
        [batch] = list(load(range(2), batch_size=2, pin_memory=True))
    assert not batch.is_pinned()


# --- datasets, samplers, lengths


class Growing(list[int]):
    """A dataset that grows."""


@WORKERS
def test_a_dataset_that_grows_changes_the_length(num_workers: int) -> None:
    """The next epoch has all of it."""
    dataset = Growing(range(4))
    loader = load(dataset, batch_size=2, num_workers=num_workers)
    assert len(loader) == 2
    assert flat(collected(loader)) == [0, 1, 2, 3]
    dataset.extend([4, 5, 6])
    assert len(loader) == 4
    assert flat(collected(loader)) == [0, 1, 2, 3, 4, 5, 6]


@WORKERS
def test_a_growing_dataset_grows_for_the_shuffle_too(num_workers: int) -> None:
    """Its sampler reads the length each time."""
    dataset = Growing(range(4))
    loader = load(dataset, batch_size=2, shuffle=True, num_workers=num_workers)
    list(loader)
    dataset.append(4)
    assert len(loader) == 3
    assert sorted(flat(collected(loader))) == [0, 1, 2, 3, 4]


@pytest.mark.process
def test_the_dataset_is_copied_when_iteration_begins() -> None:
    """Not when the loader is created, and again in each epoch."""
    dataset = [0, 1]
    loader = load(dataset, **workers(2))
    dataset[0] = 10
    iterator = iter(loader)
    dataset[1] = 11
    assert flat([batch.tolist() for batch in iterator]) == [10, 1]
    assert flat(collected(loader)) == [10, 11]


@pytest.mark.process
def test_persistent_workers_keep_the_first_copy() -> None:
    """As torch's persistent workers do."""
    dataset = [0, 1]
    loader = load(dataset, persistent_workers=True, **workers(2))
    assert flat(collected(loader)) == [0, 1]
    dataset[0] = 10
    assert flat(collected(loader)) == [0, 1]


class Counting:
    """Each copy counts its calls."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return self.asked


@pytest.mark.process
def test_a_worker_has_its_own_copy() -> None:
    """Its writes stay in the copy, and are lost with it."""
    dataset = Counting()
    loader = load(dataset, **workers(1))
    for _ in range(2):
        assert flat(collected(loader)) == [1, 2, 3, 4]
    assert dataset.asked == 0


@pytest.mark.process
def test_a_persistent_worker_keeps_its_copy() -> None:
    """With its writes."""
    loader = load(Counting(), persistent_workers=True, **workers(1))
    assert [flat(collected(loader)) for _ in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_without_workers_the_dataset_is_not_copied() -> None:
    """The loader uses the user's object."""
    dataset = Counting()
    list(load(dataset))
    assert dataset.asked == 4


@WORKERS
def test_batches_are_writable(num_workers: int) -> None:
    """Writes do not change the dataset."""
    source = torch.zeros(4, 2)
    for batch in load(source, batch_size=2, num_workers=num_workers):
        batch += 1
        assert batch.sum() == 4
    assert source.sum() == 0


@WORKERS
def test_kept_batches_do_not_change(num_workers: int) -> None:
    """None of a hundred batches is overwritten."""
    kept = list(load(Tree(200, functools.partial(torch.full, (100,))), batch_size=2, num_workers=num_workers))
    for number, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]


class Epochs:
    """Sample ``i`` is the epoch that was set in the dataset."""

    def __init__(self) -> None:
        self.epoch = 9

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


EPOCHS = pytest.mark.parametrize(
    ("num_workers", "persistent_workers"),
    [
        (0, False),
        pytest.param(2, False, marks=pytest.mark.process),
        pytest.param(2, True, marks=pytest.mark.process),
    ],
)


@EPOCHS
def test_only_the_user_sets_the_epoch_of_the_dataset(num_workers: int, persistent_workers: bool) -> None:
    """The user's epoch number may differ from the loader's: after a resume, or if it starts at 1."""
    seen = []
    for cls in (data.DataLoader, ours.DataLoader):
        dataset = Epochs()
        loader = cls(dataset, batch_size=4, persistent_workers=persistent_workers, **workers(num_workers))
        epochs = [flat(collected(loader)) for _ in range(2)]
        for epoch in (5, 7):
            dataset.set_epoch(epoch)
            epochs.append(flat(collected(loader)))
        seen.append((epochs, dataset.epoch))

    assert seen[0] == seen[1]


@EPOCHS
def test_set_epoch_of_the_loader_reaches_the_dataset_in_workers(num_workers: int, persistent_workers: bool) -> None:
    """Persistent workers too."""
    loader = ours.DataLoader(Epochs(), batch_size=4, persistent_workers=persistent_workers, **workers(num_workers))
    epochs = [flat(collected(loader))]

    loader.set_epoch(5)
    epochs += [flat(collected(loader)) for _ in range(2)]

    assert epochs == [[9] * 4, [5] * 4, [6] * 4]
    loader.close()


# --- failures


class Bad(Exception):
    """An exception with several arguments, which torch cannot raise again."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.code, self.why = code, why


def raise_value_error(index: int) -> int:
    raise ValueError(f"bad {index}")


def raise_bad(index: int) -> int:
    raise Bad(index, "it is bad")


@pytest.mark.parametrize("num_workers", [0, pytest.param(4, marks=pytest.mark.process)])
def test_41_bad_samples_are_21_errors_and_then_the_end(num_workers: int) -> None:
    """An exception for one batch does not end the iteration."""
    iterator = iter(load(Tree(41, raise_value_error), batch_size=2, **workers(num_workers)))
    for _ in range(21):
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


@WORKERS
def test_exceptions_with_several_arguments_keep_their_type(num_workers: int) -> None:
    """With their attributes."""
    with pytest.raises(Bad) as caught:
        next(iter(load(Tree(2, raise_bad), num_workers=num_workers)))
    assert (caught.value.code, caught.value.why) == (0, "it is bad")


class Lookup(Tree):
    def __getitem__(self, index: int) -> Any:
        return dict(os.environ)["missing key"]


@WORKERS
def test_key_errors_keep_their_type(num_workers: int) -> None:
    """With the key."""
    with pytest.raises(KeyError, match="missing key"):
        next(iter(load(Lookup(2, identity), num_workers=num_workers)))


@pytest.mark.process
def test_the_worker_and_its_traceback_are_printed() -> None:
    """In the output of the exception."""
    import traceback

    with pytest.raises(ValueError, match="bad 0") as caught:
        next(iter(load(Tree(2, raise_value_error), num_workers=1)))
    text = "".join(traceback.format_exception(caught.value))
    assert "raise_value_error" in text
    assert "worker 0" in text


class FailingSampler:
    """Raises after some indices."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        yield 1
        raise LookupError("no more")


def test_an_exception_of_a_sampler_is_raised_after_the_batches_before_it() -> None:
    """Then the epoch is over, like a generator. For workers see ``test_iteration``."""
    loader = load(range(4), sampler=FailingSampler())
    for _ in range(2):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0], [1]]
        with pytest.raises(LookupError, match="no more"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


class FailingStream(Numbers):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise LookupError("no more")


@WORKERS
def test_an_exception_of_an_iterable_dataset_is_raised(num_workers: int) -> None:
    """Then the dataset is at its end."""
    iterator = iter(load(FailingStream(), num_workers=min(1, num_workers)))
    assert next(iterator).tolist() == [0]
    with pytest.raises(LookupError, match="no more"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


class FailsAtIter(Numbers):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("not to be read")


@WORKERS
def test_an_iterable_dataset_that_cannot_be_opened_raises(num_workers: int) -> None:
    """At the first batch at the latest."""
    with pytest.raises(LookupError, match="not to be read"):
        list(load(FailsAtIter(), num_workers=num_workers))


# --- workers


def worker_facts(index: int) -> Any:
    info = data.get_worker_info()
    return info.id, info.num_workers, info.seed, torch.initial_seed(), os.getpid(), repr(info), len(info.dataset)


@pytest.mark.process
def test_worker_info_equals_torchs() -> None:
    """id, num_workers, seed (that of torch's generator), dataset, and a repr of all."""
    assert data.get_worker_info() is None
    facts = list(load(Tree(40, worker_facts), batch_size=None, **workers(2)))
    seeds = {(number, seed) for number, _, seed, *_ in facts}
    assert {number for number, *_ in facts} <= {0, 1}
    assert {count for _, count, *_ in facts} == {2}
    assert {seed - number for number, seed in seeds} == {min(seed - number for number, seed in seeds)}
    for _, _, _, _, pid, text, length in facts:
        assert pid != os.getpid()
        assert length == 40
        known = torch.utils.data._utils.worker.WorkerInfo
        words = [f"{name}=" for name in ("id", "num_workers", "seed", "dataset", "rng")]
        for word in words if hasattr(known, "__dataclass_fields__") else words[:4]:  # torch 2.11 has no rng yet.
            assert word in text
    assert data.get_worker_info() is None


@pytest.mark.process
def test_the_seed_of_worker_info_is_torchs_initial_seed() -> None:
    """The contract: seed (equal to torch.initial_seed())."""
    for _, _, seed, initial, *_ in load(Tree(6, worker_facts), batch_size=None, **workers(2)):
        assert seed == initial


def has_worker_info(index: int) -> bool:
    return data.get_worker_info() is not None


def test_there_is_no_worker_info_without_workers() -> None:
    """Neither in the training loop nor in the dataset."""
    assert not torch.cat(list(load(Tree(3, has_worker_info)))).any()


def seed_torch(worker_id: int) -> None:
    torch.manual_seed(12345)
    random.seed(6)
    np.random.seed(7)


def initial_seed(index: int) -> int:
    return int(torch.initial_seed())


@pytest.mark.process
def test_worker_init_fn_runs_with_the_workers_torch_seed() -> None:
    """It equals that of get_worker_info."""
    loader = load(Tree(4, lambda i: os.own), worker_init_fn=note_seeds, **workers(2))  # type: ignore[attr-defined]
    assert set(flat(collected(loader))) == {True}


def note_seeds(worker_id: int) -> None:
    os.own = data.get_worker_info().seed == torch.initial_seed()  # type: ignore[attr-defined]


@pytest.mark.process
def test_a_seed_set_in_worker_init_fn_is_kept() -> None:
    """torch.initial_seed() in __getitem__ returns it."""
    loader = load(Tree(20, initial_seed), batch_size=2, worker_init_fn=seed_torch, **workers(2))
    assert set(flat(collected(loader))) == {12345}


class Bound:
    """Returns the worker that loads a sample. One worker blocks at its first sample until the other has loaded many."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        self.journal.write(index)
        if index == 0:
            wait_until(lambda: "12" in self.journal.lines(), "the fourth batch, which is the other worker's")
        return int(data.get_worker_info().id)


def do_nothing(worker_id: int) -> None:
    pass


@pytest.mark.process
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 4, "collate_fn": torch.tensor}])
def test_with_worker_init_fn_batch_i_is_loaded_by_worker_i_modulo_their_number(options: dict[str, Any], tmp_path: Path) -> None:
    """The whole batch, whichever worker is idle: draws from the worker's own generators are a function of the plan."""
    loader = load(Bound(Journal(tmp_path / "loaded")), worker_init_fn=do_nothing, **options, **workers(2))
    assert collected(loader) == [[number % 2] * 4 for number in range(6)]


UNREADABLE: dict[str, Callable[[], Any]] = {
    "of nothing": lambda: data.RandomSampler([], num_samples=2),
    "of nothing, with a generator": lambda: data.RandomSampler([], num_samples=2, generator=torch.Generator()),
    "without weight": lambda: data.WeightedRandomSampler([0.0, 0.0], 2),
}


@pytest.mark.process
@pytest.mark.parametrize("sampler", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("cls", [data.DataLoader, ours.DataLoader], ids=["torch", "infeed"])
def test_with_workers_iter_raises_what_the_sampler_raises_at_its_first_index(cls: Any, sampler: Any) -> None:
    """Workers load ahead of the first `next`."""
    loader = cls(range(2), sampler=sampler(), **workers(1))
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        iter(loader)


@pytest.mark.process
def test_a_dataset_that_may_seed_per_worker_has_batches_bound_to_workers_as_well(tmp_path: Path) -> None:
    """It asks which worker it is in: a generator that it creates then must give the same numbers in every run."""
    loader = load(data.Subset(Bound(Journal(tmp_path / "loaded")), range(24)), batch_size=4, **workers(2))
    assert collected(loader) == [[number % 2] * 4 for number in range(6)]


class Drawing:
    """Draws from generators that worker_init_fn created or seeded."""

    rng: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random(), np.random.random(), random.random(), torch.rand(()).item()


def seed_all(worker_id: int) -> None:
    info = data.get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)
    np.random.seed([1, worker_id])
    random.seed(f"worker {worker_id}")
    torch.manual_seed(1000 + worker_id)


@pytest.mark.process
def test_generators_of_worker_init_fn_draw_torchs_numbers() -> None:
    """In both epochs of persistent workers, whichever worker is idle."""

    def drawn(cls: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"batch_size": 2, "generator": generator, "persistent_workers": True, **workers(2)}
        loader = cls(Drawing(), worker_init_fn=seed_all, **options)
        return [torch.stack([part.double() for part in batch]).tolist() for _ in range(2) for batch in loader]

    assert drawn(ours.DataLoader) == drawn(data.DataLoader)


def seed_as_documented(worker_id: int) -> None:
    """The recipe of torch's documentation."""
    seed_all(worker_id)
    np.random.seed(torch.utils.data.get_worker_info().seed % 2**32)
    random.seed(torch.utils.data.get_worker_info().seed % 2**32)


@pytest.mark.process
def test_a_generator_that_is_seeded_with_the_workers_seed_is_seeded_by_position() -> None:
    """Its numbers do not depend on the number of workers."""

    def drawn(count: int) -> list[Any]:
        loader = load(
            Drawing(),
            batch_size=2,
            generator=torch.Generator().manual_seed(5),
            worker_init_fn=seed_as_documented,
            **workers(count),
        )
        return [torch.stack(batch[2:4]).tolist() for batch in loader]

    assert drawn(1) == drawn(2)


class WithMethod:
    """Its worker_init_fn is a bound method."""

    def __init__(self) -> None:
        self.opened = "not opened"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> str:
        return self.opened

    def open(self, worker_id: int) -> None:
        data.get_worker_info().dataset.opened = f"opened by {worker_id}"
        self.opened = self.opened.upper()


@pytest.mark.process
def test_worker_init_fn_may_be_a_method_of_the_dataset() -> None:
    """There it is the worker's dataset."""
    dataset = WithMethod()
    for (text,) in load(dataset, worker_init_fn=dataset.open, **workers(2)):
        assert text in ("OPENED BY 0", "OPENED BY 1")
    assert dataset.opened == "not opened"


@pytest.mark.process
def test_worker_init_fn_may_be_a_partial_or_a_lambda() -> None:
    """Also local ones."""
    for function in (functools.partial(setattr, os, "own"), lambda worker_id: setattr(os, "own", worker_id)):
        loader = load(Tree(8, lambda i: os.own), worker_init_fn=function, **workers(2))  # type: ignore[attr-defined]
        assert set(flat(collected(loader))) <= {0, 1}


def fail_to_begin(worker_id: int) -> None:
    raise LookupError("cannot begin")


@pytest.mark.process
def test_an_exception_of_worker_init_fn_is_raised_in_the_loop() -> None:
    """With its own type."""
    with pytest.raises(LookupError, match="cannot begin"):
        list(load(range(4), worker_init_fn=fail_to_begin, **workers(2)))


def test_worker_init_fn_is_not_called_without_workers() -> None:
    """There is no worker to initialize."""
    assert len(list(load(range(4), worker_init_fn=fail_to_begin))) == 4


def set_affinity(worker_id: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})


def affinity(index: int) -> int:
    return len(os.sched_getaffinity(0))


@pytest.mark.process
@pytest.mark.linux("needs os.sched_setaffinity")
def test_worker_init_fn_may_pin_a_worker_to_a_core() -> None:
    """It stays there."""
    assert set(flat(collected(load(Tree(4, affinity), worker_init_fn=set_affinity, **workers(2))))) == {1}


class Meeting:
    """Samples wait until each worker has started, through files."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        (self.folder / str(data.get_worker_info().id)).touch()
        wait_until(lambda: len(list(self.folder.iterdir())) == self.count, "all workers at once")
        return index


@pytest.mark.process
def test_all_workers_run_in_parallel(tmp_path: Path) -> None:
    """Six workers, each of which waits for the other five."""
    assert flat(collected(load(Meeting(tmp_path, 6), **workers(6)))) == [0, 1, 2, 3, 4, 5]


# In their own scripts: multiprocessing keeps descriptors of shared objects as long as a process lives.
SHARING = """
import multiprocessing, sys, warnings
from infeed.torch import DataLoader

class Sharing:
    def __init__(self, context):
        self.value, self.lock, self.event = context.Value("i", 0), context.Lock(), context.Event()
        self.queue, self.semaphore, self.array = context.Queue(), context.Semaphore(2), context.Array("d", 3)
        self.barrier = context.Barrier(2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index < 2:
            self.barrier.wait(30)  # Both workers, with their first sample; later ones go to an idle worker.
        with self.lock, self.semaphore, self.value.get_lock():
            self.value.value += 1
        self.array[0] = 1.5
        self.event.set()
        self.queue.put(index)
        return index

dataset = Sharing(multiprocessing.get_context(sys.argv[1]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    batches = [batch.tolist() for batch in DataLoader(dataset, num_workers=2, timeout=30)]
queued = sorted(dataset.queue.get(timeout=30) for _ in range(6))
print(batches, dataset.value.value, dataset.event.is_set(), dataset.array[0], queued)
print(["fork" in str(entry.message) for entry in caught if entry.category is RuntimeWarning])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "method",
    ["spawn", *[pytest.param(name, marks=pytest.mark.linux("a start method of POSIX")) for name in ("forkserver", "fork")]],
)
def test_primitives_of_multiprocessing_may_be_in_a_dataset(method: str, tmp_path: Path) -> None:
    """infeed's workers get primitives of spawn and forkserver; those of fork use torch's workers, with one warning."""
    result = run_script(tmp_path, SHARING, method)
    assert_clean(result)
    everything = list(range(6))
    assert result.out.splitlines() == [
        f"{[[number] for number in everything]} 6 True 1.5 {everything}",
        str([True] if method == "fork" else []),
    ]


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # Python's own, from 3.12 on.
@pytest.mark.parametrize("context", ["fork", *[multiprocessing.get_context(name) for name in METHODS if name == "fork"]])
def test_a_requested_fork_is_made_with_a_warning(context: Any) -> None:
    """One warning, which says how to avoid it."""
    loader = load(Pids(4), multiprocessing_context=context, **workers(2))
    with pytest.warns(RuntimeWarning, match="fork") as caught:
        assert os.getpid() not in flat(collected(loader))
    # JAX warns about forks too, if another test has imported it.
    assert len([entry for entry in caught if "this loader runs on torch's own workers" in str(entry.message)]) == 1


@pytest.mark.process
@pytest.mark.parametrize("context", [*[name for name in METHODS if name != "fork"], multiprocessing.get_context("spawn")])
def test_other_contexts_use_the_engine(context: Any) -> None:
    """Lambdas can be pickled there too."""
    loader = load(range(4), multiprocessing_context=context, collate_fn=lambda samples: samples, **workers(1))
    assert list(loader) == [[0], [1], [2], [3]]
    assert loader.multiprocessing_context.get_start_method() in ("spawn", "forkserver")


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
def test_the_process_is_never_forked(tmp_path: Path) -> None:
    """Hooks that run at a fork are not called."""
    code = """
    import os, torch
    os.register_at_fork(before=lambda: print("forked"))
    from infeed.torch import DataLoader
    for persistent in (False, True):
        loader = DataLoader(list(range(8)), batch_size=2, num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            assert sum(batch.sum() for batch in loader) == 28
    """
    result = run_script(tmp_path, inspect.cleandoc(code))
    assert_clean(result)
    assert result.out == ""


@pytest.mark.process
def test_iterators_have_their_workers() -> None:
    """it._workers has the id of a live process for each."""
    iterator = iter(load(Pids(8), **workers(2)))
    pids = [worker.pid for worker in iterator._workers]
    assert len(set(pids)) == 2
    assert set(flat([batch.tolist() for batch in iterator])) <= set(pids)


@pytest.mark.process
def test_workers_end_with_the_epoch_unless_they_are_persistent() -> None:
    """Persistent workers end with the loader."""
    loader = load(Pids(8), **workers(2))
    list(loader)
    wait_until(lambda: not live_workers(), "the end of the workers")


@pytest.mark.process
def test_persistent_workers_live_as_long_as_the_loader() -> None:
    """No longer: torch's workers end when the last reference to the loader is dropped."""
    loader = load(Pids(8), persistent_workers=True, **workers(2))
    first, second = (set(flat(collected(loader))) for _ in range(2))
    alive = live_workers()
    gc.collect()
    gc.disable()
    try:
        del loader
        left = still_alive(alive)
    finally:
        gc.enable()
        gc.collect()
    assert first | second <= alive
    assert not left


def still_alive(pids: set[int]) -> set[int]:
    """Returns the processes that do not end by themselves. An idle worker would stay for a minute."""
    deadline = time.monotonic() + DEADLINE_S
    while (left := pids & live_workers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


# --- seeds


def draws(index: int) -> Any:
    return torch.rand(1), random.random(), float(np.random.random())


def plain(batches: Any) -> Any:
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


@pytest.mark.process
@pytest.mark.parametrize("is_given", [True, False], ids=["generator", "manual_seed"])
def test_the_same_seed_gives_the_same_random_numbers_in_workers(is_given: bool) -> None:
    """From run to run: torch, random and NumPy; another seed gives others."""

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        given = {"generator": torch.Generator().manual_seed(seed)} if is_given else {}
        return plain(load(Tree(12, draws), batch_size=2, shuffle=True, **given, **workers(2)))

    first = run(3)
    assert run(3) == first
    assert run(4) != first
    numbers = [tuple(number) for batch in first for number in batch[0]]
    assert len(set(numbers)) == 12


@WORKERS
def test_with_its_own_seed_everything_depends_on_it(num_workers: int) -> None:
    """Order and random numbers, whatever was drawn before, with or without workers (P2)."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 8}
    expected = plain(load(Tree(12, draws), **options))
    torch.rand(3)
    assert plain(load(Tree(12, draws), num_workers=num_workers, **options)) == expected


# --- streams


class Tagged(Numbers):
    """Elements contain the worker that read them."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        number = data.get_worker_info().id
        return iter([10 * number + element for element in range(self.counts[number])])


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_shards_alternate_and_an_exhausted_one_drops_out(persistent_workers: bool) -> None:
    """Worker 0, 1, 2, 0, ..., as with torch."""
    options = {"persistent_workers": persistent_workers, **workers(3)}
    loader = load(Tagged([2, 5, 0]), batch_size=1, **options)
    for _ in range(2):
        assert flat(collected(loader)) == [0, 10, 1, 11, 12, 13, 14]
    loader = load(Tagged([4, 1, 6]), batch_size=2, **options)
    assert collected(loader) == [[0, 1], [10], [20, 21], [2, 3], [22, 23], [24, 25]]


class Opened(Numbers):
    """Records when it is opened."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(3)
        self.journal = journal

    def __iter__(self) -> Iterator[int]:
        self.journal.write(f"opened in {data.get_worker_info().id}")
        yield from super().__iter__()


@pytest.mark.process
def test_every_worker_opens_the_iterable_dataset_once_per_epoch(tmp_path: Path) -> None:
    """It reads all of it, unless the dataset shards itself."""
    journal = Journal(tmp_path / "journal")
    loader = load(Opened(journal), **workers(2))
    assert flat(collected(loader)) == [0, 0, 1, 1, 2, 2]
    assert sorted(journal.lines()) == ["opened in 0", "opened in 1"]


# --- lifetime of loaders


@pytest.mark.process
def test_an_unreferenced_loader_lives_as_long_as_its_loop() -> None:
    """`for batch in DataLoader(...)`."""
    assert flat([batch.tolist() for batch in load(range(6), batch_size=2, **workers(2))]) == [0, 1, 2, 3, 4, 5]
    iterator = iter(load(range(6), batch_size=2, persistent_workers=True, **workers(2)))
    assert flat([batch.tolist() for batch in iterator]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.process
def test_iter_of_a_loader_with_persistent_workers_returns_the_same_iterator() -> None:
    """torch restarts and returns it too."""
    for cls in (data.DataLoader, ours.DataLoader):
        loader = cls(range(6), batch_size=2, persistent_workers=True, **workers(2))
        first = iter(loader)
        next(first)
        second = iter(loader)
        assert first is second
        assert flat([batch.tolist() for batch in second]) == [0, 1, 2, 3, 4, 5]
        assert flat([batch.tolist() for batch in loader]) == [0, 1, 2, 3, 4, 5]
        del first, second, loader


class Inner:
    """Iterates a loader in a sample."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return int(sum(batch.sum() for batch in load(range(index + 1), batch_size=2, num_workers=self.num_workers)))


@pytest.mark.process
@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("outer", [0, 1])
def test_loaders_within_loaders_work(inner: int, outer: int) -> None:
    """torch's workers must not have children; infeed's may."""
    assert flat(collected(load(Inner(inner), **workers(outer)))) == [0, 1, 3]


@WORKERS
def test_a_loader_can_be_copied_and_pickled(num_workers: int) -> None:
    """Before and after an iteration; the copy is a separate loader."""
    loader = load(range(6), batch_size=2, num_workers=num_workers)
    for _ in range(2):
        for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
            assert type(other) is ours.DataLoader
            assert flat(collected(other)) == [0, 1, 2, 3, 4, 5]
            with pytest.raises(ValueError, match="should not be set"):
                other.batch_size = 3
        assert flat(collected(loader)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.process
def test_num_workers_may_be_changed_between_epochs() -> None:
    """Frameworks do this."""
    loader = load(Pids(6))
    for count in (0, 2, 1, 0):
        loader.num_workers = count
        pids = set(flat(collected(loader)))
        assert (pids == {os.getpid()}) == (count == 0)
        assert len(pids) <= max(1, count)


@pytest.mark.process
def test_leaving_a_loop_leaves_nothing_behind() -> None:
    """With break, and with an exception; the leak guard checks as well."""
    for _ in load(range(100), **workers(2)):
        break
    wait_until(lambda: not live_workers(), "the end of the workers")
    loader = load(range(100), **workers(2))
    with pytest.raises(ZeroDivisionError):
        [1 // int(batch) for batch in loader]
    assert flat(collected(loader)) == list(range(100))


def test_a_thread_worker_works_too() -> None:
    """worker="thread": the same batches, from this process."""
    loader = load(Pids(6), batch_size=2, worker="thread", **workers(2))
    assert set(flat(collected(loader))) == {os.getpid()}
    shuffled = load(
        range(6), batch_size=2, shuffle=True, worker="thread", generator=torch.Generator().manual_seed(1), **workers(2)
    )
    expected = data.DataLoader(range(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert collected(shuffled) == collected(expected)


def thread_facts(index: int) -> Any:
    info = data.get_worker_info()
    return ("none",) if info is None else (f"{info.num_workers}",)


def test_thread_workers_do_not_make_the_main_thread_a_worker() -> None:
    """get_worker_info is None in the main thread."""
    for _ in load(Tree(6, thread_facts), worker="thread", **workers(2)):
        assert data.get_worker_info() is None
    assert data.get_worker_info() is None


# --- scripts

NO_GUARD = """
import torch
from torch.utils.data import Dataset
from infeed.torch import DataLoader

class Own(Dataset):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        if index == 99:
            raise Strange(index, why="strange")
        return torch.full((2,), index), Sample(index)

class Sample:
    def __init__(self, index):
        self.index = index

class Strange(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code} {why}")

def main():
    offset = 5
    def collate(samples):
        return torch.stack([tensor for tensor, _ in samples]) + offset, [sample for _, sample in samples]
    for batch, samples in DataLoader(Own(4), batch_size=2, num_workers=2, collate_fn=collate):
        print(batch[:, 0].tolist(), [type(sample) is Sample for sample in samples])
    for batch in DataLoader(Own(2), num_workers=2, collate_fn=lambda samples: samples[0][0].sum().item() + offset):
        print(batch)
    try:
        list(DataLoader(Own(100), sampler=[99], num_workers=2, collate_fn=collate))
    except Strange as error:
        print("caught", error)

main()
"""


@pytest.mark.process
def test_no_main_guard_is_needed(tmp_path: Path) -> None:
    """Classes, closures, lambdas and exceptions of the script are pickled to workers and back."""
    result = run_script(tmp_path, NO_GUARD)
    assert_clean(result)
    assert result.out.splitlines() == ["[5, 6] [True, True]", "[7, 8] [True, True]", "5", "7", "caught 99 strange"]


BUSY_EXIT = """
import sys, time, torch
from pathlib import Path
from tests.helpers import Journal
from infeed.torch import DataLoader
journal = Journal(Path(sys.argv[1]))
class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index > 0:
            journal.write("busy")
            time.sleep(60)
        while len(journal.lines()) < 3:  # the first batch comes when the other workers are busy
            time.sleep(0.01)
        return torch.zeros(2)
iterator = iter(DataLoader(Slow(), num_workers=4, persistent_workers=sys.argv[2] == "persistent"))
next(iterator)
journal.write("leaving")
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["persistent", "plain"])
def test_an_early_end_with_four_busy_workers_is_fast(tmp_path: Path, kind: str) -> None:
    """torch waits 5 seconds for each: 20 seconds in total."""
    journal = Journal(tmp_path / "journal")
    script = start_script(tmp_path, "import warnings; warnings.simplefilter('ignore')\n" + BUSY_EXIT, str(journal.path), kind)
    script.wait_line(journal, "leaving")
    with assert_faster_than(15):
        result = script.finish()
    assert_clean(result)


HUGE_LISTS = """
import torch
from infeed.torch import DataLoader
class Sampler:
    def __iter__(self):
        for _ in range(20):
            yield list(range(40960))
    def __len__(self):
        return 20
class Slow:
    def __len__(self):
        return 40960
    def __getitem__(self, index):
        return index
for batch in DataLoader(Slow(), batch_sampler=Sampler(), num_workers=2):
    raise ValueError("in the loop")
"""


@pytest.mark.process
def test_huge_lists_of_indices_do_not_block_a_failing_program(tmp_path: Path) -> None:
    """They are in pipes when the main process raises; it still exits."""
    result = run_script(tmp_path, HUGE_LISTS)
    assert result.code == 1
    assert result.err.rstrip().endswith("ValueError: in the loop")


INTERRUPTED = """
import sys, time, torch
from pathlib import Path
from tests.helpers import Journal
from infeed.torch import DataLoader
journal = Journal(Path(sys.argv[1]))
class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index == 20:
            journal.write("waiting")
            time.sleep(60)
        return index
try:
    for batch in DataLoader(Slow(), num_workers=2):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.process
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """The user gets KeyboardInterrupt, and all processes end (the script helper checks)."""
    journal = Journal(tmp_path / "journal")
    script = start_script(tmp_path, INTERRUPTED, str(journal.path))
    script.wait_line(journal, "waiting")
    os.killpg(script.pid, signal.SIGINT)
    result = script.finish()
    assert result.out == "interrupted\n"
    assert_clean(result)


@pytest.mark.process
def test_close_ends_workers_in_mid_epoch(tmp_path: Path) -> None:
    """The loader can be iterated again."""
    dataset = Blocking(8, 2, tmp_path)
    loader = load(dataset, persistent_workers=True, **workers(2))
    iterator = iter(loader)
    next(iterator)
    dataset.wait_blocked()
    del iterator
    with assert_faster_than(DEADLINE_S):  # The sample does not end by itself.
        loader.close()
    wait_until(lambda: not live_workers(), "the end of the workers")
    dataset.let_go()
    assert flat(collected(loader)) == list(range(8))
    loader.close()


# --- state


class StatefulSampler:
    """A stateful sampler."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(9)).tolist()
        while self.at < self.count:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatelessSampler:
    """The same order each time."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter([(7 * number) % 20 for number in range(20)])


class StatefulStream(Numbers):
    """Shards itself, and has a state."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        elements = list(range(first, self.count, step))
        while self.at < len(elements):
            self.at += 1
            yield elements[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatelessStream(Numbers):
    """Shards itself, and is read again."""

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(self.count) if info is None else range(info.id, self.count, info.num_workers))


def with_generator() -> dict[str, Any]:
    return {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(4)}


STATEFUL: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "sequential": lambda: (range(20), {"batch_size": 3}),
    "shuffle": lambda: (range(20), {"batch_size": 3, "shuffle": True}),
    "shuffle, drop_last": lambda: (range(20), {"batch_size": 3, "shuffle": True, "drop_last": True}),
    "shuffle, generator": lambda: (range(20), with_generator()),
    "RandomSampler": lambda: (range(20), {"batch_size": 3, "sampler": data.RandomSampler(range(20))}),
    "RandomSampler, replacement": lambda: (
        range(20), {"batch_size": 3, "sampler": data.RandomSampler(range(20), replacement=True, num_samples=24)}
    ),
    "RandomSampler, few": lambda: (range(20), {"batch_size": 3, "sampler": data.RandomSampler(range(20), num_samples=14)}),
    "RandomSampler, generator": lambda: (
        range(20), {"batch_size": 3, "sampler": data.RandomSampler(range(20), generator=torch.Generator().manual_seed(5))}
    ),
    "WeightedRandomSampler": lambda: (range(20), {"batch_size": 3, "sampler": data.WeightedRandomSampler(torch.ones(20), 20)}),
    "SubsetRandomSampler": lambda: (range(20), {"batch_size": 3, "sampler": data.SubsetRandomSampler(range(20))}),
    "BatchSampler": lambda: (range(20), {"batch_sampler": data.BatchSampler(data.RandomSampler(range(20)), 3, False)}),
    "stateful sampler": lambda: (range(20), {"batch_size": 3, "sampler": StatefulSampler(20)}),
    "stateful sampler in batches": lambda: (range(20), {"batch_sampler": data.BatchSampler(StatefulSampler(20), 3, False)}),
    "stateless sampler": lambda: (range(20), {"batch_size": 3, "sampler": StatelessSampler()}),
    "singly": lambda: (range(9), {"batch_size": None, "shuffle": True}),
    "stateful stream": lambda: (StatefulStream(20), {"batch_size": 3}),
    "stateless stream": lambda: (StatelessStream(20), {"batch_size": 3}),
    "stream, singly": lambda: (StatefulStream(9), {"batch_size": None}),
}  # fmt: skip


def values(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def jsoned(state: Any) -> Any:
    return json.loads(json.dumps(state))


def assert_resumes(name: str, options: dict[str, Any], steps: list[int]) -> None:
    """Takes states in one epoch; other loaders, with other arguments and seeds, resume from each."""
    dataset, given = STATEFUL[name]()
    torch.manual_seed(1)
    loader = load(dataset, **{**given, **options})
    states, whole = [jsoned(loader.state_dict())], []
    for batch in loader:
        whole += values([batch])
        del batch
        states.append(jsoned(loader.state_dict()))
    after = jsoned(loader.state_dict())
    loader.close()
    problems = []
    for step in [*steps, len(whole), len(whole) + 1]:
        torch.manual_seed(2 + step)
        dataset, given = STATEFUL[name]()
        other = load(dataset, **{**given, **options})
        other.load_state_dict(states[step] if step <= len(whole) else after)
        resumed, following = values(other), values(other)
        other.close()
        if step <= len(whole) and resumed != whole[step:]:
            problems.append(f"after step {step}: {resumed}, not {whole[step:]}")
        if (step > len(whole) and len(resumed) != len(whole)) or len(following) != len(whole):
            problems.append(f"after step {step}: the next epoch has {len(following)} batches, not {len(whole)}")
    assert not problems


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_resumes_in_another_loader(name: str) -> None:
    """Without workers, at every step; the last step resumes to nothing, a state after the epoch to a whole one."""
    # Step 0 has no state of draws at the beginning of the epoch.
    assert_resumes(name, {}, [1, 2, 3, 4, 5, 6])


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True], ids=["plain", "persistent"])
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ["shuffle", "shuffle, generator", "stateful stream", "stateless stream"])
def test_a_state_resumes_with_workers(name: str, num_workers: int, persistent_workers: bool) -> None:
    """Whatever they have loaded ahead."""
    assert_resumes(name, {"persistent_workers": persistent_workers, **workers(num_workers)}, [2 * num_workers - 1])


@pytest.mark.process
def test_a_state_of_another_number_of_workers_resumes() -> None:
    """torchdata fails there."""
    torch.manual_seed(1)
    loader = load(range(20), batch_size=3, shuffle=True, **workers(2))
    iterator = iter(loader)
    begun = [next(iterator) for _ in range(2)]
    state = jsoned(loader.state_dict())
    rest = values(iterator)
    for count in (0, 1, 3):
        other = load(range(20), batch_size=3, shuffle=True, **workers(count))
        other.load_state_dict(state)
        assert values(other) == rest
    assert sorted(flat(values(begun) + rest)) == list(range(20))


@WORKERS
def test_a_state_takes_effect_with_the_next_iteration(num_workers: int) -> None:
    """An active iteration continues unchanged; the same loader can go back."""
    loader = load(range(12), batch_size=3, shuffle=True, num_workers=num_workers)
    iterator = iter(loader)
    first = values([next(iterator)])
    state = loader.state_dict()
    rest = values(iterator)
    loader.load_state_dict(state)
    assert values(loader) == rest
    loader.load_state_dict(state)
    assert values(loader) == rest
    assert sorted(flat(first + rest)) == list(range(12))


def test_a_state_resumes_the_draws_of_workers_only() -> None:
    """With seed= the random numbers of the dataset are resumed as well."""
    made: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 5}
    loader = load(Tree(12, draws), **made)
    iterator = iter(loader)
    next(iterator)
    state = jsoned(loader.state_dict())
    rest = plain(iterator)
    other = load(Tree(12, draws), **made)
    other.load_state_dict(state)
    assert plain(other) == rest


@pytest.mark.process
def test_workers_draw_the_same_numbers_after_a_resume() -> None:
    """The seed of the epoch is in the state."""
    loader = load(Tree(12, draws), batch_size=3, shuffle=True, **workers(2))
    iterator = iter(loader)
    next(iterator)
    state = jsoned(loader.state_dict())
    rest = plain(iterator)
    torch.manual_seed(99)
    other = load(Tree(12, draws), batch_size=3, shuffle=True, **workers(2))
    other.load_state_dict(state)
    assert plain(other) == rest
