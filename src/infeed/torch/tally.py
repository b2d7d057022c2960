"""What infeed has done for torch's loaders in this process, for the line at the end of ``infeed run``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, final

from infeed.units import format_count


@final
@dataclass(slots=True)
class Tally:
    """Counts. ``str`` is a line for the user."""

    loader_count: int = 0
    batch_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # iterations that ran on torch's own workers, by reason

    def __str__(self) -> str:
        loaders, batches = format_count(self.loader_count, "loader"), format_count(self.batch_count, "batch", "batches")
        line = f"{loaders} on infeed's engine, {batches}"
        for why, count in self.refused.items():
            line += f"; {format_count(count, 'iteration')} on torch's own workers, because {why}"
        return line


TALLY: Final = Tally()
