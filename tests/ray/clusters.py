"""Ray clusters for tests: several nodes on this machine, each with its own raylet and object store."""

from __future__ import annotations

import os
import signal
import time
import warnings
from types import TracebackType
from typing import Any

from ray.cluster_utils import Cluster

import ray

STORE_BYTES = 200 << 20
CPUS = 3
# A node whose raylet was killed counts as dead after 1.5 s instead of 15 s, because tests wait for it.
_SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 500}


class TwoNodes:
    """A cluster of two nodes, to which this process is connected. More nodes can join, and all but the first can be killed."""

    def __enter__(self) -> TwoNodes:
        os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of Ray itself.
            head = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": _SYSTEM}
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            self.second = self.add_node()
            self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def connect(self) -> None:
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add_node(self, cpus: int = CPUS, **resources: float) -> Any:
        return self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, resources=resources)

    def kill_node(self, node: Any) -> None:
        """Kills the raylet of a node with SIGKILL, which ends its workers and its object store."""
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def remove(self, node: Any) -> None:
        """Cleans up after a killed node, or ends a node."""
        self._cluster.remove_node(node, allow_graceful=False)

    def left_behind(self) -> list[str]:
        """Returns what is in use on the cluster."""
        has, free = ray.cluster_resources(), ray.available_resources()
        lines = [
            f"{has[name] - free.get(name, 0.0):g} {name} in use"
            for name in ("CPU", "object_store_memory")
            if has.get(name, 0.0) != free.get(name, 0.0)
        ]
        groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
        return lines + [f"placement group {one}" for one in groups]

    def settle(self, limit_s: float) -> None:
        """Waits until nothing is in use, or until the timeout."""
        deadline = time.monotonic() + limit_s
        while self.left_behind() and time.monotonic() < deadline:
            time.sleep(0.05)
