"""Output streams that cannot encode every character."""

import io
import sys

import pytest

from infeed.cli.arguments import replacing


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "12 us ### ... D?ta ??"), ("latin-1", "12 µs ### ... Däta ??"), ("utf-8", "12 µs ███ … Däta 数?")],
)
def test_unencodable_characters_are_replaced(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    """A similar character is used where possible; undecodable characters of file names work too."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))

    with replacing():
        print("12 µs ███ … Däta 数\udcff", end="")

    assert output.getvalue() == shown.encode(encoding)
    assert sys.stdout.errors == "strict"  # The stream's own encoding is restored.


def test_a_stream_without_an_encoding_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's output stream, or a missing one (`None`), is not reconfigured."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)

    with replacing():
        print("12 µs", end="")

    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == "12 µs"
