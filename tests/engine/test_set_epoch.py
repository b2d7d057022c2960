"""Epochs: set by the user or advanced by the loader, and passed to all objects with ``set_epoch``, also in live workers."""

from __future__ import annotations

import functools
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Journal, Squares, Stream, Tree, collected, flat, kill_process, plain


class Epochs:
    """Sample ``i`` is the epoch that was set last."""

    def __init__(self, length: int = 12) -> None:
        self.length, self.epoch = length, -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Transform:
    """Adds the epoch that was set last to its argument."""

    def __init__(self) -> None:
        self.epoch = -1

    def __call__(self, value: Any) -> Any:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Compose:
    """Applies a list of transforms in order."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Transformed:
    """Numbers with a transform."""

    def __init__(self, transform: Any, length: int = 12) -> None:
        self.transform, self.length = transform, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class Subset:
    """Some samples of another dataset."""

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


class Slotted:
    """A class without ``__dict__``."""

    __slots__ = ("transform",)

    def __init__(self) -> None:
        self.transform = Transform()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class EpochStream:
    """An iterable dataset whose elements are the epoch that was set last."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Fetching(Epochs):
    """Has `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.epoch for _ in indices]


def epochs_seen(dataset: Any, epochs: int = 3, **options: Any) -> list[list[Any]]:
    """Returns the distinct samples of each of some epochs."""
    with infeed.DataLoader(dataset, **{"batch_size": 2, "seed": 3, **options}) as loader:
        return [sorted(set(flat(collected(loader)))) for _ in range(epochs)]


DATASETS_WITH_EPOCHS: dict[str, Any] = {
    "dataset": Epochs,
    "transform": lambda: Transformed(Transform()),
    "list of transforms": lambda: Transformed(Compose(abs, Compose(abs, Transform()))),
    "tuple": lambda: Transformed(Compose(abs, (Tree(1, abs), Transform())[1])),
    "subset": lambda: Subset(Epochs(), list(range(11, -1, -1))),
    "subset of a subset": lambda: Subset(Subset(Transformed(Compose(Transform())), list(range(12))), list(range(12))),
    "stream": EpochStream,
    "__getitems__": Fetching,
}


@pytest.mark.parametrize("make", DATASETS_WITH_EPOCHS.values(), ids=DATASETS_WITH_EPOCHS)
def test_the_epoch_is_set_before_its_first_sample(make: Any, light_engine: dict[str, Any]) -> None:
    """The user calls nothing; persistent workers and any depth of nesting work."""
    assert epochs_seen(make(), **light_engine) == [[0], [1], [2]]


@pytest.mark.process
def test_the_epoch_is_set_in_every_kind_of_process(process_engine: dict[str, Any]) -> None:
    """With each start method."""
    assert epochs_seen(Epochs(), **process_engine) == [[0], [1], [2]]


@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(Slotted, id="slot"),
        pytest.param(lambda: Transformed(functools.partial(Transform())), id="functools.partial"),
    ],
)
def test_the_epoch_is_set_in_a_transform_in_a_slot_or_a_partial(hidden: Any) -> None:
    """``@dataclass(slots=True)`` and ``partial`` are common ways to hold a transform."""
    assert epochs_seen(hidden()) == [[0], [1], [2]]


class Collate:
    """Makes a batch of the epoch that was set last."""

    def __init__(self) -> None:
        self.epoch = -1

    def __call__(self, samples: list[Any]) -> list[int]:
        return [self.epoch]

    def collate(self, samples: list[Any]) -> list[int]:
        return [self.epoch]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("make", [Collate, lambda: Collate().collate], ids=["object", "method"])
def test_the_epoch_is_set_in_collate_fn(make: Any, light_engine: dict[str, Any]) -> None:
    """collate_fn is an object, or the method of one."""
    assert epochs_seen(Squares(12), collate_fn=make(), **light_engine) == [[0], [1], [2]]


def test_arrays_need_no_set_epoch(light_engine: dict[str, Any]) -> None:
    """Arrays have no such method and still load."""
    with infeed.DataLoader((np.arange(8), np.arange(8)), batch_size=4, **light_engine) as loader:
        loader.set_epoch(3)
        assert len(collected(loader)) == 2


# --- set_epoch of the user


def test_set_epoch_gives_the_order_of_that_epoch(light_engine: dict[str, Any]) -> None:
    """Later epochs follow; workers receive them."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    with infeed.DataLoader(Squares(24), **options) as inline:
        expected = [collected(inline) for _ in range(5)]
    with infeed.DataLoader(Squares(24), **options, **light_engine) as loader:
        for first in (3, 0, 1, 3):
            loader.set_epoch(first)
            assert loader.epoch == first
            assert collected(loader) == expected[first]
            assert loader.epoch == first + 1
            assert collected(loader) == expected[first + 1]
        loader.set_epoch(1)
        loader.set_epoch(2)
        assert collected(loader) == expected[2]


def test_set_epoch_reaches_live_workers(light_engine: dict[str, Any]) -> None:
    """Forwards, backwards, and the same epoch again."""
    with infeed.DataLoader(Epochs(), batch_size=2, **light_engine) as loader:
        for number in (5, 6, 2, 2, 0, 1 << 40):
            loader.set_epoch(number)
            assert set(flat(collected(loader))) == {number}


def test_an_abandoned_epoch_is_not_set_again(light_engine: dict[str, Any]) -> None:
    """After ``break`` the next epoch is set, also if batches of the old one were in flight."""
    with infeed.DataLoader(Epochs(40), batch_size=2, **light_engine) as loader:
        for number in range(4):
            for batch in loader:
                assert set(plain(batch)) == {number}
                break
        loader.set_epoch(9)
        assert set(flat(collected(loader))) == {9}


def test_an_active_iteration_keeps_its_epoch() -> None:
    """``set_epoch`` affects the next one."""
    with infeed.DataLoader(Squares(16), batch_size=4, shuffle=True, seed=3) as loader:
        expected = [collected(loader) for _ in range(6)]
        loader.set_epoch(0)
        under_way = iter(loader)
        begun = [plain(next(under_way))]
        loader.set_epoch(5)
        assert begun + [plain(batch) for batch in under_way] == expected[0]
        assert collected(loader) == expected[5]


def test_set_epoch_after_loading_a_state_of_that_epoch_keeps_the_position() -> None:
    """Frameworks call ``set_epoch`` at the beginning of every epoch, also of a resumed one."""
    with infeed.DataLoader(Squares(16), batch_size=4, shuffle=True, seed=3) as loader:
        loader.set_epoch(2)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = [plain(batch) for batch in iterator]
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert loader.state_dict() == state
        assert collected(loader) == rest
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert loader.state_dict()["position"] == 0
        assert len(collected(loader)) == 4


@pytest.mark.parametrize("wrong", [-1, 1 << 62, 1.0, "1", None, [1], float("nan")])
def test_an_invalid_epoch_is_rejected_and_changes_nothing(wrong: Any) -> None:
    """The error has name, value, problem and fix."""
    with infeed.DataLoader(Squares(16), batch_size=4, seed=3) as loader:
        loader.set_epoch(4)
        with pytest.raises(infeed.ConfigError, match=r"epoch=.* must be (from 0 to|an int).*; pass the number"):
            loader.set_epoch(wrong)
        assert loader.epoch == 4


@pytest.mark.parametrize("wrong", [10**5000, -(10**5000)], ids=["above", "below"])
def test_a_huge_epoch_is_rejected(wrong: int) -> None:
    """Raises ConfigError."""
    with pytest.raises(infeed.ConfigError):
        infeed.DataLoader(Squares(16)).set_epoch(wrong)


def test_a_bool_is_rejected_or_has_a_loadable_state() -> None:
    """If it is accepted, the state can be loaded again."""
    loader = infeed.DataLoader(Squares(16), seed=3)
    try:
        loader.set_epoch(True)
    except infeed.ConfigError:
        return
    loader.load_state_dict(loader.state_dict())


def test_numpy_integers_are_epochs() -> None:
    """NumPy integers come from schedules, and are plain in the state."""
    loader = infeed.DataLoader(Squares(16))
    number: Any = np.int64(3)
    loader.set_epoch(number)
    assert type(loader.state_dict()["epoch"]) is int


class EpochSampler:
    """Reverses its order in odd epochs; knows the epoch only from ``set_epoch``."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(4)) if not self.epochs or self.epochs[-1] % 2 == 0 else iter(range(3, -1, -1))

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class BatchSampler:
    """Batches of a sampler, held like in torch's ``BatchSampler``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(self.sampler)])


def test_set_epoch_reaches_the_sampler() -> None:
    """As training loops do with a distributed sampler."""
    sampler = EpochSampler()
    with infeed.DataLoader(Tree(4, int), batch_size=4, sampler=sampler) as loader:
        assert collected(loader) == [[0, 1, 2, 3]]
        loader.set_epoch(1)
        assert sampler.epochs == [1]
        assert collected(loader) == [[3, 2, 1, 0]]


def test_set_epoch_reaches_a_batch_sampler_and_the_sampler_in_it() -> None:
    """`set_epoch` of either object is called."""
    inner = EpochSampler()
    with infeed.DataLoader(Tree(4, int), batch_sampler=BatchSampler(inner)) as loader:
        loader.set_epoch(1)
        assert collected(loader) == [[3, 2, 1, 0]]
    assert inner.epochs == [1]


def test_an_exception_of_a_samplers_set_epoch_reaches_the_user() -> None:
    """The loader is unchanged."""

    class Refusing(EpochSampler):
        def set_epoch(self, epoch: int) -> None:
            raise LookupError("no such epoch")

    with infeed.DataLoader(Tree(4, int), batch_size=4, sampler=Refusing()) as loader:
        with pytest.raises(LookupError, match="no such epoch"):
            loader.set_epoch(1)
        assert loader.epoch == 0
        assert collected(loader) == [[0, 1, 2, 3]]


class Unmeasurable(Squares):
    """Its length raises for a while, as when a disk is unavailable."""

    is_away = False

    def __len__(self) -> int:
        if self.is_away:
            raise OSError("the disk is away")
        return super().__len__()


def test_an_epoch_that_could_not_start_is_not_counted() -> None:
    """The exception of the dataset reaches the user and ends the iteration; later, the same epoch starts."""
    dataset = Unmeasurable(8)
    with infeed.DataLoader(dataset, batch_size=4, shuffle=True, seed=3) as loader:
        expected = collected(loader)
        loader.set_epoch(0)
        dataset.is_away = True
        for _ in range(2):
            iterator = iter(loader)
            with pytest.raises(OSError, match="the disk is away"):
                next(iterator)
            assert list(iterator) == []
        dataset.is_away = False
        assert loader.epoch == 0
        assert collected(loader) == expected


# --- deaths and exceptions


class Mortal(Epochs):
    """Kills its process at one sample of epoch 1, once; records the epochs that are set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(24)
        self.folder, self.journal = folder, Journal(folder / "journal")

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.journal.write(f"{os.getpid()} set {epoch}")

    def __getitem__(self, index: int) -> int:
        self.journal.write(f"{os.getpid()} loads {self.epoch}")
        died = self.folder / "died"
        if self.epoch == 1 and index == 13 and not died.exists():
            died.touch()
            kill_process(os.getpid())
        return self.epoch


@pytest.mark.process
def test_a_replacement_worker_gets_the_epoch_before_it_loads(tmp_path: Path, forkserver: dict[str, Any]) -> None:
    """The worker started after the epoch began."""
    dataset = Mortal(tmp_path)
    assert epochs_seen(dataset, batch_size=4, **{**forkserver, "num_workers": 1}) == [[0], [1], [2]]
    assert (tmp_path / "died").exists()
    epoch_of: dict[str, str] = {}
    for line in dataset.journal.lines():
        pid, what, epoch = line.split()
        if what == "set":
            epoch_of[pid] = epoch
        assert epoch_of.get(pid) == epoch
    assert len(epoch_of) == 2


class RefusingEpoch(Epochs):
    """Raises in `set_epoch` for epoch 1."""

    def set_epoch(self, epoch: int) -> None:
        if epoch == 1:
            raise LookupError("epoch 1 is not for me")
        super().set_epoch(epoch)


def test_an_exception_of_set_epoch_reaches_the_user(light_engine: dict[str, Any]) -> None:
    """It keeps its type and has a note that says where it was raised; the next epoch loads normally."""
    with infeed.DataLoader(RefusingEpoch(), batch_size=4, **light_engine) as loader:
        assert set(flat(collected(loader))) == {0}
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises(LookupError, match="epoch 1 is not for me") as caught:
                next(iterator)
            assert "set_epoch" in "".join(caught.value.__notes__)
        assert list(iterator) == []
        assert set(flat(collected(loader))) == {2}


# --- unusual datasets


class Odd(Squares):
    """Properties that raise, and attributes with misleading names."""

    def __init__(self) -> None:
        super().__init__(4)
        self.cycle = [self]
        self.own: Any = {"self": self, "cycle": self.cycle}
        self.classes = [Epochs, int, type]
        self.set_epoch_name = "set_epoch"
        self.array = np.arange(10)
        self.objects = np.array([self, None], dtype=object)

    @property
    def broken(self) -> int:
        raise RuntimeError("a property was read")


class Answering:
    """Returns a value for every attribute name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self


class KeyedNames:
    """Looks attributes up in a dict, and raises KeyError instead of AttributeError, as many classes do."""

    def __init__(self) -> None:
        self.__dict__["data"] = {}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


class Plain:
    """An object that can have attributes."""


class NotCallable:
    set_epoch = 3


def test_unusual_attributes_are_harmless() -> None:
    """Cycles, classes, properties that raise, misleading names."""
    dataset: Any = Odd()
    dataset.more = [Answering(), NotCallable(), object(), lambda: None, iter([1]), Ellipsis, {1, 2}, b"bytes", open]
    with infeed.DataLoader(dataset, batch_size=2) as loader:
        assert len(collected(loader)) == 2


def test_an_attribute_that_raises_key_error_for_unknown_names_is_harmless() -> None:
    """It is only referenced; its names are not needed."""
    dataset: Any = Squares(4)
    dataset.names = KeyedNames()
    with infeed.DataLoader(dataset, batch_size=2) as loader:
        assert len(collected(loader)) == 2


def test_a_dead_weak_proxy_is_harmless() -> None:
    """A cache may hold one."""
    dataset: Any = Squares(4)
    dataset.proxy = weakref.proxy(Plain())
    with infeed.DataLoader(dataset, batch_size=2) as loader:
        assert len(collected(loader)) == 2


class CountingList(list[Any]):
    """Counts the items that are read from all such lists."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            CountingList.read += 1
            yield item


def test_huge_lists_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list is data."""
    monkeypatch.setattr(CountingList, "read", 0)
    dataset: Any = Squares(4)
    dataset.paths = CountingList(range(10_000))
    dataset.labels = {"all": CountingList(range(10_000))}
    with infeed.DataLoader(dataset, batch_size=2) as loader:
        assert len(collected(loader)) == 2
    assert CountingList.read == 0


def test_a_tree_of_small_lists_is_searched_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested annotations: none of the lists is long, but together they are."""
    monkeypatch.setattr(CountingList, "read", 0)

    def tree(depth: int) -> Any:
        return CountingList(tree(depth - 1) for _ in range(30)) if depth else object()

    dataset: Any = Squares(4)
    dataset.annotations = tree(4)  # 838,000 objects
    with infeed.DataLoader(dataset, batch_size=2) as loader:
        assert len(collected(loader)) == 2
    assert 0 < CountingList.read <= 30 * 5_000


def test_a_dataset_that_holds_its_loader_does_not_reset_it() -> None:
    """As with data modules, which are a dataset and own the loader."""
    dataset: Any = Squares(8)
    loader = dataset.loader = infeed.DataLoader(dataset, batch_size=2, seed=3)
    try:
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict()["step"] == 1
        assert len(list(iterator)) == 3
        assert loader.epoch == 1
    finally:
        loader.close()


# --- equal for all workers


class Redrawing(Epochs):
    """Draws its samples in ``set_epoch``, like datasets that shuffle their files."""

    def set_epoch(self, epoch: int) -> None:
        self.number = random.random()

    def __getitem__(self, index: int) -> Any:
        return self.number


@pytest.mark.process
def test_draws_in_set_epoch_do_not_depend_on_the_workers(forkserver: dict[str, Any]) -> None:
    """They are a function of seed and epoch, like everything else (P2)."""
    random.seed(1)
    inline = epochs_seen(Redrawing())
    random.seed(2)
    assert epochs_seen(Redrawing()) == inline
    processes = epochs_seen(Redrawing(), **forkserver)
    assert processes == inline


def test_two_concurrent_iterations_have_their_own_epochs() -> None:
    """Each worker process has its own copy of the dataset; without workers, iterations take turns with one."""
    with infeed.DataLoader(Epochs(8), batch_size=2, seed=3) as loader:
        pairs = [(set(plain(one)), set(plain(other))) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [({0}, {1})] * 4


def test_resumed_iterable_datasets_get_the_epoch(light_engine: dict[str, Any]) -> None:
    """Before the first element that is read again."""
    with infeed.DataLoader(EpochStream(), batch_size=4, **light_engine) as loader:
        loader.set_epoch(3)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert set(flat(collected(loader))) == {3}


def test_iterable_datasets_without_set_epoch_have_epochs_too() -> None:
    """The loader counts them."""
    with infeed.DataLoader(Stream(4), batch_size=2) as loader:
        collected(loader)
        assert loader.epoch == 1
        loader.set_epoch(7)
        collected(loader)
        assert loader.epoch == 8


class Recording:
    """Records the epochs that were set; one sample blocks in the first epoch."""

    def __init__(self, length: int, at: int) -> None:
        self.length, self.at = length, at
        self.epochs: list[int] = []
        self.is_waiting, self.may_go = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.is_waiting.set()
            assert self.may_go.wait(30)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_threads_do_not_set_an_abandoned_epoch() -> None:
    """One thread is blocked with more tasks of the first epoch queued, while the other loads the next epoch."""
    dataset = Recording(400, 200)
    with infeed.DataLoader(dataset, num_workers=2, worker="thread", prefetch=300, timeout=60) as loader:
        batches = iter(loader)
        for _ in range(100):
            next(batches)
        assert dataset.is_waiting.wait(30)
        del batches
        rest = iter(loader)
        first = plain(next(rest))
        dataset.may_go.set()
        assert flat([first, *collected(rest)]) == list(range(400))
        assert dataset.epochs == [0, 1]
