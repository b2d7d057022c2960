"""Sizes: parsed from text, formatted as text, measured."""

from typing import Any

import pytest

from infeed.errors import ConfigError
from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (12345, 12345),
        (-1, -1),
        ("7", 7),
        ("512B", 512),
        ("1k", 1024),
        ("1KB", 1024),
        ("1KiB", 1024),
        ("512MB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        (" 2 g ", 2 << 30),
        ("3TiB", 3 << 40),
        ("0.5t", 1 << 39),
    ],
)
def test_sizes_are_parsed(value: Any, count: int) -> None:
    """Units of 1024 with or without i, in any case, with or without spaces."""
    assert parse_bytes(value) == count


@pytest.mark.parametrize("value", ["", "GB", "1e3", "-1", "1.GB", "1 000", "1GiBs", "0x10", True, None, "1,5GB"])
def test_invalid_sizes_are_rejected(value: Any) -> None:
    """The message shows the value and valid forms."""
    with pytest.raises(ConfigError, match="is not a size; pass bytes, or text such as '2GiB'") as caught:
        parse_bytes(value)
    assert f"memory_limit={value!r}" in str(caught.value)


@pytest.mark.parametrize("count", [1 << 10, 1 << 20, 1 << 30, 1 << 40, 7 << 33])
def test_a_formatted_size_can_be_parsed(count: int) -> None:
    """A figure from a message can be used as an option."""
    assert parse_bytes(format_bytes(count)) == count


def test_available_memory_is_positive_and_finite() -> None:
    """It is below the machine's total."""
    import psutil

    assert 0 < available_bytes() <= psutil.virtual_memory().total
