"""What infeed has done for torch's loaders in this process, for the line at the end of ``infeed run``."""

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
    """Counts. ``str`` is a line for the user."""

    batch_count: int = 0
    loader_count: int = 0
    # Loaders on torch's own workers, or on its own iterator without workers: by where, class, dataset and reason.
    refused: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _served: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet)
    _pid: int = field(default_factory=os.getpid)

    def serve(self, session: Session) -> None:
        """Count a loader on infeed's engine, once."""
        self._begin()
        if session not in self._served:
            self._served.add(session)
            self.loader_count += 1

    def refuse(self, loader: Any, why: str) -> None:
        """Count a loader that is not on infeed's engine."""
        self._begin()
        where = "torch's own workers" if loader.num_workers else "torch's own iterator"
        self.refused[where, _name(loader), why] += 1

    def _begin(self) -> None:
        """Child processes of ``infeed run`` count for themselves, and print their line when they end."""
        if self._pid != os.getpid():  # forked, with the counts of its parent
            self.batch_count = self.loader_count = 0
            self.refused.clear()
            self._served.clear()
            self._pid = os.getpid()
        if not self and is_child_of_run():
            # Not `atexit`, which is not called in processes that multiprocessing forks.
            Finalize(None, self._print, exitpriority=0)

    def _print(self) -> None:
        if self._pid != os.getpid():
            return  # forked, and has counted nothing
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed
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
    """As people write it: ``DataLoader(CocoDetection)``."""
    kind = type(loader)
    name = kind.__qualname__ if kind.__qualname__ == "DataLoader" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}({type(loader.dataset).__qualname__})"


TALLY: Final = Tally()
