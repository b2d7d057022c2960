"""Measures infeed against other loaders: one new process for each case, library and repeat.

    python benchmarks/run.py                                    all cases; takes tens of minutes
    python benchmarks/run.py --quick --cases big,tiny           smaller sizes, two repeats
    python benchmarks/run.py --libraries infeed,torch --json result.json

Libraries alternate within a repeat, and each repeat starts with a different library, so that changes in the speed of the
machine affect all of them.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
# Import this tree before installed packages: the result file names the commit of this tree.
_PATHS: Final = (str(ROOT), str(ROOT / "src"))
if __name__ == "__main__":
    sys.path[:0] = _PATHS

from benchmarks import adapters, cases, machine, report  # noqa: E402  # found only through the path set above
from benchmarks.measure import LINE_PREFIX  # noqa: E402
from benchmarks.spec import Case  # noqa: E402

# The longest case takes less than a minute on two cores; the limit ends a hang.
_CHILD_TIMEOUT_S: Final = 900.0


def _environment() -> dict[str, str]:
    paths = [*_PATHS, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"}


def _kill_all(child: subprocess.Popen[str]) -> None:
    """Kill a process and its workers."""
    for process in (*psutil.Process(child.pid).children(recursive=True), child):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def measure_in_child(case_name: str, library: str, size: str, workers: int | None) -> report.Record:
    """Run one case with one library in a new process; record failures and hangs too."""
    command = [sys.executable, "-m", "benchmarks.measure", f"{case_name}:{library}:{size}" + (f":{workers}" if workers else "")]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # New session: only this process receives Ctrl+C and then kills the child and its workers.
        start_new_session=True,
    )
    failed: report.Record = {"case": case_name, "library": library, "size": size}
    try:
        output, errors = child.communicate(timeout=_CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill_all(child)
        child.communicate()
        return {**failed, "error": f"no result after {_CHILD_TIMEOUT_S:.0f} s"}
    except BaseException:
        _kill_all(child)
        child.communicate()
        raise
    for line in output.splitlines():
        if line.startswith(LINE_PREFIX):
            record: report.Record = json.loads(line.removeprefix(LINE_PREFIX))
            return record
    return {**failed, "error": f"exit code {child.returncode} and no result\n{errors[-4000:]}"}


def run_case(case: Case, libraries: list[str], size: str, repeats: int, workers: int | None) -> list[report.Record]:
    variants = [library for library in case.libraries if adapters.family_of(library) in libraries]
    records: list[report.Record] = []
    broken: set[str] = set()
    for repeat in range(repeats):
        first = repeat % max(1, len(variants))
        for library in variants[first:] + variants[:first]:
            if library in broken:
                continue
            record = {**measure_in_child(case.name, library, size, workers), "repeat": repeat}
            records.append(record)
            if "error" in record:
                broken.add(library)
                print(f"{case.name:16} {library:12} FAILED\n{record['error']}", file=sys.stderr, flush=True)
                continue
            metric = case.metrics[0]
            value = record["metrics"][metric.name]
            print(f"{case.name:16} {library:12} {repeat + 1}/{repeats}  {value:,.4g} {metric.unit}", file=sys.stderr)
    return records


def _names(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return chosen

    return parse


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Measure infeed against other data loaders, each in fresh processes."
    )
    parser.add_argument("--cases", type=_names(cases.NAMES), default=list(cases.NAMES), help=", ".join(cases.NAMES))
    parser.add_argument(
        "--libraries",
        type=_names(adapters.FAMILIES),
        default=list(adapters.FAMILIES),
        help=f"{', '.join(adapters.FAMILIES)}; those not installed are left out",
    )
    parser.add_argument("--repeats", type=int, default=None, help="5, or 2 with --quick")
    parser.add_argument("--workers", type=int, default=None, help="in cases that have this parameter, such as opencv")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: to see a direction, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write records, summary and machine to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--versions", action="store_true", help="print machine and versions, measure nothing")
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 2 if options.quick else 5
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} must be at least 1")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers {options.workers} must be at least 1")
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    libraries = [family for family in options.libraries if adapters.is_installed(family)]
    for family in options.libraries:
        if family not in libraries:
            print(f"{family} is not installed and is left out", file=sys.stderr)
    described = machine.describe(libraries)
    if options.versions:
        print(json.dumps(described, indent=2))
        return 0
    # Compile bytecode, as for installed libraries and for user modules after their first import.
    for folder in ("src", "benchmarks"):
        compileall.compile_dir(ROOT / folder, quiet=1)
    size = "quick" if options.quick else "full"
    chosen = [cases.load(name) for name in options.cases]
    records: list[report.Record] = []
    for case in chosen:
        records += run_case(case, libraries, size, options.repeats, options.workers)
        if options.json is not None:  # after each case: a run that is stopped keeps what it has measured
            result = {
                "machine": described,
                "size": size,
                "repeats": options.repeats,
                "workers": options.workers,
                "left_out": [family for family in options.libraries if family not in libraries],
                "summary": report.summary(chosen, records),
                "records": records,
            }
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.print_report(chosen, records, described, is_markdown=options.markdown)
    return 1 if any("error" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
