"""A LightningModule with train, validation and predict loaders: python with_lightning.py [num_workers]."""

import json
import sys
import warnings

import lightning as L
from torch.utils.data import DataLoader, Dataset

import torch
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)
num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
L.seed_everything(0, verbose=False)


class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * (index + 1) * 0.37)
        return x, (x.sum() > 0).long()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.losses = []
        self.val_losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_losses.append(nn.functional.cross_entropy(self.net(x), y).item())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(Points(150), batch_size=16, shuffle=True, num_workers=num_workers)


model = Classifier()
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, val_dataloaders=DataLoader(Points(40), batch_size=16, num_workers=num_workers))
predicted = trainer.predict(model, DataLoader(Points(35), batch_size=16, drop_last=True, num_workers=num_workers))
print(
    json.dumps(
        {
            "program": "lightning",
            "losses": model.losses,
            "val_losses": model.val_losses,
            "predicted": torch.cat(predicted).tolist(),
        }
    )
)
