"""An Accelerate loop with gradient accumulation and gather_for_metrics: python with_accelerate.py [num_workers].

Runs in one process, or under `python -m torch.distributed.run --nproc-per-node 2` (gloo)."""

import json
import sys

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

import torch
from torch import nn

num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
set_seed(0)


class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * (index + 1) * 0.37)
        return {"x": x, "y": (x.sum() > 0).long(), "index": index}


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(Points(150), batch_size=16, shuffle=True, num_workers=num_workers)
test = DataLoader(Points(45), batch_size=16, num_workers=num_workers)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

losses, ends, remainders, synced = [], [], [], []
for epoch in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(train.end_of_dataloader)
        synced.append(accelerator.sync_gradients)
        remainders.append(train.remainder)

model.eval()
seen = []
for batch in test:
    seen += accelerator.gather_for_metrics(batch["index"]).tolist()
skipped = [batch["index"].tolist() for batch in accelerator.skip_first_batches(test, 1)]
print_out = {
    "program": "accelerate",
    "rank": accelerator.process_index,
    "losses": losses,
    "lengths": [len(train), len(test)],
    "ends": [i for i, end in enumerate(ends) if end],
    "synced": [i for i, s in enumerate(synced) if s],
    "remainders": sorted(set(remainders)),
    "seen": sorted(seen) == list(range(45)),
    "skipped": skipped,
}
# write(), not print(): in one piece, so that the lines of two ranks do not mix.
sys.stdout.write(json.dumps(print_out) + "\n")
sys.stdout.flush()
accelerator.end_training()
