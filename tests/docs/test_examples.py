"""The examples run, and do what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.process
@pytest.mark.torch
def test_statistics_arrive_in_tensorboard(tmp_path: Path) -> None:
    """Its own reader finds them, with the loss."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "plot_in_tensorboard.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert len(found.Scalars("loss")) == 64
    assert found.Scalars("data/samples")[-1].value == 2048
    assert {"data/wait_share", "data/samples_per_s", "data/workers", "data/sample_median_s"} <= set(found.Tags()["scalars"])
    assert "samples/s" in done.stdout


def test_every_example_is_tested() -> None:
    """By name, above."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert EXAMPLES
    assert all(f'"{path.name}"' in text for path in EXAMPLES)
