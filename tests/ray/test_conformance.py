"""Tests of the engine with workers on a Ray cluster, which the fixtures of ``conftest.py`` choose.

This is a subset; ``test_conformance_long.py`` has all.
"""

from __future__ import annotations

import pytest

from tests.engine import test_conformance as suite

pytestmark = [pytest.mark.process, pytest.mark.slow]

test_a_dataset_is_loaded_in_order_in_batches = suite.test_a_dataset_is_loaded_in_order_in_batches
test_shuffle_gives_every_index_once_in_a_new_order_each_epoch = (
    suite.test_shuffle_gives_every_index_once_in_a_new_order_each_epoch
)
test_an_error_of_the_sampler_is_raised_after_the_batches_before_it = (
    suite.test_an_error_of_the_sampler_is_raised_after_the_batches_before_it
)
test_a_closure_can_be_collate_fn = suite.test_a_closure_can_be_collate_fn
