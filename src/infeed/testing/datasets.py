"""Test datasets whose samples are their indices; each is slow, uneven, faulty, crashing or random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

import numpy as np

import infeed

RandomSource = Literal["python", "numpy", "torch", "infeed"]
Ending = Literal["kill", "exit"]

_EXIT_CODE: Final = 86  # of a worker that calls os._exit; nothing else uses this code


class _Numbers:
    """Sample ``i`` is ``i``. Iteration ends at the length, as for any sequence."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of bounds for a dataset of length {self._length}")
        return index % self._length


class SlowDataset(_Numbers):
    """Sleeps for every sample, like I/O on a disk or a network.

    Args:
        length: number of samples.
        seconds: time per sample.

    Examples:
        >>> from infeed.testing import SlowDataset
        >>> SlowDataset(10, 0.001)[3]
        3
    """

    def __init__(self, length: int, seconds: float) -> None:
        super().__init__(length)
        self._seconds = seconds

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        time.sleep(self._seconds)
        return sample


class UnevenDataset(_Numbers):
    """Sleeps longer for some samples, like a dataset with a few very large files.

    Args:
        length: number of samples.
        seconds: time per sample.
        slow_seconds: time of a sample whose index is a multiple of ``every``.
        every: one sample in this many is slow.

    Examples:
        >>> from infeed.testing import UnevenDataset
        >>> UnevenDataset(100, 0, slow_seconds=0.001, every=50)[50]
        50
    """

    def __init__(self, length: int, seconds: float, *, slow_seconds: float, every: int = 50) -> None:
        super().__init__(length)
        self._seconds = seconds
        self._slow_seconds = slow_seconds
        self._every = every

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        time.sleep(self._seconds if sample % self._every else self._slow_seconds)
        return sample


def _bad_sample(index: int) -> Exception:
    return ValueError(f"sample {index} is bad")


class FaultyDataset(_Numbers):
    """Raises an exception for some samples.

    Args:
        length: number of samples.
        bad: indices that raise.
        error: function of the index that returns the exception; by default a ``ValueError``.

    Examples:
        >>> from infeed.testing import FaultyDataset
        >>> FaultyDataset(10, bad=[4], error=KeyError)[4]
        Traceback (most recent call last):
            ...
        KeyError: 4
    """

    def __init__(self, length: int, bad: Iterable[int], *, error: Callable[[int], BaseException] = _bad_sample) -> None:
        super().__init__(length)
        self._bad = frozenset(bad)
        self._error = error

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        if sample in self._bad:
            raise self._error(sample)
        return sample


class CrashingDataset(_Numbers):
    """Ends the process that loads an index in ``crash_at``, the first ``times`` times that this index is loaded.

    For process workers only: in the process that created the dataset, it raises ``RuntimeError`` instead.

    Args:
        length: number of samples.
        crash_at: indices that end the process.
        count_file: file that counts the deaths, because a dead process cannot report them; created at the first death.
        times: number of deaths for each index; ``None`` for every time.
        how: ``"kill"`` sends SIGKILL like the OOM killer; ``"exit"`` calls ``os._exit`` as some libraries do.

    Examples:
        >>> from infeed.testing import CrashingDataset
        >>> dataset = CrashingDataset(10, crash_at=[4], count_file="deaths.txt")
        >>> dataset[3], dataset.deaths
        (3, 0)
    """

    def __init__(
        self,
        length: int,
        crash_at: Iterable[int],
        count_file: str | os.PathLike[str],
        *,
        times: int | None = 1,
        how: Ending = "kill",
    ) -> None:
        super().__init__(length)
        self._crash_at = frozenset(crash_at)
        self._count_file = os.fspath(count_file)
        self._times = times
        self._how = how
        self._owner_pid = os.getpid()

    @property
    def deaths(self) -> int:
        """Number of processes that the dataset has ended so far."""
        path = Path(self._count_file)
        asked = Counter(path.read_text().split()) if path.exists() else Counter()
        return sum(count if self._times is None else min(count, self._times) for count in asked.values())

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        if sample in self._crash_at:
            self._maybe_die(sample)
        return sample

    def _maybe_die(self, index: int) -> None:
        if os.getpid() == self._owner_pid:
            raise RuntimeError("CrashingDataset would kill the process that created it; use process workers")
        with open(self._count_file, "a+", encoding="ascii") as file:
            # Appending is atomic: if two workers write at the same time, each still reads its own count.
            file.write(f"{index}\n")
            file.flush()
            end = file.tell()
            file.seek(0)
            number = file.read(end).split().count(str(index))
        if self._times is not None and number > self._times:
            return
        if self._how == "kill":
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows, any signal ends the process at once
        os._exit(_EXIT_CODE)


class RandomDataset(_Numbers):
    """Draws a number from each generator in ``sources``, as augmentations do.

    A sample is ``{"index": 3, "python": 0.23, "numpy": 0.91}``. ``"python"``, ``"numpy"`` and ``"torch"`` (which imports torch)
    are the global generators; ``"infeed"`` is the sample's generator from ``infeed.get_rng``.

    Args:
        length: number of samples.
        sources: names of the generators.

    Examples:
        >>> import infeed
        >>> from infeed.testing import RandomDataset
        >>> first, second = (list(infeed.DataLoader(RandomDataset(2), batch_size=None, seed=1)) for _ in range(2))
        >>> first == second
        True
    """

    def __init__(self, length: int, sources: Iterable[RandomSource] = ("python", "numpy")) -> None:
        super().__init__(length)
        self._sources = tuple(sources)

    def __getitem__(self, index: int) -> dict[str, float]:  # type: ignore[override]  # another sample type
        sample: dict[str, float] = {"index": super().__getitem__(index)}
        for source in self._sources:
            sample[source] = _draw(source)
        return sample


def _draw(source: RandomSource) -> float:
    if source == "python":
        return random.random()
    if source == "numpy":
        return float(np.random.random())
    if source == "infeed":
        return float(infeed.get_rng().random())
    import torch  # only if this source was requested

    return float(torch.rand(()))
