"""What is known of an engine's workers: since when they are there, what they used, what they have put on their tapes."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final, NamedTuple, final

from infeed.scheduler.messages import WorkerId
from infeed.workers import tape
from infeed.workers.board import Board
from infeed.workers.tape import Slow, Sums, TapeReader

# A sample that takes less is not worth a word while it is being loaded.
_LONG_NS: Final = 20_000_000


class Usage(NamedTuple):
    cpu_ns: int
    queued_ns: int
    memory_bytes: int  # now
    private_bytes: int  # now, without what it shares with others


class Reading(NamedTuple):
    """A worker's tape: sums, histogram, and the slowest samples."""

    sums: Sums
    histogram: list[int]
    slowest: list[Slow]


_NO_READING: Final = Reading(Sums(), [0] * tape.BUCKETS, [])


@final
class Member:
    """One worker, all its lives together."""

    __slots__ = ("alive_ns", "cpu_ns", "pid", "queued_ns", "restart_count", "since_ns")

    def __init__(self) -> None:
        self.alive_ns = 0  # of lives that are over
        self.cpu_ns = self.queued_ns = 0  # of lives that are over
        self.since_ns = 0  # when this life began; 0: it has none
        self.restart_count = 0
        self.pid: int | None = None


@final
class Members:
    """Belongs to the gauge of one engine."""

    def __init__(self, board: Board, workers: tuple[WorkerId, ...]) -> None:
        self._board = board
        self._members = {worker: Member() for worker in workers}
        self._readers = {worker: board.reader(worker) for worker in workers}
        self.known: set[WorkerId] = set()  # those of them that have ever been there
        self.is_closed = False
        self._count = self._final_count = 0
        self._last: dict[WorkerId, Reading] = {}  # when they were gone
        self._idle_ns = 0  # since when nobody wants anything of them; 0: somebody does
        # Between epochs, how far they were when the last one ended: what they load ahead is counted when the next begins.
        self._still: dict[WorkerId, tuple[TapeReader, Usage]] = {}

    def __getitem__(self, worker: WorkerId) -> Member:
        return self._members[worker]

    # --- what happens to them

    def started(self, worker: WorkerId, pid: int | None) -> None:
        member = self._members[worker]
        self._count += not member.since_ns
        member.since_ns, member.pid = perf_counter_ns(), pid
        self.known.add(worker)

    def ended(self, worker: WorkerId) -> None:
        """It died, or was let go."""
        member = self._members[worker]
        if member.since_ns:
            used = self.usage(worker)
            member.cpu_ns, member.queued_ns = used.cpu_ns, used.queued_ns
            member.alive_ns += (self._idle_ns or perf_counter_ns()) - member.since_ns
            member.since_ns = 0
            self._count -= 1

    def restarted(self, worker: WorkerId) -> None:
        self._members[worker].restart_count += 1

    def rest(self, now_ns: int, *, is_still: bool) -> None:
        """Nobody wants anything of them; ``is_still``: whatever they load ahead, what is known stays as it is."""
        self._idle_ns = now_ns
        if is_still:
            self._still = {worker: (self._readers[worker].copy(), self.usage(worker)) for worker in self.known}

    def wake(self) -> None:
        """Count the time between epochs as far as workers loaded ahead: for the rest of it nobody wanted anything of them."""
        idle_ns, self._idle_ns = perf_counter_ns() - self._idle_ns, 0
        still, self._still = self._still, {}
        for worker, member in self._members.items():
            if member.since_ns:
                ahead_ns = busy_ns(self._sums(worker)) - busy_ns(still[worker][0].sums()) if worker in still else 0
                member.alive_ns -= max(0, idle_ns - ahead_ns)

    def close(self) -> None:
        """They are gone; the board is about to be."""
        self._last = {worker: self.read(worker) for worker in self._members}
        self._final_count = self.count
        for worker in self._members:
            self.ended(worker)
        self.is_closed = True
        self._still = {}

    def absorb(self, other: Members) -> None:
        """Count for those of another engine as well; both are closed."""
        self._final_count = other._final_count
        for worker, member in other._members.items():
            own = self._members.setdefault(worker, Member())
            if worker in other.known:
                self.known.add(worker)
            own.alive_ns += member.alive_ns
            own.cpu_ns += member.cpu_ns
            own.queued_ns += member.queued_ns
            own.restart_count += member.restart_count
            own.pid = member.pid
            self._last[worker] = _added(self._last.get(worker, _NO_READING), other._last.get(worker, _NO_READING))

    # --- what is known of them

    @property
    def count(self) -> int:
        """How many there are, or were when the engine was closed."""
        return self._final_count if self.is_closed else self._count

    def alive_ns(self, worker: WorkerId) -> int:
        member = self._members[worker]
        return member.alive_ns + ((self._idle_ns or perf_counter_ns()) - member.since_ns if member.since_ns else 0)

    def pending_ns(self, worker: WorkerId) -> int:
        """How long it is at the one sample that it is at, if that is long; it counts as loading when its task is done."""
        if self.is_closed or self._idle_ns or not self._members[worker].since_ns:
            return 0
        try:
            doing = self._board.doing(worker)
        except ValueError:
            return 0  # closed by another thread, a moment ago
        took_ns = perf_counter_ns() - doing.since_ns
        is_sample = doing.task is not None and doing.exact_row is not None and doing.since_ns
        return took_ns if is_sample and took_ns >= _LONG_NS else 0

    def usage(self, worker: WorkerId) -> Usage:
        """What it has used so far, all its lives together."""
        member = self._members[worker]
        if member.since_ns and not self.is_closed:
            try:
                doing = self._board.doing(worker)
            except ValueError:
                pass  # closed by another thread, a moment ago
            else:
                cpu_ns, queued_ns = member.cpu_ns + doing.cpu_ns, member.queued_ns + doing.queued_ns
                still = self._still.get(worker)
                if still is not None:
                    cpu_ns, queued_ns, *_ = still[1]
                return Usage(cpu_ns, queued_ns, doing.rss_bytes, doing.private_bytes)
        return Usage(member.cpu_ns, member.queued_ns, 0, 0)

    def read(self, worker: WorkerId) -> Reading:
        """What a worker has put on its tape."""
        if not self.is_closed:
            try:
                reader = self._reader(worker).copy()
                return Reading(reader.sums(), reader.histogram(), reader.slowest())
            except ValueError:
                pass  # closed by another thread, a moment ago
        return self._last.get(worker, _NO_READING)

    def _reader(self, worker: WorkerId) -> TapeReader:
        still = self._still.get(worker)
        return self._readers[worker] if still is None else still[0]

    def sums(self) -> dict[WorkerId, Sums]:
        """What workers have put on their tapes, of those that have been there."""
        return {worker: self._sums(worker) for worker in list(self.known)}

    def _sums(self, worker: WorkerId) -> Sums:
        if not self.is_closed:
            try:
                return self._reader(worker).sums()
            except ValueError:
                pass  # closed by another thread, a moment ago
        return self._last.get(worker, _NO_READING).sums

    def take_spans(self, *, is_last: bool) -> list[tuple[WorkerId, bytes, int]]:
        """What is new on their tapes, and how much of it was lost, by worker."""
        taken = []
        for worker in list(self.known):
            try:
                raw, lost = self._readers[worker].take_spans(is_last=is_last)
            except ValueError:
                break  # closed by another thread, a moment ago
            if raw:
                taken.append((worker, raw, lost))
        return taken


def busy_ns(sums: Sums) -> int:
    return sums.load_ns + sums.collate_ns + sums.write_ns


def _added(one: Reading, other: Reading) -> Reading:
    sums = Sums(
        one.sums.load_ns + other.sums.load_ns,
        one.sums.collate_ns + other.sums.collate_ns,
        one.sums.write_ns + other.sums.write_ns,
        one.sums.sample_count + other.sums.sample_count,
        one.sums.retry_count + other.sums.retry_count,
        one.sums.span_count + other.sums.span_count,
        other.sums.gil_share,
        other.sums.is_drawing,
    )
    histogram = [a + b for a, b in zip(one.histogram, other.histogram, strict=True)]
    return Reading(sums, histogram, sorted({*one.slowest, *other.slowest}, reverse=True)[: tape.SLOWEST])
