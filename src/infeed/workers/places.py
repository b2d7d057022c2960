"""Which sample this thread is loading, and the generator that belongs to it.

``infeed.get_rng`` needs to know the sample, not only the grain, and must not cost anything where nobody asks: samples are
fetched by ``map``, which runs in C. So the place is worked out when it is asked for, from how far the iterator of indices is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from operator import length_hint
from typing import Any, Final, final

import numpy as np

from infeed.plan.seeds import derive

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
