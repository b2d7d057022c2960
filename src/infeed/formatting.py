"""Format numbers for display, with a unit and about three significant digits; align and shorten text.

Formatted numbers are ASCII only, because the encoding of the output stream is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> [format_seconds(seconds) for seconds in (0, 0.0000123, 0.01234, 3.21, 75, 7384)]
    ['0 s', '12.3 us', '12.3 ms', '3.21 s', '1 min 15 s', '2 h 3 min']
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 59.95:
        for unit, factor in (("us", 1e6), ("ms", 1e3)):
            if abs(seconds) * factor < 999.5:
                return f"{_three_digits(seconds * factor)} {unit}"
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_rate(per_s: float) -> str:
    """Format a number of samples per second.

    >>> format_rate(12345.6), format_rate(3.14159)
    ('12,346 samples/s', '3.14 samples/s')
    """
    return f"{_three_digits(per_s)} samples/s"


def format_count(count: float, one: str, many: str = "") -> str:
    """Format a count with the singular or plural of its noun.

    >>> format_count(1, "batch", "batches"), format_count(1200, "sample"), format_count(2.5, "core")
    ('1 batch', '1,200 samples', '2.5 cores')
    """
    number = round(count, 2)
    return f"{number if number % 1 else int(number):,} {one if number == 1 else many or one + 's'}"


def format_workers(count: int, kind: str) -> str:
    """Format a number of workers of a kind.

    >>> format_workers(1, "process"), format_workers(3, "process"), format_workers(2, "thread")
    ('1 process', '3 processes', '2 threads')
    """
    return format_count(count, kind, "processes" if kind == "process" else "")


def format_bytes(count: float) -> str:
    """Format a size in bytes, with binary units.

    >>> format_bytes(1610612736)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def align(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Return rows of cells as lines of text with aligned columns.

    >>> print(align([("delivered", "200 batches"), ("work", "load 3 s")], indent="  "))
      delivered  200 batches
      work       load 3 s
    """
    table = [*rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def type_name(value: object) -> str:
    """Return the qualified name of the value's type.

    >>> type_name([]), type_name(type_name)
    ('list', 'function')
    """
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def shorten(text: str, most: int) -> str:
    """Return the text as one line of printable characters, truncated to ``most``.

    >>> shorten("a  long\\ntext", 7)
    'a long\u2026'
    """
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 1]}\u2026"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
