"""What a run ran on, for people to read."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any, Final

from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes

# Named with their version if the program has imported them.
_LIBRARIES: Final = ("numpy", "torch", "jax", "cv2", "PIL", "lightning", "accelerate", "transformers")


def describe_machine(core_count: float) -> dict[str, str]:
    """Facts about this machine and this Python. Imports nothing."""
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": f"{core_count:g} to use, {os.cpu_count() or 1} in the machine",
        "free memory": format_bytes(available_bytes()),
        "start of workers": "forkserver, where it is safe" if sys.platform == "linux" else "spawn",
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
    """Those that torch has begun to use: asking about others would begin it."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ""
    return ", ".join(cuda.get_device_name(number) for number in range(cuda.device_count()))
