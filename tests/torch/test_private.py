"""Private attributes of torch's iterators that real libraries use: Ultralytics, Lightning, Composer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers import DEADLINE_S, Pids, wait_until, worker_processes

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
dataloader = pytest.importorskip("torch.utils.data.dataloader")
ours = pytest.importorskip("infeed.torch")

pytestmark = [pytest.mark.torch, pytest.mark.process]
OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "timeout": DEADLINE_S}


@pytest.fixture
def installed() -> Iterator[None]:
    ours.install()
    yield
    ours.uninstall()


@pytest.fixture
def workers() -> Callable[[], set[int]]:
    """Returns a function that lists new processes: the test process may have others."""
    before = {process.pid for process in worker_processes()}
    return lambda: {process.pid for process in worker_processes()} - before


def assert_all_end(workers: Callable[[], set[int]]) -> None:
    wait_until(lambda: not workers(), "the end of all workers")


def test_iterators_are_instances_of_torchs_classes() -> None:
    assert isinstance(iter(ours.DataLoader(Pids(4), **OPTIONS)), dataloader._MultiProcessingDataLoaderIter)
    assert isinstance(iter(ours.DataLoader(Pids(4))), dataloader._SingleProcessDataLoaderIter)


def test_workers_can_be_inspected_and_terminated_like_processes(workers: Callable[[], set[int]]) -> None:
    """Ultralytics does so before it drops a loader."""
    batches = iter(ours.DataLoader(Pids(8), **OPTIONS))
    next(batches)
    handles = batches._workers
    assert {handle.pid for handle in handles} == workers()
    assert batches._workers == handles
    for handle in handles:
        assert handle.is_alive()
        assert handle.exitcode is None
        assert handle.daemon
        handle.join(timeout=0)
    assert len({handle.name for handle in handles}) == 2

    handles[0].terminate()
    handles[0].join()
    assert not handles[0].is_alive()
    assert handles[0].exitcode != 0

    batches._shutdown_workers()
    handles[1].join(timeout=DEADLINE_S)
    assert not handles[1].is_alive()
    assert handles[1].exitcode == 0
    assert [handle.is_alive() for handle in batches._workers] == [False] * len(handles)
    assert_all_end(workers)


@pytest.mark.parametrize("method", [None, "spawn"])
@pytest.mark.parametrize("is_over", [False, True])
def test_persistent_workers_end_when_they_are_shut_down(
    is_over: bool, method: str | None, workers: Callable[[], set[int]]
) -> None:
    """Lightning does so when it resets a loader, in mid-epoch or after an epoch."""
    loader = ours.DataLoader(Pids(4), persistent_workers=True, multiprocessing_context=method, **OPTIONS)
    batches = iter(loader)
    next(batches)
    if is_over:
        list(batches)
        assert workers()
    assert isinstance(loader._iterator, dataloader._MultiProcessingDataLoaderIter)
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert_all_end(workers)

    assert len(list(loader)) == 2  # It starts others.


class Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Infinite(data.DataLoader):  # type: ignore[name-defined,misc]
    """Like Ultralytics' ``InfiniteDataLoader``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)

    def close(self) -> None:
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()

    def reset(self) -> None:
        self.iterator = self._get_iterator()


@pytest.mark.usefixtures("installed")
def test_an_endless_loader_can_be_reset_and_ends_its_workers(workers: Callable[[], set[int]]) -> None:
    loader = Infinite(Pids(8), **OPTIONS)
    counts = [len(list(loader)) for _ in range(2)]
    loader.reset()
    counts.append(len(list(loader)))
    assert counts == [4, 4, 4]

    loader.close()
    del loader
    gc.collect()
    assert_all_end(workers)


class Named(data.DataLoader):  # type: ignore[name-defined,misc]
    """A subclass of torch's loader whose attributes have the names of infeed's options."""

    seed, worker, device, on_error, memory_limit = 7, "me", "no device", print, "all"


@pytest.mark.usefixtures("installed")
def test_attributes_of_a_subclass_are_not_mistaken_for_infeeds_options() -> None:
    torch.manual_seed(3)
    loader = Named(list(range(6)), 2, shuffle=True)
    order = [batch.tolist() for batch in loader]
    ours.uninstall()
    torch.manual_seed(3)
    assert order == [batch.tolist() for batch in Named(list(range(6)), 2, shuffle=True)]


class Fake:
    """What fastai passes to torch's iterator instead of a loader."""

    _IterableDataset_len_called, _auto_collation, drop_last, in_order = None, False, False, True
    generator, prefetch_factor, multiprocessing_context, worker_init_fn = None, 2, None, None
    _dataset_kind = dataloader._DatasetKind.Iterable
    pin_memory, pin_memory_device, timeout, persistent_workers = False, "", 0, False

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.dataset = self

    @property
    def _index_sampler(self) -> Any:
        return iter(lambda: None, 0)

    def collate_fn(self, value: Any) -> Any:
        return value

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnIter(dataloader._SingleProcessDataLoaderIter):  # type: ignore[name-defined,misc]
    """Like FastEstimator's."""


@pytest.mark.linux("torch forks its workers there")
@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # Python's own, from 3.12 on.
def test_iterators_created_by_a_library_are_torchs_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning if they have workers."""
    from infeed.torch import service as serving
    from infeed.torch import summary as tally

    counts = tally.Tally()
    monkeypatch.setattr(serving, "TALLY", counts)
    fake = Fake(num_workers=1)
    with pytest.warns(RuntimeWarning, match="torch's own workers") as caught:
        batches = [list(dataloader._MultiProcessingDataLoaderIter(fake)) for _ in range(2)]
    assert batches == [[0, 1, 2]] * 2
    assert len(caught) == 1
    assert list(OwnIter(data.DataLoader([5]))) == [torch.tensor([5])]
    assert list(data.DataLoader([5])) == [torch.tensor([5])]

    assert counts.loader_count == 1
    assert sorted((where, name) for where, name, _ in counts.refused.elements()) == [
        ("torch's own iterator", "DataLoader(list)"),
        ("torch's own workers", f"{Fake.__module__}.Fake(Fake)"),
    ]
    assert "1 loader on infeed's engine" in str(counts)
    assert "OwnIter" in str(counts)
