"""The cost of counters and timeline: tiny batches with and without them, alternating in one process."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any, Final

from benchmarks import processes
from benchmarks.rows import Rows
from benchmarks.spec import Case, Figures, Metric, Outcome, Parameters, Target

_LEVELS: Final = ("off", "counters", "timeline")


def _epoch_s(loader: Any) -> float:
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def run(library: str, parameters: Parameters) -> Outcome:
    del library
    import infeed

    before = processes.cpu_seconds()
    began = time.perf_counter()
    dataset = Rows(parameters["samples"])
    first_s = close_s = 0.0
    times: dict[str, list[float]] = {level: [] for level in _LEVELS}
    ratios: dict[str, list[float]] = {level: [] for level in _LEVELS}
    # The cores on which workers run affect the times more than `observe` does, so measure many loaders per level.
    for _ in range(parameters["loaders"]):
        loaders = {
            level: infeed.DataLoader(dataset, 32, num_workers=2, shuffle=True, seed=7, observe=level)  # type: ignore[arg-type]
            for level in _LEVELS
        }
        for loader in loaders.values():
            next(iter(loader))
            first_s = first_s or time.perf_counter() - began
            _epoch_s(loader)
        own: dict[str, list[float]] = {level: [] for level in _LEVELS}
        # The order of measurements matters too, so use all orders equally often.
        for order in itertools.islice(itertools.cycle(itertools.permutations(_LEVELS)), parameters["rounds"]):
            for level in order:
                own[level].append(_epoch_s(loaders[level]))
        for level in _LEVELS:
            times[level] += own[level]
            ratios[level].append(statistics.median(own[level]) / statistics.median(own["off"]))
        closing = time.perf_counter()
        for loader in loaders.values():
            loader.close()
        close_s = time.perf_counter() - closing
    cpu = processes.cpu_seconds().since(before)
    batches = parameters["samples"] / 32
    cost = {level: 100 * (statistics.median(ratios[level]) - 1) for level in _LEVELS[1:]}
    return Outcome(
        {"counters_cost": cost["counters"], "timeline_cost": cost["timeline"]},
        Figures(first_s, close_s, cpu.main, cpu.children),
        {f"{level}_us_per_batch": statistics.median(taken) / batches * 1e6 for level, taken in times.items()},
    )


CASES: Final = (
    Case(
        name="observing",
        title="counters and timeline on and off, batches of 32 tiny samples, 2 workers",
        metrics=(
            Metric("counters_cost", "time added by counters", "%", "lower"),
            Metric("timeline_cost", "time added by counters and timeline", "%", "lower"),
        ),
        targets=(Target("counters_cost", at_most=1), Target("timeline_cost", at_most=3)),
        libraries=("infeed",),
        baseline=None,
        warm_up="an epoch each",
        sizes={
            "full": {"samples": 6_400, "loaders": 40, "rounds": 24},
            "quick": {"samples": 6_400, "loaders": 8, "rounds": 12},
            "tiny": {"samples": 256, "loaders": 1, "rounds": 2},
        },
        run=run,
    ),
)
