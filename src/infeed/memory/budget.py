"""How much memory there is to take: of the machine, of the container, of the option ``memory_limit``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from numbers import Integral
from typing import Final, Literal

from infeed.errors import ConfigError
from infeed.memory.groups import OWN, ROOT, groups_of

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Where a process finds its group, and where groups are: cgroup version 2 and version 1, each with the names of its files for
# limit, usage and statistics, and what in the statistics is only the cache of files, which the kernel gives up when asked.
_CGROUP_OF: Final = OWN
_CGROUPS: Final = (
    (ROOT, "memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        f"{ROOT}/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def parse_bytes(value: int | str) -> int:
    """Bytes from a number, or from text such as ``"512MB"`` and ``"1.5 GiB"`` (units of 1024 either way).

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    text = value.lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text)
    if match is None:
        raise ConfigError(f"memory_limit={value!r} is not a size; give bytes, or text such as '2GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes() -> int:
    """What can be allocated now without swapping or being killed: the machine's free memory or the container's, the lesser."""
    return min(_machine_bytes(), *_group_bytes())


def _machine_bytes() -> int:
    import psutil  # here, because it takes 10 ms to import and workers have no need of it

    try:
        available: int = psutil.virtual_memory().available
    except OSError:  # no /proc, or no descriptor left to read it with
        if sys.platform == "win32":
            raise
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available


def _group_bytes() -> Iterator[int]:
    """What is left to each of the groups that this process is in and that has a limit."""
    yield sys.maxsize
    for root, limit_name, usage_name, cached in _CGROUPS:
        for group in groups_of("memory" if root.endswith("/memory") else None, _CGROUP_OF):
            folder = root + group
            try:
                limit, usage = int(_text(f"{folder}/{limit_name}")), int(_text(f"{folder}/{usage_name}"))
                lines = (line.split() for line in _text(f"{folder}/memory.stat").splitlines())
                cache = sum(int(value) for name, value in lines if name in cached)
            except (OSError, ValueError):  # there is no such group, or its limit reads "max"
                continue
            yield max(0, limit - usage + cache)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


Limit = Literal["AS", "FSIZE", "NOFILE", "NPROC"]

if sys.platform == "win32":

    def process_limit(name: Limit) -> int | None:
        del name  # there are none
        return None

else:
    import resource

    def process_limit(name: Limit) -> int | None:
        """What ``ulimit`` allows this process, or ``None`` if it is not limited."""
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        return None if limit == resource.RLIM_INFINITY else limit
