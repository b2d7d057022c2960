"""Arrays in memory: batches are gathered from the arrays without tasks."""

import sys
from types import FrameType

import numpy as np
import pytest

import infeed

COLUMNS = (np.arange(400, dtype=np.float32).reshape(100, 4), np.arange(100))


def test_a_batch_of_arrays_takes_few_calls() -> None:
    """The test counts calls instead of measuring time: a scheduler, tasks and messages took 130 Python calls per batch."""
    loader = infeed.DataLoader(COLUMNS, batch_size=2, shuffle=True, observe="off")
    for _ in loader:
        pass
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    batches = iter(loader)
    next(batches)
    sys.setprofile(count)
    try:
        rest = sum(1 for _ in batches)
    finally:
        sys.setprofile(None)
    assert rest == 49
    assert calls / rest < 60


def test_an_invalid_index_raises_in_order() -> None:
    """The batches around it are delivered, also if their slots were free when the index was found."""
    loader = infeed.DataLoader(COLUMNS, batch_sampler=[[0, 1], [2, 3], [4, 100], [5, 6], [-1, 99]])
    batches = iter(loader)
    seen: list[object] = []
    while True:
        try:
            seen.append(next(batches)[1].tolist())
        except StopIteration:
            break
        except IndexError as error:
            seen.append(str(error).partition(";")[0])
    assert seen == [[0, 1], [2, 3], "index 100 is out of bounds for a dataset of length 100", [5, 6], [99, 99]]


@pytest.mark.parametrize("sizes", [[1, 50, 3, 70, 2], [70, 1, 70]])
def test_batches_may_outgrow_their_slots(sizes: list[int]) -> None:
    rows = iter(range(1000))
    chunks = [[next(rows) % 100 for _ in range(size)] for size in sizes]
    loader = infeed.DataLoader(COLUMNS, batch_sampler=chunks)
    for _ in range(2):
        kept = list(loader)
        assert [batch[1].tolist() for batch in kept] == chunks
        assert all(np.array_equal(batch[0], COLUMNS[0][batch[1]]) for batch in kept)
