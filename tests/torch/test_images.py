"""Images preprocessed on the device; in these tests the device is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infeed
from infeed import Device
from infeed.torch import DataLoader, ImageConvert


class Pictures(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((3, 4, 5), 10 * index, dtype=torch.uint8), "label": index, "mask": torch.zeros(4)}


def test_images_are_scaled_and_normalized_and_nothing_else_changes() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    convert = ImageConvert(torch.float32, channels_last=True, mean=mean, std=std)
    (batch,) = DataLoader(Pictures(), batch_size=8, device=Device("cpu", convert=convert))
    plain = torch.arange(8, dtype=torch.float32).mul(10)[:, None, None, None].expand(8, 3, 4, 5) / 255
    expected = (plain - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(batch["image"], expected)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert batch["label"].dtype is torch.int64
    assert batch["mask"].dtype is torch.float32


def test_without_scaling_values_do_not_change() -> None:
    (batch,) = DataLoader(Pictures(), batch_size=8, device=Device("cpu", convert=ImageConvert(torch.float64, scale=False)))
    assert batch["image"].dtype is torch.float64
    assert batch["image"].amax().item() == 70


def test_the_arguments_are_checked() -> None:
    for options, words in (
        ({"dtype": torch.int32}, "dtype=torch.int32 must be a floating-point type"),
        ({"mean": (0.5,), "std": (1.0, 2.0)}, "mean has 1 numbers and std has 2"),
        ({"std": (1.0, 0.0, 1.0)}, r"std=\[1.0, 0.0, 1.0\] contains 0"),
    ):
        with pytest.raises(infeed.ConfigError, match=words):
            ImageConvert(**options)  # type: ignore[arg-type]
    convert = ImageConvert(mean=(0.5, 0.5))
    with pytest.raises(infeed.ConfigError, match="have 2 numbers for images with 3 channels"):
        list(DataLoader(Pictures(), batch_size=8, device=Device("cpu", convert=convert)))
