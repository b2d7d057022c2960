"""The child process: runs cases, each with one library, and prints one line of JSON per case.

    python -m benchmarks.measure CASE:LIBRARY:SIZE[:WORKERS] ...

The runner passes exactly one case, so that earlier cases do not affect the measurement. The tests pass many, because they
ignore the times. Keep top-level imports few: spawned workers import this file again.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from typing import Any, Final

from benchmarks import adapters, cases, processes
from benchmarks.spec import Case, Parameters

LINE_PREFIX: Final = "RECORD "


def parameters_of(case: Case, size: str, workers: int | None) -> Parameters:
    """Return the parameters of a case, with another number of workers if the case has that parameter."""
    parameters = case.sizes[size]  # type: ignore[index]  # checked by the parser of the runner
    return parameters if workers is None or "workers" not in parameters else {**parameters, "workers": workers}


def measure(case_name: str, library: str, size: str, workers: int | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {"case": case_name, "library": library, "size": size}
    case = cases.load(case_name)
    began = time.perf_counter()
    adapters.prepare(library)
    record["import_s"] = time.perf_counter() - began
    outcome = case.run(library, parameters_of(case, size, workers))
    figures = outcome.figures
    record["metrics"] = dict(outcome.metrics)
    record["first_batch_s"] = figures.first_batch_s
    record["close_s"] = figures.close_s
    record["cpu_main_s"] = figures.cpu_main_s
    record["cpu_children_s"] = figures.cpu_children_s
    record["peak_rss_mb"] = processes.peak_rss_bytes() / 1e6
    record["left_behind"] = len(processes.descendants())
    record["default_start_method"] = multiprocessing.get_start_method(allow_none=False)
    record["detail"] = dict(outcome.detail)
    return record


def main(arguments: list[str]) -> int:
    failed = 0
    for argument in arguments:
        case_name, library, size, *workers = argument.split(":")
        try:
            record = measure(case_name, library, size, *map(int, workers))
        except Exception:
            failed += 1
            record = {"case": case_name, "library": library, "size": size, "error": traceback.format_exc()}
        print(LINE_PREFIX + json.dumps(record), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
