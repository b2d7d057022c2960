"""One epoch's batches as the engine plans them: by index, or from the shares of a stream."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, final

from infeed.plan.batches import BatchPlan, Lookahead, grain_count
from infeed.plan.cursor import Cursor, ShareCursor, StreamCursor
from infeed.plan.order import Indices
from infeed.scheduler.messages import WorkerId
from infeed.workers.failures import kept
from infeed.workers.messages import OpenStream


class PlannedBatch(NamedTuple):
    """A batch before it is loaded. ``indices`` is ``None`` for streams, which are asked for whatever comes next."""

    epoch: int
    first_position: int
    row_count: int
    grain_count: int
    step: int
    stop: int  # the position that all ranks have come to with it
    indices: Indices | list[Any] | None = None
    worker: WorkerId | None = None
    rows: list[int] | None = None  # where each sample stood before others were left out; None: none were


class Feed(ABC):
    """The source of an epoch's batches. Taken from no earlier than there is room in flight."""

    def __init__(self, cursor: Cursor) -> None:
        self.epoch = cursor.epoch
        self._step = cursor.step
        self.is_exhausted = False
        # What the user's sampler raised. No batch is taken until those before it are delivered and it was raised.
        self.error: Exception | None = None

    def take_error(self) -> Exception:
        """What is to be raised, once; the epoch goes on behind it."""
        error, self.error = self.error, None
        assert error is not None
        self.delivered()
        return error

    def prime(self) -> None:
        """Ask for as many batches as may be asked for before the first is delivered.

        Raises:
            Exception: what the user's sampler raised.
        """
        return

    def delivered(self) -> None:
        """A batch, or an exception in its place, is delivered: the sampler may be asked for another."""
        return

    @property
    def share_count(self) -> int:
        """Into how many shares a stream is cut; 0 if this is none."""
        return 0

    def carried(self) -> StreamCursor | None:
        """What the shares of a stream that has ended hand on to the next epoch, if its dataset has a state."""
        return None

    @abstractmethod
    def take(self) -> PlannedBatch | None:
        """The next batch; ``None`` if there is none now, and none ever again if ``is_exhausted``."""


@final
class IndexedFeed(Feed):
    def __init__(
        self,
        cursor: Cursor,
        batches: Iterator[BatchPlan | Exception],
        grain_size: int,
        lookahead: Lookahead | None = None,
        *,
        is_inline: bool = False,
    ) -> None:
        """``batches`` may go on after it raised. An exception that it yields is raised in the place of a batch.

        With ``is_inline``, an exception is raised at once, with its traceback.
        """
        super().__init__(cursor)
        self._ahead = set(cursor.ahead)
        self._batches = batches
        self._grain_size = grain_size
        self._lookahead, known_count = lookahead or (0, sys.maxsize)
        self._asked: deque[BatchPlan | Exception] = deque()  # yielded by the sampler, not taken yet
        self._asked_count = 0
        self._due_count = self._lookahead  # as many are asked for whether there is room for them or not
        self._limit = max(known_count, self._due_count)  # as many may be asked for when there is
        self._is_at_end = False
        self._is_inline = is_inline

    def prime(self) -> None:
        self._asked.extend(islice(self._batches, self._lookahead))
        self._asked_count = len(self._asked)
        self._is_at_end = self._asked_count < self._lookahead

    def delivered(self) -> None:
        if not self._lookahead:
            return
        self._due_count += 1
        self._limit = max(self._limit, self._due_count)
        while self._asked_count < self._due_count and (plan := self._ask()) is not None:
            self._asked.append(plan)

    def _ask(self) -> BatchPlan | Exception | None:
        if self._is_at_end:
            return None
        self._asked_count += 1
        try:
            return next(self._batches)
        except StopIteration:
            self._is_at_end = True
            return None
        except Exception as error:  # the user's sampler
            return error if self._is_inline else kept(error)

    def _next(self) -> BatchPlan | None:
        if self.error is not None:
            return None
        if self._asked:
            plan: BatchPlan | Exception | None = self._asked.popleft()
        else:
            plan = self._ask() if self._asked_count < self._limit else None
        if plan is None:
            self.is_exhausted = self._is_at_end
        elif isinstance(plan, Exception):
            self.error = plan
            return None
        return plan

    def take(self) -> PlannedBatch | None:
        plan = self._next()
        while plan is not None and self._step in self._ahead:  # the user had it before the ones that were still missing
            self._step += 1
            self.delivered()
            plan = self._next()
        if plan is None:
            return None
        indices, first_position, stop, rows = plan
        count = len(indices)
        step = self._step
        self._step += 1
        grains = max(1, grain_count(count, self._grain_size))
        return PlannedBatch(self.epoch, first_position, count, grains, step, stop, indices, None, rows)


@final
@dataclass(slots=True)
class _Share:
    planned_rows: int = 0
    loaded_rows: int = 0
    is_open: bool = False
    is_ended: bool = False
    is_over: bool = False  # had ended before this run: its worker puts the dataset where it was, and reads nothing
    state: Any = None  # the dataset's own, when it had given ``state_rows``
    state_rows: int = 0
    final_state: Any = None  # the dataset's own, when the share had ended


@final
@dataclass(slots=True)
class StreamShares:
    """How a stream is read: by one worker, or by all if the dataset asks which worker it is in. Known after its first batch."""

    worker_count: int
    is_known: bool = field(init=False)
    is_alone: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.is_known = self.worker_count == 1
        self.is_alone = self.is_known

    def decide(self, *, shards_itself: bool) -> None:
        if not self.is_known:
            self.is_known = True
            self.is_alone = not shards_itself


@final
class StreamFeed(Feed):
    """Batches of each share in turn: 0, 1, ..., 0, 1, ...; a share that has ended is passed over."""

    def __init__(self, cursor: Cursor, batch_size: int, shares: StreamShares) -> None:
        super().__init__(cursor)
        self._batch_size = batch_size
        self._shares = shares
        self._by_worker = {WorkerId(0): _Share()}
        self._turn = 0
        self._has_asked = False
        self._was_alone = False  # this epoch is read by one worker to its end, whatever is known of the dataset
        if cursor.stream is not None:
            self._resume(cursor.stream)

    def _resume(self, stream: StreamCursor) -> None:
        self._turn = stream.turn
        self._was_alone = stream.is_alone
        for number, share in enumerate(stream.shares):
            has_state = share.state is not None
            self._by_worker[WorkerId(number)] = _Share(
                share.rows,
                share.rows,
                is_ended=share.is_ended and not has_state,
                is_over=share.is_ended,
                state=share.state,
                state_rows=share.rows if has_state else 0,
            )
        if not stream.is_alone:
            self._shares.decide(shards_itself=True)

    @property
    def share_count(self) -> int:
        return 1 if self.is_alone else self._shares.worker_count

    @property
    def is_alone(self) -> bool:
        return self._was_alone or self._shares.is_alone

    @property
    def is_known(self) -> bool:
        return self._was_alone or self._shares.is_known

    def take(self) -> PlannedBatch | None:
        if not self.is_known:
            # Until the first batch is here it is not known who else will read.
            if self._has_asked:
                return None
            self._has_asked = True
        elif not self.is_alone:
            for number in range(self._shares.worker_count):
                self._by_worker.setdefault(WorkerId(number), _Share())
        count = len(self._by_worker)
        for _ in range(count):
            worker = WorkerId(self._turn % count)
            self._turn += 1
            share = self._by_worker[worker]
            if not share.is_ended:
                position = share.planned_rows
                share.planned_rows += self._batch_size
                step = self._step
                self._step += 1
                return PlannedBatch(self.epoch, position, self._batch_size, 1, step, 0, worker=worker)
        self.is_exhausted = self.is_known
        return None

    def opening(self, worker: WorkerId) -> bool:
        """Whether this share is used for the first time in this epoch."""
        share = self._by_worker[worker]
        is_first, share.is_open = not share.is_open, True
        return is_first

    def open_message(self, worker: WorkerId) -> OpenStream:
        """What a worker is told that begins to read this share, or goes on where another has died."""
        share = self._by_worker.get(worker) or _Share()
        return OpenStream(
            self.epoch, share.state_rows, share.loaded_rows - share.state_rows, share.state, self.is_alone, self.is_known,
            share.is_over or share.is_ended,
        )  # fmt: skip

    def loaded(self, worker: WorkerId, row_count: int, planned_count: int, state: Any = None) -> None:
        share = self._by_worker[worker]
        share.loaded_rows += row_count
        if state is not None:
            share.state, share.state_rows = state, share.loaded_rows
        if row_count < planned_count:
            share.is_ended = True
            share.final_state = state

    def carried(self) -> StreamCursor | None:
        if all(share.final_state is None for share in self._by_worker.values()):
            return None
        return StreamCursor(0, tuple(ShareCursor(state=share.final_state) for share in self._by_worker.values()))
