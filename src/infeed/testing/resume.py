"""A test helper for users' loaders: a loader interrupted at any step and resumed must yield the same batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def assert_resumable(loader: Any, *, steps: Iterable[int] | None = None, in_order: bool = True) -> None:
    """Iterate an epoch, then restore its state after each step: the remaining batches must be identical bit for bit.

    States go through JSON, as in a checkpoint. The dataset must be finite. Afterwards the loader is at the end of that epoch.

    Args:
        loader: an ``infeed.DataLoader``, or any iterable with ``state_dict`` and ``load_state_dict``.
        steps: numbers of batches after which to interrupt; by default before the first batch and after each.
        in_order: ``False`` for a loader that yields batches as they become ready; the order is then ignored.

    Raises:
        AssertionError: the remaining batches differ; the message names the step and the batch.

    Examples:
        >>> import infeed
        >>> from infeed.testing import RandomDataset, assert_resumable
        >>> assert_resumable(infeed.DataLoader(RandomDataset(10), batch_size=4, shuffle=True))
    """
    states = [json.dumps(loader.state_dict())]
    prints: list[Any] = []
    for batch in loader:
        prints.append(_fingerprint(batch))
        states.append(json.dumps(loader.state_dict()))
    for step in range(len(states)) if steps is None else steps:
        loader.load_state_dict(json.loads(states[step]))
        rest = [_fingerprint(batch) for batch in loader]
        expected = prints[step:]
        if len(rest) != len(expected):
            raise AssertionError(f"after resuming at step {step}, {len(rest)} batches remain instead of {len(expected)}")
        if not in_order:
            if Counter(map(repr, rest)) != Counter(map(repr, expected)):
                raise AssertionError(f"after resuming at step {step}, the remaining batches differ")
            continue
        for number, (one, other) in enumerate(zip(rest, expected, strict=True), start=step):
            if one != other:
                raise AssertionError(
                    f"after resuming at step {step}, batch {number} differs: {one!r:.200} instead of {other!r:.200}"
                )


def _fingerprint(value: Any) -> Any:
    """Return a batch's types, dtypes, shapes and bits in a form that can be stored and compared."""
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return "array", str(value.dtype), value.shape, content
    if hasattr(value, "untyped_storage") and hasattr(value, "tolist"):
        dense = value.to_dense() if value.is_sparse else value
        return "tensor", str(value.dtype), tuple(value.shape), repr(dense.tolist())
    kind = type(value).__qualname__
    if isinstance(value, dict):
        return kind, [(key, _fingerprint(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return kind, [_fingerprint(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return kind, [_fingerprint(getattr(value, field.name)) for field in fields(value)]
    return kind, repr(value)
