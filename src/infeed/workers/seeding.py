"""Setting the generators that user code draws from, before each grain.

In a process of ours they are set and left. In the user's process (inline) they are lent: set for the grain, then put back as
they were. In thread workers they are shared with everybody, so they are left alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

# The C seeding, without random.seed's look at the type of its argument and the time it takes to hash it.
_seed_random: Final = super(random.Random, random._inst).seed  # type: ignore[attr-defined]  # the module's own generator


def seed_generators(seed: int) -> None:
    """Set ``random``, ``numpy.random`` and, if it is imported, torch's default generator. Takes some 6 microseconds."""
    _seed_random(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch.manual_seed also looks for every accelerator, at twenty times the cost.
        torch.default_generator.manual_seed(seed)


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
