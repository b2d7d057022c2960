import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from marks import mark

mark("imported")


class Points(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return torch.full((8,), float(index))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def on_train_epoch_start(self):
        mark("epoch")

    def training_step(self, batch, number):
        mark("batch")
        return self.layer(batch).mean()

    def validation_step(self, batch, number):
        self.log("mean", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0001)


def main():
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    loaders = [DataLoader(Points(), batch_size=50, shuffle=shuffle, num_workers=2) for shuffle in (True, False)]
    trainer.fit(Model(), *loaders)
    mark("end")


if __name__ == "__main__":
    main()
