"""``RayWorkers``: the options of workers on a Ray cluster. Does not import Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from infeed.errors import ConfigError

_HELP = "see help(infeed.RayWorkers)"
# Resources that Ray knows itself, which it refuses or confuses with its own options in a dict of custom resources.
_OWN_OPTIONS = ("CPU", "GPU", "memory", "object_store_memory")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers on the nodes of a Ray cluster, for ``worker=``. ``worker="ray"`` is short for ``worker=RayWorkers()``.

    Ray chooses the node of each worker by the resources that it needs. A worker for which there are no resources yet starts
    when a node joins or other work ends; loading does not wait for it.

    Args:
        cpus: CPUs that Ray reserves for each worker.
        memory: bytes of memory that Ray reserves for each worker; ``None`` reserves none.
        resources: custom resources that each worker needs, such as ``{"cpu_node": 1}`` to keep workers off GPU nodes.
        local: number of workers, out of ``num_workers``, that are processes on this machine. The others are on the cluster.
        runtime_env: Ray's runtime environment of the workers, for modules and packages that exist only on this machine.

    Raises:
        ConfigError: an argument is invalid.

    Examples:
        >>> import infeed
        >>> loader = infeed.DataLoader(range(100), 10, num_workers=8, worker=infeed.RayWorkers(cpus=1, local=2))
    """

    cpus: float = 1
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    local: int = 0
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_number("cpus", self.cpus, (int, float))
        _check_number("local", self.local, (int,))
        if self.memory is not None:
            _check_number("memory", self.memory, (int,))
        for name, value in (("resources", self.resources), ("runtime_env", self.runtime_env or {})):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be a dict; {_HELP}")
        for resource, amount in self.resources.items():
            if not isinstance(resource, str) or not resource or resource in _OWN_OPTIONS:
                raise ConfigError(
                    f"resources has {resource!r}, which is not a custom resource; use cpus= for CPUs, memory= for memory, and "
                    "names such as 'cpu_node'"
                )
            _check_number(f"resources[{resource!r}]", amount, (int, float))
        object.__setattr__(self, "resources", dict(self.resources))


def _check_number(name: str, value: Any, kinds: tuple[type[Any], ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
        what = "an int" if kinds == (int,) else "a finite number"
        raise ConfigError(f"{name}={value!r} must be {what}, at least 0; {_HELP}")


RayWorkers.__module__ = "infeed"  # the public path
