"""Transfer of the dataset to workers: pickled once into one segment, which every worker maps.

Workers map the segment copy-on-write. They share the bytes of arrays and tensors until a worker writes to them, which
only that worker sees. Every worker re-creates plain Python objects.

If pickling fails, the error names the object that cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from infeed.errors import WorkerStartError
from infeed.formatting import type_name
from infeed.memory.inheriting import ANONYMOUS_MEMORY, USE_ARRAY, starting, tracker_fd
from infeed.memory.pickling import dump_by_value, load, spans
from infeed.memory.reopening import advice
from infeed.memory.search import find_culprit
from infeed.memory.segments import SegmentHandle, SegmentReader, SegmentStore
from infeed.memory.shared_arrays import copying_shared

_FIX: Final = "memory-map files instead of storing their contents in the dataset, or use worker='thread'"


@final
@dataclass(frozen=True, slots=True)
class SerializedDataset:
    """Location of the pickle and its buffers, and the modules that it needs."""

    handle: SegmentHandle
    offsets: list[int]
    sizes: list[int]
    modules: frozenset[str]
    fds: tuple[int, ...] = ()  # of the main process; workers must inherit them to unpickle the dataset
    has_tracker: bool = False  # the last descriptor is that of the resource tracker


def send(named: dict[str, Any], obj: object, store: SegmentStore) -> SerializedDataset:
    """Pickle ``obj`` into a segment of ``store``.

    Args:
        named: User arguments by parameter name; searched for the culprit if ``obj`` cannot be pickled.

    Raises:
        WorkerStartError: Something in it cannot be pickled; the message names the object and its path.
    """
    modules: set[str] = set()
    with starting() as fds, _explaining(named, keeps_shared=True):
        data, buffers = dump_by_value(obj, modules, keeps_shared=True)
    chunks: list[Any] = [data, *buffers]
    sizes = [memoryview(chunk).nbytes for chunk in chunks]
    offsets, total = spans(sizes)
    segment = store.create(total, fix=_FIX)
    with memoryview(segment.memory) as view:
        for chunk, offset, size in zip(chunks, offsets, sizes, strict=True):
            view[offset : offset + size] = memoryview(chunk).cast("B") if size else b""
    tracker = tracker_fd()
    if tracker is not None:
        fds = [*fds, tracker]
    return SerializedDataset(segment.handle, offsets, sizes, frozenset(modules), tuple(fds), tracker is not None)


def copy_out(named: dict[str, Any], obj: object) -> list[Any]:
    """Pickle ``obj`` for other machines: the pickle and its buffers. Memory that is shared on this machine is copied.

    Args:
        named: as in ``send``.

    Raises:
        WorkerStartError: Something in it cannot be pickled; the message names the object and its path.
    """
    with _explaining(named, keeps_shared=False), copying_shared():
        data, buffers = dump_by_value(obj, set())
    return [data, *buffers]


@contextmanager
def _explaining(named: dict[str, Any], *, keeps_shared: bool) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a user-defined __getstate__ or __reduce__ may raise anything
        raise _explained(named, error, keeps_shared=keeps_shared) from error


def receive(serialized: SerializedDataset, reader: SegmentReader) -> Any:
    """Re-create the object in a worker, over a private mapping of the segment."""
    # Without buffers, nothing refers to the mapping. Windows charges a private one in full, for each worker that starts.
    has_buffers = len(serialized.sizes) > 1
    view = memoryview(reader.attach(serialized.handle, private=has_buffers))
    chunks = [view[offset : offset + size] for offset, size in zip(serialized.offsets, serialized.sizes, strict=True)]
    return load(bytes(chunks[0]), chunks[1:])


def _explained(named: dict[str, Any], error: Exception, *, keeps_shared: bool) -> WorkerStartError:
    for name, value in named.items():
        culprit = find_culprit(value, name, keeps_shared=keeps_shared)
        if culprit is not None:
            path, found = culprit
            is_anonymous = ANONYMOUS_MEMORY in str(error)
            problem = f"is in {ANONYMOUS_MEMORY}, which workers cannot map" if is_anonymous else "cannot be pickled"
            reason = f"{path} is a {type_name(found)}, which {problem}"
            hint = f"{USE_ARRAY if is_anonymous else advice(found)}; or ".removeprefix("; or ")
            text = (
                f"{name} cannot be sent to workers: {reason}; {hint}open it on first use or in "
                f"worker_init_fn, exclude it in __getstate__, or use worker='thread'\n  pickle error: {error}"
            )
            return _unpicklable(text, reason)
    text = f"dataset cannot be sent to workers: {error}; use worker='thread' if it must stay in this process"
    return _unpicklable(text, f"the dataset cannot be pickled: {error}")


def _unpicklable(text: str, reason: str) -> WorkerStartError:
    error = WorkerStartError(text)
    error.unpicklable = reason
    return error
