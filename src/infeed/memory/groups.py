"""The control groups that this process is in: where a container, or the machine's own manager, sets limits. Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Final

OWN: Final = "/proc/self/cgroup"  # where a process finds its groups
ROOT: Final = "/sys/fs/cgroup"  # where they are: of version 2, and below it those of version 1, a folder for each controller


def groups_of(controller: str | None, own: str = OWN) -> list[str]:
    """This process's group and all above it, as paths below the root, from the root on.

    In a container the root itself is its own. ``controller`` is that of version 1, ``None`` the one hierarchy of version 2.
    """
    path = ""
    try:
        for line in Path(own).read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers if controller is None else controller in controllers.split(","):
                path = name.rstrip("/")
    except (OSError, ValueError):
        pass
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
