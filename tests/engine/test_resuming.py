"""A resumed run equals the uninterrupted run: stateful datasets and samplers in ``infeed.DataLoader``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import infeed
from tests.helpers import DEADLINE_S
from tests.stateful import (
    Both,
    Counting,
    IteratorOnly,
    Log,
    OnItsOwn,
    Pending,
    PendingAtOnce,
    Permuted,
    ResetLog,
    Shuffled,
    Turning,
    TurningBatches,
)

CASES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "shuffle": lambda: (range(7), {"shuffle": True}),
    "sampler": lambda: (range(7), {"sampler": Turning()}),
    "sampler, singly": lambda: (range(7), {"sampler": Turning(), "batch_size": None}),
    "sampler, full batches": lambda: (range(7), {"sampler": Turning(), "batch_size": 7}),
    "sampler, drop_last": lambda: (range(7), {"sampler": Turning(), "drop_last": True}),
    "sampler, ranks": lambda: (range(7), {"sampler": Turning(), "shard": (1, 2)}),
    "pending sampler": lambda: (range(7), {"sampler": Pending()}),
    "pending sampler at once, singly": lambda: (range(7), {"sampler": PendingAtOnce(), "batch_size": None}),
    "sampler and iterator": lambda: (range(7), {"sampler": Permuted()}),
    "iterator": lambda: (range(7), {"sampler": Shuffled()}),
    "batch_sampler": lambda: (range(7), {"batch_sampler": TurningBatches(), "batch_size": 1}),
    "batch_sampler, ranks": lambda: (range(7), {"batch_sampler": TurningBatches(), "batch_size": 1, "shard": (0, 2)}),
    "stream": lambda: (Log(), {}),
    "stream, full batches": lambda: (Log(), {"batch_size": 7}),
    "stream, singly": lambda: (Log(), {"batch_size": None}),
    "stream that restarts": lambda: (ResetLog(), {}),
    "stream and iterator": lambda: (Both(), {}),
    "iterator of an iterable dataset": lambda: (IteratorOnly(), {}),
    "stream that is its iterator": lambda: (OnItsOwn(), {}),
    "dataset": lambda: (Counting(), {"shuffle": True}),
}


def made(case: str, options: dict[str, Any]) -> infeed.DataLoader:
    dataset, given = CASES[case]()
    given = {"batch_size": 2, "seed": 3, **given, **options}
    return infeed.DataLoader(dataset, collate_fn=None if given["batch_size"] is None else list, **given)


def run(loader: infeed.DataLoader, count: int, states: list[tuple[int, int, str]] | None = None) -> list[list[Any]]:
    epochs: list[list[Any]] = []
    with loader:
        for epoch in range(count):
            batches: list[Any] = []
            for iterator in ([], iter(loader)):
                if states is not None:
                    states.append((epoch, 0, json.dumps(loader.state_dict())))
                for batch in iterator:
                    batches.append(batch)
                    if states is not None:
                        states.append((epoch, len(batches), json.dumps(loader.state_dict())))
            epochs.append(batches)
    return epochs


def assert_resumes(case: str, options: dict[str, Any], *, every: int = 1) -> None:
    states: list[tuple[int, int, str]] = []
    expected = run(made(case, options), 4, states)
    problems = []
    for epoch, step, state in states[::every]:
        if epoch > 1:
            break
        loader = made(case, options)
        loader.load_state_dict(json.loads(state))
        if json.dumps(loader.state_dict()) != state:
            problems.append(f"epoch {epoch}, step {step}: another state after loading")
        got, wanted = run(loader, 3), [expected[epoch][step:], expected[epoch + 1], expected[epoch + 2]]
        if got != wanted:
            problems.append(f"epoch {epoch}, step {step}: {got} and not {wanted}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {})


@pytest.mark.parametrize("case", [case for case in CASES if case != "dataset"])
def test_a_run_with_a_thread_resumed_at_any_step_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {"num_workers": 1, "worker": "thread"}, every=3)


@pytest.mark.process
@pytest.mark.parametrize("case", ["sampler", "stream", "iterator of an iterable dataset"])
def test_a_run_with_processes_resumed_at_some_steps_equals_the_uninterrupted_run(case: str) -> None:
    assert_resumes(case, {"num_workers": 2, "timeout": DEADLINE_S}, every=4)


def test_a_state_with_workers_contains_the_dataset_only_before_the_first_epoch() -> None:
    """Later, persistent workers may have loaded ahead."""
    options = {"num_workers": 1, "worker": "thread"}
    with made("dataset", options) as loader:
        before = loader.state_dict()
        iterator = iter(loader)
        first = next(iterator)
        with pytest.warns(RuntimeWarning, match=r"Counting.*num_workers=0"):
            unknown = loader.state_dict()
        rest = list(iterator)
    for given in ({}, options):
        with made("dataset", given) as resumed:
            with pytest.raises(infeed.StateError, match=r"Counting.*num_workers=0"):
                resumed.load_state_dict(unknown)
            resumed.load_state_dict(json.loads(json.dumps(before)))
            assert list(resumed) == [first, *rest]
