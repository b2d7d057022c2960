"""Bad samples: counted, listed, and limited by the error budget."""

from __future__ import annotations

import pytest

from infeed.engine.bad_samples import BadSample, ErrorBudget, new_list


def _bad(position: int) -> BadSample:
    return BadSample(0, position, str(position), "ValueError: broken", "skipped")


@pytest.mark.parametrize(
    ("budget", "length", "bad_count", "row_count", "is_over"),
    [
        (None, 10, 10, 0, False),
        (3, 10, 3, 0, False),
        (3, 10, 4, 0, True),
        (0.5, 10, 5, 0, False),
        (0.5, 10, 6, 0, True),
        (0.1, None, 10, 0, False),  # Of unknown length: the fraction is of at least 100 samples.
        (0.1, None, 11, 0, True),
        (0.1, None, 30, 270, False),
        (0.1, None, 31, 270, True),
    ],
)
def test_the_budget_is_a_number_or_a_fraction(
    budget: float | None, length: int | None, bad_count: int, row_count: int, is_over: bool
) -> None:
    error_budget = ErrorBudget(budget, epoch_length=lambda: length)
    error_budget.begin_epoch(0, 0)
    error_budget.note([_bad(position) for position in range(bad_count)], row_count)
    assert (error_budget.excess() is not None) is is_over


def test_a_resumed_epoch_counts_earlier_bad_samples() -> None:
    error_budget = ErrorBudget(2)
    error_budget.begin_epoch(4, 2)
    assert error_budget.excess() is None
    error_budget.note([_bad(7)], 3)
    assert "budget=2 exceeded: epoch 4 had 3 bad samples, the last: index=7" in str(error_budget.excess())


def test_only_the_latest_are_listed() -> None:
    listed = new_list()
    error_budget = ErrorBudget(None, listed)
    error_budget.note([_bad(position) for position in range(2000)], 0)
    assert [listed[0].position, listed[-1].position, len(listed), error_budget.bad_count] == [1000, 1999, 1000, 2000]
