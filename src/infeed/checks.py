"""What the value of one option may be: a number of some kind, a choice, a shard, weights. What is wrong is said with a cure."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any

import numpy as np

from infeed.errors import ConfigError
from infeed.plan.shards import ALONE, Shard
from infeed.ranks import find_shard


def check_int(name: str, value: Any, least: int | None, cure: str) -> None:
    if isinstance(value, bool) or not is_int(value):
        raise ConfigError(f"{name}={short(value)} must be a whole number; {cure}")
    if least is not None and value < least:
        raise ConfigError(f"{name}={short(value)} must be at least {least}; {cure}")


def check_seconds(name: str, value: Any, cure: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ConfigError(f"{name}={short(value)} must be a number of seconds, 0 or more; {cure}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name}={value!r} is not one of {listed}; choose one of these")


def checked_shard(shard: Any) -> Shard:
    """A shard, found if that was asked for."""
    if shard is None:
        return ALONE
    if isinstance(shard, str) and shard == "auto":
        return find_shard()
    rule = "must be (rank, world_size) with 0 <= rank < world_size; or 'auto' to find it, or None"
    if not isinstance(shard, tuple | list) or len(shard) != 2 or not all(is_int(part) for part in shard):
        raise ConfigError(f"shard={short(shard)} {rule}")
    rank, world_size = (index(part) for part in shard)
    if any(isinstance(part, bool) for part in shard) or not 0 <= rank < world_size:
        raise ConfigError(f"shard={short(shard)} {rule}")
    return Shard(rank, world_size)


def check_cpu_limit(limit: Any) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 < float(limit) < float("inf"):
        raise ConfigError(f"cpu_limit={short(limit)} must be a number of cores above 0; use None for all that there are")


def checked_weights(given: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Weights, as an array."""
    try:
        weights = np.asarray(given)
    except Exception as error:  # a ragged list, an object that refuses
        raise ConfigError("weights cannot be made an array; pass one number for each sample") from error
    if weights.ndim != 1 or weights.dtype.kind not in "fiub":
        raise ConfigError(
            f"weights of shape {weights.shape} and dtype {weights.dtype} must be one number for each sample; pass a "
            "sequence of numbers"
        )
    with np.errstate(over="ignore"):
        total = float(weights.sum(dtype=np.float64))
    if not bool((weights >= 0).all()) or not 0 < total < float("inf"):
        raise ConfigError("weights must be 0 or more, finite, and not all 0; a sample with weight 0 never comes")
    return weights


def checked_budget(budget: float | None) -> float | None:
    """A number of samples is whole from here on, and a fraction of them is not."""
    if budget is None:
        return None
    rule = "must be a number of samples, or a fraction of them from 0.0 to 1.0; None sets no limit"
    if isinstance(budget, bool) or not isinstance(budget, Real) or not budget >= 0:
        raise ConfigError(f"error_budget={short(budget)} {rule}")
    if is_int(budget) and not isinstance(budget, float):
        return index(budget)
    if not budget <= 1:
        raise ConfigError(f"error_budget={short(budget)} {rule}")
    return float(budget)


def is_int(value: Any) -> bool:
    """Whether it is a whole number of any make."""
    try:
        return bool(value == value.__index__())
    except (AttributeError, TypeError):
        return False


def short(value: Any) -> str:
    """A value as it is shown in a message."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, or the user's own __repr__
        return f"{type(value).__qualname__} object"
    return text if len(text) <= 80 else f"{type(value).__qualname__} object"
