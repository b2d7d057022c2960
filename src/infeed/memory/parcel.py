"""The dataset travels once: pickled into one segment, which every worker maps.

The bytes of its arrays and tensors lie in the segment as they are and are mapped copy-on-write: all workers share the pages
until one of them writes, which then is its own affair, as with a copy. Plain Python objects are built anew in each worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from infeed.errors import WorkerStartError
from infeed.memory.blame import find_culprit
from infeed.memory.inheriting import starting, tracker_fd
from infeed.memory.pickling import dump_by_value, load, spans
from infeed.memory.segments import SegmentHandle, SegmentReader, SegmentStore

_CURE: Final = "let the dataset map its files instead of holding them (workers are sent all of it), or use worker='thread'"


@final
@dataclass(frozen=True, slots=True)
class Parcel:
    """Where the pickle and its buffers lie, and which modules it needs."""

    handle: SegmentHandle
    offsets: list[int]
    sizes: list[int]
    modules: frozenset[str]
    fds: tuple[int, ...] = ()  # of the user's process, which a worker must be handed for what is in it
    has_tracker: bool = False  # the last of them is the resource tracker's


def send(named: dict[str, Any], obj: object, store: SegmentStore) -> Parcel:
    """Put ``obj`` into a segment of ``store``.

    Args:
        named: what the user gave, by the name they gave it as; looked through if ``obj`` cannot be sent.

    Raises:
        WorkerStartError: something in it cannot leave this process; the message says what and where it is.
    """
    modules: set[str] = set()
    try:
        with starting() as fds:
            data, buffers = dump_by_value(obj, modules, keeps_shared=True)
    except MemoryError:
        raise
    except Exception as error:  # a __getstate__ or __reduce__ raises what it likes
        raise _explained(named, error) from error
    chunks: list[Any] = [data, *buffers]
    sizes = [memoryview(chunk).nbytes for chunk in chunks]
    offsets, total = spans(sizes)
    segment = store.create(total, cure=_CURE)
    with memoryview(segment.memory) as view:
        for chunk, offset, size in zip(chunks, offsets, sizes, strict=True):
            view[offset : offset + size] = memoryview(chunk).cast("B") if size else b""
    tracker = tracker_fd()
    if tracker is not None:
        fds = [*fds, tracker]
    return Parcel(segment.handle, offsets, sizes, frozenset(modules), tuple(fds), tracker is not None)


def receive(parcel: Parcel, reader: SegmentReader) -> Any:
    """Build the object again in a worker, over a private mapping of the segment."""
    view = memoryview(reader.attach(parcel.handle, private=True))
    chunks = [view[offset : offset + size] for offset, size in zip(parcel.offsets, parcel.sizes, strict=True)]
    return load(bytes(chunks[0]), chunks[1:])


def _explained(named: dict[str, Any], error: Exception) -> WorkerStartError:
    for name, value in named.items():
        culprit = find_culprit(value, name)
        if culprit is not None:
            path, found = culprit
            kind = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
            reason = f"{path} is a {kind}, which cannot be pickled"
            text = (
                f"{name} cannot be sent to workers: {reason}; open it where it is used (on first use, or in worker_init_fn), "
                f"leave it out with __getstate__, or use worker='thread'\n  the pickler says: {error}"
            )
            return _unpicklable(text, reason)
    text = f"dataset cannot be sent to workers: {error}; use worker='thread' if it must stay in this process"
    return _unpicklable(text, f"the dataset cannot be pickled: {error}")


def _unpicklable(text: str, reason: str) -> WorkerStartError:
    error = WorkerStartError(text)
    error.unpicklable = reason
    return error
