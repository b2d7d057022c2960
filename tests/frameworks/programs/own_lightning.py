"""infeed.torch.DataLoader through Lightning's Trainer and Fabric; fails by an assertion. Prints one JSON line."""

import json
import os
import sys
import tempfile
import warnings

import lightning as L
from lightning.fabric import Fabric
from torch.utils.data import Dataset, DistributedSampler

import torch
from infeed.torch import DataLoader
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Points(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index, os.getpid()


class Module(L.LightningModule):
    def __init__(self, stop_at=None):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.stop_at = stop_at
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, index, pid = batch
        assert os.getpid() not in pid.tolist()
        self.seen.append(index.tolist())
        return self.net(x / 24).mean() ** 2

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(**options):
    return DataLoader(Points(), batch_size=4, num_workers=2, seed=5, grain_size=1, timeout=60, **options)


# For training; and for prediction, where Lightning re-creates it with its own batch sampler.
module = Module()
trainer = L.Trainer(max_epochs=1, enable_checkpointing=False, devices=1, **QUIET)
trainer.fit(module, loader(shuffle=True))
assert sorted(sum(module.seen, [])) == list(range(24))
predicted = trainer.predict(module, loader())
assert torch.cat(predicted).tolist() == list(range(24))
assert type(trainer.predict_dataloaders) is DataLoader

# Re-created for ranks: a DistributedSampler replaces the shuffle, and infeed's options are kept.
from lightning.fabric.utilities.data import _update_dataloader  # noqa: E402

given = loader(shuffle=True)
made = _update_dataloader(given, DistributedSampler(Points(), num_replicas=2, rank=1))
assert type(made) is DataLoader
assert (made.seed, made.grain_size, made.num_workers, made.timeout) == (5, 1, 2, 60)
assert len(made) == 3
assert len([1 for _ in made]) == 3

# Fabric wraps it, and iterates it again in each epoch.
fabric = Fabric(accelerator="cpu", devices=1)
wrapped = fabric.setup_dataloaders(loader())
for _ in range(2):
    assert [batch[1].tolist() for batch in wrapped] == [list(range(i, i + 4)) for i in range(0, 24, 4)]


# Saved in a checkpoint in mid-epoch, and resumed from there.
class Saving(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "mid.ckpt")
    first = Module()
    L.Trainer(max_epochs=1, callbacks=[Saving(path)], enable_checkpointing=False, devices=1, **QUIET).fit(
        first, loader(shuffle=True)
    )
    second = Module()
    L.Trainer(max_epochs=1, enable_checkpointing=False, devices=1, **QUIET).fit(second, loader(shuffle=True), ckpt_path=path)
assert second.seen == first.seen[3:], (first.seen, second.seen)


# A stateful dataset from which workers load ahead: resumed from the checkpoint at the end of an epoch.
class Counting(Points):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError


with tempfile.TemporaryDirectory() as folder:
    given = DataLoader(Counting(), batch_size=4, num_workers=2, timeout=60)
    trainer = L.Trainer(max_epochs=1, default_root_dir=folder, devices=1, **QUIET)
    trainer.fit(Module(), given)
    path = trainer.checkpoint_callback.best_model_path
    second = Module()
    L.Trainer(max_epochs=2, default_root_dir=folder, devices=1, **QUIET).fit(second, given, ckpt_path=path)
assert sorted(sum(second.seen, [])) == list(range(24)), second.seen
sys.stdout.write(json.dumps({"steps": len(first.seen)}) + "\n")
