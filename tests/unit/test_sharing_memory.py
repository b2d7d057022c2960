"""Memory of shared objects: few descriptors, freed with the last view, found by other processes."""

import gc
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.errors import InfeedError, MemoryLimitError
from infeed.memory.segments import Address
from infeed.memory.shared_arrays import BINS, Bins
from tests.conftest import make_portable
from tests.helpers import shm_names

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["anonymous", "named"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of memory; no small bin of another test is left open."""
    if request.param == "named":
        make_portable(monkeypatch)
    gc.collect()
    assert not BINS
    return str(request.param)


def test_memory_is_freed_with_the_last_view(memory: str) -> None:
    """Of any kind: a slice, a row, an array inside a list, a private tensor."""
    views: list[Any] = [
        infeed.share(["a", "b"])[1:],
        infeed.share(np.arange(10))[3:],
        infeed.share([np.arange(10)])[0],
        infeed.share({"a": 1}).items(),
        iter(infeed.share([1, 2])),
    ]
    assert len(BINS) == 1
    while views:
        assert BINS
        views.pop()
        gc.collect()
    assert not BINS


def test_a_large_object_is_freed_while_others_stay(memory: str) -> None:
    """It has its own bin."""
    small, large = infeed.share([1]), infeed.share(np.zeros(8 << 20, np.uint8))
    later = infeed.share([2])
    assert len(BINS) == 2
    del large
    gc.collect()

    assert len(BINS) == 1
    assert small + later == [1, 2]


@LINUX
def test_many_objects_take_few_descriptors() -> None:
    """Small ones share a bin."""
    before = descriptors()
    kept = [infeed.share([number]) for number in range(2000)]

    assert descriptors() - before <= 6
    assert [one[0] for one in kept] == list(range(2000))


@LINUX
def test_later_bins_are_larger() -> None:
    """Four objects per bin would need 250 bins."""
    bins = Bins(largest_bin=64 << 10)
    kept = [bins.allocate(15 << 10) for _ in range(1000)]

    assert 96 <= len(bins) <= 120
    assert len(kept) == 1000


def test_a_reference_to_a_freed_object_is_an_error(memory: str) -> None:
    """The error says which process had it and what to do."""
    reference = pickle.dumps(infeed.share(["a"]))
    gc.collect()

    with pytest.raises(
        InfeedError,
        match=rf"^cannot open a shared object of process {os.getpid()} \(.*\); keep a reference to it in that process until",
    ):
        pickle.loads(reference)


def test_tensors_that_windows_refuses_to_map_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object still exists; memory and page file are used up."""

    class CommitLimitError(OSError):
        winerror = 1455

    def refuse(*_: object, **__: object) -> None:
        raise CommitLimitError(22, "The paging file is too small for this operation to complete")

    monkeypatch.setattr("infeed.memory.shared_arrays.find_segment", refuse)
    with pytest.raises(
        MemoryLimitError, match=r"Windows is out of memory and page file space; .* share NumPy arrays instead of tensors$"
    ):
        Bins().open(Address("/gone", 1 << 20, os.getpid()))


@LINUX
def test_a_reused_descriptor_is_not_mistaken(tmp_path: Path) -> None:
    """The descriptor refers to another file by now."""
    shared = infeed.share(["a"])
    reference = pickle.dumps(shared)
    del shared
    gc.collect()
    opened = [open(tmp_path / str(number), "w") for number in range(20)]  # noqa: SIM115

    with pytest.raises(InfeedError, match="cannot open a shared object"):
        pickle.loads(reference)
    for file in opened:
        file.close()


def test_names_in_the_file_system_are_removed_with_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is named."""
    make_portable(monkeypatch)
    before = shm_names(os.getpid())
    shared = infeed.share(["a"])
    if sys.platform == "linux":
        assert len(shm_names(os.getpid()) - before) == 1
    assert pickle.loads(pickle.dumps(shared)) == ["a"]
    del shared
    gc.collect()

    assert shm_names(os.getpid()) == before


def test_threads_get_different_memory() -> None:
    """The extents of objects that threads share at the same time do not overlap."""
    interval = sys.getswitchinterval()
    bins = Bins()
    found: list[list[tuple[int, int]]] = [[] for _ in range(8)]
    kept = []

    def allocate_many(extents: list[tuple[int, int]]) -> None:
        for _ in range(300):
            memory, begin = bins.allocate(64)
            kept.append(memory)
            extents.append((id(memory), begin))

    threads = [threading.Thread(target=allocate_many, args=(extents,)) for extents in found]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    places = [place for extents in found for place in extents]
    assert len(set(places)) == len(places) == 2400


@LINUX
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_shares_objects_in_its_own_memory(memory: str) -> None:
    """It has its parent's objects, and its own new objects do not overlap the parent's next one."""
    shared = infeed.share(["parent"])
    child_read, child_write = os.pipe()
    parent_read, parent_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = infeed.share(["child"])
            os.write(child_write, b"x")
            os.read(parent_read, 1)  # By now the parent has shared another.
            is_right = list(shared) == ["parent"] and list(mine) == ["child"]
            is_right = is_right and pickle.loads(pickle.dumps(shared)) == ["parent"]
            code = 0 if is_right else 2
            mine = None  # A process that ends with os._exit must release named memory first.
        finally:
            os._exit(code)
    os.read(child_read, 1)
    after = infeed.share(["after"])
    os.write(parent_write, b"x")
    _, status = os.waitpid(pid, 0)
    for fd in (child_read, child_write, parent_read, parent_write):
        os.close(fd)

    assert os.waitstatus_to_exitcode(status) == 0
    assert list(after) == ["after"]
    assert pickle.loads(pickle.dumps(shared)) == ["parent"]


@pytest.mark.process
@LINUX
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_keeps_its_parents_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finalizers run, and the names are not its own."""
    make_portable(monkeypatch)
    shared = infeed.share(["a"])
    names = shm_names(os.getpid())
    pid = os.fork()
    if pid == 0:
        try:
            shared = None
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    assert shm_names(os.getpid()) == names
    assert pickle.loads(pickle.dumps(shared)) == ["a"]
