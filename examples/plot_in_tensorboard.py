"""Show in TensorBoard, beside the loss, how long the training loop waits for data.

pip install "infeed[torch]" tensorboard
python examples/plot_in_tensorboard.py
tensorboard --logdir runs
"""

import sys
import time

import torch
from torch.utils.tensorboard import SummaryWriter

import infeed
from infeed.torch import DataLoader


class Noise(torch.utils.data.Dataset):
    """Images that take two milliseconds each, as from a disk."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 32, 32, generator=generator), index % 10


writer = SummaryWriter(sys.argv[1] if len(sys.argv) > 1 else "runs/infeed")


def plot(statistics: infeed.Statistics) -> None:
    for name, value in statistics.numbers().items():
        writer.add_scalar(f"data/{name}", value, statistics.batch_count)


loader = DataLoader(
    Noise(), batch_size=32, shuffle=True, num_workers=2, on_statistics=infeed.StatisticsCallback(plot, interval=0.2)
)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for _epoch in range(2):
    for pictures, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        writer.add_scalar("loss", loss.item(), step)
writer.close()
print(loader.statistics())
