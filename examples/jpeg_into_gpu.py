"""Decode JPEG in workers, copy uint8 images to the GPU, and convert them there. Runs on the CPU if there is no GPU.

pip install "infeed[torch]" pillow
python jpeg_into_gpu.py
"""

import io

import numpy as np
import torch
from PIL import Image

import infeed
from infeed.torch import DataLoader, ImageConvert


class Jpegs(torch.utils.data.Dataset):
    """JPEG files in memory; replace `self.files[index]` by reading a file."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (160, 200, 3), dtype=np.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB").resize((128, 128))
        return np.asarray(image).transpose(2, 0, 1), index % 10


device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = DataLoader(
    Jpegs(256),
    batch_size=32,
    shuffle=True,
    num_workers=2,
    device=infeed.Device(  # copied ahead of the training loop, on a separate stream, from page-locked memory
        device,
        convert=ImageConvert(torch.bfloat16, channels_last=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ),
)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.Flatten(), torch.nn.LazyLinear(10)).to(
    device, torch.bfloat16
)
for images, labels in loader:
    assert images.device.type == device.type
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
    loss.backward()
print(f"{len(loader)} batches on {device}")
print(loader.statistics())
