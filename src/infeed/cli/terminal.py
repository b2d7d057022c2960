"""Prints tables to the terminal: with colors if rich is installed, else as plain text."""

import importlib.util
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from infeed.formatting import align

__all__ = ["open_console", "print_entries", "print_spans", "print_table"]


def open_console() -> Any:
    """Return a rich console if rich is installed, else standard output. All functions here accept both."""
    if importlib.util.find_spec("rich") is None:
        return sys.stdout
    from rich.console import Console

    return Console()


def print_spans(console: Any, *spans: tuple[str, str], is_wrapped: bool = True) -> None:
    """Print spans of text, each with its style for rich. Rich breaks long lines between words if ``is_wrapped``."""
    if hasattr(console, "width"):
        from rich.text import Text

        console.print(Text.assemble(*spans), soft_wrap=not is_wrapped)
    else:
        print("".join(text for text, _ in spans), file=console)


def print_entries(console: Any, entries: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Print an indented table of names and values. Some names have styles. Rich wraps long values into their column."""
    name_width = 3 + max(map(len, entries))
    for name, value in entries.items():
        room = max(1, getattr(console, "width", sys.maxsize) - name_width - 2)
        for number, line in enumerate(textwrap.wrap(value, room, break_on_hyphens=False) or [""]):
            label = "" if number else f"   {name}"
            print_spans(console, (f"{label:<{name_width}}", styles.get(name, "")), (f"  {line}", ""))


def print_table(console: Any, rows: Sequence[Sequence[str]], *, chosen: str = "") -> None:
    """Print a table. The first row is the head; with rich, the row that begins with ``chosen`` is highlighted."""
    if not hasattr(console, "width"):
        print(align(rows), file=console)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(rows[0]):
        table.add_column(title, justify="right" if number and title else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row, style="green" if row[0] == chosen else None)
    console.print(table)
