"""``RayWorkers``: the options of workers on a Ray cluster. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from infeed.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers on a Ray cluster: ``DataLoader(..., num_workers=32, worker=RayWorkers(cpus=1, local=4))``.

    ``worker="ray"`` is short for ``worker=RayWorkers()``. Ray chooses the node of each worker by the resources it needs. A
    worker for which there are no resources yet starts when a node joins or other work ends; loading does not wait for it.
    """

    __module__ = "infeed"

    cpus: float = 1
    """CPUs that Ray reserves for each worker."""
    memory: int | None = None
    """Bytes of memory that Ray reserves for each worker; ``None`` reserves none."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that each worker needs, such as ``{"cpu_node": 1}`` to keep workers off GPU nodes."""
    local: int = 0
    """Number of workers, out of ``num_workers``, that are processes on this machine."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment of the workers, for modules and packages that exist only on this machine."""

    def __post_init__(self) -> None:
        for name in ("cpus", "local", "memory"):
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            kinds = (int, float) if name == "cpus" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
                raise ConfigError(f"RayWorkers({name}={value!r}) must be a number, 0 or more; see help(infeed.RayWorkers)")
        for name, kind in (("resources", Mapping), ("runtime_env", Mapping | None)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"RayWorkers({name}={getattr(self, name)!r}) must be a dict; see help(infeed.RayWorkers)")
        object.__setattr__(self, "resources", dict(self.resources))
