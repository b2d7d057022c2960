"""Measures small programs, each with torch's DataLoader (fork) and unchanged under `infeed run`.

    .libraries/bin/python benchmarks/programs.py                          all of `benchmarks/scripts`, three repeats
    .libraries/bin/python benchmarks/programs.py --programs plain,with_timm --repeats 1
    .libraries/bin/python benchmarks/programs.py --json benchmarks/results/DATE-programs.json

Each run gets a new process and an empty folder. torch and infeed alternate, and they swap their order in every other repeat.
The programs print time stamps: after their imports, at the start of each epoch, at each batch and at the end.

infeed imports libraries on a second core while the program imports them on the first. So each run waits for a second in which
other programs use less than a quarter of a core, for two minutes at most. A run in which they used more on average is discarded
and repeated, for torch and for infeed, whatever its duration.

`python dev.py test --libraries` creates the environment `.libraries`. A program that fails is reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import machine  # noqa: E402  # found only through the path set above

PROGRAMS: Final = tuple(sorted(path.stem for path in (ROOT / "benchmarks/scripts").glob("*.py") if path.stem != "marks"))
WAYS: Final = {"torch": (), "infeed": ("-m", "infeed", "run")}
_TIMEOUT_S: Final = 300.0
# Cores that other programs may use on average during a run.
_DISTURBED: Final = 0.25
_MOST_TRIES: Final = 5
_WAIT_S: Final = 120.0


@dataclass(frozen=True)
class Times:
    """Times of one run, in seconds."""

    imports: float
    """From the start of the program to the end of its imports."""
    first_batch: float
    """From the start of the program."""
    epochs: tuple[float, ...]
    others: float
    """Cores that other programs used during the run, on average."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment and `more`, without the variable that makes each interpreter recompile this tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | more


def measure(program: str, way: str) -> Times:
    """Run a program once.

    Raises:
        RuntimeError: the program failed, printed no time stamps, or did not run on infeed's engine under `infeed run`.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *WAYS[way], str(ROOT / f"benchmarks/scripts/{program}.py")]
        environ = environment(PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HOME=folder)
        started, busy = time.time(), others_seconds()
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S)
    others = (others_seconds() - busy) / (time.time() - started)
    marks = [line.split() for line in done.stdout.splitlines() if line.startswith("mark ")]
    seen = [(name, float(at) - started) for _, name, at in marks]
    if done.returncode or not seen or seen[-1][0] != "end":
        raise RuntimeError(f"{program} under {way}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    if way == "infeed" and "on infeed's engine" not in done.stderr:
        raise RuntimeError(f"{program} did not run on infeed's engine: {done.stderr[-4000:]}")
    edges = [at for name, at in seen if name in ("epoch", "end")]
    first = dict(reversed(seen))
    epochs = tuple(end - begin for begin, end in pairwise(edges))
    return Times(first["imported"], first["batch"], epochs, others)


def others_seconds() -> float:
    """Return the CPU time of all processes except this one and the children that it has waited for."""
    whole = psutil.cpu_times()
    own = os.times()
    return whole.user + whole.nice + whole.system - sum(own[:4])


def measure_undisturbed(program: str, way: str) -> Times:
    """Run a program until a run is undisturbed; after several attempts, return the least disturbed run.

    Raises:
        RuntimeError: as `measure`.
    """
    runs: list[Times] = []
    for _ in range(_MOST_TRIES):
        deadline = time.time() + _WAIT_S
        while psutil.cpu_percent(1.0) / 100 * (os.cpu_count() or 1) > _DISTURBED and time.time() < deadline:
            continue
        runs.append(measure(program, way))
        if runs[-1].others <= _DISTURBED:
            return runs[-1]
        print(f"discarded {program} {way}: {runs[-1]}", flush=True)
    return min(runs, key=lambda run: run.others)


def middle(runs: list[Times]) -> Times:
    """Return the median of each time, and the maximum for other programs."""
    return Times(
        median(run.imports for run in runs),
        median(run.first_batch for run in runs),
        tuple(median(times) for times in zip(*(run.epochs for run in runs), strict=True)),
        max(run.others for run in runs),
    )


def rows(results: dict[str, dict[str, list[Times]]]) -> list[str]:
    """Return a Markdown table of medians. Target: the first batch at most 0.5 s + 0.3 x imports later than with torch."""
    columns = ("program", "imports", "first batch: torch", "infeed", "later by (target)")
    epochs = ("epoch 1: torch", "infeed", "epoch 2: torch", "infeed", "others at most")
    lines = [" | ".join((*columns, *epochs)), " | ".join("---" for _ in (*columns, *epochs))]
    for program, ways in results.items():
        torch, infeed = middle(ways["torch"]), middle(ways["infeed"])
        later, target = infeed.first_batch - torch.first_batch, 0.5 + 0.3 * torch.imports
        met = f"{later:+.2f} s ({target:.2f} s)" + (" MISSED" if later > target else "")
        pairs = zip(torch.epochs, infeed.epochs, strict=True)
        before = [f"{seconds:.2f} s" for seconds in (torch.imports, torch.first_batch, infeed.first_batch)]
        after = [f"{seconds:.2f} s" for pair in pairs for seconds in pair]
        others = f"{max(torch.others, infeed.others):.2f} cores"
        lines.append(" | ".join((program, *before, met, *after, others)))
    return [f"| {line} |" for line in lines]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all runs and the machine to FILE")
    options = parser.parse_args(argv)
    programs = options.programs.split(",")
    described = machine.describe(("infeed", "torch"))
    print(*(f"{name}: {value}" for name, value in described.items()), sep="\n")
    results: dict[str, dict[str, list[Times]]] = {program: {way: [] for way in WAYS} for program in programs}
    for repeat in range(options.repeats + 1):
        for program in tuple(results):
            for way in list(WAYS)[:: -1 if repeat % 2 else 1]:
                try:
                    times = measure_undisturbed(program, way) if repeat else measure(program, way)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr)
                    results.pop(program, None)
                    break
                if repeat:  # repeat 0 only loads files into the page cache
                    results[program][way].append(times)
                    print(f"{repeat} {program} {way}: {times}", flush=True)
    load_after = round(os.getloadavg()[0], 2)
    print(f"load after: {load_after}", "", *rows(results), sep="\n")
    if options.json is not None:
        runs = {program: {way: list(map(asdict, times)) for way, times in ways.items()} for program, ways in results.items()}
        left_out = [program for program in programs if program not in results]
        result = {
            "machine": described | {"load_after": load_after},
            "repeats": options.repeats,
            "left_out": left_out,
            "programs": runs,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if len(results) == len(programs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
