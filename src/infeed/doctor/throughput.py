"""Finds the best worker settings for a dataset on this machine by measuring them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

from infeed.autotune.capacity import ENOUGH, MOST_WORKERS, WorkerKind
from infeed.doctor.monitor import measure as measure_batch
from infeed.errors import ConfigError
from infeed.formatting import format_workers
from infeed.programs.script import describe_error

# Throughput must grow by this factor to count as a gain. One step without a gain may be noise; two end the search.
_GAIN: Final = 1.05
# Settings above this share of the best rate are measured a second time, at most this many.
_CLOSE: Final = 0.7
_MOST_AGAIN: Final = 5
# Warm-up before counting: this share of the measuring time, and this many batches per worker.
_WARM_SHARE: Final = 0.25
_WARM_BATCHES: Final = 2


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """A worker kind and count to measure."""

    kind: WorkerKind
    num_workers: int

    def code(self, batch_size: int) -> str:
        """Return a line of code to paste."""
        worker = f', worker="{self.kind}"' if self.kind == "thread" else ""
        return f"infeed.DataLoader(dataset, batch_size={batch_size}, num_workers={self.num_workers}{worker})"

    def __str__(self) -> str:
        return format_workers(self.num_workers, self.kind) if self.num_workers else "no workers"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of measuring one setting."""

    setting: Setting
    samples_per_s: float = 0.0
    bytes_per_s: float = 0.0
    first_s: float = 0.0  # time to the first batch
    memory_bytes: int = 0  # of worker processes; without them, growth of this process
    error: str = ""


Measure: TypeAlias = Callable[[Setting], Measured]


def search(measure: Measure, core_count: int, kinds: Iterable[WorkerKind] = ("thread", "process")) -> Iterator[Measured]:
    """Measure no workers, then increasing counts of each kind, until more workers bring no gain."""
    yield measure(Setting("inline", 0))
    for kind in kinds:
        best, idle = 0.0, 0
        for count in worker_counts(core_count):
            found = measure(Setting(kind, count))
            yield found
            if found.error:
                break  # a higher count would fail as well
            idle = 0 if found.samples_per_s > _GAIN * best else idle + 1
            best = max(best, found.samples_per_s)
            if idle == 2 or (idle and count >= 2 * core_count):
                break


def confirm(measure: Measure, results: Iterable[Measured]) -> list[Measured]:
    """Measure the fastest settings again and keep the better rate: other programs can only slow a setting down."""
    kept = list(results)
    best = max((one.samples_per_s for one in kept), default=0.0)
    close = [number for number, one in enumerate(kept) if not one.error and one.samples_per_s >= _CLOSE * best]
    for number in sorted(close, key=lambda number: -kept[number].samples_per_s)[:_MOST_AGAIN]:
        again = measure(kept[number].setting)
        if not again.error and again.samples_per_s > kept[number].samples_per_s:
            kept[number] = replace(again, first_s=kept[number].first_s)
    return kept


def worker_counts(core_count: int) -> list[int]:
    """Return the worker counts to measure, in ascending order.

    >>> worker_counts(6)
    [1, 2, 4, 6, 8, 12, 16, 32, 64]
    """
    doubled = {1 << power for power in range(MOST_WORKERS.bit_length())}
    return sorted(count for count in doubled | {core_count, 2 * core_count} if count <= MOST_WORKERS)


def choose(results: Iterable[Measured]) -> Measured | None:
    """Return the setting with the fewest workers within 3% of the fastest."""
    good = [one for one in results if not one.error and one.samples_per_s]
    if not good:
        return None
    best = max(one.samples_per_s for one in good)
    enough = [one for one in good if one.samples_per_s >= ENOUGH * best]
    return min(enough, key=lambda one: (one.setting.num_workers, one.memory_bytes))


@final
class Bench:
    """Measures settings of ``infeed.DataLoader`` over one dataset."""

    def __init__(
        self, dataset: Any, *, batch_size: int, seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._dataset = dataset
        self._is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        length = len(dataset) if hasattr(dataset, "__len__") else None
        if length == 0:
            raise ConfigError("the dataset is empty; pass one with samples")
        self.batch_size = batch_size if length is None else min(batch_size, length)
        self._seconds = seconds
        self._clock = clock

    def measure(self, setting: Setting) -> Measured:
        """Load with this setting for the given time. The result holds any error, so other settings can still be measured."""
        try:
            return self._measure(setting)
        except Exception as error:  # the dataset's exceptions arrive with their own type
            return Measured(setting=setting, error=describe_error(error))

    def _measure(self, setting: Setting) -> Measured:
        import psutil

        import infeed

        before = psutil.Process().memory_info().rss
        asked = self._clock()
        loader = infeed.DataLoader(
            self._dataset,
            batch_size=self.batch_size,
            shuffle=self._is_indexed,  # as in training: sequential reads may be faster
            drop_last=True,
            num_workers=setting.num_workers,
            worker=setting.kind,
            seed=0,
        )
        with loader:
            batches = _Endless(loader)
            size, _, _ = measure_batch(next(batches))
            first_s = self._clock() - asked
            warm = self._clock() + _WARM_SHARE * self._seconds
            for _ in range(_WARM_BATCHES * setting.num_workers):
                next(batches)
                if self._clock() > warm + self._seconds:
                    break
            while self._clock() < warm:
                next(batches)
            began = now = self._clock()
            count = 0
            while now < began + self._seconds:
                next(batches)
                count += 1
                now = self._clock()
            memory = _memory(batches.worker_pids()) or max(0, psutil.Process().memory_info().rss - before)
        rate = count / (now - began)
        return Measured(
            setting=setting,
            samples_per_s=rate * self.batch_size,
            bytes_per_s=rate * size,
            first_s=first_s,
            memory_bytes=memory,
        )


class _Endless:
    """Iterates a loader epoch after epoch without end."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self._epoch)
        except StopIteration:
            self._epoch = iter(self._loader)
        try:
            return next(self._epoch)
        except StopIteration:
            raise ConfigError("the dataset has less than one batch; pass a smaller --batch-size") from None

    def worker_pids(self) -> list[int]:
        pids: list[int] = self._epoch.worker_pids()
        return pids


def _memory(pids: list[int]) -> int:
    import psutil

    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except (psutil.Error, OSError):
            continue
    return total
