"""Shared memory of the system: each kind of store allocates, maps and releases."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infeed.errors import InfeedError, MemoryLimitError, WorkerStartError
from infeed.memory import segments
from infeed.memory.segments import (
    PAGE_BYTES,
    NamedReader,
    NamedStore,
    PrivateStore,
    SegmentHandle,
    SegmentStore,
    open_reader,
    open_store,
    refused,
    remove_attached_names,
    round_up,
)
from infeed.workers.interpreter import explaining_limits
from tests.helpers import shm_names

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux")
SHM = Path("/dev/shm")
HAS_SHM = pytest.mark.skipif(not SHM.is_dir(), reason="names cannot be listed here")


def memfd_store() -> SegmentStore:
    from infeed.memory.memfd import MemfdStore

    return MemfdStore()


ALL = [
    pytest.param(memfd_store, id="memfd", marks=LINUX),
    pytest.param(NamedStore, id="named"),
    pytest.param(PrivateStore, id="private"),
]
SHARED = ALL[:2]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[SegmentStore]:
    made: SegmentStore = request.param()
    yield made
    made.close()


def names() -> set[str]:
    """Returns the names of this process: other tests run at the same time."""
    return shm_names(os.getpid())


@pytest.mark.parametrize("store", ALL, indirect=True)
@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, PAGE_BYTES + 1])
def test_a_segment_has_at_least_the_requested_size(store: SegmentStore, size: int) -> None:
    """It consists of whole pages, zeroed and writable, and its handle contains its size."""
    segment = store.create(size)

    assert len(segment.memory) == segment.handle.size >= max(1, size)
    assert segment.handle.size % PAGE_BYTES == 0
    assert segment.memory[:] == bytes(segment.handle.size)
    segment.memory[-1] = 7


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_segments_are_numbered_and_disjoint(store: SegmentStore) -> None:
    """Writes to one are not visible in another."""
    made = [store.create(PAGE_BYTES) for _ in range(5)]
    for number, segment in enumerate(made):
        segment.memory[:] = bytes([number]) * PAGE_BYTES

    assert [segment.handle.number for segment in made] == [0, 1, 2, 3, 4]
    assert [set(segment.memory[:]) for segment in made] == [{0}, {1}, {2}, {3}, {4}]


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_owner_and_reader_see_each_others_writes(store: SegmentStore) -> None:
    """Both map the same pages, also of a later segment."""
    store.create(PAGE_BYTES)
    segment = store.create(2 * PAGE_BYTES)
    memory = open_reader(store.descriptor()).attach(segment.handle)
    segment.memory[:2] = b"ab"
    memory[2:4] = b"cd"

    assert memory[:4] == segment.memory[:4] == b"abcd"
    assert len(memory) == len(segment.memory)


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_a_private_mapping_is_copied_on_write(store: SegmentStore) -> None:
    """Changes by one worker to the dataset are invisible to others."""
    segment = store.create(PAGE_BYTES)
    segment.memory[:3] = b"abc"
    reader = open_reader(store.descriptor())
    mine, other = reader.attach(segment.handle, private=True), reader.attach(segment.handle, private=True)
    mine[0:1] = b"X"

    assert mine[:3] == b"Xbc"
    assert segment.memory[:3] == other[:3] == b"abc"


def test_a_name_that_no_longer_exists_is_no_shortage_of_memory() -> None:
    """The owner has released the segment, or was killed."""
    handle = SegmentHandle(0, PAGE_BYTES, name=f"/infeed.{os.getpid()}.gone")
    with pytest.raises(InfeedError, match=r"^cannot open shared memory /infeed\S+gone \(.*\): the process that") as caught:
        NamedReader().attach(handle)
    assert not isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_a_mapping_outlives_release_and_close(store: SegmentStore) -> None:
    """A segment that is released while it is mapped stays readable."""
    released, kept = store.create(PAGE_BYTES), store.create(PAGE_BYTES)
    released.memory[:1] = kept.memory[:1] = b"x"

    store.release(released.handle)
    store.close()

    assert kept.memory[:1] == b"x"
    assert len(released.memory[:]) == PAGE_BYTES
    released.memory[:1] = b"y"


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_close_is_idempotent(store: SegmentStore) -> None:
    """For every kind of store."""
    store.create(1)
    store.close()
    store.close()


@LINUX
def test_released_anonymous_memory_returns_to_the_system() -> None:
    """At once and not at close: a loader whose batches grow must not accumulate memory."""
    store = memfd_store()
    segment = store.create(64 * PAGE_BYTES)
    descriptor = store.descriptor()
    assert descriptor is not None
    before = os.fstat(descriptor).st_blocks

    store.release(segment.handle)

    assert os.fstat(descriptor).st_blocks <= before - 64 * PAGE_BYTES // 512
    store.close()


@LINUX
@pytest.mark.parametrize("make", [memfd_store, NamedStore], ids=["memfd", "named"])
def test_memory_is_allocated_on_request(make: Callable[[], SegmentStore]) -> None:
    """A shortage is an error here and never a SIGBUS in the middle of a batch."""
    store = make()
    segment = store.create(64 * PAGE_BYTES)
    descriptor = store.descriptor()
    blocks = (os.fstat(descriptor) if descriptor is not None else os.stat(f"{SHM}/{segment.handle.name}")).st_blocks

    assert blocks * 512 >= 64 * PAGE_BYTES
    store.close()


@LINUX
def test_anonymous_memory_takes_one_descriptor_for_all_segments() -> None:
    """A worker gets it at start."""
    store = memfd_store()
    first = store.descriptor()
    before = len(os.listdir("/proc/self/fd"))
    kept = [store.create(PAGE_BYTES) for _ in range(20)]

    # mmap keeps a duplicate of the descriptor for each mapping; the store itself does not add any.
    assert store.descriptor() == first
    assert len(os.listdir("/proc/self/fd")) <= before + len(kept)
    store.close()


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_a_shortage_error_has_the_requested_and_the_available_size(store: SegmentStore) -> None:
    """More than the machine has is rejected before it is attempted."""
    with pytest.raises(
        MemoryLimitError,
        match=r"^cannot allocate 1024\.0 TiB of shared memory: [\d.]+ [KMGT]?i?B is available; "
        r"lower batch_size or prefetch, set memory_limit, or release batches that you keep$",
    ):
        store.create(1 << 50)

    assert len(store.create(1).memory) == PAGE_BYTES


class CommitLimitError(OSError):
    winerror = 1455


def test_the_commit_limit_of_windows_has_a_fix_for_windows() -> None:
    """It is no limit of the process or of a folder: RAM and page file together are too small for all programs."""
    error = CommitLimitError(22, "The paging file is too small for this operation to complete")
    assert str(refused(1 << 20, error, is_named=True)) == (
        "cannot allocate 1.0 MiB of shared memory: Windows is out of memory and page file space; increase the page file, "
        "use fewer workers, or lower batch_size or prefetch, set memory_limit, or release batches that you keep"
    )
    fix = "increase the page file, use fewer workers, or worker='thread'"
    with pytest.raises(WorkerStartError, match=fix), explaining_limits():
        raise error


def test_a_private_mapping_that_windows_refuses_has_its_own_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows charges it in full: smaller batches help less than a read-only mapping of the dataset's arrays."""
    store = NamedStore()
    handle = store.create(1).handle

    def refuse(*_: object, **__: object) -> None:
        raise CommitLimitError(22, "The paging file is too small for this operation to complete")

    monkeypatch.setattr(segments, "_map_named", refuse)
    with pytest.raises(MemoryLimitError, match=r"use fewer workers, or pass the arrays of the dataset to infeed\.share$"):
        NamedReader().attach(handle, private=True)
    monkeypatch.undo()
    store.close()


@HAS_SHM
def test_names_are_removed_when_a_store_is_closed() -> None:
    """A closed store leaves no name in the file system."""
    before = names()
    store = NamedStore()
    store.create(1)
    store.create(1)
    assert len(names() - before) == 2

    store.close()

    assert names() == before


@HAS_SHM
def test_names_are_removed_when_a_store_is_garbage_collected() -> None:
    """A fallback for close."""
    before = names()
    store = NamedStore()
    store.create(1)
    del store
    gc.collect()

    assert names() == before


@HAS_SHM
def test_a_name_is_removed_when_its_segment_is_released() -> None:
    """Not only at close."""
    before = names()
    store = NamedStore()
    kept, released = store.create(1), store.create(1)
    store.release(released.handle)

    assert names() - before == {str(kept.handle.name).lstrip("/")}
    store.close()


@HAS_SHM
def test_a_reader_removes_its_attached_names_if_the_owner_was_killed() -> None:
    """The owner cannot, so a worker does; a name that is already gone is no error."""
    before = names()
    store = NamedStore()
    memory = NamedReader().attach(store.create(PAGE_BYTES).handle)

    remove_attached_names()

    assert names() == before
    memory[:1] = b"x"
    store.close()


def test_names_of_two_stores_never_collide() -> None:
    """Many loaders, in many processes, use one file system; names have at most 31 characters for macOS."""
    one, other = NamedStore(), NamedStore()
    handles = [store.create(1).handle for store in (one, other)]

    assert handles[0].name != handles[1].name
    assert all(len(str(handle.name)) <= 31 for handle in handles)
    one.close()
    other.close()


def test_the_best_store_of_the_platform_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anonymous memory where available, names elsewhere."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    store = open_store()

    assert isinstance(store, NamedStore)
    assert isinstance(open_reader(store.descriptor()), NamedReader)
    store.close()


@LINUX
def test_linux_has_anonymous_memory() -> None:
    """No name can leak or collide."""
    from infeed.memory.memfd import MemfdReader, MemfdStore

    store = open_store()

    assert isinstance(store, MemfdStore)
    assert isinstance(open_reader(store.descriptor()), MemfdReader)
    assert store.create(1).handle.name is None
    store.close()


@pytest.mark.parametrize(("size", "unit", "rounded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_sizes_are_rounded_up(size: int, unit: int, rounded: int) -> None:
    """To the next multiple."""
    assert round_up(size, unit) == rounded
    assert segments.PAGE_BYTES == PAGE_BYTES
