"""Two gloo ranks with DDP and DistributedSampler.

python -m torch.distributed.run --nproc-per-node 2 torchrun.py [num_workers]"""

import json
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torch
from torch import nn

num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.manual_seed(0)
torch.set_num_threads(1)


class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * (index + 1) * 0.37)
        return x, (x.sum() > 0).long(), index


dist.init_process_group("gloo")
rank = dist.get_rank()
dataset = Points(150)
sampler = DistributedSampler(dataset, shuffle=True, seed=1)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, seen = [], []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y, index in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen += index.tolist()
every = [None] * dist.get_world_size()
dist.all_gather_object(every, {"losses": losses, "seen": seen})
if rank == 0:
    both = sorted(set(i for part in every for i in part["seen"]))
    print(json.dumps({"program": "torchrun", "losses": [p["losses"] for p in every], "complete": both == list(range(150))}))
dist.destroy_process_group()
