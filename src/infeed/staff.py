"""How many workers a loader has, and of which kind, where it decides that itself: what was found out, epoch after epoch."""

from __future__ import annotations

import logging
from typing import Final, Literal, final

from infeed.config import LoaderConfig, WorkerKind
from infeed.memory.budget import available_bytes
from infeed.tuning.kinds import Work, better_kind
from infeed.tuning.readings import Bound, Limits
from infeed.tuning.tuner import Tuner

_LOG: Final = logging.getLogger("infeed")
# Of the memory that is free when the first worker starts, so much is left to others.
_RESERVE: Final = 0.1
# Threads may hold each other up by other things than the GIL: memory that they ask the kernel for, locks of a library. If a
# sample takes them so many times as long as it took processes, they were the wrong choice.
_WORSE: Final = 1.15
_LEAST_NS: Final = 200_000_000  # of work, to compare them by


@final
class Staff:
    """Belongs to one loader."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._given: tuple[float, int, bool, WorkerKind] | None = None
        self._kind: Literal["thread", "process"] = "process"
        self._has_been_thread = False
        self._process_ns = 0.0  # that a sample took processes; 0: not known
        self.is_open = True  # whether the kind may still change, if it is for infeed to choose

    def tuner(self, config: LoaderConfig, cores: float) -> Tuner | None:
        """Who decides how many there are. With other limits, or another kind of worker, it begins anew from where it was."""
        if not config.is_auto:
            return None
        given = (cores, config.most_workers, config.cpu_limit is not None, self.kind(config))
        if self._tuner is None or given != self._given:
            reserve_bytes, is_strict = int(_RESERVE * available_bytes()), config.cpu_limit is not None
            limits = Limits(cores, config.most_workers, reserve_bytes, is_strict, config.is_cpu_limited)
            self._tuner = Tuner(limits, None if self._tuner is None else self._tuner.count)
            self._given = given
        return self._tuner

    @property
    def count(self) -> int | None:
        """How many there should be, as far as is known; ``None`` where the user has said it, or nobody asked yet."""
        return None if self._tuner is None else self._tuner.count

    @property
    def is_settled(self) -> bool:
        """Not while it is being tried out how many there should be."""
        return self._tuner is None or self._tuner.is_settled

    @property
    def bound(self) -> Bound:
        """What allows no more workers, though more might bring something."""
        return "" if self._tuner is None else self._tuner.bound

    def kind(self, config: LoaderConfig) -> WorkerKind:
        """What workers are to be, as far as is known."""
        return self._kind if config.is_kind_auto else config.kind

    def reconsider(self, work: Work, cores: float) -> bool:
        """Take in an epoch; whether workers should be of another kind from the next on."""
        if not self.is_open or work.kind != self._kind or not work.sample_count:
            return False
        if work.kind == "thread":
            return self._regret(work)
        if work.gil_share is None and not work.is_drawing:
            return False
        verdict = better_kind(work.gil_share or 0.0, is_drawing=work.is_drawing, cores=cores)
        _LOG.info("%s", verdict.why)
        if verdict.kind == "process":
            self.is_open = False
            return False
        self._kind, self._has_been_thread = "thread", True
        self._process_ns = work.sample_ns if work.busy_ns >= _LEAST_NS else 0.0
        return True

    def is_back(self, config: LoaderConfig) -> bool:
        """Whether workers are to be processes again, after threads."""
        return config.is_kind_auto and self._kind == "process" and self._has_been_thread

    def stay(self, kind: Literal["thread", "process"]) -> None:
        """It cannot be changed any more."""
        self._kind, self.is_open = kind, False

    def _regret(self, work: Work) -> bool:
        took_ns, before_ns = work.sample_ns, self._process_ns
        if not before_ns or work.busy_ns < _LEAST_NS or took_ns <= _WORSE * before_ns:
            return False
        self.stay("process")
        _LOG.info("processes after all: a sample took threads %.3g ms, and processes %.3g ms", took_ns / 1e6, before_ns / 1e6)
        return True
