"""Threads or processes: which of them a dataset is better loaded by."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

# Only one thread at a time can hold the GIL, and the user's own loop wants it too. So all workers together may hold it for no
# more than this part of the time, with one worker on each core; and none for more than that, however few the cores.
_TOGETHER: Final = 0.4
_ALONE: Final = 0.15


class Verdict(NamedTuple):
    kind: Literal["thread", "process"]
    why: str  # a sentence for the log


def better_kind(gil_share: float, *, is_drawing: bool, cores: float) -> Verdict:
    """Decide by what was measured while samples were loaded.

    Args:
        gil_share: of the time of loading, how much the GIL was held.
        is_drawing: whether samples draw from ``random``, ``numpy.random`` or torch's generator, which threads share: then only
            processes give the same numbers whatever the workers.
        cores: that may be used.
    """
    held = f"loading a sample holds the GIL for {gil_share:.0%} of its time"
    if is_drawing:
        return Verdict(
            "process", f"processes: the dataset draws from global random generators, which threads would share; {held}"
        )
    if gil_share > min(_ALONE, _TOGETHER / max(1.0, cores)):
        return Verdict("process", f"processes: {held}, and threads would wait for each other")
    return Verdict("thread", f"threads: {held}, so they do as well as processes, and share the dataset")
