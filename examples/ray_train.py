"""Ray Train with two ranks, whose workers are on other nodes. Needs: pip install "infeed[ray]" "ray[train]" torch

Starts a cluster of three nodes on this machine: one for the ranks, two for workers.

    python ray_train.py

Give each rank at most (CPUs for workers) / (number of ranks) workers. infeed starts them outside of the placement group of Ray
Train, so `ScalingConfig` reserves only what the ranks themselves need. The resource `train_node` keeps ranks off the nodes with
`cpu_node`: otherwise Ray may place ranks there, and their workers wait forever for the CPUs of the ranks.
"""

import tempfile
from pathlib import Path

import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import Dataset, DistributedSampler

import infeed
import infeed.torch
import ray


class Points(Dataset):
    """Points of a line."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        x = torch.tensor([index / 400])
        return x, 3 * x + 1


def train(config):
    context = ray.train.get_context()
    sampler = DistributedSampler(Points(), context.get_world_size(), context.get_world_rank(), seed=1)
    workers = infeed.RayWorkers(resources={"cpu_node": 1})
    loader = infeed.torch.DataLoader(
        Points(), batch_size=20, sampler=sampler, num_workers=2, worker=workers, persistent_workers=True
    )
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        count = 0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(x)
    loader.close()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            torch.save(model.state_dict(), Path(folder) / "model.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item(), "samples": count}, checkpoint=checkpoint)


def main():
    store = 200 << 20
    head = {"num_cpus": 2, "object_store_memory": store, "resources": {"train_node": 2}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=store, resources={"cpu_node": 2})
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": 3},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "train_node": 1}),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    result = trainer.fit()
    print(f"{result.metrics['samples']} samples per rank, loss {result.metrics['loss']:.4f}")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
