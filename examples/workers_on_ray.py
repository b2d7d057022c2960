"""Two ranks whose workers are on other nodes of a Ray cluster. Needs: pip install "infeed[ray]"

Without an address this program starts a cluster of three nodes on this machine: one for the ranks, two for workers.

    python workers_on_ray.py [address of a cluster]

On a real cluster, start the nodes for workers with `ray start --address=... --resources='{"cpu_node": 16}'` and those for ranks
with `--resources='{"train_node": 8}'`. The same works in Ray Train (ray_train.py) and under torchrun (set RAY_ADDRESS there):
pass the rank and the number of ranks, or `shard="auto"`.
"""

import sys
import time

import numpy as np

import infeed
import ray

RANKS = 2


class Images:
    """Stands for images that take 5 ms to decode."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.005)
        return {"image": np.full((3, 64, 64), index % 256, np.uint8), "index": index}


def train(rank):
    """Load the batches of one rank for one epoch; return the indices that it got."""
    workers = infeed.RayWorkers(resources={"cpu_node": 1})  # 1 CPU each: ranks cannot use more CPUs than there are
    got = []
    with infeed.DataLoader(
        Images(), batch_size=25, shuffle=True, seed=1, shard=(rank, RANKS), pad=False, num_workers=2, worker=workers
    ) as loader:
        for batch in loader:
            # uint8 over the network; convert on the GPU, for example with device=infeed.Device("cuda", convert=...)
            got += batch["index"].tolist()
    return got


def start_cluster():
    from ray.cluster_utils import Cluster

    store = 200 << 20
    head = {"num_cpus": RANKS, "object_store_memory": store, "resources": {"train_node": RANKS}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=store, resources={"cpu_node": 2})
    return cluster


def main():
    cluster = None
    if len(sys.argv) < 2:
        cluster = start_cluster()
    ray.init(address=cluster.address if cluster else sys.argv[1], log_to_driver=False)
    # Ray Train does this for you. Ranks on a node with `cpu_node` would take the CPUs for which their own workers wait.
    rank = ray.remote(num_cpus=1, resources={"train_node": 1})(train)
    ranks = [rank.remote(number) for number in range(RANKS)]
    parts = ray.get(ranks)
    assert sorted(index for part in parts for index in part) == list(range(1000))
    print(f"{RANKS} ranks, {len(parts[0])} and {len(parts[1])} samples: together each sample once")
    ray.shutdown()
    if cluster:
        cluster.shutdown()


if __name__ == "__main__":
    main()
