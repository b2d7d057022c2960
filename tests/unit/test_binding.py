"""Which datasets are recognized as drawing from generators that each worker has of its own."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infeed.engine.binding import draws_per_worker


def get_worker_info() -> Any:
    """Named as torch's and infeed's functions."""


OWN = random.Random(1)
own_seed = get_worker_info


def make_generator() -> random.Random:
    return random.Random(get_worker_info().id)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


class Plain:
    def __init__(self, part: Any = None) -> None:
        self.part = part

    def __getitem__(self, index: int) -> Any:
        return random.random()


class Seeding(Plain):
    def __getitem__(self, index: int) -> Any:
        return random.Random(get_worker_info().seed)


class SeedingTorch(Plain):
    def __getitem__(self, index: int) -> Any:
        import torch

        torch.manual_seed(index)
        return [torch.initial_seed() for _ in range(2)]


class InNestedFunction(Plain):
    def __getitem__(self, index: int) -> Any:
        return [lambda: get_worker_info() for _ in range(2)]


class Inheriting(Seeding):
    pass


class ByFunction(Plain):
    def __getitem__(self, index: int) -> Any:
        return make_generator()


class ByOtherName(Plain):
    def __getitem__(self, index: int) -> Any:
        return own_seed()


class ByProperty(Plain):
    @functools.cached_property
    def rng(self) -> Any:
        return get_worker_info()


class ByStaticMethod(Plain):
    @staticmethod
    def rng() -> Any:
        return get_worker_info()


class ByDecoratedMethod(Plain):
    @decorated
    def __getitem__(self, index: int) -> Any:
        return get_worker_info()


class ByHelperClass(Plain):
    def __getitem__(self, index: int) -> Any:
        return Seeding()


class ByGlobal(Plain):
    def __getitem__(self, index: int) -> Any:
        return OWN.random()


class Proxy:
    """Of nothing yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


class WithProxy(Plain):
    current = Proxy()

    def __getitem__(self, index: int) -> Any:
        return PROXY


PROXY = Proxy()


class BySlots:
    __slots__ = ("transform",)

    def __init__(self, transform: Any) -> None:
        self.transform = transform


SEEDING: dict[str, Any] = {
    "its class": Seeding(),
    "torch's seed": SeedingTorch(),
    "a nested function": InNestedFunction(),
    "a base class": Inheriting(),
    "a function it calls": ByFunction(),
    "another name": ByOtherName(),
    "a cached property": ByProperty(),
    "a static method": ByStaticMethod(),
    "a decorated method": ByDecoratedMethod(),
    "a class it uses": ByHelperClass(),
    "an attribute": Plain(Seeding()),
    "attributes in lists": Plain([Plain({"a": (Seeding(),)})]),
    "an attribute in slots": BySlots(Seeding()),
    "a function": make_generator,
    "a partial": functools.partial(make_generator, 1),
    "a cached function": functools.lru_cache(make_generator),
    "a bound method": Plain(Seeding().__getitem__),
    "a lambda": lambda samples: get_worker_info(),
    "a generator": Plain(random.Random(1)),
    "a generator of NumPy": Plain(Plain([np.random.default_rng(1)])),
    "an old generator of NumPy": Plain(np.random.RandomState(1)),
    "a global generator": ByGlobal(),
    "a recursive object": (recursive := Plain()),
}
recursive.part = [recursive, Seeding()]


@pytest.mark.parametrize("root", SEEDING.values(), ids=SEEDING)
def test_code_that_may_create_a_generator_per_worker_is_found(root: Any) -> None:
    """Wherever the dataset or collate_fn refers to it."""
    assert draws_per_worker(Plain(), root)


OTHERS: dict[str, Any] = {
    "an object": Plain([1, "a", None]),
    "proxies": WithProxy(Proxy()),
    "a long list": list(range(10_000)),
    "a name that is no code": {"get_worker_info": 1},
    "a built-in function": len,
    "a function of the global generator": random.random,
    "a method of the global generator": random.choice,
}


@pytest.mark.parametrize("root", OTHERS.values(), ids=OTHERS)
def test_other_code_is_not(root: Any) -> None:
    """Batches stay with whoever is free."""
    assert not draws_per_worker(root)


@pytest.mark.torch
def test_torchs_own_code_does_not_count() -> None:
    """Its default collation asks for the worker, and draws nothing. What torch's datasets hold does count."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data

    assert not draws_per_worker(data.TensorDataset(torch.zeros(3)), data.default_collate)
    assert not draws_per_worker(data.ConcatDataset([data.Subset(range(3), [1])]))
    assert draws_per_worker(data.ConcatDataset([data.Subset(Seeding(), [1])]))
    assert draws_per_worker(Plain(torch.Generator()))


def test_the_search_ends_in_large_objects() -> None:
    """After a fixed number of objects."""
    root: Any = Seeding()
    for _ in range(10_000):
        root = [root]

    assert not draws_per_worker(root)
