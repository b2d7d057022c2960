"""Random generators for user code: global generators seeded before each grain, and ``get_rng`` for each sample.

A grain is a group of samples that share one seed. Worker processes seed the global generators and leave them seeded. With
``num_workers=0`` the generators are seeded for the grain and then restored. Thread workers never seed them, because all threads
of the process share them.
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
    """Defers seeding of a module-level generator (``random``, ``numpy.random``) until user code first draws from it.

    It replaces the module's functions, which are bound methods of the generator.
    """

    def __init__(self, module: ModuleType, generator: object, seed: Callable[[int], Any]) -> None:
        self._module = module
        self._seed = seed
        self._pending: int | None = None
        self.draw_count = 0  # grains in which user code drew a number
        self.users_seed: Any = None  # the seed or state that user code has set since ``seed``
        self._functions: dict[str, Any] = {
            name: self.noting(value) if name in _SEEDING else value
            for name, value in vars(module).items()
            if getattr(value, "__self__", None) is generator
        }
        self._traps: dict[str, Any] = {name: self._trap(function) for name, function in self._functions.items()}
        # User calls to seed() are trapped too: they apply the pending seed first, which is harmless.
        vars(module).update(self._traps)

    def seed(self, seed: int) -> None:
        """Seed the generator with this value on the next draw."""
        if self._pending is None:
            vars(self._module).update(self._traps)
        self._pending = seed
        self.users_seed = None

    def settle(self) -> None:
        """Apply the pending seed, if there is one."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.draw_count += 1
            vars(self._module).update(self._functions)
            self._seed(pending)

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a seeding function so that it records the seed that user code passes."""

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
    """Seed ``random`` immediately with the C implementation, which skips the argument type checks of ``random.seed``."""
    super(random.Random, random._inst).seed(seed)
    random._inst.gauss_next = None  # type: ignore[attr-defined]  # cached second value of a gauss() pair from the old seed


def seed_numpy(seed: int) -> None:
    """Seed the legacy ``numpy.random`` generator immediately."""
    np.random.mtrand._rand.seed(seed & 0xFFFFFFFF)


def lazy_python() -> LazyModule:
    return LazyModule(random, random._inst, seed_python)


def lazy_numpy() -> LazyModule:
    """Defer seeding of ``numpy.random`` and of the generator ``numpy.random.mtrand._rand``, which libraries use directly."""
    original = np.random.mtrand._rand

    def seed(value: int) -> None:
        original.seed(value & 0xFFFFFFFF)

    lazy = LazyModule(np.random, original, seed)

    class LazyRandomState(np.random.RandomState):
        def __getattribute__(self, name: str) -> Any:
            lazy.settle()
            value = getattr(original, name)
            return lazy.noting(value) if name in _SEEDING else value  # np.random.seed looks up the method here

    np.random.mtrand._rand = LazyRandomState()
    return lazy


# Separates the per-sample generators from the grain seeds, which derive from the same numbers.
_SALT: Final = 0x52474E
_COLLATE_SALT: Final = 0x434F4C


@final
class EpochPosition:
    """The worker's current position in the epoch, from which ``get_rng`` derives its seed. Each runner has one."""

    def __init__(self) -> None:
        # Key, first position, row count, and an iterator over the indices not loaded yet. For an iterable dataset, the last
        # item is the list of elements read so far. One tuple: it is set often and read only when user code calls get_rng.
        self._where: tuple[int, int, int, Iterator[Any] | list[Any] | None] = (0, 0, 1, None)
        self._moved: tuple[int, int, list[int]] | None = None
        self._rng: np.random.Generator | None = None
        self._rng_position = -1

    def begin(self, moved: tuple[int, int, list[int]] | None) -> None:
        """Begin a task. ``moved`` is set if samples of the batch were skipped.

        A sample's generator depends on its planned position, not on skipped samples before it. So ``moved`` has the first
        position of the task, the first position of the batch, and the rows as first planned.
        """
        self._moved = moved

    def at_rows(self, key: int, first: int, count: int, rest: Iterator[Any] | None) -> None:
        """Record that the worker loads ``count`` positions from ``first``; ``rest`` yields the indices not loaded yet."""
        self._where = (key, first, count, rest)
        self._rng = None

    def at_stream(self, key: int, first: int, done: list[Any]) -> None:
        """Record that the worker reads elements from ``first`` and appends them to ``done``."""
        self._where = (key, first, 0, done)
        self._rng = None

    def at_collation(self, key: int, first: int) -> None:
        """Record that the worker collates the batch that starts at position ``first``."""
        self._moved = None
        self.at_rows(key ^ _COLLATE_SALT, first, 1, None)

    def rng(self) -> np.random.Generator:
        key, position, count, progress = self._where
        if isinstance(progress, list):
            position += len(progress)
        elif progress is not None:
            position += count - length_hint(progress) - 1
        if self._moved is not None:
            start, batch_start, rows = self._moved
            position = batch_start + rows[position - start]
        if self._rng is None or position != self._rng_position:
            self._rng = np.random.Generator(np.random.PCG64(derive(key, _SALT, position)))
            self._rng_position = position
        return self._rng


class _Local(threading.local):
    place: EpochPosition | None = None


_LOCAL: Final = _Local()


def get_rng() -> np.random.Generator:
    """Return the random generator of the current sample, seeded only from the seed, the epoch and the position.

    Call it in ``__getitem__`` and draw from the generator it returns.

    The numbers are the same with ``num_workers=0``, threads and processes. They do not depend on the number of workers or
    ranks or on the batch size, and they are the same after a resume. Further calls within one sample return the same generator
    in its current state.

    In ``__getitems__`` the generator belongs to the whole call, and in ``collate_fn`` to the batch, so there the numbers depend
    on the batch size. In an iterable dataset it belongs to the element. Outside a loader, each call returns a new, unseeded
    generator.

    Examples:
        >>> import infeed
        >>> class Dice:
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return int(infeed.get_rng().integers(1, 7))
        >>> first, second = (list(infeed.DataLoader(Dice(), batch_size=None, seed=1)) for _ in range(2))
        >>> first == second
        True
    """
    place = _LOCAL.place
    return np.random.default_rng() if place is None else place.rng()


get_rng.__module__ = "infeed"


def swap_place(place: EpochPosition | None) -> EpochPosition | None:
    """Make ``get_rng`` in this thread use ``place``; return the previous one, so that the caller can restore it."""
    before, _LOCAL.place = _LOCAL.place, place
    return before


# Check torch's generator at most this often: a check takes as long as a tiny task.
_TORCH_LOOK_S: Final = 0.01


@final
class _Seeders:
    """The seeding functions of this process: immediate, or lazy in a worker process."""

    def __init__(self) -> None:
        self.python: Callable[[int], None] = seed_python
        self.numpy: Callable[[int], None] = seed_numpy
        self.lazy: list[LazyModule] = []
        self.latest = 0
        self.kept: frozenset[str] = frozenset()  # generators that worker_init_fn has seeded


_SEEDERS: Final = _Seeders()


def seed_lazily() -> None:
    """Seed generators only on their first draw. For worker processes only; call it before user code is imported."""
    python, numpy = lazy_python(), lazy_numpy()
    _SEEDERS.python, _SEEDERS.numpy = python.seed, numpy.seed
    _SEEDERS.lazy = [python, numpy]
    # User code may import torch while it loads a sample: apply the seed of the current grain then.
    when_imported("torch", _seed_torch)


def _seed_torch() -> None:
    torch: Any = sys.modules["torch"]
    torch.default_generator.manual_seed(_SEEDERS.latest)


def seed_generators(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and, if torch is imported, its default generator."""
    _SEEDERS.latest = seed
    kept = _SEEDERS.kept
    if "random" not in kept:
        _SEEDERS.python(seed)
    if "numpy" not in kept:
        _SEEDERS.numpy(seed)
    torch = sys.modules.get("torch")
    if torch is not None and "torch" not in kept:
        # torch.manual_seed also checks for every accelerator, which takes 100 times as long.
        torch.default_generator.manual_seed(seed)


def seed_worker(seed: int) -> None:
    """Seed a worker process for one loader, before ``worker_init_fn``. The process may have served another loader before."""
    _SEEDERS.kept = frozenset()
    seed_generators(seed)


def keep_user_seeds(worker_seed: int) -> None:
    """Stop seeding the generators that ``worker_init_fn`` has seeded, as torch does. Call it after ``worker_init_fn``.

    A generator seeded with the worker's own seed is still seeded for each grain.
    """
    python, numpy = _SEEDERS.lazy
    seeds = {"random": python.users_seed, "numpy": numpy.users_seed, "torch": _torch_seed()}
    own = (worker_seed, worker_seed & 0xFFFFFFFF)
    _SEEDERS.kept = frozenset(
        name for name, seed in seeds.items() if seed is not None and not (isinstance(seed, int | np.integer) and seed in own)
    )


def show_worker_seed(seed: int) -> None:
    """Make ``torch.initial_seed()`` return the worker's seed, as in torch's workers, instead of the grain's.

    If user code has seeded torch, it returns that seed. For worker processes only.
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
    """Return the last seed of torch's default generator; ``None`` if torch is not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.default_generator.initial_seed())


@final
class DrawWatch:
    """Detects whether user code draws from the global generators. For worker processes that seed lazily."""

    def __init__(self) -> None:
        self._has_drawn = False
        self._before = self._count()
        self._next_look = 0.0

    def look(self) -> bool:
        """Return whether the task just loaded is the first in which user code drew a number."""
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


def generator_states() -> dict[str, Any]:
    """Return the state of each global generator by name; equal states have equal pickles."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.default_generator.get_state().numpy()
    return states


@contextmanager
def lent_generators() -> Iterator[None]:
    """Restore the global generators of the main process on exit, also after an exception."""
    states = generator_states()
    try:
        yield
    finally:
        random.setstate(states["random"])
        np.random.set_state(states["numpy.random"])
        if "torch" in states:
            torch: Any = sys.modules["torch"]
            torch.default_generator.set_state(torch.from_numpy(states["torch"]))
