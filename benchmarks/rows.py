"""A dataset in a separate module, as in user code, so that workers do not import a benchmark."""

from __future__ import annotations

import numpy as np


class Rows:
    """A dataset that needs only NumPy."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows = np.random.default_rng(0).random((1000, 16), dtype=np.float32)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._rows[index % 1000], index
