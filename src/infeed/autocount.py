"""``num_workers="auto"``, as the number that it is for those who only know numbers."""

from __future__ import annotations

from typing import Final, final

from infeed.cores import available_cores

# Work that waits for disks and networks gains from more workers than cores, whatever those are. Work that computes is held to
# the cores by the tuner.
MOST_WORKERS: Final = 64


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


def core_limit(cpu_limit: float | None) -> float:
    """Cores that a loader may use: what there is, or what the user allows."""
    cores = available_cores()
    return cores if cpu_limit is None else min(cores, float(cpu_limit))
