"""Counts the torch loaders and batches of this process for the summary line of ``infeed run``."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, Final, final

from infeed.engine.session import Session
from infeed.formatting import format_count
from infeed.programs.children import is_child_of_run


@final
@dataclass(slots=True)
class Tally:
    """Counts of loaders and batches. ``str`` formats them as one line for the user."""

    batch_count: int = 0
    loader_count: int = 0
    # Loaders on torch's own workers, or on its own iterator without workers; key: (where, class and dataset, reason).
    refused: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _served: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet)
    _pid: int = field(default_factory=os.getpid)

    def serve(self, session: Session) -> None:
        """Count a loader on infeed's engine, once."""
        self._begin()
        if session not in self._served:
            self._served.add(session)
            self.loader_count += 1

    def add_batch(self) -> None:
        self.batch_count += 1

    def refuse(self, loader: Any, why: str) -> None:
        """Count a loader that does not run on infeed's engine."""
        self._begin()
        where = "torch's own workers" if loader.num_workers else "torch's own iterator"
        self.refused[where, _name(loader), why] += 1

    def _begin(self) -> None:
        """Prepare for counting. Child processes of ``infeed run`` count separately and print their line at exit."""
        if self._pid != os.getpid():  # forked: drop the counts of the parent
            self.batch_count = self.loader_count = 0
            self.refused.clear()
            self._served.clear()
            self._pid = os.getpid()
        if not self and is_child_of_run():
            # Not `atexit`: it does not run in processes that multiprocessing forks.
            Finalize(None, self._print, exitpriority=0)

    def _print(self) -> None:
        if self._pid != os.getpid():
            return  # a forked process that counted nothing
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed
            print(f"infeed (pid {os.getpid()}): {self}", file=sys.stderr, flush=True)

    def __bool__(self) -> bool:
        return bool(self.loader_count or self.refused)

    def __str__(self) -> str:
        loaders, batches = format_count(self.loader_count, "loader"), format_count(self.batch_count, "batch", "batches")
        line = f"{loaders} on infeed's engine, {batches}"
        for (where, name, why), count in self.refused.items():
            line += f"; {format_count(count, 'loader')} on {where}: {name}, because {why}"
        return line


def _name(loader: Any) -> str:
    """Format a loader as code, such as ``DataLoader(CocoDetection)``."""
    kind = type(loader)
    name = kind.__qualname__ if kind.__qualname__ == "DataLoader" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}({type(loader.dataset).__qualname__})"


TALLY: Final = Tally()
