"""infeed for PyTorch: ``from infeed.torch import DataLoader`` in the place of torch's. Needs torch, and imports it."""

from __future__ import annotations

from infeed.workers.early_start import start_for_main

start_for_main()  # now, because what follows imports torch, if the program has not

from infeed.torch.accelerate import keep_loaders  # noqa: E402
from infeed.torch.images import ImageConvert as ImageConvert  # noqa: E402
from infeed.torch.install import install as install  # noqa: E402
from infeed.torch.install import uninstall as uninstall  # noqa: E402
from infeed.torch.loader import DataLoader as DataLoader  # noqa: E402

__all__ = ["DataLoader", "ImageConvert", "install", "uninstall"]

keep_loaders()
