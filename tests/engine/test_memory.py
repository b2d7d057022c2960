"""Whose memory a batch is, how much there may be of it, and that it does not grow."""

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
    """Of 2000 batches some are kept, whole or only as a view of a row; at the end they are what they were (P3)."""
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
    """The same for what the user's collate_fn made (P3)."""
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
def test_a_kept_tensor_holds_its_batch(forkserver: dict[str, Any]) -> None:
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
    """close() takes nothing from under the user."""
    loader = infeed.DataLoader(Tree(20, lambda i: np.full(1000, i)), batch_size=2, **engine)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    for number, batch in enumerate(kept):
        assert (batch[0] == 2 * number).all()
        assert (batch[1] == 2 * number + 1).all()
        batch += 1


def test_memory_is_used_again_when_nothing_is_kept(engine: dict[str, Any]) -> None:
    """An epoch of many times the memory limit goes through it: slots are reused, none is added (P6)."""
    with infeed.DataLoader(megabytes(1, 120), batch_size=2, memory_limit=24 * MIB, **engine) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]


def test_a_batch_larger_than_the_limit_is_refused_with_numbers(engine: dict[str, Any]) -> None:
    """MemoryLimitError says what the limit is, what a batch takes and what to change; it is a MemoryError."""
    with infeed.DataLoader(megabytes(1), batch_size=4, memory_limit="2MiB", **engine) as loader:
        with pytest.raises(infeed.MemoryLimitError, match=r"memory_limit=2\.0 MiB .* 4\.0 MiB; raise memory_limit") as caught:
            next(iter(loader))
        assert isinstance(caught.value, MemoryError)
        assert "your code holds" not in str(caught.value)  # nobody has any


@pytest.mark.parametrize("collate_fn", [None, np.stack], ids=["rows", "collated"])
def test_holding_all_batches_raises_and_releasing_them_recovers(engine: dict[str, Any], collate_fn: Any) -> None:
    """Keeping all batches ends in a clear error, not in wrong data; after letting go the rest comes, none twice."""
    kept, seen = [], []
    told: set[bool] = set()
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
                told.add("release batches that you keep" in str(error) and "your code holds" in str(error))
                assert [int(batch[0, 0]) for batch in kept] == seen[-len(kept) :]
                assert all((batch[1] == batch[0, 0] + 1).all() for batch in kept)
                kept.clear()
            assert errors < 20
    assert errors >= 2
    assert told == {True}
    assert seen == list(range(0, 40, 2))


def test_growing_batches_meet_the_limit_and_go_on_after_letting_go(engine: dict[str, Any]) -> None:
    """A batch that outgrows its slot at the limit is refused or placed, never put where another one lies (P3, P6)."""
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


def test_a_memory_limit_in_text_is_understood() -> None:
    """Units are of 1024, as operating systems count."""
    with infeed.DataLoader(megabytes(1, 4), batch_size=1, memory_limit="2.5 MiB") as loader:
        assert [batch[0, 0] for batch in loader] == [0, 1, 2, 3]
    with pytest.raises(infeed.ConfigError, match="'lots' is not a size"):
        infeed.DataLoader(range(3), memory_limit="lots")


def test_a_dataset_whose_batches_are_garbage_cycles_does_not_run_out(forkserver: dict[str, Any]) -> None:
    """Batches that only the garbage collector can free are freed before an error about memory is raised."""
    with infeed.DataLoader(megabytes(1, 60), batch_size=2, memory_limit=12 * MIB, **forkserver) as loader:
        for batch in loader:
            cycle: list[Any] = [batch]
            cycle.append(cycle)


@pytest.mark.process
@pytest.mark.slow
def test_a_hundred_thousand_batches_leave_nothing_more() -> None:
    """After 10**5 batches there is no descriptor, thread, process or name more than after 10**3; kept ones are unchanged."""
    import threading

    def count() -> tuple[int, int, int, set[str]]:
        return descriptors(), threading.active_count(), len(worker_processes()), shm_names(os.getpid())

    kept = []
    with infeed.DataLoader(range(200_000), batch_size=2, num_workers=2, timeout=60) as loader:
        for number, batch in enumerate(loader):
            if number == 1_000:
                before = count()
            if number % 1_000 == 500:
                kept.append((number, batch))
        assert number == 99_999
        after = count()
    assert after == before
    for number, batch in kept:
        assert batch.tolist() == [2 * number, 2 * number + 1]


@pytest.mark.linux("reads /proc/self/smaps")
@pytest.mark.process
def test_arrays_of_the_dataset_are_shared_by_workers() -> None:
    """A large array is mapped by all workers, not copied into each: its pages are shared until one writes."""
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
        """How much of the mapping that an address lies in is this process's own copy."""
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
def test_what_one_worker_writes_into_the_dataset_no_other_sees(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """Each worker's dataset is its own, as with a copy, although the arrays are shared: so is the user's."""
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
def test_the_named_memory_of_the_portable_way_is_gone_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where segments have names, they are there while the loader runs and gone when it is closed."""
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
def test_what_is_on_its_way_to_a_device_is_no_reason_to_run_out_of_memory(limit: int) -> None:
    """Fewer are in flight then: the loop does not wait for the next one yet, and releases its batch with the next step."""
    pytest.importorskip("torch")
    loader = infeed.DataLoader(megabytes(1, 80), 4, num_workers=2, worker="thread", device="cpu", memory_limit=limit * MIB)
    with loader:
        count = 0
        for batch in loader:
            assert int(batch[0, 0]) == 4 * count
            count += 1
            time.sleep(0.02)  # a step, in which all that may be is loaded
        assert count == 20
