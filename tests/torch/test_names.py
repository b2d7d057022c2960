"""Public names of infeed.torch and infeed.testing."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.torch

PUBLIC = {
    "infeed.torch": ["DataLoader", "ImageConvert", "install", "uninstall"],
    "infeed.testing": [
        "CrashingDataset", "FaultyDataset", "RandomDataset", "SlowDataset", "UnevenDataset", "assert_resumable",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_these_names_are_public(module: str) -> None:
    """Changing this list changes the API, and needs a line in the changelog."""
    pytest.importorskip("torch")
    found = importlib.import_module(module)

    assert sorted(found.__all__) == PUBLIC[module]
    assert all(getattr(found, name).__doc__ for name in PUBLIC[module])
