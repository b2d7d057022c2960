"""Select the recent part of a run, because the diagnosis covers the current state, not the start of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

from infeed.autotune.capacity import LEAST_BATCHES

# The recent part is the latest third of the elapsed time, between 250 ms (less would be noise) and one minute, and has at
# least LEAST_BATCHES batches.
_SHARE: Final = 1 / 3
_LEAST_NS: Final = 250_000_000
_MOST_NS: Final = 60_000_000_000
# If the recent part leaves out at most this share of the time, it counts as the whole run.
_NEARLY: Final = 0.05
# Rates over shorter times are noise, or come from batches loaded ahead.
_LEAST_PEAK_NS: Final = 50_000_000
# There are at most ten slices per second, so these cover more than a minute.
_SLICES_KEPT: Final = 640


class Amounts(NamedTuple):
    """Counters and times of a part of a run. Times are in nanoseconds; worker times are sums over all workers."""

    batch_count: int = 0
    sample_count: int = 0
    loaded_count: int = 0  # samples that workers loaded, including those loaded ahead
    waited_ns: int = 0
    started_ns: int = 0
    away_ns: int = 0
    blocked_ns: int = 0  # part of the wait that was not infeed's own work in the training loop's thread
    changeover_ns: int = 0  # part of the wait spent starting or stopping workers
    added_worker_ns: int = 0  # part of changeover_ns in the middle of epochs
    manned_ns: int = 0  # workers' time while the training loop waited for a batch; 0: unknown
    idled_ns: int = 0  # part of manned_ns in which workers had nothing to load
    load_ns: int = 0
    collate_ns: int = 0
    write_ns: int = 0
    alive_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    own_cpu_ns: int = 0  # CPU time of this process, with all its threads
    loop_queued_ns: int = 0  # time in which the training loop's thread was ready to run but had no CPU core

    @staticmethod
    def sum_of(parts: Iterable[Amounts]) -> Amounts:
        return Amounts(*map(sum, zip(*parts, strict=True)))

    def minus(self, other: Amounts) -> Amounts:
        # A list and a conditional: a generator and `max` would take 4 µs longer, in every measurement of a run.
        return Amounts._make([one - two if one > two else 0 for one, two in zip(self, other, strict=True)])

    @property
    def elapsed_ns(self) -> int:
        """Return the time during epochs, without worker start-up time."""
        return self.waited_ns + self.away_ns

    @property
    def busy_ns(self) -> int:
        return self.load_ns + self.collate_ns + self.write_ns

    @property
    def work_ns(self) -> int:
        """Return the workers' time for the delivered samples, without samples loaded ahead."""
        return (
            self.busy_ns * min(self.sample_count, self.loaded_count) // self.loaded_count if self.loaded_count else self.busy_ns
        )

    @property
    def wait_share(self) -> float:
        return self.waited_ns / self.elapsed_ns if self.elapsed_ns else 0.0

    @property
    def busy_share(self) -> float:
        """Return the busy share of the workers' time."""
        return min(1.0, self.busy_ns / self.alive_ns) if self.alive_ns else 0.0

    @property
    def needed_share(self) -> float:
        """Return the busy share of the workers' time while the training loop waited; idle time during steps does not count."""
        if not self.manned_ns or not self.elapsed_ns:
            return self.busy_share
        # If sending a task takes longer than the task, workers are idle for longer than the training loop is away.
        away_ns = self.alive_ns * self.away_ns // (self.elapsed_ns + self.started_ns)
        idle_ns = max(self.idled_ns, self.alive_ns - self.busy_ns - away_ns)
        return max(0.0, 1 - idle_ns / self.manned_ns)


class LoopTimes(NamedTuple):
    """Times of the training loop up to now, including the step or wait in progress."""

    waited_ns: int
    away_ns: int
    blocked_ns: int  # part of the wait that was not infeed's own work in the training loop's thread
    waiting_ns: int  # part of the wait for the batch that has not arrived yet


class Slice(NamedTuple):
    """The amounts of one engine between two measurements."""

    kind: str  # worker kind
    begin_ns: int  # time of the previous measurement
    amounts: Amounts


class Recent(NamedTuple):
    """The part of a run that the diagnosis covers."""

    amounts: Amounts
    since_ns: int  # when it began
    is_all: bool  # it covers (almost) the whole run
    peak_rate: float = 0.0  # batches per nanosecond in the fastest slice


@final
class Slices:
    """The latest slices of all engines of one loader."""

    def __init__(self) -> None:
        self.slices: deque[Slice] = deque(maxlen=_SLICES_KEPT)
        self._elapsed_ns = 0  # of all slices ever added

    def add(self, one: Slice) -> None:
        self.slices.append(one)
        self._elapsed_ns += one.amounts.elapsed_ns

    def recent(self, rest: Sequence[Slice]) -> Recent | None:
        """Return the recent part; ``None`` if nothing happened yet. ``rest`` holds the slices since the last measurement."""
        # Copied in one call: the training loop's thread may append meanwhile.
        slices = [one for one in (*list(self.slices), *rest) if any(one.amounts)]
        if not slices:
            return None
        total_ns = self._elapsed_ns + sum(one.amounts.elapsed_ns for one in rest)
        wanted_ns = min(_MOST_NS, max(_LEAST_NS, _SHARE * total_ns))
        taken: list[Slice] = []
        elapsed_ns = batch_count = 0
        for one in reversed(slices):
            is_other = bool(taken) and one.kind != taken[-1].kind
            if batch_count >= LEAST_BATCHES and (elapsed_ns >= wanted_ns or (is_other and elapsed_ns >= _LEAST_NS)):
                break
            taken.append(one)
            elapsed_ns += one.amounts.elapsed_ns
            batch_count += one.amounts.batch_count
        amounts = Amounts.sum_of(one.amounts for one in taken)
        rates = (one.amounts.batch_count / one.amounts.elapsed_ns for one in taken if one.amounts.elapsed_ns >= _LEAST_PEAK_NS)
        since_ns, is_all = min(one.begin_ns for one in taken), elapsed_ns >= (1 - _NEARLY) * total_ns
        return Recent(amounts, since_ns, is_all, max(rates, default=0.0))
