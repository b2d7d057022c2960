"""``num_workers="auto"``, as the number that it is for those who only know numbers."""

from __future__ import annotations

from math import ceil
from typing import Final, final

from infeed.cores import available_cores

# Work that waits for disks and networks gains from more workers than cores; more than this are never of use on one machine.
_PER_CORE: Final = 4
_LEAST: Final = 4
_MOST: Final = 64


@final
class AutoCount(int):
    """The most workers that there may be, where infeed decides how many there are. Shown as ``'auto'``.

    It stays what it is when it is copied, pickled, or given to another loader.
    """

    def __new__(cls, most: int) -> AutoCount:
        return super().__new__(cls, most)

    def __repr__(self) -> str:
        return "'auto'"

    def __str__(self) -> str:
        return "auto"

    def __reduce__(self) -> tuple[type[AutoCount], tuple[int]]:
        return AutoCount, (int(self),)


def auto_count(cpu_limit: float | None = None) -> AutoCount:
    """By the cores that there are for this process, and no more of them than ``cpu_limit``."""
    return AutoCount(min(_MOST, max(_LEAST, ceil(_PER_CORE * core_limit(cpu_limit)))))


def core_limit(cpu_limit: float | None) -> float:
    """Cores that a loader may use: what there is, or what the user allows."""
    cores = available_cores()
    return cores if cpu_limit is None else min(cores, float(cpu_limit))
