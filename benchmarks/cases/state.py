"""Saving the state of a loader in mid-epoch, and resuming from it."""

from __future__ import annotations

import json
import time
from typing import Final

import infeed
from benchmarks import processes
from benchmarks.cases.shuffle_billion import Range
from benchmarks.spec import Case, Figures, Metric, Outcome, Parameters, Target


def run(library: str, parameters: Parameters) -> Outcome:
    del library  # torch's loader has no state
    saves = parameters["saves"]
    cpu_before = processes.cpu_seconds()
    began = time.perf_counter()
    with infeed.DataLoader(Range(parameters["length"]), batch_size=32, shuffle=True, seed=1, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        first_batch_s = time.perf_counter() - began
        for _ in range(parameters["steps"]):
            next(batches)
        size = len(json.dumps(loader.state_dict()))
        saving = time.perf_counter()
        for _ in range(saves):
            state = loader.state_dict()
        save_us = (time.perf_counter() - saving) / saves * 1e6
        del batches
        resuming = time.perf_counter()
        loader.load_state_dict({**state, "step": parameters["length"] // 64, "position": parameters["length"] // 64 * 32})
        next(iter(loader))
        resume_ms = (time.perf_counter() - resuming) * 1e3
        cpu = processes.cpu_seconds().since(cpu_before)
        closing = time.perf_counter()
    figures = Figures(first_batch_s, time.perf_counter() - closing, cpu.main, cpu.children)
    return Outcome({"save_us": save_us, "bytes": float(size), "resume_ms": resume_ms}, figures, {})


CASES: Final = (
    Case(
        name="state",
        title="state_dict() in mid-epoch of 10**9 shuffled samples, 2 workers, and going on in the middle of it",
        metrics=(
            Metric("save_us", "state_dict()", "us", "lower"),
            Metric("bytes", "as JSON", "bytes", "lower"),
            Metric("resume_ms", "load_state_dict() to the next batch", "ms", "lower"),
        ),
        targets=(Target("save_us", at_most=50), Target("bytes", at_most=1500)),
        libraries=("infeed",),
        baseline=None,
        warm_up="some batches of the epoch; workers are running when it is resumed",
        sizes={
            "full": {"length": 10**9, "steps": 1000, "saves": 10_000},
            "quick": {"length": 10**9, "steps": 100, "saves": 1000},
            "tiny": {"length": 10**9, "steps": 3, "saves": 10},
        },
        run=run,
        note="torch's loader has no state, and torchdata's replays the epoch up to the step.",
    ),
)
