"""Datasets that misbehave on purpose: slow, uneven, faulty, deadly, random. To try out a training loop, or a loader."""

from __future__ import annotations

from infeed.testing.datasets import CrashingDataset as CrashingDataset
from infeed.testing.datasets import FaultyDataset as FaultyDataset
from infeed.testing.datasets import RandomDataset as RandomDataset
from infeed.testing.datasets import SlowDataset as SlowDataset
from infeed.testing.datasets import UnevenDataset as UnevenDataset

__all__ = ["CrashingDataset", "FaultyDataset", "RandomDataset", "SlowDataset", "UnevenDataset"]
