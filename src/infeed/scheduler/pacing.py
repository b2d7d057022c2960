"""Task sizes, work queued per worker, and the number of worker deaths that the scheduler tolerates."""

from __future__ import annotations

from typing import Final, final

from infeed.scheduler.records import BATCH_DEATHS

# Minimum duration of a task: makes the cost of its two messages (about 30 microseconds on both sides) small in comparison.
_TASK_NS: Final = 1_000_000
# Longer tasks cost the main process less. But keep this many tasks waiting per worker, so that no worker is idle at the end of
# an epoch while another has several.
_TASKS_EACH: Final = 2
# Work queued on a busy worker, so that it never waits for the next message. Queued tasks cannot be moved away from behind a
# slow sample, so queue at most this much...
_QUEUE_NS: Final = 2_000_000
# ...or this multiple of the training loop's time per batch: while the training loop runs its own code, it sends no tasks.
_AWAY_TIMES: Final = 2
# For longer tasks, if more batches wait than there are workers: send another task behind one (or two) that take less than this
# in total. When workers use all CPU cores, the training loop's thread replies some milliseconds late; without a queued task,
# workers were idle 3 to 10% of the time. If fewer batches wait, a task queued behind a slow one delays its batch while other
# workers are idle.
_NEXT_NS: Final = {1: 50_000_000, 2: 20_000_000}
# Tasks of a worker on another machine: while the result of one is on its way, the worker loads the next.
REMOTE_TASKS: Final = 2
# Limits until the training loop's time per batch is known (the first training step is often by far the longest): queue this
# much work, and always one task behind the current one. Not the whole window, because queued tasks cannot move to a worker that
# starts later.
_FIRST_QUEUE_NS: Final = 250_000_000
_FIRST_TASKS: Final = 2
# Weight of the newest duration in the running means: they follow a change within about ten values and dampen outliers.
_MEAN_WEIGHT: Final = 0.1
_AWAY_WEIGHT: Final = 0.3


@final
class Pacing:
    """Running means of the time per grain and of the training loop's time between batches; zero until measured."""

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
        """Note that the training loop gets a batch and that its time per batch is still unknown."""
        self._is_first_away = True

    def learn_away(self, away_ns: int) -> bool:
        """Record how long the training loop was away; return whether workers may now have more queued work than before."""
        if away_ns and not self.knows_loop:
            self.knows_loop, self._is_first_away = True, False
        if away_ns <= _QUEUE_NS and self._away_ns <= _QUEUE_NS:
            return False  # The common case: the limit stays the same.
        self._away_ns += _AWAY_WEIGHT * (away_ns - self._away_ns)
        queue_ns = max(float(_QUEUE_NS), _AWAY_TIMES * self._away_ns)
        has_grown, self._queue_ns = queue_ns > self._queue_ns, queue_ns
        return has_grown

    def has_room(self, task_count: int, grain_count: int, *, is_plenty: bool) -> bool:
        """Whether a worker with ``task_count`` tasks of ``grain_count`` grains may get another task.

        ``is_plenty``: enough batches wait for the other workers.
        """
        if not self._grain_ns:
            return False
        ahead_ns = task_count * grain_count * self._grain_ns
        if self._is_first_away:
            return task_count < _FIRST_TASKS or ahead_ns < _FIRST_QUEUE_NS
        return ahead_ns < self._queue_ns or (is_plenty and ahead_ns < _NEXT_NS.get(task_count, 0))

    def task_grains(self, grain_count: int, worker_count: int, *, ahead: int, waiting: int) -> int:
        """Return the number of grains per task for a batch of ``grain_count`` grains.

        Args:
            ahead: number of batches that the training loop receives before this one.
            waiting: number of batches with unassigned grains, including this one.
        """
        if not self._grain_ns:
            # No measurements yet: splitting the first batch among all workers delivers it earliest.
            return -(-grain_count // worker_count)
        # Grains that one worker loads while all workers load the batches ahead: it finishes when the training loop needs this
        # batch.
        in_time = ahead * grain_count // worker_count + 1
        fair = waiting * grain_count // (_TASKS_EACH * worker_count)
        parts = max(1, int(grain_count * self._grain_ns / _TASK_NS))  # each takes at least _TASK_NS
        return max(-(-grain_count // min(parts, grain_count)), min(in_time, fair))


# Consecutive batches, in addition to one per worker, that may kill all their workers before the scheduler gives up.
_BAD_BATCHES: Final = 3
# Deaths of idle workers expire after this time.
_IDLE_S: Final = 60.0


@final
class DeathLimit:
    """Counts worker deaths without progress in between.

    A delivered batch is progress: while the training loop receives batches, no death is a reason to give up.
    """

    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._in_a_row = 0
        self._idle_times: list[float] = []  # deaths without a task since a worker last became ready

    def expect(self, worker_count: int) -> None:
        """Note the current number of workers. The limit uses the maximum, because released workers may be among the dead."""
        self._worker_count = max(self._worker_count, worker_count)

    def renew(self) -> None:
        """Reset the counts: a worker has made progress."""
        self._in_a_row = 0
        if self._idle_times:
            self._idle_times = []

    def start_well(self) -> None:
        """Reset the deaths of idle workers: a worker has become ready, so their cause does not prevent start-up."""
        self._idle_times = []

    def lose(self, at_s: float, *, is_idle: bool) -> None:
        """Count a worker's death at this time; ``is_idle``: it had no task."""
        if is_idle:
            self._idle_times = [*(time_s for time_s in self._idle_times if at_s - time_s < _IDLE_S), at_s]
        else:
            self._in_a_row += 1

    @property
    def is_lost(self) -> bool:
        """Whether the environment is broken, rather than a batch bad.

        True if idle workers die one after another, or if nothing could be loaded of several consecutive batches.
        """
        most_idle = self._worker_count + BATCH_DEATHS
        most = (self._worker_count + _BAD_BATCHES) * (BATCH_DEATHS + 1)
        return len(self._idle_times) > most_idle or self._in_a_row > most
