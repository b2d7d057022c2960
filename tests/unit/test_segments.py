"""Shared memory from the system: each kind of store gives, lends and takes back."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infeed.errors import MemoryLimitError, WorkerStartError
from infeed.memory import segments
from infeed.memory.segments import (
    PAGE_BYTES,
    NamedReader,
    NamedStore,
    PrivateStore,
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
    """Those of this process: other tests run at the same time."""
    return shm_names(os.getpid())


@pytest.mark.parametrize("store", ALL, indirect=True)
@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, PAGE_BYTES + 1])
def test_a_segment_holds_at_least_what_was_asked_for(store: SegmentStore, size: int) -> None:
    """It is whole pages, all zero and writable, and its handle says how large it is."""
    segment = store.create(size)

    assert len(segment.memory) == segment.handle.size >= max(1, size)
    assert segment.handle.size % PAGE_BYTES == 0
    assert segment.memory[:] == bytes(segment.handle.size)
    segment.memory[-1] = 7


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_segments_are_numbered_and_do_not_touch(store: SegmentStore) -> None:
    """What is written into one is not seen in another."""
    made = [store.create(PAGE_BYTES) for _ in range(5)]
    for number, segment in enumerate(made):
        segment.memory[:] = bytes([number]) * PAGE_BYTES

    assert [segment.handle.number for segment in made] == [0, 1, 2, 3, 4]
    assert [set(segment.memory[:]) for segment in made] == [{0}, {1}, {2}, {3}, {4}]


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_a_reader_sees_what_the_owner_writes_and_the_other_way_round(store: SegmentStore) -> None:
    """Both map the same pages, also of a segment that is not the first."""
    store.create(PAGE_BYTES)
    segment = store.create(2 * PAGE_BYTES)
    memory = open_reader(store.descriptor()).attach(segment.handle)
    segment.memory[:2] = b"ab"
    memory[2:4] = b"cd"

    assert memory[:4] == segment.memory[:4] == b"abcd"
    assert len(memory) == len(segment.memory)


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_a_private_mapping_is_copied_when_it_is_written_to(store: SegmentStore) -> None:
    """What one worker does to the dataset, no other sees."""
    segment = store.create(PAGE_BYTES)
    segment.memory[:3] = b"abc"
    reader = open_reader(store.descriptor())
    mine, other = reader.attach(segment.handle, private=True), reader.attach(segment.handle, private=True)
    mine[0:1] = b"X"

    assert mine[:3] == b"Xbc"
    assert segment.memory[:3] == other[:3] == b"abc"


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_a_mapping_outlives_release_and_close(store: SegmentStore) -> None:
    """Whoever still looks into a segment when it is given back is not hurt."""
    released, kept = store.create(PAGE_BYTES), store.create(PAGE_BYTES)
    released.memory[:1] = kept.memory[:1] = b"x"

    store.release(released.handle)
    store.close()

    assert kept.memory[:1] == b"x"
    assert len(released.memory[:]) == PAGE_BYTES
    released.memory[:1] = b"y"


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_closing_twice_is_closing_once(store: SegmentStore) -> None:
    """close is idempotent, in every kind."""
    store.create(1)
    store.close()
    store.close()


@LINUX
def test_anonymous_memory_that_is_released_goes_back_to_the_system() -> None:
    """Not at close but at once: a loader whose batches grow must not pile up what it left."""
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
def test_memory_is_allocated_when_it_is_asked_for(make: Callable[[], SegmentStore]) -> None:
    """Shortage is an error here and never a SIGBUS in the middle of a batch."""
    store = make()
    segment = store.create(64 * PAGE_BYTES)
    descriptor = store.descriptor()
    blocks = (os.fstat(descriptor) if descriptor is not None else os.stat(f"{SHM}/{segment.handle.name}")).st_blocks

    assert blocks * 512 >= 64 * PAGE_BYTES
    store.close()


@LINUX
def test_anonymous_memory_takes_one_descriptor_however_many_segments() -> None:
    """A worker is handed one at birth, and none after."""
    store = memfd_store()
    first = store.descriptor()
    before = len(os.listdir("/proc/self/fd"))
    kept = [store.create(PAGE_BYTES) for _ in range(20)]

    # mmap keeps a duplicate of the descriptor for each mapping; the store itself does not add any.
    assert store.descriptor() == first
    assert len(os.listdir("/proc/self/fd")) <= before + len(kept)
    store.close()


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_shortage_says_how_much_was_asked_for_and_how_much_there_is(store: SegmentStore) -> None:
    """More than the machine has is refused before it is tried."""
    with pytest.raises(
        MemoryLimitError,
        match=r"^cannot allocate 1024\.0 TiB of shared memory: [\d.]+ [KMGT]?i?B is available; "
        r"lower batch_size or prefetch, set memory_limit, or release batches that you keep$",
    ):
        store.create(1 << 50)

    assert len(store.create(1).memory) == PAGE_BYTES


def test_the_commit_limit_of_windows_has_a_fix_for_windows() -> None:
    """It is no limit of the process or of a folder: RAM and page file together are too small for all programs."""

    class CommitLimitError(OSError):
        winerror = 1455

    error = CommitLimitError(22, "The paging file is too small for this operation to complete")
    assert str(refused(1 << 20, error, is_named=True)) == (
        "cannot allocate 1.0 MiB of shared memory: Windows is out of memory and page file space; increase the page file, "
        "use fewer workers, or lower batch_size or prefetch, set memory_limit, or release batches that you keep"
    )
    fix = "increase the page file, use fewer workers, or worker='thread'"
    with pytest.raises(WorkerStartError, match=fix), explaining_limits():
        raise error


@HAS_SHM
def test_names_are_gone_when_a_store_is_closed() -> None:
    """A closed store leaves no name in the file system."""
    before = names()
    store = NamedStore()
    store.create(1)
    store.create(1)
    assert len(names() - before) == 2

    store.close()

    assert names() == before


@HAS_SHM
def test_names_are_gone_when_a_store_is_forgotten() -> None:
    """The net under close."""
    before = names()
    store = NamedStore()
    store.create(1)
    del store
    gc.collect()

    assert names() == before


@HAS_SHM
def test_a_name_is_gone_when_its_segment_is_released() -> None:
    """Not only at close."""
    before = names()
    store = NamedStore()
    kept, released = store.create(1), store.create(1)
    store.release(released.handle)

    assert names() - before == {str(kept.handle.name).lstrip("/")}
    store.close()


@HAS_SHM
def test_a_reader_removes_the_names_it_attached_when_its_owner_was_killed() -> None:
    """The owner cannot do it any more, so a worker does, and neither minds that the other was first."""
    before = names()
    store = NamedStore()
    memory = NamedReader().attach(store.create(PAGE_BYTES).handle)

    remove_attached_names()

    assert names() == before
    memory[:1] = b"x"
    store.close()


def test_names_of_two_stores_never_meet() -> None:
    """Many loaders, in many processes, use one file system; names fit into the 31 characters of macOS."""
    one, other = NamedStore(), NamedStore()
    handles = [store.create(1).handle for store in (one, other)]

    assert handles[0].name != handles[1].name
    assert all(len(str(handle.name)) <= 31 for handle in handles)
    one.close()
    other.close()


def test_the_best_store_of_the_platform_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anonymous memory where there is any, names elsewhere."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    store = open_store()

    assert isinstance(store, NamedStore)
    assert isinstance(open_reader(store.descriptor()), NamedReader)
    store.close()


@LINUX
def test_linux_has_memory_without_a_name() -> None:
    """No name can leak or collide."""
    from infeed.memory.memfd import MemfdReader, MemfdStore

    store = open_store()

    assert isinstance(store, MemfdStore)
    assert isinstance(open_reader(store.descriptor()), MemfdReader)
    assert store.create(1).handle.name is None
    store.close()


@pytest.mark.parametrize(("size", "unit", "rounded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_sizes_are_rounded_up(size: int, unit: int, rounded: int) -> None:
    """To the next multiple, never down."""
    assert round_up(size, unit) == rounded
    assert segments.PAGE_BYTES == PAGE_BYTES
