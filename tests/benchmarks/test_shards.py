"""The summary of the shard benchmark."""

from __future__ import annotations

from benchmarks.shards import summarize


def test_medians_are_by_place_and_case_and_failed_runs_are_left_out() -> None:
    def case(place: str, name: str, *rates: float) -> list[dict[str, object]]:
        return [{"place": place, "case": name, "samples_per_s": rate, "runs_per_batch": 4.0} for rate in rates]

    records = [
        *case("local", "infeed, block shuffle", 30.0, 10.0, 20.0),
        {"place": "local", "case": "infeed, block shuffle"},
        *case("local", "WebDataset", 5.0),
        {"place": "local", "case": "resume", "first_batch_s": 0.5},
        *case("s3", "infeed, block shuffle", 7.0),
        {"place": "s3", "case": "litdata"},
    ]

    assert summarize(records) == {
        "local": {
            "infeed, block shuffle": {
                "samples_per_s": 20.0,
                "runs_per_batch": 4.0,
                "times_webdataset": 4.0,
                "is_target_met": True,
            },
            "WebDataset": {"samples_per_s": 5.0, "runs_per_batch": 4.0, "times_webdataset": 1.0},
            "resume": {"first_batch_s": 0.5, "is_target_met": False},
        },
        "s3": {"infeed, block shuffle": {"samples_per_s": 7.0, "runs_per_batch": 4.0}},
    }
