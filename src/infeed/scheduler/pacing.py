"""How many deaths are borne before it is the surroundings that are broken, and not a batch that is bad."""

from __future__ import annotations

from typing import Final, final

from infeed.scheduler.state import BATCH_DEATHS

# A task should take at least this long, so that its two messages (some 30 microseconds of both sides) are cheap beside it.
_TASK_NS: Final = 1_000_000
# Longer tasks cost the main process less. But each worker must find this many tasks waiting, so that at the end of an epoch
# none is idle while another has too much.
_TASKS_EACH: Final = 2
# Work that is sent ahead to a busy worker, so that it never waits for the next message. What is sent cannot be taken back
# from behind a slow sample, so no more than this...
_QUEUE_NS: Final = 2_000_000
# ...or than this many times what the user's loop takes for a batch: while it is away nobody sends anything.
_AWAY_TIMES: Final = 2
# Where tasks take longer, and more batches wait than there are workers, another may follow one or two that take less than this
# in all. The loop's thread answers late when workers have all processors, by some milliseconds; without the next task at hand
# they were idle for 3 to 10 % of the time. Where less waits, a task that lies behind a slow one is missed elsewhere.
_NEXT_NS: Final = {1: 50_000_000, 2: 20_000_000}
# As long as nothing is known of the loop (the first step of a training is often by far the longest): so much, and one task
# behind the one at hand whatever it takes. Not the whole window: what is sent cannot go to a worker that comes later.
_FIRST_QUEUE_NS: Final = 250_000_000
_FIRST_TASKS: Final = 2
# Weight of the newest duration in the running means: follows a change within some ten, forgives one that stands out.
_MEAN_WEIGHT: Final = 0.1
_AWAY_WEIGHT: Final = 0.3


@final
class Pacing:
    """Running means of what a grain takes and of how long the user's loop is away. Zero until something is known."""

    def __init__(self) -> None:
        self._grain_ns = 0.0
        self._away_ns = 0.0
        self._queue_ns = float(_QUEUE_NS)
        self._is_first_away = False
        self.knows_loop = False

    @property
    def grain_s(self) -> float:
        return self._grain_ns / 1e9

    def learn_task(self, elapsed_ns: int, grain_count: int) -> None:
        per_grain = elapsed_ns / grain_count
        mean = self._grain_ns
        self._grain_ns = mean + _MEAN_WEIGHT * (per_grain - mean) if mean else per_grain

    def expect_away(self) -> None:
        """The loop gets a batch, and nothing is known of how long it will be away."""
        self._is_first_away = True

    def learn_away(self, away_ns: int) -> bool:
        """Take in how long the loop was away; whether workers may be sent more ahead than before."""
        if away_ns and not self.knows_loop:
            self.knows_loop, self._is_first_away = True, False
        if away_ns <= _QUEUE_NS and self._away_ns <= _QUEUE_NS:
            return False  # the usual case, and nothing to be gained
        self._away_ns += _AWAY_WEIGHT * (away_ns - self._away_ns)
        queue_ns = max(float(_QUEUE_NS), _AWAY_TIMES * self._away_ns)
        has_grown, self._queue_ns = queue_ns > self._queue_ns, queue_ns
        return has_grown

    def has_room(self, task_count: int, grain_count: int, *, is_plenty: bool) -> bool:
        """Whether a worker with this many tasks of this many grains may be sent another; ``is_plenty``: others have enough."""
        if not self._grain_ns:
            return False
        ahead_ns = task_count * grain_count * self._grain_ns
        if self._is_first_away:
            return task_count < _FIRST_TASKS or ahead_ns < _FIRST_QUEUE_NS
        return ahead_ns < self._queue_ns or (is_plenty and ahead_ns < _NEXT_NS.get(task_count, 0))

    def task_grains(self, grain_count: int, worker_count: int, *, ahead: int, waiting: int) -> int:
        """Grains to put into one task of a batch of ``grain_count``.

        Args:
            ahead: batches that the loop gets before this one.
            waiting: batches of which something is in no task, with this one.
        """
        if not self._grain_ns:
            # Nothing is known yet: the first batch comes soonest if every worker takes its part of it.
            return -(-grain_count // worker_count)
        # What one worker loads while all of them load the batches ahead: it is done when the loop wants this batch.
        in_time = ahead * grain_count // worker_count + 1
        fair = waiting * grain_count // (_TASKS_EACH * worker_count)
        parts = max(1, int(grain_count * self._grain_ns / _TASK_NS))  # of which each takes long enough
        return max(-(-grain_count // min(parts, grain_count)), min(in_time, fair))


# Batches in a row, besides one for each worker, that may kill all their workers before it is given up.
_BAD_BATCHES: Final = 3
# Deaths of idle workers count for this long.
_IDLE_S: Final = 60.0


@final
class DeathLimit:
    """Counts deaths between which nothing was done. A batch that is delivered counts as something done: while the training
    loop is served, no death is a reason to give up."""

    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._in_a_row = 0
        self._idle_times: list[float] = []  # deaths without a task, since a worker last started well

    def expect(self, worker_count: int) -> None:
        """There are so many now. The most that there ever were may die: those that left may have been among the dead."""
        self._worker_count = max(self._worker_count, worker_count)

    def renew(self) -> None:
        """A worker has done something: it is not hopeless."""
        self._in_a_row = 0
        if self._idle_times:
            self._idle_times = []

    def start_well(self) -> None:
        """A worker is ready: whatever ended idle workers before, it does not keep them from starting."""
        self._idle_times = []

    def lose(self, at_s: float, *, is_idle: bool) -> None:
        """A worker died at this time; ``is_idle``: without a task."""
        if is_idle:
            self._idle_times = [*(time_s for time_s in self._idle_times if at_s - time_s < _IDLE_S), at_s]
        else:
            self._in_a_row += 1

    @property
    def is_lost(self) -> bool:
        """Workers that die without a task, each in turn, are a broken environment and not a bad batch; so are several batches
        in a row of which nothing could be loaded."""
        most_idle = self._worker_count + BATCH_DEATHS
        most = (self._worker_count + _BAD_BATCHES) * (BATCH_DEATHS + 1)
        return len(self._idle_times) > most_idle or self._in_a_row > most
