"""Tests of the engine with workers on a Ray cluster, which the fixtures of ``conftest.py`` choose.

This is a subset; ``test_conformance_long.py`` has all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import test_conformance as suite

pytestmark = [pytest.mark.process, pytest.mark.slow]


# A list, an object with `__getitem__` and one with `__getitems__`.
DATASETS = [case for case in suite.DATASETS if case[0] in ("list", "class", "batched")]


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in DATASETS], ids=[case[0] for case in DATASETS])
def test_a_dataset_is_loaded_in_order_in_batches(
    every_engine: dict[str, Any], make: Callable[[], Any], expected: list[Any]
) -> None:
    suite.test_a_dataset_is_loaded_in_order_in_batches(every_engine, make, expected)


test_an_error_of_the_sampler_is_raised_after_the_batches_before_it = (
    suite.test_an_error_of_the_sampler_is_raised_after_the_batches_before_it
)
