"""Describe the machine and the Python environment of a run."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any, Final

from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes

# Reported with their versions if the program has imported them.
_LIBRARIES: Final = ("numpy", "torch", "jax", "cv2", "PIL", "lightning", "accelerate", "transformers")


def describe_machine(core_count: float) -> dict[str, str]:
    """Return readable facts about this machine and this Python. Imports no library."""
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": f"{core_count:g} available of {os.cpu_count() or 1}",
        "free memory": format_bytes(available_bytes()),
        "start method": "forkserver if safe, else spawn" if sys.platform == "linux" else "spawn",
    }
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            facts[name] = str(version)
    gpus = _gpus()
    if gpus:
        facts["accelerators"] = gpus
    return facts


def _gpus() -> str:
    """Return the GPU names if torch has initialized CUDA; a query before that would initialize it."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ""
    return ", ".join(cuda.get_device_name(number) for number in range(cuda.device_count()))
