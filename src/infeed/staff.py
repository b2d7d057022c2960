"""How many workers a loader has, and of which kind, where it decides that itself: what was found out, epoch after epoch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final, Literal, final

from infeed.config import LoaderConfig
from infeed.memory.budget import available_bytes
from infeed.tuning.kinds import better_kind
from infeed.tuning.readings import Limits
from infeed.tuning.tuner import Tuner

_LOG: Final = logging.getLogger("infeed")
# Of the memory that is free when the first worker starts, so much is left to others.
_RESERVE: Final = 0.1


@final
class Staff:
    """Belongs to one loader."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._limits: tuple[float, int] | None = None
        self._kind: Literal["thread", "process"] | None = None
        self.is_open = False  # whether threads or processes are still to be decided

    def tuner(self, config: LoaderConfig) -> Tuner | None:
        """Who decides how many there are; with other limits another one."""
        if not config.is_auto:
            return None
        limits = (config.core_limit, config.most_workers)
        if self._tuner is None or limits != self._limits:
            reserve = int(_RESERVE * available_bytes())
            self._tuner, self._limits = Tuner(Limits(*limits, reserve)), limits
        return self._tuner

    def settled(self, config: LoaderConfig) -> LoaderConfig:
        """The options, with the kind of worker that has been decided on."""
        if not config.is_kind_auto or config.kind == "inline":
            return config
        self.is_open = self._kind is None and not config.is_stream
        return replace(config, worker=self._kind) if self._kind is not None else config

    def choose(self, gil_share: float, *, is_drawing: bool, cores: float) -> bool:
        """Decide, once; whether it is threads."""
        verdict = better_kind(gil_share, is_drawing=is_drawing, cores=cores)
        self._kind, self.is_open = verdict.kind, False
        _LOG.info("%s", verdict.why)
        return verdict.kind == "thread"
