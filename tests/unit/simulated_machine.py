"""A simulated machine: CPU-bound or I/O-bound workers, a training loop, and their progress in tenths of a second.

The scarcest resource limits the rate, which is slightly lower where two resources are equally scarce.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from infeed.autotune.tuner import Change, Reading, Tuner, WorkerLimits

_SHARPNESS = 40  # Width of the transition where another resource becomes the bottleneck.
READING_S = 0.1
_SUMS = ("at", "batches", "samples", "waited", "away", "busy", "cpu")


@dataclass(frozen=True)
class Work:
    """The cost of one sample, and the available resources."""

    compute_s: float = 0.01
    wait_s: float = 0.0
    away_s: float = 0.0  # Of the training step.
    away_compute: float = 0.0  # The CPU-bound part of it.
    cores: float = 4.0
    io_limit: float = 1e9  # How many samples may wait at the same time: the limit of the disk.
    worker_bytes: int = 0
    noise: float = 0.0

    def rate(self, count: int) -> float:
        scarce = [count / (self.compute_s + self.wait_s)]
        on_cores = self.compute_s + self.away_s * self.away_compute
        if on_cores:
            scarce.append(self.cores / on_cores)
        if self.wait_s:
            scarce.append(self.io_limit / self.wait_s)
        if self.away_s:
            scarce.append(1 / self.away_s)
        least = min(scarce)
        return float(least * sum((least / one) ** _SHARPNESS for one in scarce) ** (-1 / _SHARPNESS))

    def best_rate(self, most: int) -> float:
        return max(self.rate(count) for count in range(1, most + 1))


@dataclass
class Simulation:
    """A run of a tuner on such a machine."""

    work: Work
    limits: WorkerLimits
    seed: int = 0
    free_bytes: int | None = None
    is_budget: bool = False
    changes: list[Change] = field(default_factory=list)
    change_times: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tuner = Tuner(self.limits)
        self.count = self.tuner.first_count
        self._rng = random.Random(self.seed)
        self._starting = 0
        self.now = 0  # Readings so far.
        self._sums = dict.fromkeys(_SUMS, 0.0)

    def run(self, readings: int) -> Simulation:
        for _ in range(readings):
            self._pass_time(READING_S)
            self.read()
        return self

    def pause(self, seconds: float) -> None:
        """The training loop pauses, for example to save its model."""
        for name in ("at", "away"):
            self._sums[name] += seconds

    def _pass_time(self, seconds: float) -> None:
        sums, factor = self._sums, self._rng.lognormvariate(0.0, self.work.noise)
        work = replace(self.work, compute_s=self.work.compute_s * factor, wait_s=self.work.wait_s * factor)
        samples = work.rate(self.count) * seconds
        away = min(seconds, samples * work.away_s)
        # Workers that the training loop waits for are always busy, even if they wait for a core.
        is_scarce = away < 0.97 * seconds
        busy = self.count * seconds if is_scarce else min(self.count * seconds, samples * (work.compute_s + work.wait_s))
        for name, amount in {
            "at": seconds, "batches": samples / 4, "samples": samples, "waited": seconds - away, "away": away,
            "busy": busy, "cpu": min(busy, samples * work.compute_s),
        }.items():  # fmt: skip
            sums[name] += amount

    def read(self) -> None:
        sums = {name: round(value * (1 if name in ("batches", "samples") else 1e9)) for name, value in self._sums.items()}
        ready = self.count - self._starting
        self._starting = 0
        free = None if self.free_bytes is None else self.free_bytes - self.count * self.work.worker_bytes
        reading = Reading(*(sums[name] for name in _SUMS), self.count, ready, self.work.worker_bytes, free, self.is_budget)
        change = self.tuner.consider(reading)
        self.now += 1
        if change is not None:
            self.changes.append(change)
            self.change_times.append(self.now)
            self._starting = max(0, change.worker_count - self.count)
            self.count = change.worker_count

    def become(self, **changes: float) -> None:
        """Changes the work."""
        self.work = replace(self.work, **changes)  # type: ignore[arg-type]

    @property
    def share_of_best(self) -> float:
        return self.work.rate(self.count) / self.work.best_rate(self.limits.most_workers)
