"""The reference of a batch to its slot: any view keeps it, the last one ends it."""

import ctypes
import gc
import mmap
import pickle
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from infeed.memory.arena import Lease, LeaseBook
from infeed.scheduler.messages import SlotId

SLOT = SlotId(3)

VIEWS: dict[str, Callable[[Lease], Any]] = {
    "lease": lambda lease: lease,
    "array": lambda lease: np.frombuffer(lease, dtype=np.int32),
    "ndarray": lambda lease: np.ndarray((4, 8), np.float32, lease, 64),  # type: ignore[arg-type]
    "slice": lambda lease: np.frombuffer(lease, dtype=np.uint8)[10:20],
    "reshape": lambda lease: np.frombuffer(lease, dtype=np.int32).reshape(8, -1),
    "transpose": lambda lease: np.frombuffer(lease, dtype=np.int32).reshape(8, -1).T,
    "view of a view": lambda lease: np.frombuffer(lease, dtype=np.uint8)[10:20][::2].view(np.int8),
    "element as array": lambda lease: np.frombuffer(lease, dtype=np.int32)[3:4].reshape(()),
    "memoryview": memoryview,
    "memoryview slice": lambda lease: memoryview(lease).cast("B")[5:6],
    "array inside a list": lambda lease: [np.frombuffer(lease, dtype=np.int32)],
    "iterator": lambda lease: iter(np.frombuffer(lease, dtype=np.int32).reshape(8, -1)),
    "flat": lambda lease: np.frombuffer(lease, dtype=np.int32).flat,
}
TORCH_VIEWS: dict[str, Callable[[Any, Lease], Any]] = {
    "tensor": lambda torch, lease: torch.frombuffer(lease, dtype=torch.int32),
    "slice": lambda torch, lease: torch.frombuffer(lease, dtype=torch.int32)[2:5],
    "reshape": lambda torch, lease: torch.frombuffer(lease, dtype=torch.int32).view(8, -1).t(),
    "numpy of a tensor": lambda torch, lease: torch.frombuffer(lease, dtype=torch.int32).numpy(),
    "tensor of an array": lambda torch, lease: torch.from_numpy(np.frombuffer(lease, dtype=np.int32)),
    "detached": lambda torch, lease: torch.frombuffer(lease, dtype=torch.float32).requires_grad_().detach(),
    "storage": lambda torch, lease: torch.frombuffer(lease, dtype=torch.uint8).untyped_storage(),
    "part of a graph": lambda torch, lease: torch.frombuffer(lease, dtype=torch.float32).requires_grad_().reshape(2, -1),
}
COPIES: dict[str, Callable[[Lease], Any]] = {
    "copy": lambda lease: np.frombuffer(lease, dtype=np.int32).copy(),
    "scalar": lambda lease: np.frombuffer(lease, dtype=np.int32)[0],
    "sum": lambda lease: np.frombuffer(lease, dtype=np.int32) + 1,
    "fancy index": lambda lease: np.frombuffer(lease, dtype=np.int32)[[1, 2]],
    "pickle": lambda lease: pickle.dumps(np.frombuffer(lease, dtype=np.int32)),
    "list": lambda lease: np.frombuffer(lease, dtype=np.int32).tolist(),
    "bytes": lambda lease: memoryview(lease).tobytes(),
}


def granted(slot: SlotId = SLOT) -> tuple[LeaseBook, Lease]:
    book = LeaseBook()
    return book, book.grant(mmap.mmap(-1, 4096), 0, 1024, slot)


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_any_view_keeps_the_lease_and_the_last_ends_it(make: Callable[[Lease], Any]) -> None:
    """However a view was created, the slot belongs to the user until it is freed, and is free at once then."""
    book, lease = granted()
    view = make(lease)
    del lease
    gc.collect()
    assert book.ended() == []

    del view

    assert book.ended() == [SLOT]


@pytest.mark.torch
@pytest.mark.parametrize("make", TORCH_VIEWS.values(), ids=TORCH_VIEWS)
def test_any_view_of_torch_keeps_the_lease_too(torch: ModuleType, make: Callable[[Any, Lease], Any]) -> None:
    """Tensors keep the buffer through the buffer protocol, as arrays do."""
    book, lease = granted()
    view = make(torch, lease)
    del lease
    gc.collect()
    assert book.ended() == []

    del view
    gc.collect()

    assert book.ended() == [SLOT]


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_does_not_keep_the_lease(make: Callable[[Lease], Any]) -> None:
    """Users who copy what they need release the rest."""
    book, lease = granted()
    kept = make(lease)
    del lease

    assert book.ended() == [SLOT]
    assert kept is not None


def test_one_view_of_many_is_enough() -> None:
    """A batch is a tree of arrays over one lease; the slot is not free while one of them exists."""
    book, lease = granted()
    images, labels = np.frombuffer(lease, np.uint8, 512), np.frombuffer(lease, np.uint8, 512, 512)
    del lease, images
    assert book.ended() == []

    del labels
    assert book.ended() == [SLOT]


def test_the_end_of_a_lease_is_reported_once() -> None:
    """Freeing a slot twice would give it to two batches."""
    book, lease = granted()
    del lease

    assert book.ended() == [SLOT]
    assert book.ended() == []


def test_leases_end_in_any_order_each_under_its_slot() -> None:
    """Sizes differ and repeat; each lease knows its own slot."""
    book, memory = LeaseBook(), mmap.mmap(-1, 1 << 20)
    leases = {SlotId(n): book.grant(memory, 64 * n, 64 + n % 100, SlotId(n)) for n in range(200)}
    for number in (150, 3, 77):
        del leases[SlotId(number)]
    assert book.ended() == [150, 3, 77]

    leases.clear()
    assert sorted(book.ended()) == [n for n in range(200) if n not in (150, 3, 77)]


def test_a_slot_is_leased_again_after_its_lease_ended() -> None:
    """A second lease of a slot is as valid as the first."""
    book, lease = granted()
    memory = mmap.mmap(-1, 4096)
    del lease
    assert book.ended() == [SLOT]
    again = book.grant(memory, 0, 1024, SLOT)
    assert book.ended() == []
    del again

    assert book.ended() == [SLOT]


def test_a_lease_may_end_in_another_thread() -> None:
    """The last view is freed in any thread; only the record itself happens there."""
    book, lease = granted()
    box = [np.frombuffer(lease, dtype=np.uint8)]
    del lease
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()

    assert book.ended() == [SLOT]


def test_a_lease_in_a_cycle_ends_with_garbage_collection() -> None:
    """Only the collector can free it."""
    book, lease = granted()
    cycle: list[Any] = [np.frombuffer(lease, dtype=np.uint8)]
    cycle.append(cycle)
    del lease, cycle
    gc.collect()

    assert book.ended() == [SLOT]


def test_many_threads_dropping_leases_lose_none() -> None:
    """Each end is recorded once, however many happen at the same time."""
    book, memory = LeaseBook(), mmap.mmap(-1, 1 << 20)
    piles = [[book.grant(memory, 64 * n, 64, SlotId(n)) for n in range(start, start + 500)] for start in range(0, 4000, 500)]
    threads = [threading.Thread(target=pile.clear) for pile in piles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(book.ended()) == list(range(4000))


def test_a_lease_is_a_view_of_the_memory() -> None:
    """Nothing is copied: writes before and after are visible."""
    memory = mmap.mmap(-1, 4096)
    lease = LeaseBook().grant(memory, 128, 64, SLOT)
    memory[128:131] = b"abc"
    ctypes.memset(ctypes.addressof(lease) + 1, ord("X"), 1)

    assert memory[128:131] == b"aXc"
    assert ctypes.sizeof(lease) == 64


def test_no_python_code_runs_when_a_lease_ends() -> None:
    """A KeyboardInterrupt at such a moment would be lost, and the slot too: Python prints such exceptions and continues."""
    book, lease = granted()
    calls: list[Any] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        del lease
    finally:
        sys.setprofile(None)

    assert calls == []
    assert book.ended() == [SLOT]
