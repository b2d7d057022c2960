"""Drives one loader with the consumer that all cases and libraries share.

The consumer receives a batch, adds its length to a count, and drops the batch when the next one arrives. It reads values
only in the checked epoch, which is never timed and in which every label must appear exactly once.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks import adapters, processes
from benchmarks.spec import Figures, LoaderSpec


class WrongDataError(Exception):
    """A library delivered the wrong samples, so its time is invalid."""


class Run:
    """One loader from construction to close, and the figures that every case reports."""

    def __init__(self, library: str, spec: LoaderSpec) -> None:
        self._spec = spec
        self._cpu_before = processes.cpu_seconds()
        self._began = time.perf_counter()
        self.loader = adapters.build(library, spec)
        self._first_batch_s: float | None = None

    def first_batch_s(self) -> float:
        """Start an epoch, take one batch and drop the rest; return the seconds from ``iter`` to the batch."""
        began = time.perf_counter()
        batches = iter(self.loader)
        batch = next(batches)
        arrived = time.perf_counter()
        self._note_first(arrived)
        expected = min(self._spec.batch_size, self._spec.length)
        if len(batch[0]) != expected:
            raise WrongDataError(f"the first batch has {len(batch[0])} samples instead of {expected}")
        return arrived - began

    def epoch_s(self) -> float:
        """Return the seconds from ``iter`` to the end of the epoch."""
        began = time.perf_counter()
        batches = iter(self.loader)
        samples = len(next(batches)[0])
        self._note_first(time.perf_counter())
        for batch in batches:
            samples += len(batch[0])
        elapsed = time.perf_counter() - began
        if samples != self._spec.length:
            raise WrongDataError(f"an epoch had {samples} samples instead of {self._spec.length}")
        return elapsed

    def checked_epoch(self) -> None:
        """Run an untimed epoch as a warm-up and check every label."""
        labels: list[np.ndarray] = []
        for batch in self.loader:
            self._note_first(time.perf_counter())
            labels.append(np.array(batch[1]))
        seen = np.concatenate(labels)
        expected = np.arange(self._spec.length)
        if not np.array_equal(np.sort(seen), expected):
            raise WrongDataError("an epoch did not hold every sample exactly once")
        if self.loader.keeps_order and self._spec.shuffle == np.array_equal(seen, expected):
            raise WrongDataError("an epoch came in the wrong order" if not self._spec.shuffle else "no shuffling")

    def close(self) -> Figures:
        cpu = processes.cpu_seconds().since(self._cpu_before)
        began = time.perf_counter()
        self.loader.close()
        close_s = time.perf_counter() - began
        if self._first_batch_s is None:
            raise WrongDataError("closed before the first batch")
        return Figures(self._first_batch_s, close_s, cpu.main, cpu.children)

    def _note_first(self, arrived: float) -> None:
        if self._first_batch_s is None:
            self._first_batch_s = arrived - self._began


def steady(library: str, spec: LoaderSpec, epochs: int) -> tuple[float, Figures]:
    """Return the seconds per epoch with running workers: the mean of ``epochs`` timed epochs after a checked one."""
    run = Run(library, spec)
    run.checked_epoch()
    elapsed = sum(run.epoch_s() for _ in range(epochs))
    return elapsed / epochs, run.close()
