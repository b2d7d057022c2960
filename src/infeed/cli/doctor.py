"""``infeed doctor``: runs a program for a limited time and reports problems in its data loading."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from infeed.cli import arguments as types
from infeed.cli.arguments import Output, complain, find_problem, program_of
from infeed.cli.terminal import open_console, print_entries, print_spans

if TYPE_CHECKING:
    from infeed.doctor.evidence import Run
    from infeed.doctor.finding import Finding

__all__ = ["add_parser", "print_report", "run"]

_FOUND: Final = 1
_USAGE: Final = 2
_NOT_RUN: Final = 3
# Findings in the summary, so that it fits one screen.
_MOST_SHOWN: Final = 5
_COLORS: Final = {"hang": "red", "failure": "red", "wrong results": "red", "time": "yellow", "memory": "cyan"}

_EPILOG: Final = """\
exit codes: 0 no problems found, 1 problems found, 2 wrong usage or a file that cannot be written, 3 no problems found, but no
batch arrived or the program failed, 130 interrupted
"""

_complain: Final = partial(complain, "doctor")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="find problems in the data loading of a program",
        description=(
            "Runs a program without changes for a limited time, monitors its data loaders (torch or infeed), measures their "
            "datasets, and reports problems, the most expensive first."
        ),
        usage="infeed doctor [options] (script.py [arguments ...] | -m module [arguments ...] | module:dataset)",
        epilog=_EPILOG,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the evidence and all fixes of every finding")
    parser.add_argument("-m", dest="is_module", action="store_true", help="program is a module, as with `python -m`")
    parser.add_argument(
        "--seconds", type=types.seconds, default=30.0, help="monitoring time from the first iteration of a loader (default: 30)"
    )
    parser.add_argument(
        "--start-seconds",
        type=types.seconds,
        default=600.0,
        help="time limit until the first iteration of a loader (default: 600)",
    )
    parser.add_argument("--infeed", action="store_true", help="run torch's loaders on infeed, as `infeed run` does")
    parser.add_argument("--ignore", action="append", default=[], metavar="NAME", help="skip a finding; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="write an HTML report")
    parser.add_argument(
        "--num-workers", type=types.workers, metavar="N", help="number of workers; only for module:dataset (default: 2)"
    )
    parser.add_argument(
        "--batch-size", type=types.count, metavar="N", help="samples per batch; only for module:dataset (default: 32)"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script, module or dataset, and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the program, print the findings, and return an exit code that shows whether there are any."""
    from infeed.doctor.checks import NAMES, examine
    from infeed.doctor.child import ChildOptions
    from infeed.doctor.report import conclusion, ending, findings_page, plain
    from infeed.doctor.runner import survey

    program = program_of(arguments.program)
    unknown = [name for name in arguments.ignore if name not in NAMES]
    if unknown:
        return _complain(f"--ignore {unknown[0]}: unknown finding; choose from {', '.join(NAMES)}")
    kind = _kind(program, arguments.is_module)
    if kind is None:
        return _USAGE
    if kind == "dataset" and program[1:]:
        return _complain(f"{' '.join(program[1:])}: a dataset takes no arguments; put options before {program[0]}")
    of_dataset = {"num_workers": arguments.num_workers, "batch_size": arguments.batch_size}
    given = {name: value for name, value in of_dataset.items() if value is not None}
    if kind != "dataset" and given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        return _complain(f"{option} is only for module:dataset; {program[0]} sets its own loaders' options")
    data, page = Output("--json", arguments.json, may_print=True), Output("--html", arguments.html)
    problem = find_problem([data, page])
    if problem:
        return _complain(problem)
    orders = ChildOptions(
        journal="",
        kind=kind,
        seconds=arguments.seconds,
        with_infeed=arguments.infeed,
        **given,
    )
    # With --json -, send the program's output to stderr, so it does not mix with the JSON.
    seen = survey(
        orders, program, start_seconds=arguments.start_seconds, stdout=sys.stderr.fileno() if data.is_stdout else None
    )
    if not any(loader.epochs for loader in seen.loaders):
        if seen.ending in ("finished", "exit") and not seen.exit_code:
            _complain(f"{program[0]} iterated no DataLoader of torch or infeed")
        elif seen.ending in ("time", "stuck"):
            _complain(f"{program[0]} iterated no DataLoader within {arguments.start_seconds:g} s; raise --start-seconds")
        else:
            _complain(f"{program[0]} {ending(seen)}")
        return _NOT_RUN
    findings = [finding for finding in examine(seen) if finding.name not in arguments.ignore]
    if not data.is_stdout:
        print_report(seen, findings, open_console(), is_verbose=arguments.verbose)
    faults = []
    if data.is_wanted:
        faults.append(data.write(json.dumps(plain(seen, findings), indent=2) + "\n"))
    if page.is_wanted:
        faults.append(page.write(findings_page(seen, findings)))
    for problem in filter(None, faults):
        _complain(problem)
    if any(faults):
        return _USAGE
    if findings:
        return _FOUND
    if not seen.has_batch or seen.has_failed:
        if data.is_stdout:
            _complain(f"{program[0]}: {conclusion(seen)}")
        return _NOT_RUN
    return 0


def _kind(program: list[str], is_module: bool) -> Literal["script", "module", "dataset"] | None:
    from infeed.doctor.targets import names_dataset

    if not program:
        _complain("missing program; pass a script, -m MODULE or module:dataset; for example: infeed doctor train.py")
        return None
    if is_module:
        return "module"
    if Path(program[0]).is_file():
        return "script"
    if names_dataset(program[0]):
        return "dataset"
    _complain(f"{program[0]!r} is not a file; pass a script, a module with -m, or module:dataset")
    return None


def _rows(finding: "Finding", *, is_verbose: bool) -> dict[str, str]:
    """Return what to print below a finding's title. The summary has only the bottleneck and the fix for the own library."""
    if is_verbose:
        return {"loader": finding.loader, **finding.evidence, **{f"fix ({name})": text for name, text in finding.fix.items()}}
    own = "torch" if finding.loader.startswith("torch") else "infeed"
    bottleneck = {"bottleneck": finding.evidence["bottleneck"]} if finding.bottleneck else {}
    return {**bottleneck, "fix": finding.fix[own]}


def _more(findings: "Sequence[Finding]", *, is_verbose: bool) -> list[str]:
    """Return the lines below the shown findings."""
    if is_verbose or not findings:
        return []
    rest = ", ".join(finding.name for finding in findings[_MOST_SHOWN:])
    details = "Evidence and all fixes: infeed doctor -v, or --html FILE."
    return [f"Also found: {rest}.", details] if rest else [details]


def print_report(run: "Run", findings: "Sequence[Finding]", console: Any, *, is_verbose: bool = False) -> None:
    """Print the findings.

    Args:
        run: The monitored run.
        findings: Most costly first.
        console: From ``open_console``.
        is_verbose: Print all findings with their evidence and all fixes, instead of a summary that fits one screen.
    """
    from infeed.doctor.report import conclusion, cost_text, overview

    print_spans(console, (overview(run), ""), is_wrapped=False)
    print_spans(console)
    for number, finding in enumerate(findings if is_verbose else findings[:_MOST_SHOWN], 1):
        title = (f"{number}. {finding.title}", f"bold {_COLORS[finding.risk]}")
        print_spans(console, title, (f"  [{finding.name}; {cost_text(finding)}]", "dim"))
        rows = _rows(finding, is_verbose=is_verbose)
        print_entries(console, rows, {name: "green" for name in rows if name.startswith("fix")})
        print_spans(console)
    for line in _more(findings, is_verbose=is_verbose):
        print_spans(console, (line, ""))
    if not findings:
        color = "green" if run.has_batch and not run.has_failed else "red"
        print_spans(console, (conclusion(run), color), is_wrapped=False)
