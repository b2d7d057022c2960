"""infeed.torch.DataLoader through Accelerate; fails by an assertion. Prints one JSON line."""

import json
import os
import sys
import tempfile

from accelerate import Accelerator
from torch.utils.data import Dataset

import torch
from infeed.torch import DataLoader

COUNT = 45


class Points(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "index": index, "pid": os.getpid()}


accelerator = Accelerator(cpu=True)
ranks = accelerator.num_processes
given = DataLoader(Points(), batch_size=4, num_workers=2, seed=5, grain_size=1, timeout=60)
loader = accelerator.prepare(given)

# It is still infeed's loader, with the options that torch does not know, and sharded once.
assert isinstance(loader, DataLoader)
assert type(loader.base_dataloader) is DataLoader
assert (loader.base_dataloader.seed, loader.base_dataloader.grain_size) == (5, 1)
assert loader.total_batch_size == 4 * ranks
assert accelerator.prepare(loader) is loader

seen, ends = [], []
for batch in loader:
    assert os.getpid() not in batch["pid"].tolist()
    seen += accelerator.gather_for_metrics(batch["index"]).tolist()
    ends.append(loader.end_of_dataloader)
assert sorted(seen) == list(range(COUNT)), seen
assert ends == [False] * (len(ends) - 1) + [True]
assert loader.remainder == COUNT % (4 * ranks)

skipping = accelerator.skip_first_batches(loader, 2)
assert type(skipping.base_dataloader) is DataLoader
assert len([1 for _ in skipping]) == len(ends) - 2


# Accelerate saves the state of each loader that it prepares, also if workers load ahead from a stateful dataset.
class Counting(Points):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError


counting = accelerator.prepare(DataLoader(Counting(), batch_size=4, num_workers=2, timeout=60))
assert len(list(counting)) == len(ends)

# Its state goes into Accelerate's checkpoints.
stateful = Accelerator(cpu=True)
stateful.dataloader_config.use_stateful_dataloader = True
loader = stateful.prepare(DataLoader(Points(), batch_size=4, num_workers=2, seed=5, timeout=60))
assert type(loader.base_dataloader) is DataLoader
rest = []
with tempfile.TemporaryDirectory() as folder:
    for step, batch in enumerate(loader):
        if step == 2:
            stateful.save_state(folder)
        if step > 2:
            rest.append(batch["index"].tolist())
    stateful.load_state(folder)
    assert [batch["index"].tolist() for batch in loader] == rest, rest
sys.stdout.write(json.dumps({"rank": accelerator.process_index, "steps": len(ends)}) + "\n")
accelerator.end_training()
