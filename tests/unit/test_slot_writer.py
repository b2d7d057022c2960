"""SlotWriter: writers of rows are cached."""

import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np

from infeed.collate.layout import infer_layout
from infeed.memory.arena import Block
from infeed.workers.write import SlotWriter


def test_the_writers_of_all_slots_are_reused() -> None:
    """Tiny batches fill 258 slots in turn; a cache that is cleared in each round would be slower than none."""
    layout = infer_layout([(np.zeros(3), 0)], [0])
    _, size = layout.offsets(2)
    memory = mmap.mmap(-1, 258 * size)
    unused: Any = None
    spec: Any = SimpleNamespace(kind="process")
    source: Any = SimpleNamespace(torch_collate=None)
    segments: Any = SimpleNamespace(memory=lambda segment: memory)
    slots = SlotWriter(spec, source, segments, unused, unused, unused, unused)
    blocks = [Block(0, slot * size, size) for slot in range(258)]

    first, second = ([slots.writer(block, layout, 2) for block in blocks] for _ in range(2))

    assert all(one is other for one, other in zip(first, second, strict=True))
