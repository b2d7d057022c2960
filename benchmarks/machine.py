"""Describes the machine of a measurement, without host name, user or paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_ALWAYS_REPORTED: Final = ("numpy", "pillow", "psutil")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _git(*arguments: str) -> str | None:
    # No optional locks: reading the status must not write to the repository.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def revision() -> dict[str, Any]:
    changed = _git("status", "--porcelain")
    return {"commit": _git("rev-parse", "HEAD"), "has_local_changes": None if changed is None else bool(changed)}


def versions(families: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (*families, *_ALWAYS_REPORTED):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "infeed":
                found[name] = "from this tree, not installed"
    return found


def describe(families: Iterable[str]) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round((_memory_bytes() or 0) / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": versions(families),
        **revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
