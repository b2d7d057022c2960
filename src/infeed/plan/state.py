"""Position within an epoch, saved as a few readable numbers and strings that JSON can store.

The position counts delivered batches, not prefetched ones. ``read_state`` validates everything, because a state may be damaged
or come from another program or version. The result is always a cursor or one ``StateError``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from infeed.errors import StateError

VERSION: Final = 1
# Limits of positions and epochs: larger numbers are corrupt, and would overflow 64-bit positions.
_MOST: Final = (1 << 63) - 1
_MOST_EPOCH: Final = (1 << 62) - 1
MOST_SEED_BITS: Final = 256
# Maximum number of batches delivered before an earlier one, with in_order=False; more cannot be in flight, so the state is
# corrupt.
_MOST_AHEAD: Final = 1 << 12
_MOST_SHARES: Final = 1 << 12
# Orders that user code determines: their length is not known in advance.
_GIVEN_ORDERS: Final = ("sampler", "batch_sampler", "stream", "torch")


@final
@dataclass(frozen=True, slots=True)
class ShareCursor:
    """How much of one worker's share of an iterable dataset has been delivered."""

    rows: int = 0
    is_ended: bool = False
    state: Any = None  # state of the dataset and of its iterator, if they have one; see ``Opened``


@final
@dataclass(frozen=True, slots=True)
class StreamCursor:
    """How much of an iterable dataset has been delivered, from one worker or from the shares of several in turn."""

    turn: int
    shares: tuple[ShareCursor, ...]

    @property
    def is_alone(self) -> bool:
        return len(self.shares) == 1


@final
@dataclass(frozen=True, slots=True)
class Cursor:
    """The next batch is ``step`` of ``epoch``, at ``position``. ``ahead``: later steps already delivered, out of order."""

    epoch: int = 0
    step: int = 0
    position: int = 0
    ahead: tuple[int, ...] = ()
    stream: StreamCursor | None = None
    bad_count: int = 0  # samples of this epoch that were skipped or replaced so far
    sampler: Any = None  # state of samplers and generators in a loaded state; the plan reads it
    dataset: Any = None  # state of a map-style dataset in a loaded state


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The loader that a state belongs to.

    Loaders with equal order, length, num_samples and seed yield the same samples in the same order. The other fields describe
    the split into batches, which may change.
    """

    order: str
    length: int | None
    num_samples: int | None
    seed: int
    is_seed_given: bool
    batch_size: int | None
    world_size: int
    worker_count: int

    @property
    def step_size(self) -> int:
        return (self.batch_size or 1) * self.world_size

    @property
    def epoch_length(self) -> int | None:
        if self.order in _GIVEN_ORDERS:
            return None  # the user's sampler or iterable dataset determines it
        return self.length if self.num_samples is None else self.num_samples


def write_state(cursor: Cursor, identity: Identity) -> dict[str, Any]:
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": cursor.epoch,
        "step": cursor.step,
        "position": cursor.position,
        "seed": identity.seed,
        "order": identity.order,
        "length": identity.length,
        "num_samples": identity.num_samples,
        "batch_size": identity.batch_size,
        "world_size": identity.world_size,
    }
    if cursor.ahead:
        state["ahead"] = list(cursor.ahead)
    if cursor.bad_count:
        state["bad_count"] = cursor.bad_count
    if cursor.stream is not None:
        state["stream"] = {
            "turn": cursor.stream.turn,
            "shares": [{"rows": s.rows, "ended": s.is_ended, "state": s.state} for s in cursor.stream.shares],
        }
    return state


def read_state(state: Any, identity: Identity) -> tuple[Cursor, int]:
    """Return the position to resume from, and the seed.

    Raises:
        StateError: the state is invalid, or belongs to another loader.
    """
    fields = _mapping(state, "state")
    if "version" not in fields:
        raise StateError("state has no 'version', so it is not a state of infeed; pass the result of state_dict()")
    version = fields["version"]
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"state has version={_shown(version)}, but this infeed reads version {VERSION}; load it with the version of infeed "
            "that created it"
        )
    _check_same(fields, identity)
    seed = _whole(fields, "seed", least=None)
    epoch_length = identity.epoch_length
    position = _whole(fields, "position")
    if epoch_length is not None and position > epoch_length:
        raise StateError(f"state has position={position}, but the epoch has {epoch_length} samples; use the same dataset")
    step = _whole(fields, "step")
    epoch = _whole(fields, "epoch")
    if epoch > _MOST_EPOCH:
        raise StateError(f"state has epoch={epoch}, which is out of range; pass the result of state_dict()")
    cursor = Cursor(
        epoch=epoch,
        step=step,
        position=position,
        ahead=_ahead(fields, step),
        stream=_stream(fields, identity),
        bad_count=_whole(fields, "bad_count") if "bad_count" in fields else 0,
    )
    batch_size = None if fields.get("batch_size", 0) is None else _whole(fields, "batch_size", least=1)
    world_size = _whole(fields, "world_size", least=1)
    if (batch_size, world_size) == (identity.batch_size, identity.world_size):
        return cursor, seed
    is_shared_stream = identity.order == "stream" and max(world_size, identity.world_size) > 1
    if cursor.ahead or (is_shared_stream and position):
        why = "ranks share an iterable dataset" if is_shared_stream else "batches were delivered out of order (in_order=False)"
        raise StateError(
            f"state has batch_size={batch_size} and world_size={world_size}, this loader has batch_size={identity.batch_size} "
            f"and world_size={identity.world_size}; use the same until the end of the epoch, because {why}"
        )
    return Cursor(cursor.epoch, position // identity.step_size, position, (), cursor.stream, cursor.bad_count), seed


def _check_same(fields: Mapping[str, Any], identity: Identity) -> None:
    """Raise ``StateError`` with the differences if a field that determines the order differs."""
    names = ["order", "length", "num_samples"] + (["seed"] if identity.is_seed_given else [])
    for name in ("order", "length", "num_samples", "seed"):
        if name not in fields:
            raise StateError(f"state has no {name!r}; pass the complete result of state_dict()")
    theirs = [f"{name}={_shown(fields[name])}" for name in names if not _equal(fields[name], getattr(identity, name))]
    if theirs:
        ours = [
            f"{name}={_shown(getattr(identity, name))}" for name in names if not _equal(fields[name], getattr(identity, name))
        ]
        raise StateError(
            f"state does not match: it has {', '.join(theirs)}, this loader has {', '.join(ours)}; use the same dataset and "
            "options, or start a new run"
        )


def _equal(left: Any, right: Any) -> bool:
    # Compare types too: True equals 1, and a malicious type can claim to equal anything.
    return type(left) is type(right) and bool(left == right)


def _ahead(fields: Mapping[str, Any], step: int) -> tuple[int, ...]:
    steps = fields.get("ahead", [])
    is_list = isinstance(steps, list | tuple) and len(steps) <= _MOST_AHEAD
    if not is_list or not all(type(later) is int and step <= later <= _MOST for later in steps):
        raise StateError(
            f"state has ahead={_shown(steps)}, which must be a list of steps from step={step} on; pass the result of "
            "state_dict()"
        )
    return tuple(sorted(set(steps)))


def _stream(fields: Mapping[str, Any], identity: Identity) -> StreamCursor | None:
    if identity.order != "stream":
        return None
    if fields.get("stream") is None:
        if fields.get("position") or fields.get("step"):
            raise StateError(
                "state has no 'stream', but is in mid-epoch of an iterable dataset; pass the complete result of state_dict()"
            )
        return None
    stream = _mapping(fields["stream"], "stream")
    shares = stream.get("shares")
    if not isinstance(shares, list | tuple) or not 0 < len(shares) <= _MOST_SHARES:
        raise StateError(
            f"state has shares={_shown(shares)}, which must be a list with one entry per worker; pass the result of "
            "state_dict()"
        )
    if len(shares) > 1 and len(shares) != identity.worker_count:
        raise StateError(
            f"state was saved with {len(shares)} workers that share an iterable dataset, but this loader has "
            f"{identity.worker_count}; use num_workers={len(shares)} until the end of the epoch, or start a new epoch"
        )
    cursors = []
    for number, entry in enumerate(shares):
        share = _mapping(entry, f"share {number}")
        is_ended = share.get("ended")
        if type(is_ended) is not bool:
            raise StateError(
                f"state has ended={_shown(is_ended)} in share {number}, which must be a bool; pass the result of state_dict()"
            )
        cursors.append(ShareCursor(_whole(share, "rows"), is_ended, share.get("state")))
    return StreamCursor(_whole(stream, "turn"), tuple(cursors))


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not issubclass(type(value), dict):
        raise StateError(f"{name} must be a dict, not {_shown(value)}; pass the result of state_dict()")
    return dict.copy(value)  # a plain dict: a subclass may override lookups


def _whole(fields: Mapping[str, Any], name: str, least: int | None = 0) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise StateError(f"state has {name}={_shown(value)}, which must be an int; pass the result of state_dict()")
    is_good = least <= value <= _MOST if least is not None else value.bit_length() <= MOST_SEED_BITS
    if not is_good:
        raise StateError(f"state has {name}={_shown(value)}, which is out of range; pass the result of state_dict()")
    return value


def _shown(value: Any) -> str:
    """Return a short and safe text for any value."""
    try:
        return reprlib.repr(value)
    except Exception:  # an integer with too many digits, or a foreign object
        return f"<{type(value).__name__}>"
