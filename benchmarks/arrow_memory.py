"""Measures the memory of a process that filters and sorts Arrow tables for a long time, with Arrow's jemalloc pool. Linux only.

python benchmarks/arrow_memory.py
JE_ARROW_MALLOC_CONF=background_thread:false python benchmarks/arrow_memory.py
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000


def main() -> None:
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
    print(f"private memory after every 30 turns: {used} MB; after 11 s without work: {private_mb():.0f} MB")


if __name__ == "__main__":
    main()
