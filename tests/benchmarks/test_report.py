"""Ratios have the right direction, and a target is checked only against measured results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report, spec

RATE = spec.Metric("rate", "rate", "samples/s", "higher")
DELAY = spec.Metric("delay", "delay", "s", "lower")


def never_run(library: str, parameters: spec.Parameters) -> spec.Outcome:
    raise NotImplementedError


def make_case(*targets: spec.Target) -> spec.Case:
    return spec.Case(
        name="made_up",
        title="a case that is not run",
        metrics=(RATE, DELAY),
        targets=targets,
        libraries=("infeed", "torch"),
        baseline="torch",
        warm_up="none",
        sizes={},
        run=never_run,
    )


def make_record(library: str, rate: float, delay: float) -> dict[str, Any]:
    costs = dict.fromkeys(report.COSTS, 1.0)
    return {"case": "made_up", "library": library, "metrics": {"rate": rate, "delay": delay}, "left_behind": 0, **costs}


RECORDS = [
    make_record("infeed", 100.0, 0.1),
    make_record("infeed", 300.0, 0.3),
    make_record("infeed", 200.0, 0.2),
    make_record("torch", 20.0, 2.0),
]


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (spec.Target("rate", at_least=10, against="torch"), True),
        (spec.Target("rate", at_least=11, against="torch"), False),
        (spec.Target("delay", at_least=10, against="torch"), True),
        (spec.Target("delay", at_least=11, against="torch"), False),
        (spec.Target("delay", at_most=0.2), True),
        (spec.Target("delay", at_most=0.1), False),
        (spec.Target("rate", at_least=200), True),
        (spec.Target("rate", at_least=201), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else report._target_text(value, ""),
)
def test_a_target_check_follows_the_median_and_the_direction(target: spec.Target, is_met: bool) -> None:
    """Medians decide. A ratio above 1 is better for rates and for delays."""
    rows = report.metric_rows(make_case(target), RECORDS)
    checks = [check for row in rows for check in row.targets]
    assert [check.is_met for check in checks] == [is_met]


def test_a_target_against_a_missing_library_is_neither_met_nor_missed() -> None:
    """Without the other library there is no ratio, and the table reports that."""
    ours = [record for record in RECORDS if record["library"] == "infeed"]
    rows = report.metric_rows(make_case(spec.Target("rate", at_least=10, against="torch")), ours)
    checks = [check for row in rows for check in row.targets]
    assert [(check.reached, check.is_met) for check in checks] == [(None, None)]


def test_a_failed_run_is_listed_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed run does not change the medians and is listed below the tables."""
    failed = {"case": "made_up", "library": "torch", "repeat": 1, "error": "Traceback\nValueError: odd"}
    machine = dict.fromkeys(("cpu", "cores", "cores_usable", "memory_gib", "kernel", "python"), "made up")
    described = {**machine, "versions": {}, "commit": None, "has_local_changes": False, "date": "", "load_before": 0}
    report.print_report([make_case()], [*RECORDS, failed], described, is_markdown=True)
    printed = capsys.readouterr().out
    assert "FAILED made_up with torch, repeat 1: ValueError: odd" in printed
    assert "| made_up | rate | torch | 20.0 | 20.0 .. 20.0 | samples/s |" in printed


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (spec.Target("speed", at_least=1), "does not report"),
        (spec.Target("rate"), "exactly one"),
        (spec.Target("rate", at_least=1, against="spdl"), "does not run"),
    ],
)
def test_a_target_that_cannot_be_judged_is_refused(target: spec.Target, message: str) -> None:
    """A target must have a metric, one bound and a library that runs the case."""
    with pytest.raises(ValueError, match=message):
        make_case(target)
