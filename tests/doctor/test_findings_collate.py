"""What is said of loops that wait for ``collate_fn``."""

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
REMOTE = replace(QUICK, collate_cpu_s=0.001, collate_switches=1.0)  # it waits for somebody
BENCH = "; infeed bench module:dataset compares settings"


def collated(**options: Any) -> LoaderSeen:
    """Two workers make a batch every 40 ms, the loop takes 10 ms for it."""
    return loader(**{"wait": 0.03, "away": 0.01, "library": "infeed", "start_method": "", "probe": QUICK, **options})


def test_a_collate_fn_is_named_with_what_it_takes() -> None:
    """And samples are not said to be dear."""
    told = found(collated(), seconds=1.0)["data-bound"]

    assert (told.bottleneck, told.numbers["workers_bottleneck"]) == ("collate", "few-workers")
    assert "collate_fn" in told.evidence
    assert told.fix["infeed"] == f"num_workers=4; a cheaper collate_fn{BENCH}"


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"core_count": 4}, 4),
        ({"core_count": 16}, 10),  # eight batches in 80 ms, and some room
        ({"core_count": 2, "probe": REMOTE}, 10),  # it waits and does not compute
        ({"core_count": 2}, None),
    ],
)
def test_the_number_of_workers_counts_collate_fn(options: dict[str, Any], best: int | None) -> None:
    """As far as there are cores for it, and never none."""
    core_count = options.pop("core_count")
    told = found(collated(**options), core_count=core_count, seconds=1.0)

    assert ("num-workers" in told) is (best is not None)
    if best is not None:
        assert told["num-workers"].fix["infeed"] == f"num_workers={best}"
        assert told["num-workers"].numbers["load_s"] == pytest.approx(0.08, abs=0.001)


def test_where_cores_are_all_at_work_only_a_cheaper_collate_fn_helps() -> None:
    """Two workers on two cores."""
    told = found(collated(), core_count=2, seconds=1.0)["data-bound"]

    assert (told.bottleneck, told.numbers["workers_bottleneck"]) == ("collate", "all-cores")
    assert told.fix["infeed"] == f"a cheaper collate_fn{BENCH}"


def test_torch_stacks_faster_what_has_fewer_arrays() -> None:
    """Who has no collate_fn of their own cannot make it cheaper."""
    told = found(collated(library="torch", probe=replace(QUICK, has_collate_fn=False)), seconds=1.0)["data-bound"]

    assert told.fix["torch"] == f"num_workers=4; fewer, larger arrays per sample{BENCH}"


def test_a_collate_fn_of_which_nothing_is_known_may_be_what_takes_long() -> None:
    """Samples that cost nothing are no reason to have no workers."""
    seen = collated(probe=replace(QUICK, is_collate_known=False, collate_s=0.0))
    told = found(seen, seconds=1.0)

    assert list(told) == ["data-bound"]
    assert told["data-bound"].fix["infeed"].startswith("more workers; ")


def test_slow_samples_are_not_blamed_for_what_collate_fn_takes() -> None:
    """Of 100 samples one takes 10 ms, most of what they take; and ten batches of them take 0.8 s more."""
    seen = collated(probe=replace(QUICK, sample_s=1e-4, slow=[SlowIndex("7", 0.01)]))

    assert seen.slow_share == pytest.approx(0.0123, abs=1e-3)
    assert "slow-samples" not in found(seen, seconds=1.0)


def test_what_waits_counts_by_its_part_of_the_loading() -> None:
    """Samples compute for 40 ms a batch, collate_fn waits as long: a worker uses half of a core."""
    probe = replace(REMOTE, sample_s=0.004, cpu_s=0.004, collate_s=0.04, collate_cpu_s=0.0)
    seen = collated(probe=probe, away=1e-4)

    assert best_workers(run(seen), seen) == 8
