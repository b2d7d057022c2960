"""Which samples an epoch has, and which rank gets them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import infeed
from infeed import RandomSampler
from infeed.testing import assert_resumable
from tests.helpers import Squares, Stream, Tree, collected, flat, plain

NUMBERS = Tree(50, int)
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}


def epoch(dataset: Any = NUMBERS, **options: Any) -> list[int]:
    """Returns the samples of one epoch."""
    with infeed.DataLoader(dataset, **{"batch_size": 8, "seed": 3, **options}) as loader:
        return flat(collected(loader))


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates a machine without a launcher."""
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    return monkeypatch


# --- selected samples


def test_samples_repeat_with_replacement(light_engine: dict[str, Any]) -> None:
    """As many as the dataset has, some several times and some never; all kinds of workers agree."""
    drawn = epoch(sampler=RandomSampler(replacement=True), **light_engine)

    assert len(drawn) == 50
    assert 20 < len(set(drawn)) < 45
    assert drawn == epoch(sampler=RandomSampler(replacement=True))


def test_weights_decide_how_often_a_sample_comes() -> None:
    """Weight 0 never, twice the weight twice as often; over several epochs."""
    weights = [0.0] * 10 + [1.0] * 20 + [2.0] * 20
    with infeed.DataLoader(NUMBERS, batch_size=100, sampler=RandomSampler(weights, num_samples=3000), seed=3) as loader:
        counts = Counter(number for _ in range(2) for number in flat(collected(loader)))

    assert set(counts) == set(range(10, 50))
    light = sum(counts[index] for index in range(10, 30))
    assert 1800 < light < 2200  # 2000 of 6000 expected, standard deviation 37.


@pytest.mark.parametrize(
    ("options", "distinct"),
    [
        ({"num_samples": 20}, 20),
        ({"num_samples": 50}, 50),
        ({"num_samples": 20, "replacement": True}, None),
        ({"num_samples": 170, "replacement": True}, None),
        ({"num_samples": 170, "weights": np.ones(50)}, None),
    ],
)
def test_num_samples_is_the_length_of_an_epoch(options: dict[str, Any], distinct: int | None) -> None:
    """It may exceed the dataset only with replacement; ``len`` is right."""
    with infeed.DataLoader(NUMBERS, batch_size=8, seed=3, sampler=RandomSampler(**options)) as loader:
        batches = collected(loader)
        assert len(batches) == len(loader) == -(-options["num_samples"] // 8)
        numbers = flat(batches)
        assert len(numbers) == options["num_samples"]
        assert set(numbers) <= set(range(50))
        if distinct is not None:
            assert len(set(numbers)) == distinct
        assert flat(collected(loader)) != numbers


SAMPLERS = [RandomSampler(replacement=True), RandomSampler(np.arange(50)), RandomSampler(num_samples=20)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["replacement", "weights", "num_samples"])
def test_epochs_and_seeds_draw_different_samples(sampler: RandomSampler) -> None:
    """The same seed and epoch give the same samples again."""
    with infeed.DataLoader(NUMBERS, batch_size=8, seed=3, sampler=sampler) as loader:
        first, second = flat(collected(loader)), flat(collected(loader))
        loader.set_epoch(0)
        assert flat(collected(loader)) == first
    assert first != second
    assert epoch(sampler=sampler) == first
    assert epoch(sampler=sampler, seed=4) != first


def test_shuffle_is_short_for_a_random_sampler() -> None:
    assert epoch(shuffle=True) == epoch(sampler=RandomSampler())


def test_a_single_sample_can_be_drawn_repeatedly() -> None:
    """Also from a dataset of one."""
    assert epoch(Tree(1, int), sampler=RandomSampler(replacement=True, num_samples=9)) == [0] * 9
    assert epoch(Tree(1, int), sampler=RandomSampler([0.5], num_samples=9)) == [0] * 9


def test_an_empty_dataset_has_an_empty_epoch() -> None:
    """With replacement, too."""
    assert epoch(Tree(0, int), sampler=RandomSampler(replacement=True)) == []
    assert epoch(Tree(0, int), shuffle=True) == []


def test_drawing_from_an_empty_dataset_is_an_error() -> None:
    """The constructor raises."""
    with pytest.raises(infeed.ConfigError, match="num_samples=4"):
        infeed.DataLoader(Tree(0, int), sampler=RandomSampler(replacement=True, num_samples=4))


@pytest.mark.torch
def test_weights_may_be_a_tensor_or_any_sequence() -> None:
    """Anything that NumPy converts to an array."""
    torch = pytest.importorskip("torch")
    expected = epoch(sampler=RandomSampler(np.arange(50)))
    for weights in (list(range(50)), tuple(range(50)), range(50), torch.arange(50), np.arange(50, dtype=np.float16)):
        assert epoch(sampler=RandomSampler(weights)) == expected


def test_later_changes_of_weights_have_no_effect() -> None:
    """The loader copies them."""
    weights = np.ones(50)
    expected = epoch(sampler=RandomSampler(weights.copy()))
    with infeed.DataLoader(NUMBERS, batch_size=8, seed=3, sampler=RandomSampler(weights)) as loader:
        weights[:49] = 0
        assert flat(collected(loader)) == expected


# --- invalid arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replacement": 1}, r"replacement=1 must be a bool; "),
        ({"num_samples": 0}, r"num_samples=0 must be at least 1; use None for the length of the dataset"),
        ({"num_samples": -3}, r"num_samples=-3 must be at least 1; use None"),
        ({"num_samples": 2.5}, r"num_samples=2.5 must be an int; use None"),
        ({"num_samples": "5"}, r"num_samples='5' must be an int; use None"),
        ({"num_samples": True}, r"num_samples=True must be an int; use None"),
        ({"num_samples": 51}, r"num_samples=51 must be at most 50, the length of the dataset; use replacement=True"),
        ({"weights": [1.0] * 49}, r"weights has 49 numbers for 50 samples; pass one number per sample"),
        ({"weights": []}, r"weights .*shape \(0,\)|weights must be finite, at least 0, and not all 0"),
        ({"weights": 3}, r"weights has shape \(\) .*; pass one number per sample"),
        ({"weights": np.ones((50, 1))}, r"weights has shape \(50, 1\) .*; pass one number per sample"),
        ({"weights": ["a"] * 50}, r"weights has shape \(50,\) and dtype <U1"),
        ({"weights": [1j] * 50}, r"dtype complex128"),
        ({"weights": [[1], [1, 2]]}, r"weights cannot be converted to an array; pass one number per sample"),
        ({"weights": iter([1.0] * 50)}, r"weights has shape \(\) and dtype object"),
        ({"weights": [0.0] * 50}, r"weights must be finite, at least 0, and not all 0; a sample with weight 0"),
        ({"weights": [-1.0] + [1.0] * 49}, r"weights must be finite"),
        ({"weights": [float("nan")] + [1.0] * 49}, r"weights must be finite"),
        ({"weights": [float("inf")] + [1.0] * 49}, r"weights must be finite"),
        ({"weights": [1e308] * 50}, r"weights must be finite"),
    ],
)
def test_an_invalid_random_sampler_is_rejected_with_problem_and_fix(options: dict[str, Any], words: str) -> None:
    """By its constructor, or when the loader knows the length of the dataset."""
    with pytest.raises(infeed.ConfigError, match=words):
        infeed.DataLoader(NUMBERS, sampler=RandomSampler(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pad": None}, r"pad=None must be a bool; "),
        ({"sampler": RandomSampler(), "shuffle": True}, r"shuffle=True is not supported with sampler"),
        (
            {"sampler": RandomSampler(), "batch_sampler": [[1]]},
            r"sampler=RandomSampler\(.* is not supported with batch_sampler",
        ),
        ({"pad": False, "batch_sampler": [[1]]}, r"pad=False is not supported with batch_sampler.*; omit pad"),
        ({"shard": (3, 3)}, r"shard=\(3, 3\) must be \(rank, world_size\) with 0 <= rank < world_size; use 'auto'.*or None"),
        ({"shard": (-1, 3)}, r"shard=\(-1, 3\) must be \(rank, world_size\)"),
        ({"shard": (0, 0)}, r"shard=\(0, 0\) must be"),
        ({"shard": (0,)}, r"shard=\(0,\) must be"),
        ({"shard": (0, 1, 2)}, r"shard=\(0, 1, 2\) must be"),
        ({"shard": (0.0, 2)}, r"shard=\(0.0, 2\) must be"),
        ({"shard": (False, 2)}, r"shard=\(False, 2\) must be"),
        ({"shard": ("0", "2")}, r"shard=\('0', '2'\) must be"),
        ({"shard": "torch"}, r"shard='torch' must be"),
        ({"shard": 2}, r"shard=2 must be"),
        ({"shard": {0, 2}}, r"shard=\{0, 2\} must be"),
    ],
)
def test_an_invalid_use_is_rejected_with_problem_and_fix(options: dict[str, Any], words: str) -> None:
    """By the constructor, in one message."""
    with pytest.raises(infeed.ConfigError, match=words):
        infeed.DataLoader(NUMBERS, **options)


def test_an_iterable_dataset_has_no_sampler() -> None:
    """It decides its own samples."""
    with pytest.raises(infeed.ConfigError, match="sampler is not supported for iterable datasets"):
        infeed.DataLoader(Stream(9), sampler=RandomSampler(num_samples=3))


@pytest.mark.parametrize("options", [{"batch_size": -(10**5000)}, {"shard": (10**5000, 2)}])
def test_a_huge_number_is_rejected(options: dict[str, Any]) -> None:
    """Raises ConfigError, however many digits the number has."""
    with pytest.raises(infeed.ConfigError):
        infeed.DataLoader(NUMBERS, **options)
    with pytest.raises(infeed.ConfigError):
        infeed.DataLoader(NUMBERS, sampler=RandomSampler(num_samples=10**5000))


# --- ranks


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_have_as_many_batches_and_see_every_sample(world: int, pad: bool) -> None:
    """With padding they have equal sizes, and at most one repetition each; without, each sample is used exactly once."""
    for length in (0, 1, 5, 6, 24, 25, 50):
        assert_shared_out(length, world, pad=pad)


def assert_shared_out(length: int, world: int, *, pad: bool) -> None:
    dataset = Tree(length, int)
    ranks = []
    for rank in range(world):
        with infeed.DataLoader(dataset, batch_size=4, shuffle=True, seed=3, shard=(rank, world), pad=pad) as loader:
            batches = collected(loader)
            assert len(loader) == len(batches)
            ranks.append(batches)
    seen = [number for batches in ranks for number in flat(batches)]
    assert set(seen) == set(range(length))
    if pad:
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1
        assert len(seen) < length + world
    else:
        assert len(seen) == length
    if pad or length >= world:
        assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_with_drop_last_ranks_have_full_batches_only(world: int) -> None:
    """What does not fill a step of all ranks is omitted on all ranks."""
    for rank in range(world):
        with infeed.DataLoader(NUMBERS, batch_size=4, shard=(rank, world), drop_last=True) as loader:
            batches = collected(loader)
        assert len(batches) == len(loader) == 50 // (4 * world)
        assert {len(batch) for batch in batches} == {4}


@pytest.mark.parametrize("options", [{"replacement": True}, {"weights": np.arange(50)}, {"num_samples": 24}])
def test_ranks_share_the_drawn_samples(options: dict[str, Any]) -> None:
    """Together they have what a single rank would have."""
    options = {"sampler": RandomSampler(**{"num_samples": 48, **options}), "batch_size": 4}
    alone = epoch(**options)
    ranks = [epoch(shard=(rank, 3), **options) for rank in range(3)]
    assert Counter(flat(ranks)) == Counter(alone)


def test_ranks_share_the_batches_of_a_batch_sampler() -> None:
    """In turn; a rank without a batch in the last round repeats a first one."""
    batches = [[number, number + 20] for number in range(7)]
    ranks = []
    for rank in range(3):
        with infeed.DataLoader(NUMBERS, batch_sampler=batches, shard=(rank, 3)) as loader:
            assert len(loader) == 3
            ranks.append(collected(loader))
    assert ranks == [
        [batches[0], batches[3], batches[6]],
        [batches[1], batches[4], batches[0]],
        [batches[2], batches[5], batches[1]],
    ]


def test_ranks_share_single_samples() -> None:
    """``batch_size=None``: each rank has every third sample."""
    ranks = []
    for rank in range(3):
        with infeed.DataLoader(Tree(9, int), batch_size=None, shard=(rank, 3)) as loader:
            ranks.append(list(loader))
    assert ranks == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_shards_may_be_numpy_integers_and_lists() -> None:
    """As returned by other libraries."""
    given: list[Any] = [(np.int64(1), np.int32(2)), [1, 2]]
    for shard in given:
        loader = infeed.DataLoader(NUMBERS, shard=shard)
        assert "shard=(1, 2)" in repr(loader)


def test_ranks_without_a_seed_share_one() -> None:
    """They do not communicate, so it is 0, and repr shows it; a single rank draws one."""
    for rank in range(2):
        loader = infeed.DataLoader(NUMBERS, shuffle=True, shard=(rank, 2))
        assert loader.seed == 0
        assert repr(loader).endswith(f"shard=({rank}, 2), seed=0)")
    alone = [infeed.DataLoader(NUMBERS, shuffle=True, shard=(0, 1)) for _ in range(2)]
    assert alone[0].seed != alone[1].seed
    assert "shard" not in repr(alone[0])


# --- ranks from the environment


@pytest.mark.parametrize("names", LAUNCHERS.values(), ids=LAUNCHERS)
def test_the_environment_of_the_launcher_sets_the_rank(names: tuple[str, str], no_launcher: pytest.MonkeyPatch) -> None:
    """That of torchrun, MPI and Slurm."""
    no_launcher.setenv(names[0], "2")
    no_launcher.setenv(names[1], "5")
    loader = infeed.DataLoader(NUMBERS, batch_size=2, shuffle=True, shard="auto")

    assert repr(loader).endswith("shard=(2, 5), seed=0)")
    assert len(loader) == 5


def test_ranks_are_looked_up_only_on_request(no_launcher: pytest.MonkeyPatch) -> None:
    """An environment variable alone has no effect."""
    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("WORLD_SIZE", "2")
    assert "shard" not in repr(infeed.DataLoader(NUMBERS))
    assert "shard=(1, 2)" in repr(infeed.DataLoader(NUMBERS, shard="auto"))
    assert "shard=(0, 3)" in repr(infeed.DataLoader(NUMBERS, shard=(0, 3)))


def test_without_a_launcher_there_is_one_rank(no_launcher: pytest.MonkeyPatch) -> None:
    """Also if only one of the two variables is set."""
    assert "shard" not in repr(infeed.DataLoader(NUMBERS, shard="auto"))
    no_launcher.setenv("RANK", "1")
    assert "shard" not in repr(infeed.DataLoader(NUMBERS, shard="auto"))


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", ""), ("0", "0"), ("1.0", "2")])
def test_a_contradictory_environment_is_reported(rank: str, size: str, no_launcher: pytest.MonkeyPatch) -> None:
    """With both variables and a fix."""
    no_launcher.setenv("RANK", rank)
    no_launcher.setenv("WORLD_SIZE", size)
    with pytest.raises(infeed.ConfigError, match=rf"RANK='{rank}' and WORLD_SIZE='{size}' .*shard=\(rank, world_size\)"):
        infeed.DataLoader(NUMBERS, shard="auto")


def test_torch_distributed_has_precedence_over_the_environment(no_launcher: pytest.MonkeyPatch) -> None:
    """If it is initialized; otherwise the environment counts."""
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    fake = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4)
    no_launcher.setitem(sys.modules, "torch.distributed", fake)
    assert "shard=(3, 4)" in repr(infeed.DataLoader(NUMBERS, shard="auto"))
    fake.is_initialized = lambda: False
    assert "shard=(0, 2)" in repr(infeed.DataLoader(NUMBERS, shard="auto"))
    fake.is_initialized = lambda: True
    fake.is_available = lambda: False
    assert "shard=(0, 2)" in repr(infeed.DataLoader(NUMBERS, shard="auto"))


# --- tables


def tables() -> dict[str, Any]:
    numbers = np.arange(50)
    return {
        "array": numbers,
        "tuple of arrays": (numbers, np.stack([numbers, numbers], axis=1).astype(np.float32)),
        "dict of arrays": {"x": numbers, "y": -numbers},
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"sampler": RandomSampler(np.arange(50))},
    "replacement": {"sampler": RandomSampler(replacement=True, num_samples=77)},
    "a part": {"sampler": RandomSampler(num_samples=30)},
    "rank": {"shuffle": True, "shard": (1, 3)},
    "exact rank": {"shuffle": True, "shard": (2, 3), "pad": False},
}


def column(batch: Any) -> list[int]:
    """Returns the numbers in a batch of a table."""
    first = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple | list) else batch
    numbers: list[int] = plain(first)
    return numbers


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("table", tables().values(), ids=tables())
def test_tables_yield_the_same_samples_as_other_datasets(table: Any, options: dict[str, Any]) -> None:
    """Gathered arrays give the same epoch as `__getitem__`, and can be resumed."""
    with infeed.DataLoader(table, batch_size=8, seed=3, **options) as loader:
        batches = list(loader)
        assert len(loader) == len(batches)
        assert flat([column(batch) for batch in batches]) == epoch(**options)
        loader.set_epoch(0)
        assert_resumable(loader)


@pytest.mark.torch
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_tensor_dataset_yields_the_same_samples_as_other_datasets(options: dict[str, Any]) -> None:
    """The same for torch's TensorDataset."""
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.arange(50), torch.zeros(50, 2))
    with infeed.DataLoader(dataset, batch_size=8, seed=3, **options) as loader:
        assert flat([column(batch) for batch in loader]) == epoch(**options)
        loader.set_epoch(0)
        assert_resumable(loader)


def test_a_table_whose_length_differs_from_its_weights_is_rejected() -> None:
    """Rows count, not columns."""
    with pytest.raises(infeed.ConfigError, match="weights has 2 numbers for 50 samples"):
        infeed.DataLoader((np.arange(50), np.arange(50)), sampler=RandomSampler([1, 1]))


def test_a_state_of_a_table_fits_a_dataset_of_the_same_rows() -> None:
    """The samples do not depend on how they are loaded."""
    with infeed.DataLoader(np.arange(50), batch_size=8, shuffle=True, seed=3) as table:
        iterator = iter(table)
        begun = [plain(next(iterator)) for _ in range(2)]
        with infeed.DataLoader(NUMBERS, batch_size=8, shuffle=True, seed=3) as loader:
            loader.load_state_dict(table.state_dict())
            assert flat(begun + collected(loader)) == epoch(shuffle=True)


# --- samplers longer than the dataset, and other numbers of ranks


@pytest.mark.parametrize("options", [{"sampler": list(range(10)) * 3, "batch_size": 4}, {"batch_sampler": [[1, 2, 3, 4]] * 9}])
def test_a_sampler_longer_than_the_dataset_can_be_resumed(options: dict[str, Any]) -> None:
    """For example a sampler with replacement."""
    with infeed.DataLoader(Squares(10), seed=3, **options) as loader:
        assert_resumable(loader)


@pytest.mark.parametrize(
    ("world", "then", "size"),
    [
        pytest.param(2, 2, 4, id="as before"),
        pytest.param(2, 1, 4),
        pytest.param(2, 3, 4),
        pytest.param(2, 2, 3),
    ],
)
def test_changing_ranks_of_an_iterable_dataset_resumes_or_raises(world: int, then: int, size: int) -> None:
    """With another number of ranks or batch size, both runs read each element once, or the error gives the reason."""
    seen: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(world):
        with infeed.DataLoader(Stream(48), batch_size=4, shard=(rank, world), pad=False, seed=3) as loader:
            seen += plain(next(iter(loader)))
            state = loader.state_dict()
    for rank in range(then):
        with infeed.DataLoader(Stream(48), batch_size=size, shard=(rank, then), pad=False, seed=3) as loader:
            try:
                loader.load_state_dict(state)
            except infeed.StateError:
                return
            seen += flat(collected(loader))
    assert sorted(seen) == list(range(48))


def test_without_workers_a_sampler_is_read_on_demand() -> None:
    """A sampler that depends on the training loop's actions sees all of them, and nothing is lost if the loop is left."""
    done: list[int] = []
    adaptive = infeed.DataLoader(range(9), sampler=Adaptive(done))
    for batch in adaptive:
        done.append(int(batch[0]))
    assert done == [0, 1, 2, 3]

    once = infeed.DataLoader(range(9), batch_size=2, sampler=iter(range(9)))
    assert [next(iter(once)).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


class Adaptive:
    """Yields how many samples the training loop has received."""

    def __init__(self, done: list[int]) -> None:
        self.done = done

    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            yield len(self.done)


def test_an_invalid_batch_of_a_batch_sampler_raises_once(light_engine: dict[str, Any]) -> None:
    """In order; the following batches are delivered."""
    with infeed.DataLoader(range(9), batch_sampler=[[0], 5, [1, 2]], **light_engine) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0]
        with pytest.raises(TypeError):
            next(batches)
        assert [batch.tolist() for batch in batches] == [[1, 2]]
