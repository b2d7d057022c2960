import json
import sys

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


def show(**seen):
    # In one write: two ranks print into the same pipe.
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        loss = self.layer(batch).mean()
        seen = [self.global_rank, self.current_epoch, number, batch[:, 0].tolist(), round(loss.item(), 4)]
        show(train=seen)
        return loss

    def validation_step(self, batch, number):
        show(valid=[self.global_rank, self.current_epoch, number, batch[:, 0].tolist()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0001)


def main():
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Model(), DataLoader(Numbers(), 4, shuffle=True, num_workers=2), DataLoader(Numbers(), 4, num_workers=2))


if __name__ == "__main__":
    main()
