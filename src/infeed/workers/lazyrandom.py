"""Python's ``random``, seeded only when it is drawn from.

Seeding the Mersenne Twister takes 3.5 microseconds, which for tiny samples is as much as loading them, and most datasets never
draw from it. So in a process of ours the module's functions are replaced by traps before any user code is imported. The first
draw of a grain springs them: the generator is seeded and the module gets its own functions back, until the next grain.

``from random import choice`` holds on to a trap: such a draw costs one more Python call, and is seeded all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, final

_NAMES: Final = (
    "betavariate", "binomialvariate", "choice", "choices", "expovariate", "gammavariate", "gauss", "getrandbits", "getstate",
    "lognormvariate", "normalvariate", "paretovariate", "randbytes", "randint", "random", "randrange", "sample", "setstate",
    "shuffle", "triangular", "uniform", "vonmisesvariate", "weibullvariate",
)  # fmt: skip


@final
class LazyRandom:
    """Stands between the module ``random`` and its generator. One per process, made by ``install``."""

    def __init__(self) -> None:
        generator: random.Random = random._inst
        self._seed = super(random.Random, generator).seed
        self._pending: int | None = None
        self._functions = {name: getattr(random, name) for name in (*_NAMES, "seed") if hasattr(random, name)}
        self._traps = {name: self._trap(function) for name, function in self._functions.items()}
        # A seed of the user's makes ours void.
        self._traps["seed"] = self._seed_trap(self._functions["seed"])
        self._set(self._traps)

    def seed(self, seed: int) -> None:
        """Let what is drawn next come from this seed."""
        if self._pending is None:
            self._set(self._traps)
        self._pending = seed

    def _trap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if self._pending is not None:
                self._spring()
            return function(*args, **kwargs)

        return drawn

    def _seed_trap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            self._pending = None
            self._set(self._functions)
            return function(*args, **kwargs)

        return seeded

    def _spring(self) -> None:
        assert self._pending is not None
        self._seed(self._pending)
        # gauss() keeps the second of each pair that it makes; it belongs to the old seed.
        random._inst.gauss_next = None
        self._pending = None
        self._set(self._functions)

    def _set(self, functions: dict[str, Callable[..., Any]]) -> None:
        for name, function in functions.items():
            setattr(random, name, function)
