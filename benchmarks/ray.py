"""Compares workers on a Ray cluster with local workers and with Ray Data, in one run.

    python -m benchmarks.ray [--workers 2] [--batches 20] [--repeat 3] [--without-ray-data]

The cluster is two nodes on this machine (``ray.cluster_utils.Cluster``): transfers between them cross the loopback interface.
``cpu`` has samples of 5 ms of CPU time in batches of 16; ``big`` has batches of 64 images of 3x224x224 float32, 38.5 MB, that
take no time to create. Variants alternate; the table shows medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ray.cluster_utils import Cluster

import infeed
import ray

_STORE_BYTES = 1 << 30
_SAMPLE_S = 0.005


class Cpu:
    """Samples of 5 ms of CPU time."""

    batch_size = 16

    def __init__(self, batches: int) -> None:
        self.count = batches * self.batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float]:
        end = time.thread_time() + _SAMPLE_S
        value = float(index)
        while time.thread_time() < end:
            value = value * 1.000001 + 1.0
        return index, value


class Big:
    """Images of 602 kB that are already in memory."""

    batch_size = 64

    def __init__(self, batches: int) -> None:
        self.count = batches * self.batch_size
        self.image = np.zeros((3, 224, 224), np.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.image


def with_infeed(dataset: Any, workers: int, worker: Any) -> tuple[float, float]:
    """Return batches per second after the first batch, and the seconds until the first batch."""
    began = time.perf_counter()
    with infeed.DataLoader(dataset, dataset.batch_size, num_workers=workers, worker=worker, timeout=300) as loader:
        next(iter(loader))
        first_s = time.perf_counter() - began
        list_len = 0
        began = time.perf_counter()  # a whole epoch with warm workers
        for _ in loader:
            list_len += 1
        return list_len / (time.perf_counter() - began), first_s


def with_ray_data(dataset: Any, workers: int) -> tuple[float, float]:
    """Measure the same samples with ``iter_torch_batches``; each worker is a task with one CPU."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False

    def load(rows: dict[str, Any]) -> dict[str, Any]:
        samples = [dataset[int(index)] for index in rows["id"]]
        if isinstance(samples[0], tuple):
            return {"index": np.array([one[0] for one in samples]), "value": np.array([one[1] for one in samples])}
        return {"image": np.stack(samples)}

    began = time.perf_counter()
    table = ray.data.range(len(dataset), override_num_blocks=2 * workers)
    loaded = table.map_batches(load, batch_size=dataset.batch_size, concurrency=workers)
    count, first_s = 0, 0.0
    for _ in loaded.iter_torch_batches(batch_size=dataset.batch_size, prefetch_batches=4):
        if not count:
            first_s = time.perf_counter() - began
        count += 1
    return count / (time.perf_counter() - began), first_s


def _variants(workers: int, has_ray_data: bool) -> Iterator[tuple[str, Callable[[Any], tuple[float, float]]]]:
    yield "infeed, local", lambda dataset: with_infeed(dataset, workers, "process")
    yield "infeed, same node", lambda dataset: with_infeed(dataset, workers, infeed.RayWorkers(resources={"near": 1}))
    yield "infeed, other node", lambda dataset: with_infeed(dataset, workers, infeed.RayWorkers(resources={"far": 1}))
    if has_ray_data:
        yield "Ray Data", lambda dataset: with_ray_data(dataset, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--without-ray-data", action="store_true", help="Ray Data needs pandas and pyarrow")
    arguments = parser.parse_args()
    count = arguments.workers
    node = {"num_cpus": count + 1, "object_store_memory": _STORE_BYTES}
    head = {**node, "resources": {"near": count}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node, resources={"far": count})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        for name, dataset in (("cpu", Cpu(arguments.batches)), ("big", Big(arguments.batches))):
            rates: dict[str, list[tuple[float, float]]] = {}
            for _ in range(arguments.repeat):
                for variant, measure in _variants(count, not arguments.without_ray_data):
                    rates.setdefault(variant, []).append(measure(dataset))
            local = statistics.median(rate for rate, _ in rates["infeed, local"])
            print(f"{name}: {arguments.batches} batches, {count} workers")
            for variant, results in rates.items():
                rate = statistics.median(one for one, _ in results)
                first_s = statistics.median(one for _, one in results)
                print(f"  {variant:<20} {rate:8.1f} batches/s  {rate / local:5.2f} x local  first batch after {first_s:.2f} s")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
