"""What doctor and bench have found, as a web page in one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infeed.doctor.benching import Measured
from infeed.doctor.evidence import Run
from infeed.doctor.findings import Finding
from infeed.doctor.findings.finding import describe
from infeed.doctor.report import conclusion, cost_text, ending
from infeed.observe.page import Block, Tone, chart, code, facts, label, page, paragraph, plotly_source, section, table, verdict
from infeed.units import format_bytes, format_seconds


def findings_page(run: Run, findings: Sequence[Finding]) -> str:
    """The page with what was found, the most costly first, and what was watched."""
    blocks: list[Block] = []
    if findings:
        count = "1 thing is" if len(findings) == 1 else f"{len(findings)} things are"
        blocks.append(verdict(f"{count} wrong.\nThe most costly: {findings[0].title}.", "bad"))
    else:
        told = conclusion(run)
        tone: Tone = "good" if run.has_batch and not run.has_failed else "bad"
        blocks.append(verdict(f"{told[0].upper()}{told[1:]}.", tone))
    for number, finding in enumerate(findings, 1):
        tone = "fair" if finding.risk in ("time", "memory") else "bad"
        cures = "\n".join(f"# {name}\n{text}" for name, text in finding.cure.items())
        blocks.append(
            section(
                f"{number}. {finding.title}",
                label(f"{finding.name}: {cost_text(finding)}", tone),
                facts(finding.evidence),
                code(cures),
                note=finding.loader,
            )
        )
    rows = [
        (
            describe(loader),
            str(len(loader.epochs)),
            f"{loader.given_count:,}",
            f"{loader.told_share:.0%}" if run.has_own_loop and (loader.batch_count or loader.waiting_s) else "",
            format_seconds(loader.probe.sample_s) if loader.probe.sample_count else "",
        )
        for loader in run.loaders
    ]
    head = ("loader", "epochs", "batches", "loop waited", "a sample")
    blocks.append(
        section("What was watched", table(head, rows, numbers=range(1, 5)), paragraph(f"How it ended: {ending(run)}."))
    )
    return page("infeed doctor", blocks, subtitle=f"{run.program}, watched for {format_seconds(run.seconds)}")


def check_plot() -> None:
    """Make sure that ``bench_page`` can draw.

    Raises:
        ConfigError: plotly is not installed.
    """
    plotly_source()


def bench_page(name: str, batch_size: int, core_count: int, results: Sequence[Measured], best: Measured | None) -> str:
    """The page with the rate of each setting."""
    blocks: list[Block] = []
    if best is not None:
        blocks.append(verdict(f"Best here: {best.setting}, {best.samples_per_s:,.0f} samples/s.", "good"))
        blocks.append(section("To paste", code(best.setting.code(batch_size))))
    blocks.append(section("Rate by number of workers", chart(rate_figure(results, core_count), height_px=320)))
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
    head = ("workers", "samples/s", "rate", "first batch", "memory")
    blocks.append(section("All settings", table(head, rows, numbers=range(1, 5))))
    return page("infeed bench", blocks, subtitle=f"{name}, batch size {batch_size}, {core_count} cores")


def rate_figure(results: Sequence[Measured], core_count: int) -> dict[str, Any]:
    """Samples per second against workers, a line for each kind; no workers is where both begin."""
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
