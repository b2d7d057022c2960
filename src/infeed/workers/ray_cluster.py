"""The Ray cluster that this process is connected to: the connection, what it has room for, what is free."""

from __future__ import annotations

import os
from typing import Any, Final, final

from infeed.errors import ConfigError, WorkerDiedError
from infeed.workers.ray_options import RayWorkers

# The number of workers that a cluster has resources for, if they need none.
_NO_LIMIT: Final = 1024
DISCONNECTED: Final = (
    "ray.shutdown() was called while a loader had workers on the cluster; call ray.init() and start a new epoch"
)


def connect() -> Any:
    """Return the ``ray`` module, connected to a cluster.

    Raises:
        ConfigError: Ray is not installed, no cluster is known, or the connection is that of the parent of a forked process.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("worker='ray' needs Ray; install it with: pip install \"infeed[ray]\"") from error
    if not ray.is_initialized():
        if not os.environ.get("RAY_ADDRESS"):
            raise ConfigError("worker='ray' needs a Ray cluster; call ray.init() first, or set RAY_ADDRESS")
        ray.init(log_to_driver=True)
    if _is_inherited(ray):
        raise ConfigError(
            "worker='ray' does not work in a process that was forked after ray.init(); start the process with the "
            "multiprocessing method 'spawn', or call ray.init() only in the child"
        )
    if ray.util.client.ray.is_connected():
        raise ConfigError("worker='ray' does not support ray:// addresses; run the training process on a node of the cluster")
    return ray


def _is_inherited(ray: Any) -> bool:
    """Return whether the connection is that of the parent of this forked process.

    There, ids of objects would collide with those of the parent, and calls hang. Ray does not note its process, but a fork
    copies no thread, and each training process that is connected has one.
    """
    thread = getattr(ray._private.worker.global_worker, "listener_thread", None)
    return thread is not None and not thread.is_alive()


@final
class Connection:
    """The connection of this process to a cluster, as it is when this object is created.

    After ``ray.shutdown()``, most functions of Ray start a cluster, or connect to any that they find. So they are called only
    through this object.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._identity = self._identify()

    def _identify(self) -> tuple[str, str]:
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()  # ids of nodes are unique, those of jobs within a cluster

    @property
    def is_open(self) -> bool:
        try:
            return bool(self._ray.is_initialized()) and self._identify() == self._identity
        except Exception:  # another thread is in ray.shutdown()
            return False

    def check(self) -> None:
        """Check that the connection is open. Call it before each call of an actor.

        Raises:
            WorkerDiedError: ``ray.shutdown()`` was called.
        """
        if not self.is_open:
            raise WorkerDiedError(DISCONNECTED)

    @property
    def ray(self) -> Any:
        """The ``ray`` module, after ``check``."""
        self.check()
        return self._ray

    def store_sizes(self) -> dict[str, float]:
        """Return the size of each node's object store."""
        nodes = self.ray.nodes()
        return {node["NodeID"]: node["Resources"].get("object_store_memory", 0.0) for node in nodes if node["Alive"]}

    def describe_free(self, options: RayWorkers) -> str:
        """Return what a worker needs, and how much of it is free: "1 CPU (0 of 6 free)"."""
        needs, has, free = _needs(options), self.ray.cluster_resources(), self.ray.available_resources()
        return ", ".join(f"{needs[name]:g} {name} ({free.get(name, 0):g} of {has.get(name, 0):g} free)" for name in needs)


def capacity(options: RayWorkers) -> float:
    """Return how many workers the cluster has resources for, if it does nothing else."""
    needs = {name: need for name, need in _needs(options).items() if need}
    nodes: list[dict[str, float]] = [node["Resources"] for node in connect().nodes() if node["Alive"]]
    if not needs:
        return float(_NO_LIMIT)
    return sum(min(has.get(name, 0.0) // need for name, need in needs.items()) for has in nodes)


def _needs(options: RayWorkers) -> dict[str, float]:
    needs = {"CPU": float(options.cpus), **options.resources}
    if options.memory is not None:
        needs["memory"] = float(options.memory)
    return needs
