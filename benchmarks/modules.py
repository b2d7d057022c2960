"""Measures worker start for datasets that import common modules: forked or spawned, and the time to the first batch.

    .libraries/bin/python benchmarks/modules.py                     all modules, three repeats
    .libraries/bin/python benchmarks/modules.py --modules polars,av --repeats 1

Each run is a new process with a script that imports the module, a dataset that uses it, and two loaders in sequence with two
workers each. `python dev.py test --libraries` creates the environment `.libraries`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import machine  # noqa: E402  # found only through the path set above
from benchmarks.programs import environment  # noqa: E402

# For each module, an expression that uses it; `index` is the sample index.
MODULES: Final = {
    "av": 'av.VideoFrame(16, 16, "rgb24").to_ndarray().mean()',
    "cv2": 'cv2.resize(np.full((8, 8, 3), index, "u1"), (4, 4)).mean()',
    "datasets": 'float(datasets.Dataset.from_dict({"x": [index]})[0]["x"])',
    "h5py": 'h5py.File("x", "w", driver="core", backing_store=False).create_dataset("x", data=[index])[0]',
    "numba": "float(double(index))",
    "pandas": 'float(pandas.DataFrame({"x": [index], "text": ["a"]}).x.sum())',
    "PIL": 'np.asarray(PIL.Image.new("L", (4, 4), index)).mean()',
    "polars": 'float(polars.DataFrame({"x": [index]}).select(polars.col("x").sum()).item())',
    "pyarrow": 'float(pyarrow.table({"x": [index]})["x"][0].as_py())',
    "scipy": "float(scipy.ndimage.zoom(np.full((2, 2), float(index)), 2).mean())",
    "sklearn": "sklearn.preprocessing.scale(np.arange(4.0) + index).sum()",
    "torch": "torch.full((4,), float(index)).mean().item()",
    "torch_geometric": "float(torch_geometric.data.Data(x=torch.full((2,), float(index))).x[0])",
    "torchvision": "float(torchvision.transforms.functional.hflip(torch.full((1, 2, 2), float(index))).mean())",
    "transformers": "float(transformers.BatchEncoding({'x': index})['x'])",
    "zarr": "float(zarr.array(np.full(4, index))[:].mean())",
}
# Distribution names and import statements that differ from the module name.
DISTRIBUTIONS: Final = {"cv2": "opencv-python-headless", "sklearn": "scikit-learn", "PIL": "pillow"}
IMPORTS: Final = {
    "numba": "import numba\n@numba.njit\ndef double(x): return 2 * x",
    "PIL": "import PIL.Image",
    "scipy": "import scipy.ndimage",
    "sklearn": "import sklearn.preprocessing",
    "torch_geometric": "import torch, torch_geometric.data",
    "torchvision": "import torch, torchvision",
}
SCRIPT: Final = """
import json, os, time
import numpy as np
import infeed
began = time.perf_counter()
{imports}
imports = time.perf_counter() - began


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.float64({expression}), os.getppid()


def first_batch():
    began = time.perf_counter()
    with infeed.DataLoader(Samples(), 8, num_workers=2) as loader:
        for _, parents in loader:
            return time.perf_counter() - began, int(parents[0]) == os.getpid()


for number in range(2):
    seconds, is_spawned = first_batch()
    print(json.dumps([imports, seconds, is_spawned]), flush=True)
"""
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Start:
    """Start-up of one loader; times in seconds."""

    imports: float
    """How long the program took to import the module."""
    first_batch: float
    """From the construction of the loader."""
    is_spawned: bool


def measure(module: str) -> list[Start]:
    """Return how the workers of the first and the second loader of a process started.

    Raises:
        RuntimeError: the script failed.
    """
    text = SCRIPT.format(imports=IMPORTS.get(module, f"import {module}"), expression=MODULES[module])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(text, encoding="utf-8")
        environ = environment(PYTHONPATH=str(ROOT / "src"))
        command = [sys.executable, str(path)]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{module}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return [Start(*json.loads(line)) for line in done.stdout.splitlines()]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join(MODULES), help="names, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all runs and the machine to FILE")
    options = parser.parse_args(argv)
    described = machine.describe(("infeed", "torch"))
    print(*(f"{name}: {value}" for name, value in described.items()), sep="\n")
    results: dict[str, dict[str, Any]] = {}
    lines = ["| module | version | workers | import | first batch | second loader |", "|---|---|---|---|---|---|"]
    for module in options.modules.split(","):
        runs = [measure(module) for _ in range(options.repeats)]
        kinds = {"spawned" if start.is_spawned else "forked" for run in runs for start in run}
        times = [
            median(run[0].imports for run in runs),
            *(median(run[loader].first_batch for run in runs) for loader in range(2)),
        ]
        installed = version(DISTRIBUTIONS.get(module, module))
        results[module] = {"version": installed, "runs": [list(map(asdict, run)) for run in runs]}
        cells = [module, installed, ", ".join(sorted(kinds)), *(f"{seconds:.2f} s" for seconds in times)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    load_after = round(os.getloadavg()[0], 2)
    print(f"load after: {load_after}", "", *lines, sep="\n")
    if options.json is not None:
        result = {"machine": described | {"load_after": load_after}, "repeats": options.repeats, "modules": results}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
