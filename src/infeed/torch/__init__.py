"""infeed for PyTorch: ``from infeed.torch import DataLoader`` replaces torch's class. Imports torch, which it requires."""

from __future__ import annotations

from infeed.workers.preload import start_for_main

start_for_main()  # before the imports below, which import torch unless the program already has

from infeed.torch.accelerate import keep_loaders  # noqa: E402
from infeed.torch.images import ImageConvert as ImageConvert  # noqa: E402
from infeed.torch.loader import DataLoader as DataLoader  # noqa: E402
from infeed.torch.patching import install as install  # noqa: E402
from infeed.torch.patching import uninstall as uninstall  # noqa: E402

__all__ = ["DataLoader", "ImageConvert", "install", "uninstall"]

keep_loaders()
