"""Output that cannot show every letter."""

import io
import sys

import pytest

from infeed.cli.arguments import replacing


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "12 us ### ... D?ta ??"), ("latin-1", "12 µs ### ... Däta ??"), ("utf-8", "12 µs ███ … Däta 数?")],
)
def test_what_output_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    """By a similar name, if there is one; the last letter is of an unreadable file name."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))

    with replacing():
        print("12 µs ███ … Däta 数\udcff", end="")

    assert output.getvalue() == shown.encode(encoding)
    assert sys.stdout.errors == "strict"  # as it was


def test_a_stream_that_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a notebook's; or there is none at all."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)

    with replacing():
        print("12 µs", end="")

    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == "12 µs"
