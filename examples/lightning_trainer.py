"""A Lightning Trainer with infeed's loaders, checkpointed and resumed in mid-epoch.

pip install "infeed[torch]" lightning
python lightning_trainer.py [folder for checkpoints]

An existing program needs no change: `infeed run train.py`.
"""

import logging
import sys
import tempfile

import lightning as L
import torch

from infeed.torch import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Points(torch.utils.data.Dataset):
    """y = 3x, with noise."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 256])
        return x, 3 * x + 0.01 * torch.randn(1)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.sample_count = 0

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        self.sample_count += len(x)
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: str, max_steps: int) -> L.Trainer:
    return L.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=max_steps,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def loader() -> DataLoader:
    return DataLoader(Points(), batch_size=16, shuffle=True, seed=1, num_workers=2, persistent_workers=True)


folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
first = trainer(folder, max_steps=10)  # an epoch has 16 steps
first.fit(Line(), loader())
first.save_checkpoint(f"{folder}/step10.ckpt")  # holds the state of the loader too

model = Line()
trainer(folder, max_steps=16).fit(model, loader(), ckpt_path=f"{folder}/step10.ckpt")
assert model.sample_count == 6 * 16  # the rest of the epoch, not all of it again
print(f"the resumed run loaded the {model.sample_count} samples that the first run had not")
