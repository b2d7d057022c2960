"""Chooses threads or processes from measurements."""

from __future__ import annotations

import pytest

from infeed.autotune.tuner import better_kind


@pytest.mark.parametrize(
    ("gil_share", "is_drawing", "cores", "kind"),
    [
        (0.0, False, 2, "thread"),
        (0.1, False, 2, "thread"),
        (0.1, False, 16, "process"),  # Sixteen threads would need the GIL for more than all of the time.
        (0.01, False, 16, "thread"),
        (0.5, False, 1, "process"),
        (1.0, False, 2, "process"),
        (0.0, True, 2, "process"),  # Threads would share the generators.
        (0.0, False, 0.5, "thread"),
    ],
)
def test_the_better_kind(gil_share: float, is_drawing: bool, cores: float, kind: str) -> None:
    diagnosis = better_kind(gil_share, is_drawing=is_drawing, cores=cores)
    assert diagnosis.kind == kind
    assert is_drawing or f"{gil_share:.0%}" in diagnosis.why
    assert ("random" in diagnosis.why) == is_drawing
