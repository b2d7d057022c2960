"""Runs the tests with third-party libraries, `tests/libraries`, in a separate environment.

    python dev.py test --libraries [pytest args]

The first run builds `.libraries` in about ten minutes: torch, infeed (editable) and the newest version of each library. Later
runs install only libraries that are missing or whose requirements changed in this file. Remove `.libraries` for new versions.

torch is installed first, pinned to the version of the `dev` extra, and no library may replace it. If a library cannot be
installed, its tests are skipped with the error of pip as the reason.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".libraries"
PYTHON = HOME / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# For each library: the installed requirements, or the installation error. tests/libraries reads this file.
STATE = HOME / "state.json"
CONSTRAINTS = HOME / "constraints.txt"


class Library(NamedTuple):
    name: str
    """As pip knows it."""
    also: tuple[str, ...] = ()
    """More to install."""
    ignores_pins: bool = False
    """Whether its own requirements cannot be met here; `also` then lists what its tests need."""


LIBRARIES = (
    Library("accelerate"),
    Library("array_record"),
    Library("datasets"),
    Library("h5py"),
    Library("lightning"),
    Library("litdata"),
    Library("lmdb"),
    Library("monai"),
    # Its requirements include numpy<2.2, transformers<5 and the clients of five cloud providers.
    Library("mosaicml-streaming", ("brotli", "catalogue", "python-snappy", "xxhash", "zstd"), ignores_pins=True),
    Library("skorch"),
    Library("tensordict"),
    Library("timm"),
    Library("torch_geometric"),
    Library("transformers", ("accelerate",)),
    Library("ultralytics"),
    Library("webdataset"),
    Library("zarr"),
)
# Other modules that datasets import; `benchmarks/modules.py` measures with them.
MODULES = tuple(
    Library(name) for name in ("av", "numba", "opencv-python-headless", "pandas", "polars", "pyarrow", "scikit-learn", "scipy")
)

# torchvision's wheels for Linux are built for CUDA. With a torch without CUDA, its compiled operators cannot be loaded, and its
# import fails because it describes two operators that nothing declares. Once they are declared, its Python part works.
DECLARE_OPERATORS = """
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def call(command: list[str]) -> int:
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


def pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]


def read_state() -> dict[str, dict[str, str]]:
    """Return the recorded state of the environment; empty if it does not exist or was not completed."""
    try:
        return json.loads(STATE.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def write_state(state: dict[str, dict[str, str]]) -> None:
    STATE.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def build() -> int:
    """Update the environment; return 0 or the exit code of the failed step. A library that fails is not an error."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    torch = next(requirement for requirement in extras["dev"] if requirement.startswith("torch=="))
    runner = extras["test"]
    base = shlex.join([torch, *runner])
    state = read_state()
    if state.get("base") != {"installed": base}:
        state = {}
        steps = ([sys.executable, "-m", "venv", "--clear", str(HOME)], pip(torch), pip("-e", ".", *runner, torch))
        for step in steps:
            if code := call(step):
                return code
        CONSTRAINTS.write_text(f"{torch}\n", encoding="utf-8")
        state["base"] = {"installed": base}
        write_state(state)
    for library in (*LIBRARIES, *MODULES):
        wanted = {"installed": shlex.join([library.name, *library.also, *["--no-deps"] * library.ignores_pins])}
        if state.get(library.name) != wanted:
            reason = install(library)
            state[library.name] = {"failed": reason} if reason else wanted
            write_state(state)
    return 0


def install(library: Library) -> str:
    """Install a library; return the error, or an empty string on success."""
    limits = ("-c", str(CONSTRAINTS))
    steps = [pip(*limits, library.name, *library.also)]
    if library.ignores_pins:
        steps = [pip("--no-deps", library.name), pip(*limits, *library.also)]
    for step in steps:
        print("+", shlex.join(step), flush=True)
        done = subprocess.run(step, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"exit code {done.returncode}"]
            print(f"  {library.name} cannot be installed: {errors[-1]}", flush=True)
            return errors[-1]
    allow_torchvision_without_operators()
    return ""


def allow_torchvision_without_operators() -> None:
    """Make torchvision importable if it is installed but cannot be imported."""
    for path in [
        *HOME.glob("lib/python*/site-packages/torchvision/extension.py"),
        *HOME.glob("Lib/site-packages/torchvision/extension.py"),
    ]:
        text = path.read_text(encoding="utf-8")
        is_broken = subprocess.run([str(PYTHON), "-c", "import torchvision"], capture_output=True).returncode != 0
        if is_broken and DECLARE_OPERATORS not in text:
            path.write_text(text + DECLARE_OPERATORS, encoding="utf-8")


def main(argv: list[str]) -> int:
    if code := build():
        return code
    # Without xdist: each test starts two programs with workers, and importing these libraries uses both cores. The programs
    # have their own time limit, which is longer than that of the suite.
    return call([str(PYTHON), "-m", "pytest", "-m", "libraries", "-o", "faulthandler_timeout=660", "tests/libraries", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
