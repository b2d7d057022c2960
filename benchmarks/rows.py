"""A dataset in a module of its own, as users have them: a worker that imports it must not have to import a benchmark."""

from __future__ import annotations

import numpy as np


class Rows:
    """A dataset that needs NumPy and nothing else."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows = np.random.default_rng(0).random((1000, 16), dtype=np.float32)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._rows[index % 1000], index
