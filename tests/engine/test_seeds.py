"""Random numbers in the dataset depend only on the seed; the user's own generators are not changed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.testing import RandomDataset
from tests.conftest import engine_params
from tests.helpers import Journal, Tree, collected, wait_until

FORKS = pytest.mark.linux("only Linux has the fork server")


def loaded(dataset: Any, **options: Any) -> list[Any]:
    """Returns two epochs."""
    with infeed.DataLoader(dataset, **{"batch_size": 8, "shuffle": True, "seed": 42, **options}) as loader:
        return [collected(loader) for _ in range(2)]


@pytest.fixture(scope="module")
def inline() -> list[Any]:
    return loaded(RandomDataset(50))


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("start_method", engine_params("forkserver", "spawn"))
def test_draws_do_not_depend_on_the_workers(inline: list[Any], start_method: Any, workers: int) -> None:
    """random and numpy.random give the same numbers to the same samples for any number of processes (P2)."""
    assert loaded(RandomDataset(50), num_workers=workers, start_method=start_method, timeout=30) == inline


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize(
    ("workers", "start_method"),
    [*(pytest.param(count, "forkserver", marks=FORKS) for count in (1, 3)), (1, "spawn")],
)
def test_draws_from_torch_do_not_depend_on_the_workers(workers: int, start_method: Any) -> None:
    """The same for torch's default generator (P2); a spawned worker imports torch in the middle of the first grain."""
    pytest.importorskip("torch")
    dataset = RandomDataset(50, ["python", "numpy", "torch"])
    assert loaded(dataset, num_workers=workers, start_method=start_method, timeout=30) == loaded(dataset)


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"collate_fn": list}, id="collated"),
        pytest.param({"batch_size": None}, id="single"),
        pytest.param({"grain_size": 1}, id="smallest grains"),
        pytest.param({"grain_size": 3}, id="odd grains"),
        pytest.param({"batch_size": 8, "prefetch": 1}, id="one in flight"),
        pytest.param({"shuffle": False, "sampler": list(range(20)) * 2}, id="the same samples again"),
        pytest.param({"shuffle": False, "batch_size": 1, "batch_sampler": [[1, 2, 3]] * 9}, id="the same batch again"),
    ],
)
def test_draws_do_not_depend_on_how_batches_are_collated(options: dict[str, Any]) -> None:
    """Main process and workers agree for every way of making batches (P2)."""
    assert loaded(RandomDataset(50), num_workers=3, timeout=30, **options) == loaded(RandomDataset(50), **options)


@pytest.mark.process
def test_draws_do_not_depend_on_how_a_batch_is_split(tmp_path: Any) -> None:
    """Samples of uneven speed are distributed differently each time, and draw the same numbers (P2)."""
    import time

    class Jittery(RandomDataset):
        def __getitem__(self, index: int) -> dict[str, float]:
            sample = super().__getitem__(index)
            time.sleep(0.003 * Random(os.urandom(4)).random())
            return sample

    assert loaded(Jittery(60), num_workers=4, grain_size=1, timeout=30) == loaded(RandomDataset(60), grain_size=1)


@pytest.mark.process
def test_draws_in_an_iterable_dataset_do_not_depend_on_the_workers() -> None:
    """Its elements draw the same numbers in the main process and in a worker (P2)."""

    class Drawing:
        def __iter__(self) -> Iterator[dict[str, float]]:
            for _ in range(30):
                yield {"python": random.random(), "numpy": float(np.random.random())}

    options: dict[str, Any] = {"shuffle": False}
    assert loaded(Drawing(), **options) == loaded(Drawing(), num_workers=2, timeout=30, **options)


def test_samples_epochs_and_seeds_draw_differently(every_engine: dict[str, Any]) -> None:
    """No two samples of an epoch, no two epochs and no two seeds give the same numbers."""
    if every_engine.get("worker") == "thread":
        pytest.skip("thread workers share the user's global generators")
    first, second = loaded(RandomDataset(40), **every_engine)
    other = loaded(RandomDataset(40), **{**every_engine, "seed": 43})[0]
    draws = [number for epoch in (first, second, other) for batch in epoch for number in batch["python"]]
    assert len(set(draws)) == 120


@pytest.mark.process
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda: [random.gauss(0, 1) for _ in range(3)], id="gauss, which makes two at a time"),
        pytest.param(lambda: np.random.normal(size=3).tolist(), id="normal"),
        pytest.param(lambda: np.random.randint(0, 1000, 3).tolist(), id="randint"),
        pytest.param(lambda: random.sample(range(100), 3), id="sample"),
        pytest.param(lambda: np.random.permutation(5).tolist(), id="permutation"),
        pytest.param(lambda: np.random.mtrand._rand.rand(2).tolist(), id="the generator itself"),  # type: ignore[attr-defined]
        pytest.param(lambda: (random.getrandbits(40), random.getstate()[1][:3]), id="state"),
        pytest.param(lambda: (random.seed(5), random.random())[1], id="seeded by the user"),
        pytest.param(lambda: (np.random.seed(5), float(np.random.random()))[1], id="NumPy seeded by the user"),
    ],
)
def test_every_way_of_drawing_is_seeded(draw: Any) -> None:
    """Whichever function a dataset uses, workers draw what the main process draws."""
    dataset = Tree(12, lambda index: str(draw()))
    assert loaded(dataset, num_workers=2, timeout=30) == loaded(dataset)


@pytest.mark.process
def test_names_imported_from_random_are_seeded_too() -> None:
    """With ``from random import random`` before the loader exists, the worker's own generator is used."""
    from random import random as drawn

    dataset = Tree(12, lambda index: (drawn(), index))
    got = loaded(dataset, num_workers=2, timeout=30)
    assert got == loaded(dataset)
    assert len({number for epoch in got for batch in epoch for number in batch[0]}) == 24


@pytest.mark.torch
def test_the_users_generators_are_unchanged(engine: dict[str, Any]) -> None:
    """Whatever the dataset draws or seeds, the user's own random numbers continue undisturbed (P8)."""
    torch = pytest.importorskip("torch")
    if engine.get("worker") == "thread":
        pytest.skip("thread workers share the user's global generators")

    def draw(index: int) -> float:
        random.seed(index)
        np.random.seed(index)
        return random.random() + float(np.random.random())

    def state() -> tuple[Any, ...]:
        numpy_state: Any = np.random.get_state()
        return random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist()

    random.random()
    before = state()
    with infeed.DataLoader(Tree(12, draw), batch_size=4, shuffle=True, **engine) as loader:
        for _ in loader:
            assert state() == before
    assert state() == before


def test_the_users_generators_are_restored_after_an_error() -> None:
    """A sample raises in the middle (P8)."""

    def fail(index: int) -> float:
        random.random()
        raise ValueError(index)

    before = random.getstate()
    with pytest.raises(ValueError, match="0"):
        next(iter(infeed.DataLoader(Tree(4, fail))))
    assert random.getstate() == before


def test_the_users_process_is_unchanged(engine: dict[str, Any]) -> None:
    """A loader changes no environment variable, signal handler, start method, working directory or warning filter (P8)."""
    import sys
    import warnings

    def things() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        if hasattr(signal, "SIGCHLD"):
            handlers += [signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGPIPE)]
        return [
            dict(os.environ), handlers, multiprocessing.get_start_method(allow_none=True), os.getcwd(), sys.path[:],
            warnings.filters[:], sys.gettrace(), sys.getrecursionlimit(), sys.excepthook,
        ]  # fmt: skip

    before = things()
    with infeed.DataLoader(Tree(8, lambda i: i), batch_size=2, **engine) as loader:
        assert collected(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert things() == before
    assert things() == before


# --- worker info


def test_worker_init_fn_runs_once_in_each_worker_with_its_number(engine: dict[str, Any], tmp_path: Any) -> None:
    """Before the first sample, in the worker, once for all epochs; without workers it does not run."""
    journal = Journal(tmp_path / "journal")
    with infeed.DataLoader(range(8), batch_size=2, worker_init_fn=journal.write, **engine) as loader:
        for _ in range(2):
            collected(loader)
        wait_until(lambda: len(journal.lines()) >= engine["num_workers"], "all workers")
    assert sorted(journal.lines()) == ([] if engine["num_workers"] == 0 else ["0", "1"])


@pytest.mark.process
def test_changes_of_worker_init_fn_are_visible_in_the_dataset(process_engine: dict[str, Any]) -> None:
    """It can open what the dataset needs: get_worker_info().dataset is the object that loads."""

    class Opened:
        handle: str | None = None

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> str:
            return f"{self.handle}"

    def open_it(number: int) -> None:
        info = infeed.get_worker_info()
        assert info is not None
        assert info.id == number
        info.dataset.handle = "open"

    with infeed.DataLoader(Opened(), batch_size=3, worker_init_fn=open_it, **process_engine) as loader:
        assert list(loader) == [["open"] * 3] * 2


def test_worker_info_is_available_only_in_workers(engine: dict[str, Any]) -> None:
    """In a worker: its number, the number of workers and its seed; elsewhere None."""

    def who(index: int) -> Any:
        info = infeed.get_worker_info()
        return None if info is None else (info.id, info.num_workers, type(info.seed).__name__, type(info.dataset).__name__)

    with infeed.DataLoader(Tree(20, lambda i: str(who(i))), batch_size=2, **engine) as loader:
        seen = {text for batch in loader for text in batch}
    if engine["num_workers"] == 0:
        assert seen == {"None"}
    else:
        assert seen <= {"(0, 2, 'int', 'Tree')", "(1, 2, 'int', 'Tree')"}
        assert seen
    assert infeed.get_worker_info() is None


@pytest.mark.process
def test_workers_have_different_seeds_derived_from_the_loader_seed() -> None:
    """get_worker_info().seed differs between workers and is the same for the same loader seed."""

    def seeds() -> set[str]:
        found: set[str] = set()

        def info(index: int) -> str:
            worker = infeed.get_worker_info()
            assert worker is not None
            return f"{worker.id}: {worker.seed}"

        with infeed.DataLoader(Tree(200, info), batch_size=1, num_workers=2, seed=1, timeout=30) as loader:
            for _ in range(20):
                found.update(text for batch in loader for text in batch)
                if len(found) == 2:
                    return found
        return found

    first = seeds()
    assert len({text.partition(": ")[2] for text in first}) == 2
    assert seeds() == first


@pytest.mark.process
def test_workers_have_the_environment_and_folder_of_the_user(
    process_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """As at the start of the workers, including changes after infeed's first use."""
    with infeed.DataLoader(Tree(2, lambda i: i), **process_engine) as loader:
        collected(loader)
    monkeypatch.setenv("INFEED_TEST", "later")
    monkeypatch.chdir(tmp_path)

    class Text(str): ...  # A class that workers do not know.

    monkeypatch.setattr("sys.argv", ["train.py", Text("--later"), None])  # Other text is removed.
    dataset = Tree(1, lambda i: (os.environ.get("INFEED_TEST"), os.path.realpath(os.getcwd()), sys.argv))
    with infeed.DataLoader(dataset, batch_size=None, **process_engine) as loader:
        assert list(loader) == [("later", os.path.realpath(tmp_path), ["train.py", "--later"])]
    monkeypatch.delattr("sys.argv")  # As in a program that embeds Python.
    with infeed.DataLoader(Tree(1, lambda i: len(sys.argv)), batch_size=None, **process_engine) as loader:
        assert list(loader) == [0]
