"""Data-parallel training with two processes. Together they see each sample once per epoch.

pip install "infeed[torch]"
torchrun --nproc-per-node 2 two_ranks_with_torchrun.py

If RAY_ADDRESS is set, the workers are on that Ray cluster. Needs: pip install "infeed[ray]"
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import infeed


class Points:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / 200])
        return {"index": torch.tensor(index), "x": x, "y": 3 * x}


dist.init_process_group("gloo")  # "nccl" with GPUs
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# shard="auto" asks torch.distributed for the rank. pad=False: no sample is repeated to make batches equal.
options = {"batch_size": 16, "shuffle": True, "seed": 3, "shard": "auto", "pad": False, "num_workers": 2}
with infeed.DataLoader(Points(), worker="ray" if os.environ.get("RAY_ADDRESS") else "process", **options) as loader:
    for epoch in range(2):
        seen: list[int] = []
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["index"].tolist()
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seen)
        assert sorted(index for part in gathered for index in part) == list(range(200))
        if rank == 0:
            print(f"epoch {epoch}: {[len(part) for part in gathered]} samples per rank, each sample once")
dist.destroy_process_group()
