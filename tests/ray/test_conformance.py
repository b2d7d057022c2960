"""The tests of every kind of worker, with workers on a Ray cluster, which the fixtures of ``conftest.py`` beside it choose.

These are a part of them; ``test_conformance_long.py`` has all.
"""

from __future__ import annotations

import pytest

from tests.engine import test_conformance as suite

pytestmark = [pytest.mark.process, pytest.mark.slow]

test_a_dataset_is_loaded_in_order_in_batches = suite.test_a_dataset_is_loaded_in_order_in_batches
test_a_single_sample_is_given_as_it_is = suite.test_a_single_sample_is_given_as_it_is
test_shuffle_gives_every_index_once_in_a_new_order_each_epoch = (
    suite.test_shuffle_gives_every_index_once_in_a_new_order_each_epoch
)
test_a_sampler_that_raises_is_heard_after_the_batches_before_it = (
    suite.test_a_sampler_that_raises_is_heard_after_the_batches_before_it
)
test_a_closure_makes_the_batch = suite.test_a_closure_makes_the_batch
test_classes_of_a_local_scope_can_be_samples = suite.test_classes_of_a_local_scope_can_be_samples
test_getitems_is_given_plain_integers_a_batch_at_a_time = suite.test_getitems_is_given_plain_integers_a_batch_at_a_time
test_out_of_order_gives_the_same_batches_as_a_set = suite.test_out_of_order_gives_the_same_batches_as_a_set
