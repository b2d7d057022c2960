"""Findings for training loops that wait for ``collate_fn``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.doctor.evidence import LoaderSeen, Probe, SlowIndex
from infeed.doctor.time_checks import best_workers
from tests.doctor.evidence_of import found, loader, run

QUICK = Probe(
    sample_count=100,
    sample_s=2e-6,
    median_s=2e-6,
    cpu_s=2e-6,
    switches=0.0,
    has_collate_fn=True,
    collate_s=0.08,
    collate_cpu_s=0.08,
    collate_switches=0.0,
)
REMOTE = replace(QUICK, collate_cpu_s=0.001, collate_switches=1.0)  # I/O-bound
ELSEWHERE = "workers on other machines (worker='ray' of infeed's loaders)"
BENCH = "; infeed bench module:dataset compares settings"


def collated(**options: Any) -> LoaderSeen:
    """Two workers deliver a batch every 40 ms; the training step takes 10 ms."""
    return loader(**{"wait": 0.03, "away": 0.01, "library": "infeed", "start_method": "", "probe": QUICK, **options})


def test_a_slow_collate_fn_is_reported_with_its_time() -> None:
    """Samples are not reported as slow."""
    finding = found(collated(), seconds=1.0)["data-bound"]

    assert (finding.bottleneck, finding.numbers["workers_bottleneck"]) == ("collate", "few-workers")
    assert "collate_fn" in finding.evidence
    assert finding.fix["infeed"] == f"num_workers=4; a cheaper collate_fn{BENCH}"


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"core_count": 4}, 4),
        ({"core_count": 16}, 10),  # Eight batches in 80 ms, and a reserve.
        ({"core_count": 2, "probe": REMOTE}, 10),  # I/O-bound
        ({"core_count": 2}, None),
    ],
)
def test_the_number_of_workers_includes_collate_fn(options: dict[str, Any], best: int | None) -> None:
    """The number is limited by the cores, and never 0."""
    core_count = options.pop("core_count")
    findings = found(collated(**options), core_count=core_count, seconds=1.0)

    assert ("num-workers" in findings) is (best is not None)
    if best is not None:
        assert findings["num-workers"].fix["infeed"] == f"num_workers={best}"
        assert findings["num-workers"].numbers["load_s"] == pytest.approx(0.08, abs=0.001)


def test_a_cheaper_collate_fn_or_other_machines_help_if_all_cores_are_busy() -> None:
    """Two workers on two cores."""
    finding = found(collated(), core_count=2, seconds=1.0)["data-bound"]

    assert (finding.bottleneck, finding.numbers["workers_bottleneck"]) == ("collate", "all-cores")
    assert finding.fix["infeed"] == f"{ELSEWHERE}; a cheaper collate_fn{BENCH}"


def test_default_collate_of_torch_is_faster_with_fewer_arrays() -> None:
    """Without a collate_fn of their own, users cannot make it cheaper."""
    finding = found(collated(library="torch", probe=replace(QUICK, has_collate_fn=False)), seconds=1.0)["data-bound"]

    assert finding.fix["torch"] == f"num_workers=4; fewer, larger arrays per sample{BENCH}"


def test_an_unmeasured_collate_fn_may_be_the_bottleneck() -> None:
    """Cheap samples alone are no reason to propose num_workers=0."""
    seen = collated(probe=replace(QUICK, is_collate_known=False, collate_s=0.0))
    findings = found(seen, seconds=1.0)

    assert list(findings) == ["data-bound"]
    assert findings["data-bound"].fix["infeed"].startswith("more workers; ")


def test_slow_samples_are_not_reported_if_collate_fn_dominates() -> None:
    """One of 100 samples takes 10 ms, most of the sample time; collating its ten batches takes 0.8 s."""
    seen = collated(probe=replace(QUICK, sample_s=1e-4, slow=[SlowIndex("7", 0.01)]))

    assert seen.slow_share == pytest.approx(0.0123, abs=1e-3)
    assert "slow-samples" not in found(seen, seconds=1.0)


def test_io_bound_time_counts_by_its_share_of_loading() -> None:
    """Samples compute for 40 ms per batch and collate_fn waits as long, so a worker uses half a core."""
    probe = replace(REMOTE, sample_s=0.004, cpu_s=0.004, collate_s=0.04, collate_cpu_s=0.0)
    seen = collated(probe=probe, away=1e-4)

    assert best_workers(run(seen), seen) == 8
