"""Converts records to medians, ratios, target results and tables. ``spec.Case`` contains everything specific to a case."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.spec import Case, Metric, Target

Record = dict[str, Any]

COSTS: Final = ("first_batch_s", "close_s", "import_s", "cpu_main_s", "cpu_children_s", "peak_rss_mb")


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    most: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class TargetCheck:
    target: str
    reached: float | None
    is_met: bool | None


@dataclass(frozen=True, slots=True)
class MetricRow:
    case: str
    metric: str
    title: str
    unit: str
    library: str
    spread: Spread
    baseline: str | None
    advantage: float | None
    targets: tuple[TargetCheck, ...]


@dataclass(frozen=True, slots=True)
class CostRow:
    case: str
    library: str
    costs: dict[str, Spread]


def advantage(metric: Metric, ours: float, theirs: float) -> float | None:
    """Return how many times better ``ours`` is than ``theirs``; above 1 is better for every metric."""
    above, below = (ours, theirs) if metric.better == "higher" else (theirs, ours)
    if metric.better == "neither" or above <= 0 or below <= 0:
        return None
    return above / below


def _target_text(target: Target, unit: str) -> str:
    sign, bound = (">=", target.at_least) if target.at_least is not None else ("<=", target.at_most)
    text = f"{sign} {bound:g}"
    if target.against is not None:
        text += f" x {target.against}"
    elif unit:
        text += f" {unit}"
    return f"{text} ({target.note})" if target.note else text


def _check_target(target: Target, metric: Metric, value: float, others: dict[str, Spread]) -> TargetCheck:
    reached: float | None = value
    if target.against is not None:
        theirs = others.get(target.against)
        reached = None if theirs is None else advantage(metric, value, theirs.median)
    is_met: bool | None = None
    if reached is not None:
        is_met = reached >= target.at_least if target.at_least is not None else reached <= (target.at_most or 0.0)
    return TargetCheck(_target_text(target, metric.unit), reached, is_met)


def metric_rows(case: Case, records: Iterable[Record]) -> list[MetricRow]:
    good = [record for record in records if record["case"] == case.name and "error" not in record]
    rows: list[MetricRow] = []
    for metric in case.metrics:
        spreads: dict[str, Spread] = {}
        for library in case.libraries:
            values = [r["metrics"][metric.name] for r in good if r["library"] == library and metric.name in r["metrics"]]
            if values:
                spreads[library] = Spread.of(values)
        for library, spread in spreads.items():
            base = spreads.get(case.baseline) if case.baseline is not None else None
            ratio = None if base is None or library == case.baseline else advantage(metric, spread.median, base.median)
            targets = tuple(
                _check_target(target, metric, spread.median, spreads)
                for target in case.targets
                if library == "infeed" and target.metric == metric.name
            )
            rows.append(
                MetricRow(case.name, metric.name, metric.title, metric.unit, library, spread, case.baseline, ratio, targets)
            )
    return rows


def cost_rows(case: Case, records: Iterable[Record]) -> list[CostRow]:
    good = [record for record in records if record["case"] == case.name and "error" not in record]
    rows: list[CostRow] = []
    for library in case.libraries:
        own = [record for record in good if record["library"] == library]
        if own:
            rows.append(CostRow(case.name, library, {name: Spread.of([r[name] for r in own]) for name in COSTS}))
    return rows


def summary(cases: Iterable[Case], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the content of the JSON file other than the raw records."""
    return [
        {
            "case": case.name,
            "title": case.title,
            "warm_up": case.warm_up,
            "note": case.note,
            "metrics": [asdict(row) for row in metric_rows(case, records)],
            "costs": [asdict(row) for row in cost_rows(case, records)],
        }
        for case in cases
    ]


def _number(value: float) -> str:
    if value != 0 and abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _check_text(check: TargetCheck) -> str:
    if check.is_met is None:
        return "not measured"
    reached = _number(check.reached or 0.0)
    return f"{'met' if check.is_met else 'MISSED'} ({reached})"


def _results_table(cases: Sequence[Case], records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    head = ["case", "metric", "library", "median", "min .. max", "unit", "x baseline", "target", "result"]
    lines: list[list[str]] = []
    for case in cases:
        for row in metric_rows(case, records):
            ratio = "" if row.advantage is None else f"{_number(row.advantage)} x {row.baseline}"
            lines.append(
                [
                    row.case,
                    row.title,
                    row.library,
                    _number(row.spread.median),
                    f"{_number(row.spread.least)} .. {_number(row.spread.most)}",
                    row.unit,
                    ratio,
                    "; ".join(check.target for check in row.targets),
                    "; ".join(map(_check_text, row.targets)),
                ]
            )
    return head, lines


def _costs_table(cases: Sequence[Case], records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    head = ["case", "library", "first batch s", "close s", "import s", "CPU main s", "CPU children s", "peak RSS MB"]
    lines = [
        [row.case, row.library, *(_number(row.costs[name].median) for name in COSTS)]
        for case in cases
        for row in cost_rows(case, records)
    ]
    return head, lines


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _plain(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
    rows = [head, ["-" * width for width in widths], *lines]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _print_rich(title: str, head: list[str], lines: list[list[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console()
    if not console.is_terminal:
        return False
    table = Table(title=title, title_justify="left")
    for column in head:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    return True


def print_report(cases: Sequence[Case], records: Sequence[Record], machine: dict[str, Any], *, is_markdown: bool) -> None:
    tables = (
        ("Results (median of repeats; x baseline above one is better)", *_results_table(cases, records)),
        ("Costs of one run, from the loader's construction to its close (medians)", *_costs_table(cases, records)),
    )
    print(f"\n{machine_line(machine)}")
    for title, head, lines in tables:
        print()
        if is_markdown:
            print(f"**{title}**\n\n{_markdown(head, lines)}")
        elif not _print_rich(title, head, lines):
            print(f"{title}\n\n{_plain(head, lines)}")
    notes = [f"{case.name}: {case.note}" for case in cases if case.note]
    if notes:
        print("\n" + "\n".join(f"- {note}" for note in notes))
    for record in records:
        if "error" in record:
            last = record["error"].strip().splitlines()[-1]
            print(f"- FAILED {record['case']} with {record['library']}, repeat {record.get('repeat')}: {last}")


def machine_line(machine: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    changed = " with local changes" if machine["has_local_changes"] else ""
    return (
        f"{machine['cpu']}, {machine['cores_usable']} of {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, {machine['python']}; {found}; commit {machine['commit']}{changed}; {machine['date']}; "
        f"load before {machine['load_before']}"
    )
