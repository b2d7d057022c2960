"""``infeed bench``: measures worker settings for a dataset and reports the best one on this machine."""

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from infeed.cli import arguments as types
from infeed.cli.arguments import Output, complain, find_problem
from infeed.cli.terminal import open_console, print_table
from infeed.formatting import format_bytes, format_seconds

if TYPE_CHECKING:
    from infeed.doctor.throughput import Measured, Setting

__all__ = ["add_parser", "run"]

_USAGE: Final = 2
_NOT_RUN: Final = 3
_FORMAT_VERSION: Final = 1
_EPILOG: Final = """\
exit codes: 0 done, 2 wrong usage or a file that cannot be written, 3 the dataset could not be loaded, 130 interrupted
"""
# Widths in characters: bars, the gap between two columns, and both table edges together.
_BAR: Final = 24
_LEAST_BAR: Final = 4
_GAP: Final = 3
_EDGES: Final = 2

_complain: Final = partial(complain, "bench")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="find the best worker settings for a dataset on this machine",
        description="Measures a dataset without workers, then with increasing numbers of threads and processes.",
        epilog=_EPILOG,
    )
    parser.add_argument("dataset", metavar="module:dataset", help="a dataset, or a function without arguments that returns one")
    parser.add_argument("--batch-size", type=types.count, default=32, metavar="N", help="samples per batch (default: 32)")
    parser.add_argument("--seconds", type=types.seconds, default=1.5, help="measuring time per setting (default: 1.5)")
    parser.add_argument("--worker", choices=("thread", "process"), help="measure only this kind of worker")
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="write an HTML report with a chart")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure the settings, print the results, and print the best setting as a line to paste."""
    from infeed.doctor import targets
    from infeed.doctor.report import bench_page
    from infeed.doctor.throughput import Bench, choose, confirm, search
    from infeed.errors import ConfigError
    from infeed.memory.limits import available_cores
    from infeed.metrics.page import plotly_source
    from infeed.programs.script import describe_error, show_error

    target: str = arguments.dataset
    if not targets.names_dataset(target):
        return _complain(f"{target!r} does not have the form module:dataset; for example: infeed bench data:train_set", _USAGE)
    data, page = Output("--json", arguments.json, may_print=True), Output("--html", arguments.html)
    problem = find_problem([data, page])
    if problem:
        return _complain(problem, _USAGE)
    try:
        if page.is_wanted:
            plotly_source()  # raises now rather than after the measurement
    except ConfigError as error:
        return _complain(str(error), _USAGE)
    try:
        bench = Bench(targets.load_dataset(target), batch_size=arguments.batch_size, seconds=arguments.seconds)
    except ConfigError as error:
        return _complain(str(error), _NOT_RUN)
    except Exception as error:  # raised by the user's module or dataset function
        show_error(error, [__file__, targets.__file__, importlib.__file__])
        return _complain(f"{target} could not be loaded: {describe_error(error)}", _NOT_RUN)
    cores = max(1, int(available_cores()))  # a container may have less than one core
    if bench.batch_size < arguments.batch_size:
        print(f"batch size reduced to {bench.batch_size}, the number of samples", file=sys.stderr)

    def measure(setting: "Setting") -> "Measured":
        # Print the setting before measuring it: the dataset may hang or end the process.
        print(f"  {setting}: ", end="", file=sys.stderr, flush=True)
        found = bench.measure(setting)
        print(found.error or f"{found.samples_per_s:,.0f} samples/s", file=sys.stderr)
        return found

    results = list(search(measure, cores, [arguments.worker] if arguments.worker else ("thread", "process")))
    results = confirm(bench.measure, results)
    best = choose(results)
    if best is not None and not data.is_stdout:
        _print_table(results, best)
        print(f"\nBest setting (fewest workers within 3% of the fastest):\n  {best.setting.code(bench.batch_size)}")
    faults = []
    if data.is_wanted:
        document = {
            "format": _FORMAT_VERSION,
            "dataset": target,
            "batch_size": bench.batch_size,
            "cores": cores,
            "results": [asdict(one) for one in results],
            "best": None if best is None else {**asdict(best), "code": best.setting.code(bench.batch_size)},
        }
        faults.append(data.write(json.dumps(document, indent=2) + "\n"))
    if page.is_wanted:
        faults.append(page.write(bench_page(target, bench.batch_size, cores, results, best)))
    for problem in filter(None, faults):
        _complain(problem, _USAGE)
    if best is None:
        return _complain(f"{target} could not be loaded: {results[0].error}", _NOT_RUN)
    return _USAGE if any(faults) else 0


def _print_table(results: "Sequence[Measured]", best: "Measured") -> None:
    good = [one for one in results if not one.error]
    rows = [["workers", "samples/s", "first batch", "memory"]]
    for one in good:
        rate = f"{one.samples_per_s:,.0f}"
        rows.append([str(one.setting), rate, format_seconds(one.first_s), format_bytes(one.memory_bytes)])
    rows = _fitting(rows, [one.samples_per_s for one in good], shutil.get_terminal_size().columns)
    print_table(open_console(), rows, chosen=str(best.setting))
    failed = [one for one in results if one.error]
    for one in failed:
        print(f"{one.setting}: {one.error}")
    if failed:
        print("After a failure, larger numbers of that kind of worker were not measured.")


def _fitting(rows: list[list[str]], rates: Sequence[float], width: int) -> list[list[str]]:
    """Fit the table to the terminal: bars as long as the width allows; if narrow, drop bars and the last columns."""
    while len(rows[0]) > 2 and _room(rows, width) < 0:
        rows = [row[:-1] for row in rows]
    length = min(_BAR, _room(rows, width) - _GAP)
    if length < _LEAST_BAR:
        return rows
    bars = ["", *("█" * max(1, round(length * rate / max(rates))) for rate in rates)]
    return [[*row[:2], bar, *row[2:]] for row, bar in zip(rows, bars, strict=True)]


def _room(rows: list[list[str]], width: int) -> int:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return width - sum(widths) - _GAP * (len(widths) - 1) - _EDGES
