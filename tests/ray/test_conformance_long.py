"""Tests of the engine with workers on a Ray cluster: conformance, iterable datasets, seeds, states, errors, epochs."""

from __future__ import annotations

import pytest

from tests.engine import (
    test_bad_samples,
    test_batches,
    test_conformance,
    test_epochs,
    test_errors,
    test_iterable_datasets,
    test_rng,
    test_seeds,
    test_state,
)

pytestmark = [pytest.mark.process, pytest.mark.long]

# Workers on a cluster have the environment of their node, and their own memory.
_LOCAL_ONLY = {
    "test_workers_have_the_environment_and_folder_of_the_user",
    "test_a_worker_that_cannot_start_does_not_break_others",
}

for _suite in (
    test_bad_samples,
    test_batches,
    test_conformance,
    test_epochs,
    test_errors,
    test_rng,
    test_seeds,
    test_state,
    test_iterable_datasets,
):
    _topic = _suite.__name__.rpartition("test_")[2]
    for _name, _value in list(vars(_suite).items()):
        if _name.startswith("test_") and _name not in _LOCAL_ONLY:
            globals()[f"test_{_topic}_{_name.removeprefix('test_')}"] = _value
        elif not _name.startswith(("_", "test_", "pytestmark")):
            globals().setdefault(_name, _value)  # Fixtures.
