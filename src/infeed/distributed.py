"""Find the rank of this process and the number of ranks, for ``shard="auto"``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from infeed.errors import ConfigError
from infeed.plan.sharding import ALONE, Shard

# Environment variables with the rank and the world size: torchrun and similar, Open MPI, MPICH and Intel MPI, Slurm.
_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def find_shard(environ: Mapping[str, str] | None = None) -> Shard:
    """Return the shard of this process.

    Sources, in this order: ``torch.distributed`` if it is initialized, the launcher's environment variables, or a single
    process.

    Raises:
        ConfigError: the environment variables contain an invalid rank or world size.
    """
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return Shard(torch.get_rank(), torch.get_world_size())
    environ = os.environ if environ is None else environ
    for rank_name, size_name in _VARIABLES:
        if rank_name in environ and size_name in environ:
            return _parsed(rank_name, environ[rank_name], size_name, environ[size_name])
    return ALONE


def _parsed(rank_name: str, rank: str, size_name: str, size: str) -> Shard:
    try:
        shard = Shard(int(rank), int(size))
    except ValueError:
        shard = Shard(-1, 0)
    if not 0 <= shard.rank < shard.world_size:
        raise ConfigError(
            f"shard='auto' found {rank_name}={rank!r} and {size_name}={size!r} in the environment, but they must be ints with "
            "0 <= rank < size; correct them, or pass shard=(rank, world_size)"
        )
    return shard
