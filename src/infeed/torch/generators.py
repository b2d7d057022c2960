"""torch generators in the state of a loader: what it draws from, how it is saved, and how a resumed run repeats its draws."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch

from infeed.errors import StateError

# Names in a state: torch's default generator, the loader's, and the sampler's if it differs.
DEFAULT: Final = "default"
LOADER: Final = "generator"
SAMPLER: Final = "sampler_generator"
# The generator of the order when the order was drawn, if user code drew from it after ``iter``.
ORDER: Final = "order_generator"
NAMES: Final = (DEFAULT, LOADER, SAMPLER, ORDER)
# Key of the digest of the default generator at the time of the state.
NOW: Final = "now"


@final
class LentGenerator:
    """Sets torch's default generator to the state of a saved run while the loader draws.

    NOTE [generators in states]
      A resumed epoch repeats its draws (the base seed of workers, the order): its state holds the generator states from before
      ``iter``. Resuming sets a generator that was passed to the loader or the sampler to its saved state. The default generator
      of the process belongs to user code. Only while the loader draws does it get the state of the saved run (``lending``), in
      this epoch and the following ones. The loader draws from it directly again once its state matches the saved run: user code
      has restored it, or has seeded it with another seed.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None  # in the saved run, if this run continues it
        self._is_lending = False
        self._is_for_one_epoch = False  # user code has restored the default generator
        self._seeded_with = 0  # initial seed of the default generator when a state was loaded

    def begin_resume(self) -> None:
        """Forget what was lent, because another state is loaded."""
        self._state = None
        self._seeded_with = torch.default_generator.initial_seed()

    def lend(self, state: torch.Tensor) -> None:
        """Continue the saved run from a state of its default generator."""
        self._state = None if torch.equal(state, torch.default_generator.get_state()) else state

    def states(self, generators: dict[str, torch.Generator]) -> dict[str, torch.Tensor]:
        """Return the states of generators by name; for the default one, the state that the loader would draw from."""
        states = {name: generator.get_state() for name, generator in generators.items()}
        if DEFAULT in states and self._state is not None:
            states[DEFAULT] = self._state
        return states

    def restore(self, generators: dict[str, torch.Generator], record: dict[str, Any], *, is_mid_epoch: bool) -> None:
        """Restore generators from a state before an iteration draws, or decide whether to stop lending."""
        default = torch.default_generator
        is_seeded_again = default.initial_seed() != self._seeded_with
        if DEFAULT in record and not (is_seeded_again and not is_mid_epoch):
            self.lend(decoded(record[DEFAULT]))
            self._is_for_one_epoch = _digest(default) == record.get(NOW)
        elif is_seeded_again or self._is_for_one_epoch:
            self._state = None
        for name, generator in generators.items():
            if name != DEFAULT and name in record:
                generator.set_state(decoded(record[name]))

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Set the default generator to the state of the saved run while the loader draws."""
        if self._state is None or self._is_lending:
            yield
            return
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self._state)
        self._is_lending = True
        try:
            yield
        finally:
            self._is_lending = False
            self._state = default.get_state()
            default.set_state(before)


def encoded(states: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return generator states as text, plus the digest of the default generator if it is one of them."""
    record = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
    if DEFAULT in record:
        record[NOW] = _digest(torch.default_generator)
    return record


def decoded(text: Any) -> torch.Tensor:
    """Return the generator state that a text holds.

    Raises:
        StateError: it is not the state of a torch generator.
    """
    try:
        data = base64.b64decode(text, validate=True)
        state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        torch.Generator().set_state(state)  # raises if it is not a generator state
    except (TypeError, ValueError, RuntimeError):
        raise StateError("state has an invalid torch generator; pass the result of state_dict()") from None
    return state


def _digest(generator: torch.Generator) -> str:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()
