"""What happened lately: a run is judged by how it goes now, not by how it began."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

# The latest third of the time says how it goes: so much at least, so that chance does not, and no more than a minute...
_SHARE: Final = 1 / 3
_LEAST_NS: Final = 250_000_000
_MOST_NS: Final = 60_000_000_000
# ...and so many batches.
_LEAST_BATCHES: Final = 4
# What leaves out less than this is all of it.
_NEARLY: Final = 0.05
# A rate that lasts for less is a matter of chance, or of what is loaded ahead.
_LEAST_PEAK_NS: Final = 50_000_000
# There are ten a second at most, so this is more than a minute.
_SLICES_KEPT: Final = 640


class Amounts(NamedTuple):
    """What was done in a part of a run. Times are nanoseconds; those of workers are sums over all of them."""

    batch_count: int = 0
    sample_count: int = 0
    loaded_count: int = 0  # samples, by workers: some for later
    waited_ns: int = 0
    started_ns: int = 0
    away_ns: int = 0
    blocked_ns: int = 0  # of the wait, what was not infeed's own work in the loop's thread
    changeover_ns: int = 0  # of the wait, for workers that were started or stopped
    added_worker_ns: int = 0  # of that, what came in the middle of epochs
    manned_ns: int = 0  # workers' time while the loop waited for a batch; 0: not known
    idled_ns: int = 0  # of that, while they had nothing to load
    load_ns: int = 0
    collate_ns: int = 0
    write_ns: int = 0
    alive_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    own_cpu_ns: int = 0  # of this process, with all its threads
    loop_queued_ns: int = 0  # how long the loop's thread was ready to run and had no core

    @staticmethod
    def sum_of(parts: Iterable[Amounts]) -> Amounts:
        return Amounts(*map(sum, zip(*parts, strict=True)))

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(*(max(0, one - two) for one, two in zip(self, other, strict=True)))

    @property
    def elapsed_ns(self) -> int:
        """While an epoch was in progress, starting apart."""
        return self.waited_ns + self.away_ns

    @property
    def busy_ns(self) -> int:
        return self.load_ns + self.collate_ns + self.write_ns

    @property
    def work_ns(self) -> int:
        """What workers did for what the loop has had; what they have loaded ahead is left out."""
        return (
            self.busy_ns * min(self.sample_count, self.loaded_count) // self.loaded_count if self.loaded_count else self.busy_ns
        )

    @property
    def wait_share(self) -> float:
        return self.waited_ns / self.elapsed_ns if self.elapsed_ns else 0.0

    @property
    def busy_share(self) -> float:
        """Of all workers' time, how much they worked."""
        return min(1.0, self.busy_ns / self.alive_ns) if self.alive_ns else 0.0

    @property
    def needed_share(self) -> float:
        """Of workers' time while the loop waited, how much they were at work: they may idle while it does not."""
        if not self.manned_ns or not self.elapsed_ns:
            return self.busy_share
        # They idle for longer than the loop was away where tasks are so small that sending them takes longer.
        away_ns = self.alive_ns * self.away_ns // (self.elapsed_ns + self.started_ns)
        idle_ns = max(self.idled_ns, self.alive_ns - self.busy_ns - away_ns)
        return max(0.0, 1 - idle_ns / self.manned_ns)


class LoopTimes(NamedTuple):
    """What the loop did up to now, with the step or the wait that is still going on."""

    waited_ns: int
    away_ns: int
    blocked_ns: int  # of the wait, what was not infeed's own work in the loop's thread
    waiting_ns: int  # of the wait, what is for the batch that it waits for now


class Slice(NamedTuple):
    """What one engine did between two looks."""

    kind: str  # of its workers
    begin_ns: int  # when it was last looked at before
    amounts: Amounts


class Recent(NamedTuple):
    """The part of a run that is judged."""

    amounts: Amounts
    since_ns: int  # when it began
    is_all: bool  # there was nothing before
    peak_rate: float = 0.0  # batches for each nanosecond, when the loop took most


@final
class Past:
    """Belongs to one loader: the latest slices of all its engines."""

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=_SLICES_KEPT)
        self._elapsed_ns = 0  # of all that there were

    def add(self, one: Slice) -> None:
        self._slices.append(one)
        self._elapsed_ns += one.amounts.elapsed_ns

    def recent(self, rest: Sequence[Slice]) -> Recent | None:
        """The part that says how it goes now; ``None`` if there is none. ``rest`` is what was done since the last look."""
        # Copied at once: the loop's thread may go on meanwhile.
        slices = [one for one in (*list(self._slices), *rest) if any(one.amounts)]
        if not slices:
            return None
        total_ns = self._elapsed_ns + sum(one.amounts.elapsed_ns for one in rest)
        wanted_ns = min(_MOST_NS, max(_LEAST_NS, _SHARE * total_ns))
        taken: list[Slice] = []
        elapsed_ns = batch_count = 0
        for one in reversed(slices):
            is_other = bool(taken) and one.kind != taken[-1].kind
            if batch_count >= _LEAST_BATCHES and (elapsed_ns >= wanted_ns or (is_other and elapsed_ns >= _LEAST_NS)):
                break
            taken.append(one)
            elapsed_ns += one.amounts.elapsed_ns
            batch_count += one.amounts.batch_count
        amounts = Amounts.sum_of(one.amounts for one in taken)
        rates = (one.amounts.batch_count / one.amounts.elapsed_ns for one in taken if one.amounts.elapsed_ns >= _LEAST_PEAK_NS)
        since_ns, is_all = min(one.begin_ns for one in taken), elapsed_ns >= (1 - _NEARLY) * total_ns
        return Recent(amounts, since_ns, is_all, max(rates, default=0.0))
