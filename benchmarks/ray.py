"""Compares workers on a Ray cluster with local workers and with Ray Data, in one run.

    python -m benchmarks.ray [--workers 2] [--batches 60] [--repeats 3] [--without-ray-data] [--json FILE]

The cluster is two nodes on this machine (``ray.cluster_utils.Cluster``): transfers between them cross the loopback interface.
``cpu`` has samples of 5 ms of CPU time in batches of 16; ``big`` has batches of 64 images of 3x224x224 float32, 38.5 MB, that
take no time to create.

Each variant loads two epochs with a new connection to the cluster. "Cold" is the time from the call of ``ray.init`` to the
first batch (with local workers, from the creation of the loader), "warm" that from the start of the second epoch to its first
batch. Ray Data loads on the node of this process. The rate is that of the second epoch after its first batch. The CPU time is
that of this process and of the raylet of its node, in the second epoch. Variants alternate; the table shows medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ray.cluster_utils import Cluster

import infeed
import ray
from benchmarks import machine

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


class Meter:
    """Measures epochs, and the CPU time that this node spends on receiving batches."""

    def __init__(self, raylet: int) -> None:
        self._processes = [psutil.Process(), psutil.Process(raylet)]

    def _cpu_s(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._processes))

    def epochs(self, began: float, first: Iterable[Any], second: Callable[[], Iterable[Any]]) -> dict[str, float]:
        """Measure two epochs, of which the first began at ``began``."""
        cold_s = 0.0
        for _ in first:
            cold_s = cold_s or time.perf_counter() - began
        before_s, began = self._cpu_s(), time.perf_counter()
        times, nbytes = [], 0
        for batch in second():
            times.append(time.perf_counter())
            nbytes += _size(batch)
        cpu_s = self._cpu_s() - before_s
        return {
            "batches_per_s": (len(times) - 1) / (times[-1] - times[0]),
            "cold_s": cold_s,
            "warm_s": times[0] - began,
            "cpu_s": cpu_s,
            "gb": nbytes / 1e9,
        }


def _size(batch: Any) -> int:
    if isinstance(batch, dict):
        return sum(map(_size, batch.values()))
    return sum(map(_size, batch)) if isinstance(batch, tuple | list) else batch.nbytes


def with_infeed(meter: Meter, began: float, dataset: Any, workers: int, worker: Any) -> dict[str, float]:
    if worker == "process":
        began = time.perf_counter()
    with infeed.DataLoader(dataset, dataset.batch_size, num_workers=workers, worker=worker, timeout=300) as loader:
        return meter.epochs(began, loader, lambda: loader)


def with_ray_data(meter: Meter, began: float, dataset: Any, workers: int) -> dict[str, float]:
    """Measure the same samples with ``iter_torch_batches``; one task with one CPU loads a batch."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def load(rows: dict[str, Any]) -> dict[str, Any]:
        samples = [dataset[int(index)] for index in rows["id"]]
        if isinstance(samples[0], tuple):
            return {"index": np.array([one[0] for one in samples]), "value": np.array([one[1] for one in samples])}
        return {"image": np.stack(samples)}

    def epoch() -> Iterable[Any]:
        batches: Iterable[Any] = loaded.iter_torch_batches(batch_size=dataset.batch_size, prefetch_batches=4)
        return batches

    table = ray.data.range(len(dataset), override_num_blocks=len(dataset) // dataset.batch_size)
    pool = ray.data.TaskPoolStrategy(size=workers)
    loaded = table.map_batches(load, batch_size=dataset.batch_size, compute=pool, resources={"near": 1})
    return meter.epochs(began, epoch(), epoch)


def _variants(meter: Meter, workers: int, has_ray_data: bool) -> Iterator[tuple[str, Callable[[float, Any], dict[str, float]]]]:
    yield "infeed, local", lambda began, dataset: with_infeed(meter, began, dataset, workers, "process")
    for name, place in (("same", "near"), ("other", "far")):
        worker = infeed.RayWorkers(resources={place: 1})
        yield f"infeed, {name} node", lambda began, dataset, worker=worker: with_infeed(meter, began, dataset, workers, worker)
    if has_ray_data:
        yield "Ray Data", lambda began, dataset: with_ray_data(meter, began, dataset, workers)


def summarize(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the repeats of one variant."""
    of = {name: statistics.median(record[name] for record in records) for name in records[0] if name not in ("case", "variant")}
    return of | {"cpu_s_per_gb": of["cpu_s"] / of["gb"]}


def check_targets(summary: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return a line per target: the rate of ``cpu`` beside local workers, that of ``big`` beside Ray Data, the first batch."""
    rates = {case: {name: one["batches_per_s"] for name, one in of.items()} for case, of in summary.items()}
    checks = []
    for place in ("same", "other"):
        share = rates["cpu"][f"infeed, {place} node"] / rates["cpu"]["infeed, local"]
        checks.append((f"cpu, {place} node: {share:.2f} x local, target 0.9", share >= 0.9))
    if "Ray Data" in rates["big"]:
        times = rates["big"]["infeed, same node"] / rates["big"]["Ray Data"]
        checks.append((f"big, same node: {times:.1f} x Ray Data, target 5", times >= 5))
    cold_s = max(one["cold_s"] for of in summary.values() for name, one in of.items() if name.endswith(" node"))
    checks.append((f"first batch: at most {cold_s:.2f} s after ray.init, target 3 s", cold_s <= 3))
    return [f"{text}: {'met' if is_met else 'MISSED'}" for text, is_met in checks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-ray-data", action="store_true", help="also left out if pandas or pyarrow is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write records, medians and machine to FILE")
    arguments = parser.parse_args()
    described = machine.describe(["infeed", "ray", "torch"])
    has_ray_data = not arguments.without_ray_data and all(map(importlib.util.find_spec, ("pandas", "pyarrow", "torch")))
    count = arguments.workers
    node = {"num_cpus": count + 1, "object_store_memory": _STORE_BYTES}
    head = {**node, "resources": {"near": count}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    records: list[dict[str, Any]] = []
    summary: dict[str, dict[str, dict[str, float]]] = {}
    try:
        cluster.add_node(**node, resources={"far": count})
        meter = Meter(cluster.head_node.all_processes["raylet"][0].process.pid)
        for case, dataset in (("cpu", Cpu(arguments.batches)), ("big", Big(arguments.batches))):
            for _ in range(arguments.repeats):
                for variant, measure in _variants(meter, count, has_ray_data):
                    began = time.perf_counter()
                    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
                    records.append({"case": case, "variant": variant, **measure(began, dataset)})
                    ray.shutdown()
            names = dict.fromkeys(record["variant"] for record in records)
            summary[case] = {
                name: summarize([one for one in records if one["case"] == case and one["variant"] == name]) for name in names
            }
            local = summary[case]["infeed, local"]["batches_per_s"]
            print(f"{case}: {arguments.batches} batches, {count} workers")
            for name, one in summary[case].items():
                print(
                    f"  {name:<18} {one['batches_per_s']:7.1f} batches/s {one['batches_per_s'] / local:5.2f} x local"
                    f"   first batch: cold {one['cold_s']:.2f} s, warm {one['warm_s']:.3f} s"
                    + (f"   {one['cpu_s_per_gb']:.2f} CPU s/GB" if case == "big" else "")
                )
        targets = check_targets(summary)
        print(*targets, sep="\n")
    finally:
        ray.shutdown()
        cluster.shutdown()
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        left_out = [] if has_ray_data else ["Ray Data"]
        result = {
            "machine": described, "arguments": options, "left_out": left_out, "targets": targets, "summary": summary,
            "records": records,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
