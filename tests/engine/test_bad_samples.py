"""Bad samples are raised, skipped or replaced, equally for all kinds of workers, within an error budget."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.testing import CrashingDataset
from tests.helpers import Journal, Tree, collected, flat, plain


class Patchy:
    """Sample ``i`` is ``i`` and a random number; some samples raise."""

    def __init__(self, length: int, bad: list[int]) -> None:
        self.length, self.bad = length, set(bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")
        return index, random.random()


class PatchyTogether(Patchy):
    """The same with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


class Flaky:
    """Each sample raises the first times it is requested, in any process."""

    def __init__(self, length: int, times: int, folder: Path) -> None:
        self.length, self.times, self.folder = length, times, folder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        asked = self.folder / f"asked-{index}"
        drawn = random.random()
        with asked.open("a") as file:
            file.write("x")
        if asked.stat().st_size <= self.times:
            raise OSError(f"the disk was away at {index}")
        return index, drawn


class Restless:
    """An iterable dataset that raises at some elements and continues."""

    def __init__(self, count: int, bad: list[int]) -> None:
        self.count, self.bad = count, set(bad)

    def __iter__(self) -> Iterator[int]:
        return _RestlessIterator(self.count, self.bad)


class _RestlessIterator(Iterator[int]):
    def __init__(self, count: int, bad: set[int]) -> None:
        self.next, self.count, self.bad = 0, count, bad

    def __next__(self) -> int:
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        if self.next - 1 in self.bad:
            raise ValueError(f"element {self.next - 1} is broken")
        return self.next - 1


def _indices(loader: infeed.DataLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def test_skip_omits_the_sample_from_its_batch(engine: dict[str, Any]) -> None:
    """The other samples keep their order; skipped samples are listed."""
    with infeed.DataLoader(Patchy(12, [1, 2, 9]), batch_size=4, on_error="skip", **engine) as loader:
        assert _indices(loader) == [[0, 3], [4, 5, 6, 7], [8, 10, 11]]
        bad = loader.bad_samples
    assert [(one.position, one.index, one.outcome) for one in bad] == [
        (1, "1", "skipped"),
        (2, "2", "skipped"),
        (9, "9", "skipped"),
    ]
    assert bad[0].error == "ValueError: sample 1 is broken"
    assert str(bad[0]) == "index=1 (position 1 of epoch 0) skipped: ValueError: sample 1 is broken"


def test_a_batch_without_good_samples_is_not_delivered(engine: dict[str, Any]) -> None:
    with infeed.DataLoader(Patchy(12, [4, 5, 6, 7]), batch_size=4, on_error="skip", **engine) as loader:
        for _ in range(2):
            assert _indices(loader) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_an_epoch_without_good_samples_is_an_error(light_engine: dict[str, Any]) -> None:
    """A folder that is not mounted must not look like an empty dataset."""
    loader = infeed.DataLoader(Patchy(5, [0, 1, 2, 3, 4]), batch_size=2, on_error="skip", **light_engine)
    with (
        loader,
        pytest.raises(infeed.SampleError, match=r"epoch 0 delivered no batch: it had 5 bad samples.*sample 4 is broken"),
    ):
        list(loader)


def test_replace_keeps_batch_sizes(engine: dict[str, Any]) -> None:
    """Another sample of the epoch takes its place, and `bad_samples` says which one."""
    with infeed.DataLoader(Patchy(12, [1, 2, 9]), batch_size=4, seed=3, on_error="replace", **engine) as loader:
        got = _indices(loader)
        bad = loader.bad_samples
    assert [len(batch) for batch in got] == [4, 4, 4]
    assert got[1] == [4, 5, 6, 7]
    assert not {1, 2, 9} & set(flat(got))
    # A replacement may be bad too; the last one recorded is in the batch.
    last = {one.position: one.replacement for one in bad}
    assert last == {1: str(got[0][1]), 2: str(got[0][2]), 9: str(got[2][1])}


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("dataset_type", [Patchy, PatchyTogether])
def test_the_outcome_is_the_same_whatever_the_workers(on_error: Any, dataset_type: Any) -> None:
    """Order, contents, random numbers and the list of bad samples are the same (P2)."""
    got = []
    for workers in (0, 1, 3):
        dataset = dataset_type(60, [0, 3, 4, 31, 32, 33, 34, 35, 36, 37, 38, 39, 59])
        options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 11, "on_error": on_error}
        with infeed.DataLoader(dataset, num_workers=workers, **options) as loader:
            got.append(([[plain(batch) for batch in loader] for _ in range(2)], loader.bad_samples))
    assert got[0] == got[1] == got[2]
    assert len(got[0][1]) >= 26


def test_replacements_come_from_the_batch_of_a_sampler() -> None:
    """Samples that the sampler leaves out (the validation set) must not be used."""
    chosen = [1, 3, 5, 7, 9, 11]
    with infeed.DataLoader(Patchy(100, [5]), batch_size=3, sampler=chosen, on_error="replace") as loader:
        got = _indices(loader)
    assert [len(batch) for batch in got] == [3, 3]
    assert set(flat(got)) == {1, 3, 7, 9, 11}


def test_the_only_sample_of_a_batch_cannot_be_replaced() -> None:
    with infeed.DataLoader(Patchy(10, [5]), batch_size=1, sampler=[4, 5], on_error="replace") as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(infeed.SampleError, match=r"failed for index=5 at position 1 .* has no other sample") as caught:
            next(batches)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_on_error_function_decides_in_the_main_process(engine: dict[str, Any]) -> None:
    """It receives the exception with its notes, and the index; infeed does what it returns."""
    seen: list[tuple[str, Any]] = []

    def decide(error: BaseException, index: Any) -> Any:
        seen.append((f"{error} {error.__notes__}", index))
        return {2: "skip", 5: "replace"}.get(index, "raise")

    with infeed.DataLoader(Patchy(12, [2, 5, 11]), batch_size=4, seed=1, on_error=decide, **engine) as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == [0, 1, 3]
        assert len(next(batches)[0]) == 4
        with pytest.raises(ValueError, match="sample 11 is broken"):
            next(batches)
    assert {index for _, index in seen} >= {2, 5, 11}
    assert any("sample 2 is broken" in text and "index=2 (position 2 of epoch 0" in text for text, _ in seen)


def test_an_on_error_function_that_raises_or_returns_an_invalid_value_raises() -> None:
    def stumble(error: BaseException, index: Any) -> Any:
        raise LookupError(f"no rule for {index}")

    for decide, kind, words in (
        (stumble, LookupError, "no rule for 1"),
        (lambda error, index: "ignore", infeed.ConfigError, "on_error returned 'ignore'; return 'raise'"),
    ):
        loader = infeed.DataLoader(Patchy(4, [1]), batch_size=2, on_error=decide)
        with loader, pytest.raises(kind, match=words):
            next(iter(loader))


def test_raise_is_the_default(engine: dict[str, Any]) -> None:
    with infeed.DataLoader(Patchy(4, [1]), batch_size=2, **engine) as loader:
        with pytest.raises(ValueError, match="sample 1 is broken"):
            next(iter(loader))
        assert loader.bad_samples == []


def test_bad_samples_with_single_samples_and_collate_fn(light_engine: dict[str, Any]) -> None:
    """Without batches a bad sample is left out; collate_fn gets a list without it."""
    with infeed.DataLoader(Patchy(5, [1, 3]), batch_size=None, on_error="skip", **light_engine) as loader:
        assert [sample[0] for sample in loader] == [0, 2, 4]
    with infeed.DataLoader(
        Patchy(6, [1, 3]), batch_size=3, collate_fn=lambda samples: [s[0] for s in samples], on_error="skip", **light_engine
    ) as loader:
        assert list(loader) == [[0, 2], [4, 5]]


def test_an_exception_of_collate_fn_is_not_a_bad_sample(light_engine: dict[str, Any]) -> None:
    def collate(samples: list[Any]) -> Any:
        raise TypeError("they do not go together")

    loader = infeed.DataLoader(Patchy(6, []), batch_size=3, collate_fn=collate, on_error="skip", **light_engine)
    with loader, pytest.raises(TypeError, match="they do not go together"):
        list(loader)


def test_bad_elements_of_an_iterable_dataset_are_skipped(light_engine: dict[str, Any]) -> None:
    """The dataset continues after it raised, and later elements move up."""
    with infeed.DataLoader(Restless(10, [0, 4, 5]), batch_size=3, on_error="skip", **light_engine) as loader:
        assert collected(loader) == [[1, 2, 3], [6, 7, 8], [9]]
        assert [one.error for one in loader.bad_samples] == [f"ValueError: element {i} is broken" for i in (0, 4, 5)]


def test_an_iterable_dataset_that_only_raises_is_an_error() -> None:
    loader = infeed.DataLoader(Restless(1000, list(range(1000))), batch_size=3, on_error="skip")
    with loader, pytest.raises(ValueError, match="is broken"):
        list(loader)


def test_an_on_error_function_may_raise_for_an_iterable_dataset() -> None:
    with infeed.DataLoader(Restless(6, [4]), batch_size=3, on_error=lambda error, index: "raise") as loader:
        batches = iter(loader)
        assert plain(next(batches)) == [0, 1, 2]
        with pytest.raises(ValueError, match="element 4 is broken"):
            next(batches)


# --- retries


@pytest.mark.parametrize("workers", [0, 2])
def test_a_retried_sample_is_the_same_as_without_failure(workers: int, tmp_path: Path) -> None:
    """Bit-identical, with its neighbors: the whole grain is loaded again under its seed."""
    options: dict[str, Any] = {"batch_size": 8, "seed": 5, "num_workers": workers, "grain_size": 4}
    for name in ("good", "flaky"):
        (tmp_path / name).mkdir()
    with infeed.DataLoader(Flaky(24, 0, tmp_path / "good"), **options) as loader:
        expected = collected(loader)
    with infeed.DataLoader(Flaky(24, 2, tmp_path / "flaky"), on_error=infeed.ErrorPolicy(retries=2), **options) as loader:
        assert collected(loader) == expected
        assert loader.bad_samples == []


def test_a_sample_is_tried_as_often_as_configured(tmp_path: Path) -> None:
    loader = infeed.DataLoader(Flaky(1, 3, tmp_path), on_error=infeed.ErrorPolicy(retries=2))
    with loader, pytest.raises(OSError, match="the disk was away at 0"):
        next(iter(loader))
    assert (tmp_path / "asked-0").stat().st_size == 3


# --- samples that kill


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_sample_that_kills_its_worker_repeatedly_is_bad(on_error: Any, tmp_path: Path) -> None:
    dataset = CrashingDataset(24, [9], tmp_path / "deaths", times=None)
    with infeed.DataLoader(dataset, batch_size=4, num_workers=2, seed=1, timeout=60, on_error=on_error) as loader:
        got = collected(loader)
        (bad,) = loader.bad_samples
    assert [len(batch) for batch in got] == [4, 4, 3 if on_error == "skip" else 4, 4, 4, 4]
    assert 9 not in flat(got)
    assert bad.index == "9"
    assert bad.error.startswith("WorkerDiedError: 3 workers died while loading this sample")


# --- budget, list and state


@pytest.mark.parametrize(("budget", "is_enough"), [(3, True), (2, False), (0.25, True), (0.24, False), (0, False), (1.0, True)])
def test_exceeding_the_error_budget_is_an_error(budget: Any, is_enough: bool) -> None:
    """It is raised in order, at the batch that exceeds the budget, whatever was loaded ahead."""
    for workers in (0, 2):
        options: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
        policy = infeed.ErrorPolicy("skip", budget=budget)
        with infeed.DataLoader(Patchy(12, [1, 5, 10]), on_error=policy, **options) as loader:
            if is_enough:
                assert sum(len(batch) for batch in _indices(loader)) == 9
                continue
            batches = iter(loader)
            with pytest.raises(infeed.SampleError, match=rf"budget={budget}.* exceeded: .*, the last: index=\d+ "):
                for _ in batches:
                    pass


def test_the_epoch_ends_with_a_log_line_about_skipped_samples(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "infeed")
    with infeed.DataLoader(Patchy(20, list(range(8))), batch_size=4, on_error="skip") as loader:
        list(loader)
    (text,) = caplog.messages
    assert text.startswith("epoch 0 had 8 bad samples:\n  index=0 (position 0 of epoch 0) skipped: ValueError")
    assert text.endswith("and 3 more; see loader.bad_samples")


def test_the_count_is_part_of_the_state() -> None:
    """A resumed run has used as much of the budget."""
    options: dict[str, Any] = {"batch_size": 2, "on_error": infeed.ErrorPolicy("skip", budget=2), "seed": 0}
    loader = infeed.DataLoader(Patchy(12, [1, 3, 9]), **options)
    batches = iter(loader)
    got = [next(batches)[0].tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert got == [[0], [2], [4, 5]]
    assert state["bad_count"] == 2
    again = infeed.DataLoader(Patchy(12, [1, 3, 9]), **options)
    again.load_state_dict(state)
    batches = iter(again)
    assert next(batches)[0].tolist() == [6, 7]
    with pytest.raises(infeed.SampleError, match="epoch 0 had 3 bad samples"):
        next(batches)
    with pytest.raises(infeed.StateError, match="bad_count"):
        again.load_state_dict({**state, "bad_count": -1})


def test_a_batch_with_replaced_samples_can_be_explained_and_replayed() -> None:
    with infeed.DataLoader(Patchy(12, [1]), batch_size=4, seed=2, on_error="replace", num_workers=2) as loader:
        first = plain(next(iter(loader)))
        assert loader.explain(0).indices == tuple(first[0]) or list(loader.explain(0).indices) == list(first[0])
        assert plain(loader.replay(0)) == first


def test_a_bad_batch_is_loaded_again_once(tmp_path: Path) -> None:
    """A task reports all of its bad samples at once."""
    journal = Journal(tmp_path / "asked")

    def load(index: int) -> int:
        journal.write(index)
        if index % 2:
            raise ValueError(index)
        return index

    with infeed.DataLoader(Tree(16, load), batch_size=16, num_workers=1, on_error="skip", timeout=60) as loader:
        assert plain(next(iter(loader))) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(journal.lines()) <= 3 * 16


def test_the_arguments_are_checked() -> None:
    data = np.arange(4)
    for options, words in (
        ({"on_error": "ignore"}, "on_error='ignore' is not supported; use 'raise', 'skip' or 'replace'"),
        ({"sample_timeout": -1}, "sample_timeout=-1 must be a number of seconds"),
        ({"hang_warning": "soon"}, "hang_warning='soon' must be a number of seconds"),
        ({"sample_timeout": 1, "num_workers": 1, "worker": "thread"}, "sample_timeout is not supported with worker='thread'"),
    ):
        with pytest.raises(infeed.ConfigError, match=words):
            infeed.DataLoader(data, **options)  # type: ignore[arg-type]
    for policy, words in (
        ({"action": "ignore"}, "action='ignore' is not supported"),
        ({"budget": -1}, "budget=-1 must be a number of samples, or a fraction"),
        ({"budget": 1.5}, "budget=1.5 must be"),
        ({"budget": True}, "budget=True must be"),
        ({"retries": -1}, "retries=-1 must be at least 0"),
    ):
        with pytest.raises(infeed.ConfigError, match=words):
            infeed.ErrorPolicy(**policy)  # type: ignore[arg-type]
    with pytest.raises(infeed.ConfigError, match="on_error='replace' is not supported for iterable datasets"):
        infeed.DataLoader(Restless(3, []), on_error="replace")


# --- edge cases


def test_ranks_that_share_an_iterable_dataset_continue_after_a_bad_element() -> None:
    """A generator shards the dataset, and an exception that passed through it would end it."""
    got = []
    for rank in range(2):
        with infeed.DataLoader(Restless(13, [4]), batch_size=2, shard=(rank, 2), on_error="skip", pad=False) as loader:
            got += flat(collected(loader))
            assert [one.index for one in loader.bad_samples] == ["element 4"]
    assert sorted(got) == [0, 1, 2, 3, *range(5, 13)]


def test_a_state_after_exceeding_the_budget_can_be_loaded_with_a_larger_one() -> None:
    """Also if the batch that exceeded it had no other samples."""
    for batch_size, bad in ((4, [1, 5]), (1, [1])):
        small, large = (infeed.ErrorPolicy("skip", budget=len(bad) - less) for less in (1, 0))
        loader = infeed.DataLoader(Patchy(12, bad), batch_size, on_error=small)
        with pytest.raises(infeed.SampleError, match="exceeded"):
            list(loader)
        again = infeed.DataLoader(Patchy(12, bad), batch_size, on_error=large)
        again.load_state_dict(loader.state_dict())
        assert flat(_indices(again))[-1] == 11


def test_a_sample_does_not_inherit_the_deaths_of_a_skipped_neighbor(tmp_path: Path) -> None:
    """Rows move up when the batch is planned again."""

    def load(index: int) -> int:
        if index == 2 or (index == 3 and not (tmp_path / "died").exists()):
            if index == 3:
                (tmp_path / "died").touch()
            os._exit(3)
        return index

    with infeed.DataLoader(Tree(8, load), batch_size=8, num_workers=1, on_error="skip", timeout=60) as loader:
        assert plain(next(iter(loader))) == [0, 1, 3, 4, 5, 6, 7]


def test_an_index_outside_of_arrays_is_a_bad_sample() -> None:
    with infeed.DataLoader(np.arange(10), batch_size=2, sampler=[0, 99, 1, 2], on_error="skip") as loader:
        assert collected(loader) == [[0], [1, 2]]


def test_a_batch_without_good_samples_can_be_explained() -> None:
    with infeed.DataLoader(Patchy(6, [2, 3]), batch_size=2, on_error="skip") as loader:
        list(loader)
        assert list(loader.explain(1).indices or ()) == []
        with pytest.raises(IndexError, match="has nothing to replay"):
            loader.replay(1)


def test_the_iteration_ends_after_an_epoch_without_good_samples() -> None:
    loader = infeed.DataLoader(Patchy(4, [0, 1, 2, 3]), batch_size=2, on_error="skip")
    batches = iter(loader)
    with pytest.raises(infeed.SampleError, match="epoch 0 delivered no batch: it had 4 bad samples"):
        next(batches)
    assert next(batches, None) is None
    assert loader.state_dict()["epoch"] == 1
