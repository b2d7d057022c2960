"""What unit tests share."""

from types import ModuleType

import pytest


@pytest.fixture
def torch() -> ModuleType:
    """torch, for tests that need it; imported by none of the others."""
    module: ModuleType = pytest.importorskip("torch")
    return module
