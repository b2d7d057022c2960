"""Datasets with different loading costs for `auto`, in a separate module that workers import."""

from __future__ import annotations

import time
import zlib

import numpy as np


class _Kind:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.work(index)
        return np.zeros(16, dtype=np.float32), index

    def work(self, index: int) -> None:
        raise NotImplementedError


class Computing(_Kind):
    """Python code that holds the GIL for about a millisecond."""

    def work(self, index: int) -> None:
        total = index
        for number in range(15_000):
            total ^= number * number


class Decoding(_Kind):
    """Native code that releases the GIL: about a millisecond of decompression, as for an image."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        noise = np.random.default_rng(0).integers(0, 8, 400_000, dtype=np.uint8)
        self._packed = zlib.compress(noise.tobytes(), 6)

    def work(self, index: int) -> None:
        del index
        zlib.decompress(self._packed)


class Waiting(_Kind):
    """Sleeps for five milliseconds, as when waiting for a network."""

    def work(self, index: int) -> None:
        del index
        time.sleep(0.005)


class Uneven(_Kind):
    """CPU-bound; one sample in fifty takes fifty times as long."""

    def work(self, index: int) -> None:
        is_slow = (index * 0x9E3779B97F4A7C15 % 2**64 >> 32) % 50 == 0
        total = index
        for number in range(150_000 if is_slow else 3_000):
            total ^= number * number


KINDS = {"computing": Computing, "decoding": Decoding, "waiting": Waiting, "uneven": Uneven}
