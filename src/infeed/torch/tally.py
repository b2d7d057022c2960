"""What infeed has done for torch's loaders in this process, for the line at the end of ``infeed run``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, final


@final
@dataclass(slots=True)
class Tally:
    """Counts. ``str`` is a line for the user."""

    loader_count: int = 0
    batch_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # iterations that ran on torch's own workers, by reason

    def __str__(self) -> str:
        line = f"{_counted(self.loader_count, 'loader')} on infeed's engine, {_counted(self.batch_count, 'batch', 'batches')}"
        for why, count in self.refused.items():
            line += f"; {_counted(count, 'iteration')} on torch's own workers, because {why}"
        return line


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


TALLY: Final = Tally()
