"""Measures the memory of a process that filters and sorts Arrow tables for a long time, with Arrow's jemalloc pool. Linux only.

python benchmarks/arrow_memory.py --json result.json
JE_ARROW_MALLOC_CONF=background_thread:false python benchmarks/arrow_memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from benchmarks import machine  # found only through the path set above

_VARIABLE: Final = "JE_ARROW_MALLOC_CONF"


def private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the memory and the machine to FILE")
    options = parser.parse_args(argv)
    described = machine.describe(("infeed",)) | {"pyarrow": pa.__version__, _VARIABLE: os.environ.get(_VARIABLE)}
    pa.set_memory_pool(pa.jemalloc_memory_pool())
    rng = np.random.default_rng(0)
    strings = pa.array([f"{number}" * 3 for number in range(200_000)] * 10)
    table = pa.table({"x": rng.random(2_000_000), "s": strings})
    used = []
    for turn in range(150):
        part = table.slice(int(rng.integers(0, 1_900_000)), int(rng.integers(1000, 1_000_000)))
        large = part.filter(pc.greater(part["x"], 0.5))
        pa.concat_tables([large, part.sort_by("x").slice(0, 1000)]).combine_chunks()
        if turn % 30 == 29:
            used.append(round(private_mb()))
    time.sleep(11)  # jemalloc returns free memory after 10 s
    idle_mb = round(private_mb())
    print(f"private memory after every 30 turns: {used} MB; after 11 s without work: {idle_mb} MB")
    if options.json is not None:
        result = {"machine": described, "private_mb": used, "idle_private_mb": idle_mb}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
