"""Batches as JAX arrays, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Tree

jax = pytest.importorskip("jax")


def coded(index: int) -> dict[str, Any]:
    return {"x": np.full((4, 64), index, dtype=np.float32), "y": index, "name": f"sample {index}"}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_jax_arrays_with_their_own_memory(workers: int) -> None:
    """Batches that are kept while others are loaded stay valid: JAX may use their host memory."""
    with infeed.DataLoader(Tree(200, coded), batch_size=8, num_workers=workers, device=infeed.Device(output="jax")) as loader:
        for _ in range(2):
            kept = list(loader)
            for number, batch in enumerate(kept):
                expected = np.arange(8 * number, 8 * number + 8)
                assert isinstance(batch["x"], jax.Array)
                assert (np.asarray(batch["x"]) == expected[:, None, None]).all()
                assert np.asarray(batch["y"]).tolist() == expected.tolist()
                assert batch["name"] == [f"sample {index}" for index in expected]


def test_a_device_and_a_conversion_can_be_passed() -> None:
    device = jax.devices("cpu")[0]
    delivery = infeed.Device(device, output="jax", convert=lambda batch: batch["x"] * 2)
    with infeed.DataLoader(Tree(16, coded), batch_size=8, device=delivery) as loader:
        got = list(loader)
    assert [float(batch[1, 0, 0]) for batch in got] == [2.0, 18.0]
    assert got[0].devices() == {device}
