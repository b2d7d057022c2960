"""Journal from the monitored program to the doctor: JSON lines in a file, so no event is lost however the program ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, final

EVENT: Final = "event"


@final
class Journal:
    """Writes events. Ignores writes in processes forked from the one that opened it."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # open until the process ends

    @property
    def is_here(self) -> bool:
        """Whether this process opened the journal and has not closed it."""
        return os.getpid() == self._pid and not self._file.closed

    def write(self, event: str, **facts: Any) -> None:
        if self.is_here:
            self._file.write(json.dumps({EVENT: event, **facts}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


@final
class JournalReader:
    """Reads events while the program writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self.events: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the new events and add them to ``events``. An incomplete last line is left for the next call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    def has(self, event: str) -> bool:
        return any(one[EVENT] == event for one in self.events)

    def has_fact(self, event: str, name: str, value: Any) -> bool:
        return any(one[EVENT] == event and one.get(name) == value for one in self.events)
