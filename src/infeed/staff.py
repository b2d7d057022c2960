"""How many workers a loader has, and of which kind, where it decides that itself: what was found out, epoch after epoch."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Final, Literal, NamedTuple, final

from infeed.config import LoaderConfig, WorkerKind
from infeed.memory.budget import available_bytes
from infeed.tuning.kinds import better_kind
from infeed.tuning.readings import Limits
from infeed.tuning.tuner import Tuner

_LOG: Final = logging.getLogger("infeed")
# Of the memory that is free when the first worker starts, so much is left to others.
_RESERVE: Final = 0.1
# Threads may hold each other up by other things than the GIL: memory that they ask the kernel for, locks of a library. If a
# sample takes them so many times as long as it took processes, over so many looks, they were the wrong choice.
_WORSE: Final = 1.15
_LOOKS: Final = 6


class Work(NamedTuple):
    """What workers have done, from the beginning."""

    busy_ns: int
    sample_count: int


@final
class Staff:
    """Belongs to one loader."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._given: tuple[float, int, bool, WorkerKind] | None = None
        self._kind: Literal["thread", "process"] = "process"
        self._process_ns = 0.0  # that a sample took processes
        self._seen: deque[Work] = deque(maxlen=_LOOKS)  # by workers of this kind
        self.is_open = True  # whether the kind may still change, if it is for infeed to choose

    def tuner(self, config: LoaderConfig) -> Tuner | None:
        """Who decides how many there are. With other limits, or another kind of worker, it begins anew from where it was."""
        if not config.is_auto:
            return None
        given = (config.core_limit, config.most_workers, config.cpu_limit is not None, self._kind)
        if self._tuner is None or given != self._given:
            cores, most_workers, is_strict, _ = given
            limits = Limits(cores, most_workers, int(_RESERVE * available_bytes()), is_strict)
            self._tuner = Tuner(limits, None if self._tuner is None else self._tuner.count)
            self._given = given
        return self._tuner

    def settled(self, config: LoaderConfig) -> LoaderConfig:
        """The options, with the kind of worker that is best as far as is known."""
        if not config.is_kind_auto:
            return config
        self._seen.clear()
        return config if self.is_open and self._kind == "process" else replace(config, worker=self._kind)

    def reconsider(self, kind: WorkerKind, gil: tuple[float, bool] | None, work: Work, cores: float) -> bool:
        """Take in what workers of a kind do; whether they should be of the other.

        Args:
            gil: how much of the time loading holds the GIL, and whether it draws from global generators, if that is known.
        """
        if kind != self._kind:
            return False  # the change was decided, and comes with the next epoch
        self._seen.append(work)
        if kind == "thread":
            return self._regret()
        if gil is None:
            return False
        verdict = better_kind(gil[0], is_drawing=gil[1], cores=cores)
        _LOG.info("%s", verdict.why)
        self.is_open = verdict.kind == "thread"
        if not self.is_open:
            return False
        self._kind, self._process_ns = "thread", self._sample_ns() or 0.0
        return True

    def _regret(self) -> bool:
        took_ns = self._sample_ns()
        if took_ns is None or len(self._seen) < _LOOKS or took_ns <= _WORSE * self._process_ns:
            return False
        self._kind, self.is_open = "process", False
        _LOG.info(
            "processes after all: a sample took threads %.3g ms, and processes %.3g ms", took_ns / 1e6, self._process_ns / 1e6
        )
        return True

    def _sample_ns(self) -> float | None:
        """What a sample took lately."""
        first, last = self._seen[0], self._seen[-1]
        count = last.sample_count - first.sample_count
        return (last.busy_ns - first.busy_ns) / count if count else None
