"""What counters and timeline cost: the same tiny batches with and without them, in one process, taking turns."""

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
    loaders = {
        level: infeed.DataLoader(dataset, 32, num_workers=2, shuffle=True, seed=7, observe=level)  # type: ignore[arg-type]
        for level in _LEVELS
    }
    first_s = 0.0
    for loader in loaders.values():
        next(iter(loader))
        first_s = first_s or time.perf_counter() - began
        _epoch_s(loader)
        _epoch_s(loader)
    times: dict[str, list[float]] = {level: [] for level in _LEVELS}
    # Whoever is measured after whom matters at this scale: all orders come equally often.
    for order in itertools.islice(itertools.cycle(itertools.permutations(_LEVELS)), parameters["rounds"]):
        for level in order:
            times[level].append(_epoch_s(loaders[level]))
    cost = {
        level: 100 * (statistics.median(own / off for own, off in zip(times[level], times["off"], strict=True)) - 1)
        for level in _LEVELS[1:]
    }
    cpu = processes.cpu_seconds().since(before)
    closing = time.perf_counter()
    for loader in loaders.values():
        loader.close()
    batches = parameters["samples"] / 32
    return Outcome(
        {"counters_cost": cost["counters"], "timeline_cost": cost["timeline"]},
        Figures(first_s, time.perf_counter() - closing, cpu.main, cpu.children),
        {f"{level}_us_per_batch": statistics.median(own) / batches * 1e6 for level, own in times.items()},
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
        warm_up="two epochs each",
        sizes={
            "full": {"samples": 12_800, "rounds": 600},
            "quick": {"samples": 25_600, "rounds": 24},
            "tiny": {"samples": 256, "rounds": 2},
        },
        run=run,
    ),
)
