"""Lifetimes, resource usage and recorders of one engine's workers."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from infeed.metrics.process_time import Clock
from infeed.scheduler.messages import WorkerId
from infeed.workers import recorder
from infeed.workers.recorder import RecorderReader, Slow, Sums
from infeed.workers.status import StatusBoard

# `pending_ns` reports a sample in progress only after 20 ms.
_LONG_SPAN_NS: Final = 20_000_000


class Usage(NamedTuple):
    cpu_ns: int
    queued_ns: int
    memory_bytes: int  # now
    private_bytes: int  # now, without shared memory


class Totals(NamedTuple):
    """Sums over all workers that ever started."""

    load_ns: int = 0
    collate_ns: int = 0
    write_ns: int = 0
    sample_count: int = 0
    alive_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    memory_bytes: int = 0


class RecorderContents(NamedTuple):
    """The contents of a worker's recorder, without spans."""

    sums: Sums
    histogram: list[int]
    slowest: list[Slow]


_NO_READING: Final = RecorderContents(Sums(), [0] * recorder.BUCKETS, [])


@final
class Member:
    """One worker id, across restarts."""

    __slots__ = ("alive_ns", "cpu_ns", "pid", "queued_ns", "restart_count", "since_ns")

    def __init__(self) -> None:
        self.alive_ns = 0  # of previous incarnations
        self.cpu_ns = self.queued_ns = 0  # of previous incarnations
        self.since_ns = 0  # when the current incarnation started; 0: not running
        self.restart_count = 0
        self.pid: int | None = None


@final
class WorkerMetrics:
    """The workers of one engine: their lifetimes, resource usage and recorders."""

    def __init__(self, status_board: StatusBoard, workers: tuple[WorkerId, ...], clock: Clock) -> None:
        self._status_board, self._clock = status_board, clock
        self._members = {worker: Member() for worker in workers}
        self._readers = {worker: status_board.reader(worker) for worker in workers}
        self.known: set[WorkerId] = set()  # workers that ever started
        self.is_closed = False
        self._count = self._final_count = 0
        self._last: dict[WorkerId, RecorderContents] = {}  # final readings, taken at close
        self._idle_ns = 0  # since when no epoch is in progress; 0: one is
        # Between epochs: snapshots from the end of the last epoch. Work loaded ahead counts only when the next epoch begins.
        self._still: dict[WorkerId, tuple[RecorderReader, Usage]] = {}

    def __getitem__(self, worker: WorkerId) -> Member:
        return self._members[worker]

    # --- lifecycle

    def started(self, worker: WorkerId, pid: int | None) -> None:
        member = self._members[worker]
        self._count += not member.since_ns
        member.since_ns, member.pid = self._clock.now_ns(), pid
        self.known.add(worker)

    def ended(self, worker: WorkerId) -> None:
        """Record that the worker died or was stopped."""
        member = self._members[worker]
        if member.since_ns:
            used = self.usage(worker)
            member.cpu_ns, member.queued_ns = used.cpu_ns, used.queued_ns
            member.alive_ns += (self._idle_ns or self._clock.now_ns()) - member.since_ns
            member.since_ns = 0
            self._count -= 1

    def restarted(self, worker: WorkerId) -> None:
        self._members[worker].restart_count += 1

    def rest(self, now_ns: int, *, is_still: bool) -> None:
        """Pause between epochs. With ``is_still``, readings stay frozen while workers load ahead."""
        self._idle_ns = now_ns
        if is_still:
            self._still = {worker: (self._readers[worker].copy(), self.usage(worker)) for worker in self.known}

    def wake(self) -> None:
        """End the pause between epochs. Of the pause, only the time spent loading ahead counts as alive time."""
        idle_ns, self._idle_ns = self._clock.now_ns() - self._idle_ns, 0
        still, self._still = self._still, {}
        for worker, member in self._members.items():
            if member.since_ns:
                ahead_ns = busy_ns(self._sums(worker)) - busy_ns(still[worker][0].sums()) if worker in still else 0
                member.alive_ns -= max(0, idle_ns - ahead_ns)

    def close(self) -> None:
        """Take final readings. The workers have exited, and the status board is about to close."""
        self._last = {worker: self.read(worker) for worker in self._members}
        self._final_count = self.count
        for worker in self._members:
            self.ended(worker)
        self.is_closed = True
        self._still = {}

    def absorb(self, other: WorkerMetrics) -> None:
        """Add the workers of another engine; both engines are closed."""
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

    # --- readings

    @property
    def count(self) -> int:
        """Number of workers now, or when the engine was closed."""
        return self._final_count if self.is_closed else self._count

    def alive_ns(self, worker: WorkerId) -> int:
        member = self._members[worker]
        return member.alive_ns + ((self._idle_ns or self._clock.now_ns()) - member.since_ns if member.since_ns else 0)

    def pending_ns(self, worker: WorkerId) -> int:
        """Return how long the worker has been loading its current sample; 0 below 20 ms.

        That time counts as loading only when the task is done.
        """
        if self.is_closed or self._idle_ns or not self._members[worker].since_ns:
            return 0
        try:
            doing = self._status_board.doing(worker)
        except ValueError:
            return 0  # another thread has just closed the status board
        took_ns = self._clock.now_ns() - doing.since_ns
        is_sample = doing.task is not None and doing.exact_row is not None and doing.since_ns
        return took_ns if is_sample and took_ns >= _LONG_SPAN_NS else 0

    def usage(self, worker: WorkerId) -> Usage:
        """Return the resource usage of the worker so far, including before restarts."""
        member = self._members[worker]
        if member.since_ns and not self.is_closed:
            try:
                doing = self._status_board.doing(worker)
            except ValueError:
                pass  # another thread has just closed the status board
            else:
                cpu_ns, queued_ns = member.cpu_ns + doing.cpu_ns, member.queued_ns + doing.queued_ns
                still = self._still.get(worker)
                if still is not None:
                    cpu_ns, queued_ns, *_ = still[1]
                return Usage(cpu_ns, queued_ns, doing.rss_bytes, doing.private_bytes)
        return Usage(member.cpu_ns, member.queued_ns, 0, 0)

    def read(self, worker: WorkerId) -> RecorderContents:
        """Return the contents of the worker's recorder."""
        if not self.is_closed:
            try:
                reader = self._reader(worker).copy()
                return RecorderContents(reader.sums(), reader.histogram(), reader.slowest())
            except ValueError:
                pass  # another thread has just closed the status board
        return self._last.get(worker, _NO_READING)

    def _reader(self, worker: WorkerId) -> RecorderReader:
        still = self._still.get(worker)
        return self._readers[worker] if still is None else still[0]

    def sums(self) -> dict[WorkerId, Sums]:
        """Return the recorded sums of all workers that ever started."""
        return {worker: self._sums(worker) for worker in list(self.known)}

    def _sums(self, worker: WorkerId) -> Sums:
        if not self.is_closed:
            try:
                return self._reader(worker).sums()
            except ValueError:
                pass  # another thread has just closed the status board
        return self._last.get(worker, _NO_READING).sums

    def totals(self) -> Totals:
        """Return the sums over all workers that ever started; each worker is read once."""
        load_ns = collate_ns = write_ns = sample_count = alive_ns = cpu_ns = queued_ns = memory_bytes = 0
        for worker in list(self.known):
            sums, usage = self._sums(worker), self.usage(worker)
            load_ns += sums.load_ns
            collate_ns += sums.collate_ns
            write_ns += sums.write_ns
            sample_count += sums.sample_count
            alive_ns += self.alive_ns(worker)
            cpu_ns += usage.cpu_ns
            queued_ns += usage.queued_ns
            memory_bytes += usage.memory_bytes
        return Totals(load_ns, collate_ns, write_ns, sample_count, alive_ns, cpu_ns, queued_ns, memory_bytes)

    def take_spans(self, *, is_last: bool) -> list[tuple[WorkerId, bytes, int]]:
        """Return new raw spans for each worker, with the number of spans that were lost."""
        taken = []
        for worker in list(self.known):
            try:
                raw, lost = self._readers[worker].take_spans(is_last=is_last)
            except ValueError:
                break  # another thread has just closed the status board
            if raw:
                taken.append((worker, raw, lost))
        return taken


def busy_ns(sums: Sums | Totals) -> int:
    return sums.load_ns + sums.collate_ns + sums.write_ns


def _added(one: RecorderContents, other: RecorderContents) -> RecorderContents:
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
    return RecorderContents(sums, histogram, sorted({*one.slowest, *other.slowest}, reverse=True)[: recorder.SLOWEST])
