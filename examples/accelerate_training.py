"""Training with Accelerate: `prepare` keeps infeed's loader.

pip install "infeed[torch]" accelerate
python accelerate_training.py
accelerate launch --num_processes 2 accelerate_training.py
"""

import torch
from accelerate import Accelerator

from infeed.torch import DataLoader


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 512])
        return x, 3 * x


accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Points(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    accelerator.print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f} over {len(losses)} batches")

assert isinstance(loader, DataLoader)
accelerator.print(loader.statistics())
accelerator.end_training()
