"""Findings as text and as plain data."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Final

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings import Finding
from infeed.doctor.findings.finding import RISKS, describe
from infeed.units import format_count, format_seconds

FORMAT_VERSION: Final = 1


def plain(run: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it, fit for JSON. Names of findings and keys do not change within a version of the format."""
    return {
        "format": FORMAT_VERSION,
        "program": run.program,
        "ending": run.ending,
        "exit_code": run.exit_code,
        "error": run.error,
        "seconds": run.seconds,
        "loaders": [
            {
                "loader": describe(loader),
                "library": loader.library,
                "num_workers": loader.num_workers,
                "batch_size": loader.batch_size,
                "epochs": len(loader.epochs),
                "batches": loader.given_count,
                "judged_batches": loader.batch_count,  # waited_s, away_s and wait_share are of these
                "waited_s": loader.waited_s,
                "away_s": loader.away_s,
                "wait_share": loader.wait_share,
                "sample_s": loader.probe.sample_s,
                "cpu_s": loader.probe.cpu_s,
            }
            for loader in run.loaders
        ],
        "findings": [finding.plain() for finding in findings],
    }


def summary(run: Run) -> str:
    """How the program ran, in a line or two."""
    batches = sum(loader.given_count for loader in run.loaders)
    epochs = sum(len(loader.epochs) for loader in run.loaders)
    counts = (
        format_count(len(run.loaders), "loader"),
        format_count(epochs, "epoch"),
        format_count(batches, "batch", "batches"),
    )
    lines = [f"watched {run.program} for {format_seconds(run.seconds)}: {', '.join(counts)}; {ending(run)}"]
    for loader in run.loaders:
        lines.append(f"  {describe(loader)}: {_waiting(loader) if run.has_own_loop else 'iterated by the doctor'}")
        if loader.probe.error:
            lines.append(f"  samples could not be loaded here, so less is known: {loader.probe.error}")
    return "\n".join(lines)


def _waiting(loader: LoaderSeen) -> str:
    if loader.has_warmed_up and not loader.batch_count and not loader.waiting_s:
        return "infeed was still finding out how many are best"
    since = " once infeed had found out how many are best" if loader.has_warmed_up else ""
    return f"the loop waited {loader.told_share:.0%} of its time{since}"


def ending(run: Run) -> str:
    """How it ended, in words."""
    return {
        "finished": "it ran to its end",
        "exit": f"it ended with exit code {run.exit_code}",
        "error": f"it failed: {run.error}",
        "time": "it was stopped when its time was up",
        "stuck": "it did not ask for a batch any more and was stopped",
        "died": _death(run.exit_code or 0),
    }[run.ending]


def conclusion(run: Run) -> str:
    """What to say where there are no findings: that is good news only of a program that gave batches and did not fail."""
    if not run.has_batch:
        return f"nothing was looked at, because no batch came: {ending(run)}"
    if run.has_failed:
        return f"nothing found that would explain it, but {ending(run)}"
    return "nothing found"


def _death(code: int) -> str:
    """Of a process that could not tell its end. A negative code means a signal; else it left by itself, as os._exit does."""
    if code >= 0:
        return f"its process ended at once, with exit code {code}, so that its datasets could not be looked at"
    try:
        return f"its process died with code {code} ({signal.Signals(-code).name})"
    except ValueError:  # it has no name
        return f"its process died with code {code}"


def cost_text(finding: Finding) -> str:
    """What a finding costs, in a word or two."""
    if finding.risk == "time":
        return f"{finding.cost:.0%} of the time"
    if finding.risk == "memory":
        return f"{finding.cost:.1%} of free memory"
    return {"hang": "may hang", "failure": "may fail", "wrong results": "wrong results"}[finding.risk]


def text(findings: Sequence[Finding]) -> str:
    """Findings for a terminal that knows no colours."""
    blocks = []
    for number, finding in enumerate(findings, 1):
        rows = {"in": finding.loader, **finding.evidence, **{f"cure, {name}": value for name, value in finding.cure.items()}}
        width = max(map(len, rows))
        lines = [f"{number}. {finding.title}  [{finding.name}; {cost_text(finding)}]"]
        lines += [f"   {name:<{width}}  {value}" for name, value in rows.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def print_report(run: Run, findings: Sequence[Finding], console: Any) -> None:
    """Print it all with rich, which the console is of; or as plain text to a stream."""
    if not hasattr(console, "is_terminal"):
        print(summary(run), text(findings) or conclusion(run), sep="\n\n", file=console)
        return
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    colours = dict(zip(RISKS, ("red", "red", "red", "yellow", "cyan"), strict=True))
    console.print(escape(summary(run)), highlight=False, soft_wrap=True)
    console.print()
    for number, finding in enumerate(findings, 1):
        colour = colours[finding.risk]
        console.print(
            f"[bold {colour}]{number}. {escape(finding.title)}[/]  [dim]{escape(f'[{finding.name}; {cost_text(finding)}]')}[/]",
            highlight=False,
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_column(overflow="fold")
        grid.add_column(overflow="fold")  # a long word is broken, and not cut off
        grid.add_row("[dim]in[/]", f"[dim]{escape(finding.loader)}[/]")
        for name, value in finding.evidence.items():
            grid.add_row(escape(name), escape(value))
        for name, value in finding.cure.items():
            grid.add_row(f"[green]cure, {name}[/]", escape(value))
        console.print(Padding(grid, (0, 0, 1, 3), expand=False), highlight=False)
    if not findings:
        colour = "green" if run.has_batch and not run.has_failed else "red"
        console.print(f"[{colour}]{escape(conclusion(run))}[/]", highlight=False, soft_wrap=True)
