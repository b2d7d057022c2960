"""Every benchmark case runs at a small size. These tests check no timing."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adapters, cases, measure, report

pytest.importorskip("PIL", reason="the case jpeg needs Pillow")

ROOT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 100.0
NUMBERS = (*report.COSTS, "left_behind")

# Spawned torch workers take seconds to import torch, so only one case runs that variant; it differs in one argument.
RUNS = [
    (name, library)
    for name in cases.NAMES
    for library in cases.load(name).libraries
    if adapters.family_of(library) in ("infeed", "torch") and (library != "torch-spawn" or name == "first_cold")
]


@pytest.mark.process
@pytest.mark.parametrize("family", ["infeed", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.long])])
def test_every_case_gives_a_whole_record(family: str) -> None:
    """The record of a run contains every figure of every repetition and the metrics that the case declares."""
    if family != "infeed" and importlib.util.find_spec(family) is None:
        pytest.skip(f"{family} is not installed")
    runs = [(name, library) for name, library in RUNS if adapters.family_of(library) == family]
    records = records_of([f"{name}:{library}:tiny" for name, library in runs])
    assert set(records) == set(runs)
    for (name, _), record in records.items():
        assert "error" not in record, record["error"]
        case = cases.load(name)
        assert case.metrics[0].name in record["metrics"], name
        assert set(record["metrics"]) <= {metric.name for metric in case.metrics}, name
        assert {target.metric for target in case.targets} <= set(record["metrics"]), name
        assert all(math.isfinite(value) for value in record["metrics"].values()), name
        assert all(math.isfinite(record[number]) and record[number] >= 0 for number in NUMBERS), name
        assert report.metric_rows(case, [record])
        assert report.cost_rows(case, [record])


def records_of(runs: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs all cases in one child process, because importing torch once per case takes too long."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", *runs],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    prefix = measure.LINE_PREFIX
    lines = [line.removeprefix(prefix) for line in done.stdout.splitlines() if line.startswith(prefix)]
    records = [json.loads(line) for line in lines]
    assert records, done.stderr
    return {(record["case"], record["library"]): record for record in records}


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_case_has_all_sizes_and_runs_infeed(name: str) -> None:
    """Each case has a name and three sizes, and includes infeed and its competitors."""
    case = cases.load(name)
    assert case.name == name
    assert set(case.sizes) == {"full", "quick", "tiny"}
    assert "infeed" in case.libraries
    assert case.baseline is None or case.baseline in case.libraries


@pytest.mark.parametrize(("name", "expected"), [("opencv", 3), ("tiny", None)])
def test_the_number_of_workers_can_be_set_in_cases_that_have_it(name: str, expected: int | None) -> None:
    """Other parameters, and cases without `num_workers`, do not change."""
    case = cases.load(name)
    changed = measure.parameters_of(case, "tiny", 3)

    assert changed.get("workers") == expected
    assert {**changed, "workers": 0} == {**case.sizes["tiny"], "workers": 0}
    assert measure.parameters_of(case, "tiny", None) == case.sizes["tiny"]
