"""Modules that datasets import: workers are forked, whatever the modules do on import."""

from __future__ import annotations

import pytest

from benchmarks.modules import DISTRIBUTIONS, MODULES, measure
from tests.libraries.test_programs import skip_without

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.linux("is about the fork server"),
]


@pytest.mark.parametrize("module", MODULES)
def test_workers_of_a_dataset_that_uses_a_module_are_forked(module: str) -> None:
    """For the first loader of a process and the second, when the fork server knows what workers import."""
    skip_without(DISTRIBUTIONS.get(module, module))

    assert [start.is_spawned for start in measure(module)] == [False, False]
