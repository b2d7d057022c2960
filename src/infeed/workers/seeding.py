"""Setting the generators that user code draws from, before each grain.

In a process of ours they are set and left. In the user's process (inline) they are lent: set for the grain, then put back as
they were. In thread workers they are shared with everybody, so they are left alone.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np

from infeed.importing import when_imported
from infeed.workers.lazyrandom import LazyModule, lazy_numpy, lazy_python, seed_numpy, seed_python

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
