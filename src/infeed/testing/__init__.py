"""Datasets that misbehave on purpose (slow, uneven, faulty, crashing, random), to test a training loop or a loader.

``assert_resumable`` fails if a loader yields different batches after it is interrupted and resumed.
"""

from __future__ import annotations

from infeed.testing.datasets import CrashingDataset as CrashingDataset
from infeed.testing.datasets import FaultyDataset as FaultyDataset
from infeed.testing.datasets import RandomDataset as RandomDataset
from infeed.testing.datasets import SlowDataset as SlowDataset
from infeed.testing.datasets import UnevenDataset as UnevenDataset
from infeed.testing.resume import assert_resumable as assert_resumable

__all__ = ["CrashingDataset", "FaultyDataset", "RandomDataset", "SlowDataset", "UnevenDataset", "assert_resumable"]
