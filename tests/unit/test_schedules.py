"""The scheduler under random schedules: workers die, samples are bad, memory is short, epochs are abandoned, at any time.

Each schedule follows from a seed and is the same in every run, unless INFEED_FUZZ=1 draws new ones. A failing schedule is
minimized, and printed in a form that reproduces it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Final

import pytest

from tests.unit.engine_model import FAULTS, EngineModel, ModelOptions, play_in

_SHORT: Final = 2000
_PER_PART: Final = 10_000
_LONG_PARTS: Final = 100  # A million.
_SHOWN: Final = 40

Schedule = tuple[ModelOptions, bytes]


def random_schedule(rng: random.Random) -> Schedule:
    """Returns a schedule without some kinds of faults: rare ones would be masked if all happened."""
    is_stream = rng.random() < 0.3
    is_bound = not is_stream and rng.random() < 0.2
    options = ModelOptions(
        workers=rng.randint(1, 4),
        window=rng.randint(1, 6),
        in_order=rng.random() < 0.6,
        whole_batches=is_stream or is_bound or rng.random() < 0.4,
        is_stream=is_stream,
        is_bound=is_bound,
        slots=rng.choice([0, 1, 2, 3, 20]),
        never=tuple(kind for kind in FAULTS if rng.random() < 0.5),
        often=rng.choice(["", "kill", "bad", "scale"]),
    )
    return options, rng.randbytes(rng.choice([20, 60, 150]))


def failure_of(schedule: Schedule) -> tuple[str, EngineModel] | None:
    """Returns the error of a schedule, and the run up to it."""
    model = EngineModel(schedule[0])
    try:
        play_in(model, schedule[1])
        if not model.is_closed:
            left = [batch.batch for batch in model.batches.values() if not batch.outcome]
            assert not left, f"batches {left} never came"
        assert len(set(model.delivered)) == len(model.delivered), "a batch came twice"
        for epoch in {batch.epoch for batch in model.batches.values()} if model.options.in_order else ():
            came = [number for number in model.delivered if model.batches[number].epoch == epoch]
            assert came == sorted(came), f"epoch {epoch} came in the order {came}"
    except Exception as error:
        return f"{type(error).__name__}: {error}", model
    return None


def shrunk(schedule: Schedule, fails: Callable[[Schedule], object]) -> Schedule:
    """Returns a schedule that also fails, from which nothing can be deleted, and in which no number can become zero."""
    options, script = schedule
    size = len(script)
    while size:
        begin = 0
        while begin < len(script):
            shorter = script[:begin] + script[begin + size :]
            if fails((options, shorter)):
                script = shorter
            else:
                begin += size
        size //= 2
    for place in range(len(script)):
        simpler = script[:place] + b"\0" + script[place + 1 :]
        if script[place] and fails((options, simpler)):
            script = simpler
    return options, script


def assert_no_failure(seed: object, count: int) -> None:
    rng = random.Random(f"schedules {seed}")
    for _ in range(count):
        schedule = random_schedule(rng)
        if failure_of(schedule) is not None:
            options, script = shrunk(schedule, failure_of)
            found = failure_of((options, script))
            assert found is not None
            reason, model = found
            history = "\n  ".join(map(str, model.history[-_SHOWN:]))
            replay = f"play({options}, bytes.fromhex({script.hex()!r}))"
            pytest.fail(f"{reason}\nafter\n  {history}\nplay it again:\n  {replay}", pytrace=False)


def seed_of(part: int) -> object:
    return os.urandom(8).hex() if os.environ.get("INFEED_FUZZ") else part


@pytest.mark.slow
def test_invariants_hold_under_thousands_of_schedules() -> None:
    """Each batch once and in order, no stall, no slot used twice: checked after every event (P1, P4, P6)."""
    assert_no_failure(seed_of(0), _SHORT)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, _LONG_PARTS))
def test_invariants_hold_under_a_million_schedules(part: int) -> None:
    """The same with other seeds."""
    assert_no_failure(seed_of(part), _PER_PART)


def test_a_failing_schedule_is_minimized() -> None:
    """The report contains only what leads to the failure."""
    schedule = ModelOptions(), bytes(range(100))

    options, script = shrunk(schedule, lambda one: sum(byte > 90 for byte in one[1]) >= 2)

    assert options == ModelOptions()
    assert len(script) == 2
