"""infeed for PyTorch: ``from infeed.torch import DataLoader`` in the place of torch's. Needs torch, and imports it."""

from __future__ import annotations

from infeed.torch.accelerating import keep_loaders
from infeed.torch.converting import ImageConvert as ImageConvert
from infeed.torch.installing import install as install
from infeed.torch.installing import uninstall as uninstall
from infeed.torch.loader import DataLoader as DataLoader

__all__ = ["DataLoader", "ImageConvert", "install", "uninstall"]

keep_loaders()
