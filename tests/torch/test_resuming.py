"""A resumed run equals the uninterrupted run, for states taken at every step, in this epoch and the next two."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

from infeed import StateError
from infeed.torch import DataLoader
from infeed.torch.patching import StatefulDataLoader
from tests import stateful
from tests.helpers import DEADLINE_S
from tests.stateful import Counting, Pending, PendingAtOnce, Permuted, Shuffled, Turning, TurningBatches, TurningInside

Made = tuple[Any, dict[str, Any]]


class Numbers(data.Dataset[int]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index


class Random(Numbers):
    """Adds a random number of the worker."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random()


# --- samplers


class Drawing:
    """Draws its order from torch's default generator, without a state."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(7).tolist())


class DrawingBatches:
    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(7).tolist()
        return iter([order[:3], order[3:4], order[4:]])


# --- iterable datasets


class Stream(data.IterableDataset[int]):
    """Stateless: it is read again."""

    def __iter__(self) -> Iterator[int]:
        info = data.get_worker_info()
        return iter(range(7) if info is None else range(info.id, 7 + info.id, info.num_workers))


class Log(stateful.Log, Stream):
    pass


class ResetLog(stateful.ResetLog, Stream):
    pass


class Both(stateful.Both, Stream):
    pass


class IteratorOnly(stateful.IteratorOnly, Stream):
    pass


class PendingLog(Pending, data.IterableDataset[int]):
    pass


class OnItsOwn(stateful.OnItsOwn, Stream):
    pass


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def shared_generator() -> Made:
    generator = seeded(5)
    return Numbers(), {"generator": generator, "sampler": data.RandomSampler(Numbers(), num_samples=9, generator=generator)}


CASES: dict[str, Callable[[], Made]] = {
    "sequential": lambda: (Numbers(), {}),
    "shuffle": lambda: (Numbers(), {"shuffle": True}),
    "shuffle, drop_last": lambda: (Numbers(), {"shuffle": True, "drop_last": True}),
    "shuffle, singly": lambda: (Numbers(), {"shuffle": True, "batch_size": None}),
    "shuffle, seed": lambda: (Numbers(), {"shuffle": True, "seed": 3}),
    "shuffle, generator": lambda: (Numbers(), {"shuffle": True, "generator": seeded(4)}),
    "RandomSampler, generator": lambda: (Numbers(), {"sampler": data.RandomSampler(Numbers(), generator=seeded(4))}),
    "RandomSampler, replacement": lambda: (
        Numbers(), {"sampler": data.RandomSampler(Numbers(), True, num_samples=36), "batch_size": 8}
    ),
    "RandomSampler, two generators": lambda: (
        Numbers(), {"generator": seeded(2), "sampler": data.RandomSampler(Numbers(), True, 9, generator=seeded(4))}
    ),
    "RandomSampler, shared generator": shared_generator,
    "WeightedRandomSampler": lambda: (Numbers(), {"sampler": data.WeightedRandomSampler(torch.ones(7), 7)}),
    "SubsetRandomSampler": lambda: (Numbers(), {"sampler": data.SubsetRandomSampler(range(7))}),
    "BatchSampler": lambda: (Numbers(), {"batch_sampler": data.BatchSampler(data.RandomSampler(Numbers()), 2, True)}),
    "sampler that draws": lambda: (Numbers(), {"sampler": Drawing()}),
    "sampler that draws, singly": lambda: (Numbers(), {"sampler": Drawing(), "batch_size": None}),
    "batches that draw": lambda: (Numbers(), {"batch_sampler": DrawingBatches()}),
    "list": lambda: (Numbers(), {"sampler": [4, 1, 5]}),
    "stateful sampler": lambda: (Numbers(), {"sampler": Turning()}),
    "stateful sampler, singly": lambda: (Numbers(), {"sampler": Turning(), "batch_size": None}),
    "stateful sampler, drop_last": lambda: (Numbers(), {"sampler": Turning(), "drop_last": True}),
    "stateful sampler, full batches": lambda: (Numbers(), {"sampler": Turning(), "batch_size": 7}),
    "pending sampler": lambda: (Numbers(), {"sampler": Pending()}),
    "pending sampler, singly": lambda: (Numbers(), {"sampler": Pending(), "batch_size": None}),
    "pending sampler, full batches": lambda: (Numbers(), {"sampler": Pending(), "batch_size": 7}),
    "pending sampler, at once": lambda: (Numbers(), {"sampler": PendingAtOnce()}),
    "stateful iterator of a stateful sampler": lambda: (Numbers(), {"sampler": Permuted()}),
    "stateful iterator": lambda: (Numbers(), {"sampler": Shuffled()}),
    "stateful iterator, singly": lambda: (Numbers(), {"sampler": Shuffled(), "batch_size": None}),
    "stateful batches": lambda: (Numbers(), {"batch_sampler": TurningBatches()}),
    "stateful sampler in batches": lambda: (Numbers(), {"batch_sampler": TurningInside()}),
    "stateful dataset": lambda: (Counting(), {"shuffle": True}),
    "random numbers": lambda: (Random(), {"shuffle": True}),
    "stream": lambda: (Stream(), {}),
    "stream with a state": lambda: (Log(), {}),
    "stream with a state, full batches": lambda: (Log(), {"batch_size": 7}),
    "stream with a state, drop_last": lambda: (Log(), {"drop_last": True}),
    "stream with a state, singly": lambda: (Log(), {"batch_size": None}),
    "stream that restarts": lambda: (ResetLog(), {}),
    "stream with a pending state": lambda: (PendingLog(), {}),
    "stream with a pending state, singly": lambda: (PendingLog(), {"batch_size": None}),
    "stream and iterator with states": lambda: (Both(), {}),
    "stream whose iterator has a state": lambda: (IteratorOnly(), {}),
    "stream that is its iterator": lambda: (OnItsOwn(), {}),
}  # fmt: skip
STREAMS = [name for name in CASES if name.startswith("stream")]
INDEXED = [name for name in CASES if name not in (*STREAMS, "random numbers")]  # These draw from the process's own generators.


def made(case: str, options: dict[str, Any]) -> DataLoader[Any]:
    dataset, given = CASES[case]()
    if "batch_sampler" not in given:
        given = {"batch_size": 2, **given}
    workers = {"timeout": DEADLINE_S} if options.get("num_workers") else {}
    return DataLoader(dataset, collate_fn=list if given.get("batch_size", 2) else None, **{**given, **workers, **options})


def run(loader: DataLoader[Any], epoch_count: int, states: list[tuple[int, int, str]] | None = None) -> list[list[Any]]:
    """Iterates. Appends the states at all steps to ``states``, with the epoch and the number of delivered batches."""

    def note(epoch: int, step: int) -> None:
        if states is not None:
            states.append((epoch, step, json.dumps(loader.state_dict())))

    epochs: list[list[Any]] = []
    for epoch in range(epoch_count):
        note(epoch, 0)
        iterator = iter(loader)
        note(epoch, 0)
        batches: list[Any] = []
        for batch in iterator:
            batches.append(batch)
            note(epoch, len(batches))
        epochs.append(batches)
    loader.close()
    return epochs


def assert_resumes(case: str, options: dict[str, Any], *, every: int = 1, following: int = 2, epochs: int = 2) -> None:
    """Takes states at all steps of some epochs, and resumes from some of them in new loaders."""
    torch.manual_seed(1)
    states: list[tuple[int, int, str]] = []
    expected = run(made(case, options), epochs + following, states)
    if every == 1:
        torch.manual_seed(1)
        assert run(made(case, options), epochs + following) == expected, "taking states changes what is loaded"
    problems = []
    for number, (epoch, step, state) in enumerate(states[::every]):
        if epoch >= epochs:
            break
        # Sometimes as in a restarted job, sometimes in another process.
        torch.manual_seed(1 if number % 2 else 1000 + number)
        loader = made(case, options)
        loader.load_state_dict(json.loads(state))
        if json.dumps(loader.state_dict()) != state:
            problems.append(f"epoch {epoch}, step {step}: another state after loading")
        got = run(loader, 1 + following)
        wanted = [expected[epoch][step:], *expected[epoch + 1 : epoch + 1 + following]]
        if got != wanted:
            problems.append(f"epoch {epoch}, step {step}: {got} and not {wanted}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("case", [*INDEXED, *STREAMS])
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {})


@pytest.mark.parametrize("case", [name for name in INDEXED if name != "stateful dataset"])
def test_a_run_with_threads_resumed_at_any_step_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {"num_workers": 2, "worker": "thread"}, every=3)


@pytest.mark.parametrize("case", STREAMS)
def test_an_iterable_dataset_read_by_a_thread_resumed_at_any_step_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {"num_workers": 1, "worker": "thread"}, every=3)


@pytest.mark.process
@pytest.mark.parametrize(
    "case",
    ["shuffle", "shuffle, generator", "sampler that draws", "stateful sampler", "stream with a state"],
)
def test_a_run_with_processes_resumed_at_some_steps_equals_the_uninterrupted_run(case: str) -> None:
    """Workers begin each epoch with the main process's dataset."""
    assert_resumes(case, {"num_workers": 2}, every=4, epochs=1)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("case", [*(name for name in INDEXED if name != "stateful dataset"), "random numbers", *STREAMS])
def test_runs_with_processes_resumed_at_many_steps_equal_the_uninterrupted_runs(case: str) -> None:
    assert_resumes(case, {"num_workers": 2}, every=5)


@pytest.mark.process
@pytest.mark.parametrize(
    "case", ["random numbers", "shuffle, generator", "stateful sampler", "stream", "stream and iterator with states"]
)
def test_a_run_with_persistent_workers_resumed_at_some_steps_equals_the_uninterrupted_run(case: str) -> None:
    """Workers keep their dataset and their initial seed."""
    assert_resumes(case, {"num_workers": 2, "persistent_workers": True}, every=7)


# --- with the process's generator


def test_resuming_does_not_change_the_default_generator() -> None:
    torch.manual_seed(1)
    loader = made("shuffle", {})
    next(iter(loader))
    state = loader.state_dict()
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    loader = made("shuffle", {})
    loader.load_state_dict(state)
    run(loader, 3)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_that_draws_resumes_exactly_if_the_default_generator_is_restored() -> None:
    """The training loop draws from it too, so the orders of later epochs depend on its state."""

    def drawing(loader: DataLoader[Any], rest: int = 0) -> Iterator[tuple[Any, float, Any, Any]]:
        for _ in range(3):
            for batch in loader:
                number = torch.rand(()).item()
                yield batch, number, loader.state_dict(), torch.get_rng_state()

    torch.manual_seed(1)
    uninterrupted = list(drawing(made("shuffle", {})))
    assert len(uninterrupted) == 12
    for number, (_, _, state, generator) in enumerate(uninterrupted[:8]):
        torch.manual_seed(2)
        loader = made("shuffle", {})
        loader.load_state_dict(state)
        torch.set_rng_state(generator)
        resumed = [step[:2] for step in drawing(loader)]
        assert resumed[: 11 - number] == [step[:2] for step in uninterrupted[number + 1 :]]


def test_a_seeded_epoch_keeps_its_seed_after_a_resume() -> None:
    """The user calls ``torch.manual_seed(epoch)`` before every epoch."""

    def seeding(loader: DataLoader[Any], first: int) -> list[Any]:
        batches = []
        for epoch in range(first, 3):
            torch.manual_seed(epoch)
            batches.append(list(loader))
        return batches

    torch.manual_seed(5)
    loader = made("shuffle", {})
    expected = seeding(loader, 0)
    torch.manual_seed(5)
    loader = made("shuffle", {})
    torch.manual_seed(0)
    list(loader)
    state = loader.state_dict()
    torch.manual_seed(5)
    loader = made("shuffle", {})
    loader.load_state_dict(state)
    assert seeding(loader, 1) == expected[1:]


# Orders that are drawn with the first batch, and other draws from the same generator.
DRAWN = [
    "shuffle", "shuffle, generator", "RandomSampler, generator", "RandomSampler, replacement", "RandomSampler, two generators",
    "WeightedRandomSampler", "SubsetRandomSampler",
]  # fmt: skip


@pytest.mark.parametrize("case", DRAWN)
def test_draws_between_iter_and_the_first_batch_are_repeated(case: str) -> None:
    torch.manual_seed(1)
    saved = made(case, {})
    iterator = iter(saved)
    torch.rand(3, generator=getattr(saved.sampler, "generator", None))
    batches = [next(iterator)]
    state = json.dumps(saved.state_dict())
    batches += iterator
    following = list(saved)

    torch.manual_seed(2)
    resumed = made(case, {})
    resumed.load_state_dict(json.loads(state))
    iterator = iter(resumed)
    rest = [next(iterator)]
    again = resumed.state_dict()
    rest += iterator
    assert rest == batches[1:]
    assert list(resumed) == following
    resumed = made(case, {})
    resumed.load_state_dict(again)
    assert list(resumed) == batches[2:]


# --- when states are taken


@pytest.mark.parametrize("num_workers", [0, 2], ids=["inline", "threads"])
def test_a_state_before_the_first_batch_belongs_to_the_latest_iterator(num_workers: int) -> None:
    loader = made("shuffle", {"num_workers": num_workers, "worker": "thread"})
    left = iter(loader)
    next(left)
    iterator = iter(loader)
    state = loader.state_dict()
    whole = list(iterator)
    other = made("shuffle", {})
    other.load_state_dict(state)
    assert len(whole) == 4
    assert list(other) == whole


def test_an_unused_iterator_does_not_count() -> None:
    torch.manual_seed(1)
    loader = made("shuffle", {})
    iter(loader)
    state = loader.state_dict()
    epochs = run(loader, 2)
    other = made("shuffle", {})
    other.load_state_dict(state)
    assert run(other, 2) == epochs


def test_a_state_after_loading_is_the_one_that_was_loaded() -> None:
    """Not that of the abandoned iteration, which continues unchanged."""
    loader = made("stateful sampler", {})
    first = loader.state_dict()
    iterator = iter(loader)
    batches = [next(iterator)]
    loader.load_state_dict(first)
    assert loader.state_dict() == first
    batches += iterator
    assert loader.state_dict() == first
    assert list(loader) == batches


def test_taking_a_state_does_not_keep_earlier_ones() -> None:
    """If a sampler's states are large, only those ahead of the training loop are kept."""
    copies: list[Any] = []

    class Large(list[int]):
        def __deepcopy__(self, memo: Any) -> Large:
            copies.append(weakref.ref(made := Large(self)))
            return made

    class Sampler(Turning):
        def state_dict(self) -> Any:
            return {"large": Large(), **self.live}

    loader = DataLoader(Numbers(), sampler=Sampler())
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    assert sum(copy() is not None for copy in copies) <= 4


# --- stateful objects


class Litdata(Stream):
    """Its state methods are for litdata's own loader."""

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


class LitdataMap(Numbers):
    state_dict, load_state_dict = Litdata.state_dict, Litdata.load_state_dict


@pytest.mark.parametrize("dataset", [Litdata(), LitdataMap()], ids=["stream", "map"])
def test_state_methods_with_other_arguments_are_ignored(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=2, collate_fn=list)
    batches = list(loader)
    loader = DataLoader(dataset, batch_size=2, collate_fn=list)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    assert list(loader) == batches[1:]


WORKERS = pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.process)])


def counting(**options: Any) -> DataLoader[Any]:
    timeout = DEADLINE_S if "num_workers" in options else 0
    return DataLoader(Counting(), batch_size=2, collate_fn=list, timeout=timeout, **options)


@WORKERS
def test_a_state_with_workers_in_mid_epoch_omits_the_dataset(worker: Any) -> None:
    """Frameworks take states of every loader that has them, so taking one must not raise."""
    loader = counting(num_workers=1, worker=worker)
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(RuntimeWarning, match=r"Counting.*num_workers=0") as warned:
        states = [loader.state_dict() for _ in range(2)]
    assert [one.filename for one in warned] == [__file__]
    state = states[1]
    assert states[0] == state

    for other in (loader, counting()):
        with pytest.raises(StateError, match=r"Counting.*num_workers=0"):
            other.load_state_dict(state)
    assert len(list(iterator)) == 3
    without = DataLoader(Numbers(), batch_size=2, collate_fn=list, num_workers=1, worker=worker)
    without.load_state_dict(state)
    assert list(without) == [[2, 3], [4, 5], [6]]


@WORKERS
def test_a_state_with_workers_between_epochs_contains_the_dataset(worker: Any) -> None:
    """Workers begin with a copy of the main process's dataset."""
    saved = counting(num_workers=1, worker=worker)
    saved.dataset.seen = 10
    states, epochs = [saved.state_dict()], []
    for _ in range(3):
        iterator = iter(saved)
        epochs.append([next(iterator) for _ in range(4)])
        states.append(saved.state_dict())
        assert next(iterator, None) is None
    states.append(saved.state_dict())
    for state, expected in zip(states, [epochs, [[], *epochs[1:]], [[], *epochs[2:]], [[]], []], strict=True):
        resumed = counting(num_workers=1, worker=worker)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [list(resumed) for _ in expected] == expected


@WORKERS
def test_a_state_of_a_dataset_in_mid_epoch_is_rejected_with_workers(worker: Any) -> None:
    inline = counting()
    next(iter(inline))
    loader = counting(num_workers=1, worker=worker)
    with pytest.raises(StateError, match="num_workers=0"):
        loader.load_state_dict(inline.state_dict())
    assert len(list(loader)) == 4


@pytest.mark.process
def test_a_state_between_epochs_of_persistent_workers_omits_the_dataset() -> None:
    """Workers keep their copies."""
    loader = counting(num_workers=1, persistent_workers=True)
    before = loader.state_dict()
    list(loader)
    with pytest.warns(RuntimeWarning, match="Counting"):
        after = loader.state_dict()
    with pytest.raises(StateError, match="Counting"):
        loader.load_state_dict(after)
    loader.load_state_dict(before)
    assert [batch[0] for batch in loader] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    loader.close()


def test_states_of_stateless_objects_are_rejected() -> None:
    with_dataset, with_sampler = DataLoader(Counting()).state_dict(), DataLoader(Numbers(), sampler=Turning()).state_dict()
    loader = DataLoader(Numbers())
    with pytest.raises(StateError, match="dataset"):
        loader.load_state_dict(with_dataset)
    with pytest.raises(StateError, match="sampler"):
        loader.load_state_dict(with_sampler)
    loader = DataLoader(Numbers(), sampler=Drawing())
    loader.load_state_dict(with_sampler)
    with pytest.raises(StateError, match="Drawing"):
        list(loader)


@pytest.mark.parametrize(
    "change",
    [
        {"default": "AAAA"}, {"default": 3}, {"seed": -1}, {"seed": "1"}, {"now": 1}, {"state": 1}, {"state": {}},
        {"state": {"other": 1}}, {"position": 8}, {"position": "1"}, {"ended": 1}, {"other": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_state_of_a_sampler_is_rejected(change: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), sampler=Turning(), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict({**state, "sampler": {**state["sampler"], **change}})
    loader.load_state_dict(state)
    assert len(list(loader)) == 3


@pytest.mark.parametrize("options", [{"generator": seeded(1)}, {"sampler": data.RandomSampler(Numbers(), generator=seeded(1))}])
def test_a_state_of_an_order_of_another_generator_is_rejected(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), shuffle=True)
    next(iter(loader))
    other = DataLoader(Numbers(), shuffle=None if "sampler" in options else True, **options)
    with pytest.raises(StateError, match="generator"):
        other.load_state_dict(loader.state_dict())


def test_states_of_torchdatas_sampler_can_be_resumed() -> None:
    """Its iterator has the state, which contains a tensor."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def loader() -> DataLoader[Any]:
        return DataLoader(
            Numbers(), sampler=torchdata.RandomSampler(Numbers(), generator=seeded(3)), batch_size=2, collate_fn=list
        )

    uninterrupted = run(loader(), 3)
    saved = loader()
    iterator = iter(saved)
    states = []
    for _ in iterator:
        states.append(saved.state_dict())
    for step, state in enumerate([*states, saved.state_dict()], start=1):
        resumed = loader()
        resumed.load_state_dict(state)
        if step <= 4:
            assert run(resumed, 3) == [uninterrupted[0][step:], *uninterrupted[1:]]
        else:
            assert run(resumed, 2) == uninterrupted[1:]


class Counted(Numbers):
    """Samples tell how many this copy has loaded; its state is that number."""

    count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return 10 * self.count + index

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.process
@pytest.mark.linux("torch forks its workers there")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_torchdatas_loader_resumes_a_stateful_map_style_dataset_on_its_own_workers(is_persistent: bool) -> None:
    """infeed's would not know the dataset's state at a batch. The batches are torchdata's, with one warning per loader."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")

    def batches(cls: Any) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": is_persistent}
        loader, resumed = cls(Counted(), **options), cls(Counted(), **options)
        iterator = iter(loader)
        first = next(iterator)
        resumed.load_state_dict(loader.state_dict())
        rest = [list(iterator), list(resumed), list(resumed)]
        return [first, *([batch.tolist() for batch in epoch] for epoch in rest)]

    with pytest.warns(
        RuntimeWarning, match=r"torch's own workers, because its map-style dataset has a state_dict\(\)"
    ) as caught:
        own = batches(StatefulDataLoader)
    assert len([one for one in caught if one.category is RuntimeWarning]) == 2
    assert str(own) == str(batches(torchdata.StatefulDataLoader))


def test_torchdatas_loader_resumes_a_stateful_map_style_dataset_without_workers_on_infeeds_engine() -> None:
    """Which follows the state of the dataset there."""
    loader, resumed = (StatefulDataLoader(Counted(), batch_size=2, snapshot_every_n_steps=3) for _ in range(2))
    iterator = iter(loader)
    next(iterator)

    resumed.load_state_dict(loader.state_dict())

    assert [batch.tolist() for batch in iterator] == [batch.tolist() for batch in resumed]
    assert resumed.statistics().batch_count == 3
