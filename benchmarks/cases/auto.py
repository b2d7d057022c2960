"""Compares infeed's automatic number and kind of workers with a grid of fixed settings."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from benchmarks import processes
from benchmarks.kinds import KINDS
from benchmarks.spec import Case, Figures, Metric, Outcome, Parameters, Target


def _rates(loader: Any, warm_s: float, timed_s: float, rounds: int) -> list[float]:
    """Return samples per second in each of several intervals after a warm-up."""
    batches = iter(loader)
    next(batches)
    deadline = time.perf_counter() + warm_s
    for _ in batches:
        if time.perf_counter() >= deadline:
            break
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        count = 0
        for batch in batches:
            count += len(batch[1])
            if time.perf_counter() - began >= timed_s:
                break
        rates.append(count / (time.perf_counter() - began))
    return rates


def _counts(most: int) -> list[int]:
    counts = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    return [count for count in counts if count <= most]


def run(kind: str, library: str, parameters: Parameters) -> Outcome:
    del library
    import infeed

    before = processes.cpu_seconds()
    cores = len(os.sched_getaffinity(0))
    most = min(parameters["most_workers"], 64 if kind == "waiting" else 2 * cores)
    dataset = KINDS[kind](1 << 40)
    make: Callable[..., Any] = partial(infeed.DataLoader, dataset, 16, shuffle=True, seed=7)
    began = time.perf_counter()
    timed_s, rounds = parameters["timed_s"], parameters["rounds"]
    with make(num_workers="auto", worker="auto") as loader:
        next(iter(loader))
        first_s = time.perf_counter() - began
    grid: dict[str, list[float]] = {}
    settings = [(worker, count) for worker in ("thread", "process") for count in _counts(most)]
    for worker, count in settings:
        with make(num_workers=count, worker=worker) as loader:
            grid[f"{worker}:{count}"] = _rates(loader, parameters["grid_warm_s"], timed_s, 1)
    best = max(grid, key=lambda name: grid[name][0])
    worker, count = best.split(":")
    # The speed of the machine drifts, so measure the best setting again before and after.
    shares, chosen = [], []
    for _ in range(rounds):
        with make(num_workers=int(count), worker=worker) as loader:
            fixed = _rates(loader, parameters["grid_warm_s"], timed_s, 2)
        with make(num_workers="auto", worker="auto") as loader:
            own = _rates(loader, parameters["warm_s"], timed_s, 2)
            known = loader.statistics()
            chosen.append(f"{known.kind}:{known.worker_count}")
        with make(num_workers=int(count), worker=worker) as loader:
            fixed += _rates(loader, parameters["grid_warm_s"], timed_s, 2)
        shares.append(statistics.median(own) / statistics.median(fixed))
    cpu = processes.cpu_seconds().since(before)
    return Outcome(
        {"share_of_best": statistics.median(shares)},
        Figures(first_s, 0.0, cpu.main, cpu.children),
        {"best": best, "chosen": chosen, "shares": shares, "grid": {name: rates[0] for name, rates in grid.items()}},
    )


_TITLES: Final = {
    "computing": "Python that computes",
    "decoding": "native code that leaves the GIL",
    "waiting": "samples that wait",
    "uneven": "one sample in fifty takes fifty times as long",
}

CASES: Final = tuple(
    Case(
        name=f"auto_{kind}",
        title=f"num_workers='auto', worker='auto': {title}",
        metrics=(Metric("share_of_best", "rate as share of the best fixed setting", "", "higher"),),
        targets=(Target("share_of_best", at_least=0.95),),
        libraries=("infeed",),
        baseline=None,
        warm_up="5 seconds for auto, half a second for fixed settings",
        sizes={
            "full": {"timed_s": 1.0, "grid_warm_s": 0.5, "warm_s": 5.0, "rounds": 7, "most_workers": 64},
            "quick": {"timed_s": 0.5, "grid_warm_s": 0.3, "warm_s": 5.0, "rounds": 1, "most_workers": 64},
            "tiny": {"timed_s": 0.02, "grid_warm_s": 0.0, "warm_s": 0.0, "rounds": 1, "most_workers": 2},
        },
        run=partial(run, kind),
    )
    for kind, title in _TITLES.items()
)
