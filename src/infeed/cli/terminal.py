"""Prints tables to the terminal: with colors if rich is installed, else as plain text."""

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from infeed.formatting import align

__all__ = ["open_console", "print_entries", "print_spans", "print_table", "width_of"]

_INDENT: Final = "   "


def open_console() -> Any:
    """Return a rich console if rich is installed, else standard output. All functions here accept both."""
    if importlib.util.find_spec("rich") is None:
        return sys.stdout
    from rich.console import Console

    return Console()


def _is_rich(console: Any) -> bool:
    return hasattr(console, "is_terminal")


def width_of(console: Any) -> int:
    """Return the width in characters."""
    return console.width if _is_rich(console) else shutil.get_terminal_size().columns


def print_spans(console: Any, *spans: tuple[str, str], is_wrapped: bool = True) -> None:
    """Print spans of text, each with its style for rich. Rich breaks long lines between words if ``is_wrapped``."""
    if _is_rich(console):
        from rich.text import Text

        console.print(Text.assemble(*spans), soft_wrap=not is_wrapped)
    else:
        print("".join(text for text, _ in spans), file=console)


def print_entries(console: Any, entries: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Print an indented table of names and values. With rich, long values are wrapped into their column.

    Args:
        console: From ``open_console``.
        entries: Values by name.
        styles: Styles of some names.
    """
    wide = max(map(len, entries))
    room = max(1, width_of(console) - wide - len(_INDENT) - 2)
    for name, value in entries.items():
        lines = textwrap.wrap(value, room, break_on_hyphens=False) if _is_rich(console) else [value]
        for number, line in enumerate(lines):
            print_spans(console, (f"{_INDENT}{'' if number else name:<{wide}}", styles.get(name, "")), (f"  {line}", ""))


def print_table(console: Any, rows: Sequence[Sequence[str]], *, chosen: str = "") -> None:
    """Print a table. The first row is the head; with rich, the row that begins with ``chosen`` is highlighted."""
    if not _is_rich(console):
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
