"""Formats numbers as short text with units."""

from __future__ import annotations

import pytest

from infeed.formatting import format_bytes, format_count, format_rate, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-7, "0.42 us"),
        (5e-5, "50 us"),
        (9.994e-4, "999 us"),
        (9.997e-4, "1 ms"),
        (0.25, "250 ms"),
        (0.9997, "1 s"),
        (3.214, "3.21 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3599.6, "1 h 0 min"),
        (7384, "2 h 3 min"),
        (-0.25, "-250 ms"),
    ],
)
def test_durations_have_a_suitable_unit(seconds: float, text: str) -> None:
    """None has an exponent."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_sizes_have_a_suitable_unit(count: int, text: str) -> None:
    """One decimal place."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 batches"),
        (1, "1 batch"),
        (1.0, "1 batch"),
        (2.5, "2.5 batches"),
        (1 / 3, "0.33 batches"),
        (12345678, "12,345,678 batches"),
    ],
)
def test_singular_and_plural_differ(count: float, text: str) -> None:
    assert format_count(count, "batch", "batches") == text


def test_the_default_plural_adds_an_s() -> None:
    assert (format_count(1, "core"), format_count(0.5, "core"), format_count(2, "core")) == ("1 core", "0.5 cores", "2 cores")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.021, "0.021 samples/s"), (3.14159, "3.14 samples/s"), (99.96, "100 samples/s"), (12345.6, "12,346 samples/s")],
)
def test_rates_have_three_digits_or_all(rate: float, text: str) -> None:
    assert format_rate(rate) == text
