"""Tables on the terminal, with and without rich."""

import io

import pytest

from infeed.cli.terminal import print_entries, print_table

ENTRIES = {"loader": "Faces", "fix (infeed)": "num_workers=4; larger batches"}


def test_without_rich_columns_are_aligned() -> None:
    file = io.StringIO()
    print_table(file, [("workers", "rate"), ("16 threads", "5")])
    print_entries(file, ENTRIES, {"loader": "green"})

    assert file.getvalue().splitlines() == [
        "workers     rate",
        "16 threads  5",
        "   loader        Faces",
        "   fix (infeed)  num_workers=4; larger batches",
    ]


def test_with_rich_long_values_stay_in_their_column() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=32)
    print_entries(console, {**ENTRIES, "empty": ""}, {})

    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["   loader        Faces", "   fix (infeed)  num_workers=4;", " " * 17 + "larger batches", "   empty"]
