"""Setting the generators that user code draws from, before each grain.

In a process of ours they are set and left. In the user's process (inline) they are lent: set for the grain, then put back as
they were. In thread workers they are shared with everybody, so they are left alone.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import length_hint
from types import ModuleType
from typing import Any, Final, final

import numpy as np

from infeed.import_hooks import when_imported
from infeed.plan.seeds import derive

_SEEDING: Final = ("seed", "setstate", "set_state")


@final
class LazyModule:
    """Stands between a module of random functions and the generator that they are methods of."""

    def __init__(self, module: ModuleType, generator: object, seed: Callable[[int], Any]) -> None:
        self._module = module
        self._seed = seed
        self._pending: int | None = None
        self.draw_count = 0  # grains in which somebody has drawn
        self.users_seed: Any = None  # what user code has seeded the generator with since ``seed``; a state counts as well
        self._functions: dict[str, Any] = {
            name: self.noting(value) if name in _SEEDING else value
            for name, value in vars(module).items()
            if getattr(value, "__self__", None) is generator
        }
        self._traps: dict[str, Any] = {name: self._trap(function) for name, function in self._functions.items()}
        # A seed of the user's makes ours void; one more draw from ours before it would do no harm either.
        vars(module).update(self._traps)

    def seed(self, seed: int) -> None:
        """Let what is drawn next come from this seed."""
        if self._pending is None:
            vars(self._module).update(self._traps)
        self._pending = seed
        self.users_seed = None

    def settle(self) -> None:
        """Seed now, if that is still to be done."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.draw_count += 1
            vars(self._module).update(self._functions)
            self._seed(pending)

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that seeds the generator, made to note that it was called."""

        def seeded(*args: Any, **kwargs: Any) -> Any:
            self.users_seed = (*args, *kwargs.values(), None)[0]
            return function(*args, **kwargs)

        return seeded

    def _trap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            self.settle()
            return function(*args, **kwargs)

        return drawn


def seed_python(seed: int) -> None:
    """Seed ``random`` at once: the C seeding, without ``random.seed``'s look at the type of its argument."""
    super(random.Random, random._inst).seed(seed)
    random._inst.gauss_next = None  # type: ignore[attr-defined]  # the second of a pair that gauss() made under the old seed


def seed_numpy(seed: int) -> None:
    """Seed the legacy ``numpy.random`` at once."""
    np.random.mtrand._rand.seed(seed & 0xFFFFFFFF)


def lazy_python() -> LazyModule:
    return LazyModule(random, random._inst, seed_python)


def lazy_numpy() -> LazyModule:
    """Besides the module's functions, libraries ask for the generator itself: ``numpy.random.mtrand._rand``."""
    original = np.random.mtrand._rand

    def seed(value: int) -> None:
        original.seed(value & 0xFFFFFFFF)

    lazy = LazyModule(np.random, original, seed)

    class LazyRandomState(np.random.RandomState):
        def __getattribute__(self, name: str) -> Any:
            lazy.settle()
            value = getattr(original, name)
            return lazy.noting(value) if name in _SEEDING else value  # np.random.seed asks the generator for it

    np.random.mtrand._rand = LazyRandomState()
    return lazy


# Keeps the generator of a sample apart from the seeds of grains, which come from the same numbers.
_SALT: Final = 0x52474E
_COLLATE_SALT: Final = 0x434F4C


@final
class Place:
    """Where in an epoch a worker is. Belongs to one runner."""

    def __init__(self) -> None:
        # Key, first position, how many, and an iterator of indices that are still to be loaded; of a stream, in its place, a
        # list of what has been read. One tuple, because it is set for every few samples and looked at only if somebody asks.
        self._where: tuple[int, int, int, Iterator[Any] | list[Any] | None] = (0, 0, 1, None)
        # Where samples of the batch were left out: the first position, that of the batch, and the rows as first planned. The
        # generator of a sample belongs to its position in the epoch, whatever was left out before it.
        self.moved: tuple[int, int, list[int]] | None = None
        self._rng: np.random.Generator | None = None
        self._rng_position = -1

    def at_rows(self, key: int, first: int, count: int, rest: Iterator[Any] | None) -> None:
        """The worker loads ``count`` positions from ``first`` on; ``rest`` yields what is still to be loaded."""
        self._where = (key, first, count, rest)
        self._rng = None

    def at_stream(self, key: int, first: int, done: list[Any]) -> None:
        """The worker reads elements from ``first`` on and puts them into ``done``."""
        self._where = (key, first, 0, done)
        self._rng = None

    def at_collation(self, key: int, first: int) -> None:
        """The worker makes a batch of the samples from ``first`` on."""
        self.moved = None
        self.at_rows(key ^ _COLLATE_SALT, first, 1, None)

    def rng(self) -> np.random.Generator:
        key, position, count, progress = self._where
        if isinstance(progress, list):
            position += len(progress)
        elif progress is not None:
            position += count - length_hint(progress) - 1
        if self.moved is not None:
            start, batch_start, rows = self.moved
            position = batch_start + rows[position - start]
        if self._rng is None or position != self._rng_position:
            self._rng = np.random.Generator(np.random.PCG64(derive(key, _SALT, position)))
            self._rng_position = position
        return self._rng


class _Local(threading.local):
    place: Place | None = None


_LOCAL: Final = _Local()


def get_rng() -> np.random.Generator:
    """The random generator of the sample that is being loaded: made from seed, epoch and position, and of nothing else.

    Call it in ``__getitem__`` and draw from what it returns::

        def __getitem__(self, index):
            rng = infeed.get_rng()
            return augment(self.images[index], angle=rng.uniform(-10, 10))

    The numbers are the same inline, in threads and in processes, for any number of workers and ranks, any batch size, and after
    a resume. Within one sample, further calls give the same generator, where it stands. In ``__getitems__`` it belongs to the
    whole call and in ``collate_fn`` to the batch, so there the numbers depend on the batch size. In a stream it belongs to the
    element. Outside of a loader it is fresh and unseeded.
    """
    place = _LOCAL.place
    return np.random.default_rng() if place is None else place.rng()


get_rng.__module__ = "infeed"


def swap_place(place: Place | None) -> Place | None:
    """Let ``get_rng`` in this thread mean this place; gives what it meant before, to be put back."""
    before, _LOCAL.place = _LOCAL.place, place
    return before


# How often torch's generator is looked at: that takes as long as a tiny task.
_TORCH_LOOK_S: Final = 0.01


@final
class _Seeders:
    """How the generators are seeded in this process: at once, or lazily in a process of ours."""

    def __init__(self) -> None:
        self.python: Callable[[int], None] = seed_python
        self.numpy: Callable[[int], None] = seed_numpy
        self.lazy: list[LazyModule] = []
        self.latest = 0
        self.kept: frozenset[str] = frozenset()  # generators that worker_init_fn has seeded


_SEEDERS: Final = _Seeders()


def seed_lazily() -> None:
    """Seed only what is drawn from, from now on. For processes of ours only, before user code is imported."""
    python, numpy = lazy_python(), lazy_numpy()
    _SEEDERS.python, _SEEDERS.numpy = python.seed, numpy.seed
    _SEEDERS.lazy = [python, numpy]
    # Whoever imports torch only when a sample is loaded is in the middle of a grain, whose seed it must get too.
    when_imported("torch", _seed_torch)


def _seed_torch() -> None:
    torch: Any = sys.modules["torch"]
    torch.default_generator.manual_seed(_SEEDERS.latest)


def seed_generators(seed: int) -> None:
    """Set ``random``, ``numpy.random`` and, if it is imported, torch's default generator."""
    _SEEDERS.latest = seed
    kept = _SEEDERS.kept
    if "random" not in kept:
        _SEEDERS.python(seed)
    if "numpy" not in kept:
        _SEEDERS.numpy(seed)
    torch = sys.modules.get("torch")
    if torch is not None and "torch" not in kept:
        # torch.manual_seed also looks for every accelerator, at a hundred times the cost.
        torch.default_generator.manual_seed(seed)


def seed_worker(seed: int) -> None:
    """Seed a process of ours for one loader, before ``worker_init_fn``. It may have worked for another loader before."""
    _SEEDERS.kept = frozenset()
    seed_generators(seed)


def keep_user_seeds(worker_seed: int) -> None:
    """After ``worker_init_fn``, in a process of ours: leave the generators alone that it has seeded, as torch's loader does.

    Seeding one with the worker's own seed asks for nothing that grains do not have.
    """
    python, numpy = _SEEDERS.lazy
    seeds = {"random": python.users_seed, "numpy": numpy.users_seed, "torch": _torch_seed()}
    own = (worker_seed, worker_seed & 0xFFFFFFFF)
    _SEEDERS.kept = frozenset(
        name for name, seed in seeds.items() if seed is not None and not (isinstance(seed, int | np.integer) and seed in own)
    )


def show_worker_seed(seed: int) -> None:
    """Let ``torch.initial_seed()`` in this process of ours say the worker's seed, as in torch's workers, and not the grain's.

    Whoever seeds torch themselves is told their own.
    """

    def show() -> None:
        torch: Any = sys.modules["torch"]
        generator = torch.default_generator

        def initial_seed() -> int:
            real = int(generator.initial_seed())
            return seed if real == _SEEDERS.latest else real

        torch.initial_seed = torch.random.initial_seed = initial_seed

    when_imported("torch", show)


def _torch_seed() -> int | None:
    """What torch's default generator was last seeded with; ``None`` if torch is not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.default_generator.initial_seed())


@final
class DrawWatch:
    """Sees whether user code draws from the global generators. For processes of ours that seed lazily."""

    def __init__(self) -> None:
        self._has_drawn = False
        self._before = self._count()
        self._next_look = 0.0

    def look(self) -> bool:
        """A task has been loaded: whether it is the first in which somebody drew."""
        if self._has_drawn:
            return False
        self._has_drawn = self._count() > self._before or self._has_drawn_from_torch()
        return self._has_drawn

    def _count(self) -> int:
        return sum(one.draw_count for one in _SEEDERS.lazy)

    def _has_drawn_from_torch(self) -> bool:
        torch: Any = sys.modules.get("torch")
        now = time.monotonic()
        if torch is None or now < self._next_look:
            return False
        self._next_look = now + _TORCH_LOOK_S
        fresh = torch.Generator().manual_seed(_SEEDERS.latest)
        return not torch.equal(fresh.get_state(), torch.default_generator.get_state())


def generator_states() -> dict[str, object]:
    """Where each of the global generators is, by name, to see whether somebody drew from it."""
    numpy_state: Any = np.random.get_state()
    states: dict[str, object] = {"random": random.getstate(), "numpy.random": (numpy_state[1].tobytes(), *numpy_state[2:])}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return states


@contextmanager
def lent_generators() -> Iterator[None]:
    """Give the user's process its generators back as they were, whatever happens inside."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch: Any = sys.modules.get("torch")
    torch_state = torch.default_generator.get_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch_state is not None:
            torch.default_generator.set_state(torch_state)
