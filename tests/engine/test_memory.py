"""Ownership and limits of batch memory, and that it does not grow."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Journal, Tree, plain, shm_names, wait_until, worker_processes

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


def megabytes(count: int, length: int = 64) -> Tree:
    """Samples of ``count`` MiB; all bytes of sample ``i`` are ``i``."""
    return Tree(length, lambda index: np.full(count * MIB, index, np.uint8))


@pytest.mark.slow
def test_kept_batches_never_change(every_engine: dict[str, Any]) -> None:
    """Some of 2000 batches are kept, whole or as a view of a row; at the end they are unchanged (P3)."""
    kept = []
    with infeed.DataLoader(Tree(8000, lambda i: (np.full(8, i), i)), batch_size=4, **every_engine) as loader:
        for number, (rows, labels) in enumerate(loader):
            if number % 7 == 0:
                kept.append((number, rows, labels))
            elif number % 50 == 1:
                kept.append((number, rows[2:3, 4:], None))
    for number, rows, labels in kept:
        if labels is None:
            assert rows.tolist() == [[4 * number + 2] * 4]
        else:
            assert rows.tolist() == [[4 * number + row] * 8 for row in range(4)]
            assert labels.tolist() == [4 * number + row for row in range(4)]


def test_kept_collated_batches_never_change(engine: dict[str, Any]) -> None:
    """The same for results of the user's collate_fn (P3)."""
    kept = []
    with infeed.DataLoader(
        range(800), batch_size=4, collate_fn=lambda s: {"x": np.array(s), "t": str(s[0])}, **engine
    ) as loader:
        for number, batch in enumerate(loader):
            if number % 5 == 0:
                kept.append((number, batch["x"][1:], batch["t"]))
    for number, rows, text in kept:
        assert rows.tolist() == [4 * number + 1, 4 * number + 2, 4 * number + 3]
        assert text == str(4 * number)


@pytest.mark.torch
def test_a_kept_tensor_keeps_its_batch(forkserver: dict[str, Any]) -> None:
    """Views, slices and NumPy views of a tensor keep its memory as the tensor itself does (P3)."""
    torch = pytest.importorskip("torch")
    kept = []
    with infeed.DataLoader(Tree(400, lambda i: torch.full((4,), i)), batch_size=2, **forkserver) as loader:
        for number, tensor in enumerate(loader):
            if number % 3 == 0:
                kept.append((number, tensor.view(-1)[4:].numpy(), tensor[0].unsqueeze(0)))
    for number, second, first in kept:
        assert second.tolist() == [2 * number + 1] * 4
        assert first.tolist() == [[2 * number] * 4]


def test_kept_batches_are_valid_after_close(engine: dict[str, Any]) -> None:
    """close() does not free memory that the user holds."""
    loader = infeed.DataLoader(Tree(20, lambda i: np.full(1000, i)), batch_size=2, **engine)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    for number, batch in enumerate(kept):
        assert (batch[0] == 2 * number).all()
        assert (batch[1] == 2 * number + 1).all()
        batch += 1


def test_memory_is_reused_when_nothing_is_kept(engine: dict[str, Any]) -> None:
    """An epoch loads many times the memory limit: slots are reused, none is added (P6)."""
    with infeed.DataLoader(megabytes(1, 120), batch_size=2, memory_limit=24 * MIB, **engine) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]


def test_a_batch_larger_than_the_limit_is_rejected_with_numbers(engine: dict[str, Any]) -> None:
    """MemoryLimitError, a MemoryError, shows the limit, the size of a batch and the fix."""
    with infeed.DataLoader(megabytes(1), batch_size=4, memory_limit="2MiB", **engine) as loader:
        with pytest.raises(infeed.MemoryLimitError, match=r"memory_limit=2\.0 MiB .* 4\.0 MiB; raise memory_limit") as caught:
            next(iter(loader))
        assert isinstance(caught.value, MemoryError)
        assert "your code holds" not in str(caught.value)  # No slot is in use.


@pytest.mark.parametrize("collate_fn", [None, np.stack], ids=["rows", "collated"])
def test_holding_all_batches_raises_and_releasing_them_recovers(engine: dict[str, Any], collate_fn: Any) -> None:
    """Keeping all batches raises an error instead of corrupting data; after release the rest is delivered, none twice."""
    kept, seen = [], []
    explained: set[bool] = set()
    with infeed.DataLoader(megabytes(1, 40), batch_size=2, memory_limit=16 * MIB, collate_fn=collate_fn, **engine) as loader:
        batches = iter(loader)
        errors = 0
        while True:
            try:
                kept.append(next(batches))
                seen.append(int(kept[-1][0, 0]))
            except StopIteration:
                break
            except infeed.MemoryLimitError as error:
                errors += 1
                explained.add("release batches that you keep" in str(error) and "your code holds" in str(error))
                assert [int(batch[0, 0]) for batch in kept] == seen[-len(kept) :]
                assert all((batch[1] == batch[0, 0] + 1).all() for batch in kept)
                kept.clear()
            assert errors < 20
    assert errors >= 2
    assert explained == {True}
    assert seen == list(range(0, 40, 2))


def test_growing_batches_reach_the_limit_and_continue_after_release(engine: dict[str, Any]) -> None:
    """A batch that outgrows its slot at the limit is rejected or placed, never over another one (P3, P6)."""
    sizes = [(i % 10 + 1) << 17 for i in range(30)]
    kept: list[Any] = []
    seen, errors = [], 0
    with infeed.DataLoader(
        Tree(30, lambda i: np.full(sizes[i], i, np.uint8)), batch_size=1, memory_limit=9 * MIB // 2, **engine
    ) as loader:
        batches = iter(loader)
        while errors < 100:
            try:
                kept.append(next(batches))
                seen.append(int(kept[-1][0, 0]))
            except StopIteration:
                break
            except infeed.MemoryLimitError:
                errors += 1
                assert kept, "refused although nothing is kept"
                for batch in kept:
                    number = int(batch[0, 0])
                    assert batch.shape == (1, sizes[number])
                    assert (batch == number).all()
                del batch, kept[: len(kept) // 2 + 1]
    assert seen == list(range(30))
    assert errors > 0


def test_a_memory_limit_can_be_text() -> None:
    """Units are multiples of 1024."""
    with infeed.DataLoader(megabytes(1, 4), batch_size=1, memory_limit="2.5 MiB") as loader:
        assert [batch[0, 0] for batch in loader] == [0, 1, 2, 3]
    with pytest.raises(infeed.ConfigError, match="'lots' is not a size"):
        infeed.DataLoader(range(3), memory_limit="lots")


def test_batches_in_garbage_cycles_do_not_exhaust_memory(forkserver: dict[str, Any]) -> None:
    """Batches that only the garbage collector can free are freed before a memory error is raised."""
    with infeed.DataLoader(megabytes(1, 60), batch_size=2, memory_limit=12 * MIB, **forkserver) as loader:
        for batch in loader:
            cycle: list[Any] = [batch]
            cycle.append(cycle)


@pytest.mark.process
@pytest.mark.slow
def test_twenty_thousand_batches_leak_nothing() -> None:
    """After 20,000 batches there is no more descriptor, thread, process or name than after 10**3; kept ones are unchanged."""
    import threading

    def count() -> tuple[int, int, int, set[str]]:
        return descriptors(), threading.active_count(), len(worker_processes()), shm_names(os.getpid())

    kept = []
    with infeed.DataLoader(range(40_000), batch_size=2, num_workers=2, timeout=60) as loader:
        for number, batch in enumerate(loader):
            if number == 1_000:
                before = count()
            if number % 1_000 == 500:
                kept.append((number, batch))
        assert number == 19_999
        after = count()
    assert after == before
    for number, batch in kept:
        assert batch.tolist() == [2 * number, 2 * number + 1]


@pytest.mark.linux("reads /proc/self/smaps")
@pytest.mark.process
def test_arrays_of_the_dataset_are_shared_by_workers() -> None:
    """Workers map a large array instead of copying it: its pages are shared until one writes."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc")
    size = 64 * MIB

    class Big:
        def __init__(self) -> None:
            self.array = np.ones(size, np.uint8)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[int, int]:
            total = int(self.array[:: 1 << 12].sum())
            return total, copied_bytes(self.array.ctypes.data + size // 2)

    def copied_bytes(address: int) -> int:
        """Returns how many bytes of the mapping at an address are private to this process."""
        is_inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                is_inside = begin <= address < end
            elif is_inside and line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the address is in no mapping")

    with infeed.DataLoader(Big(), batch_size=1, num_workers=2, timeout=30) as loader:
        for total, copied in loader:
            assert total[0] == size >> 12
            assert copied[0] < size // 10


@pytest.mark.process
def test_writes_of_a_worker_to_the_dataset_are_private(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """Each worker has its own dataset, as with a copy, although the arrays are shared; so has the user."""
    journal = Journal(tmp_path / "present")

    class Writing:
        def __init__(self) -> None:
            self.array = np.zeros(1000)

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[int, float]:
            if str(os.getpid()) not in journal.lines():
                journal.write(os.getpid())
                wait_until(lambda: len(journal.lines()) == 2, "the other worker")
            self.array += 1
            return os.getpid(), self.array[0]

    dataset = Writing()
    highest: dict[int, list[float]] = {}
    with infeed.DataLoader(dataset, batch_size=1, **process_engine) as loader:
        for pid, value in loader:
            highest.setdefault(int(pid[0]), []).append(float(value[0]))
    assert dataset.array.sum() == 0
    assert len(highest) == 2
    for values in highest.values():
        assert sorted(values) == list(range(1, len(values) + 1))


@pytest.mark.process
@pytest.mark.linux("names can be listed")
def test_named_memory_of_the_portable_pool_is_gone_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named segments exist while the loader runs, and are gone when it is closed."""
    from tests.conftest import make_portable

    make_portable(monkeypatch)
    before = shm_names(os.getpid())
    with infeed.DataLoader(megabytes(1, 8), batch_size=2, num_workers=2, timeout=30) as loader:
        batches = iter(loader)
        kept = next(batches)
        names = shm_names(os.getpid()) - before
        assert names
    assert not names & shm_names(os.getpid())
    assert plain(kept[:, 0]) == [0, 1]


@pytest.mark.parametrize("limit", [9, 13])
def test_a_transfer_to_a_device_does_not_exhaust_memory(limit: int) -> None:
    """Fewer batches are in flight instead: the training loop is not waiting yet, and releases its batch after the step."""
    pytest.importorskip("torch")
    loader = infeed.DataLoader(megabytes(1, 80), 4, num_workers=2, worker="thread", device="cpu", memory_limit=limit * MIB)
    with loader:
        count = 0
        for batch in loader:
            assert int(batch[0, 0]) == 4 * count
            count += 1
            time.sleep(0.02)  # A step, in which everything allowed is loaded.
        assert count == 20
