"""``random`` and ``numpy.random``, seeded only when they are drawn from.

Seeding a Mersenne Twister takes 2 to 4 microseconds, which for tiny samples is as much as loading them, and most datasets never
draw from these generators. So in a process of ours the functions of both modules are replaced by traps before any user code is
imported. The first draw of a grain springs them: the generator is seeded and the module gets its own functions back, until the
next grain.

``from random import choice`` holds on to a trap: such a draw costs one more Python call, and is seeded all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, final

import numpy as np

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
