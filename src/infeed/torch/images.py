"""Converts images on the device: ``uint8`` transfers need a quarter of the bytes of ``float32``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from infeed.delivery.backend import map_leaves
from infeed.errors import ConfigError


@final
class ImageConvert:
    """Converts every 4-D ``uint8`` tensor (batch, channels, height, width) to floating point.

    Pass it as ``device=infeed.Device("cuda:0", convert=ImageConvert(...))``.

    Args:
        dtype: floating-point type of the result.
        channels_last: use the channels-last memory format, which is faster for convolutions on a GPU.
        scale: divide by 255.
        mean: one number per channel, subtracted after scaling.
        std: one number per channel, divided by after subtracting the mean.

    Raises:
        ConfigError: ``dtype`` is not floating point, ``std`` has a zero, or ``mean`` and ``std`` differ in length.

    Examples:
        >>> import torch
        >>> from infeed.torch import ImageConvert
        >>> convert = ImageConvert(torch.float32, mean=(0.5,), std=(0.5,))
        >>> convert(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
        tensor(1.)
    """

    __module__ = "infeed.torch"

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        channels_last: bool = False,
        scale: bool = True,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype} must be a floating-point type; use torch.float32, torch.bfloat16 or torch.float16"
            )
        if mean is not None and std is not None and len(mean) != len(std):
            raise ConfigError(f"mean has {len(mean)} numbers and std has {len(std)}; pass one of each per channel")
        if std is not None and not all(std):
            raise ConfigError(f"std={list(std)} contains 0; use 1 for channels that are constant")
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        unit = 1 / 255 if scale else 1.0
        mean, std = (None if one is None else [float(number) for number in one] for one in (mean, std))
        channels = len(mean or std or (0,))
        deviations = list(std or [1.0] * channels)
        # One multiplication and one addition: x * unit / std - mean / std.
        self._factor = [unit / one for one in deviations]
        self._shift = [-middle / one for middle, one in zip(mean or [0.0] * channels, deviations, strict=True)]
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        return map_leaves(batch, self._converted)

    def _converted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.uint8 or leaf.dim() != 4:
            return leaf
        if len(self._factor) not in (1, leaf.shape[1]):
            raise ConfigError(
                f"mean and std have {len(self._factor)} numbers for images with {leaf.shape[1]} channels; pass one per channel"
            )
        factor, shift = self._on(leaf.device)
        images = leaf.to(self._dtype, memory_format=self._format).mul_(factor)
        return images.add_(shift) if any(self._shift) else images

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._constants.get(device)
        if known is None:
            shape = (1, len(self._factor), 1, 1)
            made = [torch.tensor(one, dtype=self._dtype, device=device).view(shape) for one in (self._factor, self._shift)]
            known = self._constants[device] = (made[0], made[1])
        return known
