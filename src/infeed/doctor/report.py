"""Reports of ``infeed doctor`` (JSON data, HTML page, parts of the terminal text) and the HTML page of ``infeed bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.finding import Finding, describe
from infeed.doctor.throughput import Measured
from infeed.formatting import format_bytes, format_count, format_seconds
from infeed.metrics.page import (
    Html,
    Tone,
    chart,
    code,
    diagnosis,
    facts,
    label,
    page,
    paragraph,
    section,
    table,
)
from infeed.workers.process_tools import signal_name


def findings_page(run: Run, findings: Sequence[Finding]) -> str:
    """Return the HTML page: findings, most costly first, then the monitored loaders."""
    blocks: list[Html] = []
    if findings:
        count = format_count(len(findings), "problem")
        blocks.append(diagnosis(f"{count} found.\nMost costly: {findings[0].title}.", "bad"))
    else:
        text = conclusion(run)
        tone: Tone = "good" if run.has_batch and not run.has_failed else "bad"
        blocks.append(diagnosis(f"{text[0].upper()}{text[1:]}.", tone))
    for number, finding in enumerate(findings, 1):
        tone = "fair" if finding.risk in ("time", "memory") else "bad"
        fixes = "\n".join(f"# {name}\n{text}" for name, text in finding.fix.items())
        blocks.append(
            section(
                f"{number}. {finding.title}",
                label(f"{finding.name}: {cost_text(finding)}", tone),
                facts(finding.evidence),
                code(fixes),
                note=finding.loader,
            )
        )
    rows = [
        (
            describe(loader),
            str(len(loader.epochs)),
            f"{loader.delivered_count:,}",
            f"{loader.shown_wait_share:.0%}" if run.has_own_loop and (loader.batch_count or loader.waiting_s) else "",
            format_seconds(loader.probe.sample_s) if loader.probe.sample_count else "",
        )
        for loader in run.loaders
    ]
    head = ("loader", "epochs", "batches", "waits for data", "per sample")
    blocks.append(
        section("Monitored loaders", table(head, rows, numbers=range(1, 5)), paragraph(f"The program {ending(run)}."))
    )
    return page("infeed doctor", blocks, subtitle=f"{run.program}, monitored for {format_seconds(run.seconds)}")


def bench_page(name: str, batch_size: int, core_count: int, results: Sequence[Measured], best: Measured | None) -> str:
    """Return the HTML page with the throughput of each setting."""
    blocks: list[Html] = []
    if best is not None:
        blocks.append(diagnosis(f"Best setting: {best.setting}, {best.samples_per_s:,.0f} samples/s.", "good"))
        blocks.append(section("Code", code(best.setting.code(batch_size))))
    blocks.append(section("Throughput by number of workers", chart(rate_figure(results, core_count), height_px=320)))
    rows = [
        (
            str(one.setting),
            one.error or f"{one.samples_per_s:,.0f}",
            "" if one.error else f"{format_bytes(one.bytes_per_s)}/s",
            "" if one.error else format_seconds(one.first_s),
            "" if one.error else format_bytes(one.memory_bytes),
        )
        for one in results
    ]
    head = ("workers", "samples/s", "bytes/s", "first batch", "memory")
    blocks.append(section("All settings", table(head, rows, numbers=range(1, 5))))
    return page("infeed bench", blocks, subtitle=f"{name}, batch size {batch_size}, {core_count} cores")


def rate_figure(results: Sequence[Measured], core_count: int) -> dict[str, Any]:
    """Plot samples per second over the number of workers, one line per kind; both start at ``num_workers=0``."""
    good = [one for one in results if not one.error]
    inline = [one for one in good if one.setting.kind == "inline"]
    lines = []
    for kind, colour in (("thread", "var(--write)"), ("process", "var(--load)")):
        points = [*inline, *(one for one in good if one.setting.kind == kind)]
        if len(points) > len(inline):
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": {"thread": "threads", "process": "processes"}[kind],
                    "x": [one.setting.num_workers for one in points],
                    "y": [one.samples_per_s for one in points],
                    "line": {"color": colour},
                    "hovertemplate": "%{x} workers: %{y:,.0f} samples/s<extra></extra>",
                }
            )
    layout = {
        "xaxis": {"title": {"text": f"workers (this machine has {core_count} cores)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
        "legend": {"orientation": "h"},
    }
    return {"data": lines, "layout": layout}


FORMAT_VERSION: Final = 1


def plain(run: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the whole result as JSON-compatible data. Finding names and keys are stable within a format version."""
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
                "batches": loader.delivered_count,
                "judged_batches": loader.batch_count,  # waited_s, away_s and wait_share cover these
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


def overview(run: Run) -> str:
    """Describe the run: one line for the program, then one or two lines per loader."""
    batches = sum(loader.delivered_count for loader in run.loaders)
    epochs = sum(len(loader.epochs) for loader in run.loaders)
    counts = (
        format_count(len(run.loaders), "loader"),
        format_count(epochs, "epoch"),
        format_count(batches, "batch", "batches"),
    )
    lines = [f"{run.program}: {', '.join(counts)} in {format_seconds(run.seconds)}; the program {ending(run)}"]
    for loader in run.loaders:
        lines.append(f"  {describe(loader)}: {_waiting(loader) if run.has_own_loop else 'iterated by the doctor'}")
        if loader.probe.error:
            lines.append(f"  samples could not be loaded for measurement: {loader.probe.error}")
    return "\n".join(lines)


def _waiting(loader: LoaderSeen) -> str:
    if loader.has_warmed_up and not loader.batch_count and not loader.waiting_s:
        return "warming up: infeed was still searching for the best number of workers"
    since = " after infeed found the best number of workers" if loader.has_warmed_up else ""
    return f"the training loop waited for data {loader.shown_wait_share:.0%} of the time{since}"


def ending(run: Run) -> str:
    """Describe how the program ended, as the end of a sentence about it."""
    return {
        "finished": "ran to its end",
        "exit": f"exited with code {run.exit_code}",
        "error": f"failed: {run.error}",
        "time": "was stopped at the time limit",
        "stuck": "requested no more batches and was stopped",
        "died": _death(run.exit_code or 0),
    }[run.ending]


def conclusion(run: Run) -> str:
    """Return the message for no findings, which is good news only if the program yielded batches and did not fail."""
    if not run.has_batch:
        return f"no batch arrived, so nothing was examined: the program {ending(run)}"
    if run.has_failed:
        return f"no problems found, but the program {ending(run)}"
    return "no problems found"


def _death(code: int) -> str:
    """Describe a process that ended without an "end" event: a negative code is a signal, else it called ``os._exit``."""
    if code >= 0:
        return f"called os._exit({code}), so its datasets could not be examined"
    return f"was killed by {signal_name(-code)}"


def cost_text(finding: Finding) -> str:
    """Return a finding's cost in a few words."""
    if finding.risk == "time":
        return f"{finding.cost:.0%} of the time"
    if finding.risk == "memory":
        return f"{finding.cost:.1%} of free memory"
    return {"hang": "may hang", "failure": "may fail", "wrong results": "wrong results"}[finding.risk]
