"""How much memory there is to take: of the machine, of the container, of the option ``memory_limit``."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Final

from infeed.errors import ConfigError

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# (limit, usage) of the container: cgroup version 2, version 1.
_CGROUP_FILES: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
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


def format_bytes(count: float) -> str:
    """A size for people.

    >>> format_bytes(1610612736)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def available_bytes() -> int:
    """What can be allocated now without swapping or being killed: the machine's free memory or the container's, the lesser."""
    import psutil  # here, because it takes 10 ms to import and workers have no need of it

    available: int = psutil.virtual_memory().available
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            with open(limit_file) as limit_text, open(usage_file) as usage_text:
                limit, usage = int(limit_text.read()), int(usage_text.read())
        except (OSError, ValueError):  # no container, or the limit reads "max"
            continue
        available = min(available, max(0, limit - usage))
    return available
