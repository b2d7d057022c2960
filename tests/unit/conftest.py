"""Fixtures of the unit tests."""

from types import ModuleType

import pytest


@pytest.fixture
def torch() -> ModuleType:
    """torch, for tests that need it; no other test imports it."""
    module: ModuleType = pytest.importorskip("torch")
    return module
