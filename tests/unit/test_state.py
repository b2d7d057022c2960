"""Reading and writing states: any input gives a cursor or one clear error."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infeed
from infeed.errors import StateError
from infeed.plan.state import Cursor, Identity, ShareCursor, StreamCursor, read_state, write_state
from tests.helpers import Squares, Stream, assert_faster_than, collected, plain

MOST = (1 << 63) - 1
# More digits than Python prints, and more than any other program supports.
ENDLESS = 10**5000


def identity(**changes: Any) -> Identity:
    return Identity(
        **{
            "order": "shuffled",
            "length": 100,
            "num_samples": None,
            "seed": 7,
            "is_seed_given": True,
            "batch_size": 4,
            "world_size": 1,
            "worker_count": 2,
            **changes,
        }
    )


PLAIN = identity()
STREAMED = identity(order="stream", length=None)
PLAIN_CURSOR = Cursor(3, 5, 20, (7, 9))
STREAM_CURSOR = Cursor(1, 6, 24, (), StreamCursor(5, (ShareCursor(16, False, {"dataset": {"next": 3}}), ShareCursor(8, True))))


def states() -> dict[str, Any]:
    return write_state(PLAIN_CURSOR, PLAIN)


def stream_states() -> dict[str, Any]:
    return write_state(STREAM_CURSOR, STREAMED)


class Unshowable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("not for you")


class Agreeable:
    """Compares as equal to anything, and as greater and less too."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __le__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return True


class Refusing:
    """Comparisons raise."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("incomparable")

    __hash__ = None  # type: ignore[assignment]


class Number(int):
    """A subclass of int."""


class Traps(dict[str, Any]):
    """A dict whose methods raise."""

    def get(self, *_arguments: Any) -> Any:
        raise RuntimeError("do not ask")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "nothing": None,
    "text": "3",
    "long text": "x" * 10**6,
    "control characters": "\x00\x1b[2J\ud800",
    "format": "{0.__class__} %s %n",
    "fraction": 3.0,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "negative": -1,
    "true": True,
    "beyond 64 bits": MOST + 1,
    "endless": ENDLESS,
    "minus endless": -ENDLESS,
    "almost an int": Number(3),
    "numpy": np.int64(3),
    "array": np.arange(3),
    "list": [1, 2],
    "dict": {"version": 1},
    "deep": nested(100_000),
    "unshowable": Unshowable(),
    "agreeable": Agreeable(),
    "refusing": Refusing(),
    "class": int,
}


def assert_refused(state: Any, whose: Identity = PLAIN, match: str | None = None) -> StateError:
    """Checks that reading it raises one StateError with a printable message, quickly."""
    with assert_faster_than(10), pytest.raises(StateError, match=match) as caught:
        read_state(state, whose)
    message = str(caught.value)
    assert len(message) < 1000
    assert "\x1b" not in message
    return caught.value


# --- valid states


@pytest.mark.parametrize(("cursor", "whose"), [(PLAIN_CURSOR, PLAIN), (STREAM_CURSOR, STREAMED), (Cursor(), PLAIN)])
def test_a_written_state_can_be_read(cursor: Cursor, whose: Identity) -> None:
    """Through JSON, too."""
    state = json.loads(json.dumps(write_state(cursor, whose)))

    assert read_state(state, whose) == (cursor, 7)


_STEPS = st.integers(0, MOST)


@given(
    epoch=_STEPS,
    step=st.integers(0, 1 << 40),
    position=st.integers(0, 100),
    later=st.sets(st.integers(0, 1 << 30), max_size=20),
    seed=st.integers(-(1 << 200), 1 << 200),
)
def test_every_cursor_of_a_map_style_dataset_is_restored(
    epoch: int, step: int, position: int, later: set[int], seed: int
) -> None:
    """For any numbers."""
    cursor = Cursor(epoch, step, position, tuple(sorted(step + number for number in later)))
    state = json.loads(json.dumps(write_state(cursor, identity(seed=seed))))

    assert read_state(state, identity(seed=seed)) == (cursor, seed)


@given(
    turn=_STEPS,
    shares=st.lists(
        st.builds(ShareCursor, _STEPS, st.booleans(), st.one_of(st.none(), st.dictionaries(st.text(), st.integers()))),
        min_size=1,
        max_size=5,
    ),
)
def test_every_cursor_of_an_iterable_dataset_is_restored(turn: int, shares: list[ShareCursor]) -> None:
    """With as many workers as shards."""
    cursor = Cursor(0, 3, 12, (), StreamCursor(turn, tuple(shares)))
    whose = identity(order="stream", length=None, worker_count=len(shares))
    state = json.loads(json.dumps(write_state(cursor, whose)))

    assert read_state(state, whose) == (cursor, 7)


def test_a_drawn_seed_is_taken_from_the_state() -> None:
    """The loader has no seed of its own."""
    assert read_state(states(), identity(seed=8, is_seed_given=False)) == (PLAIN_CURSOR, 7)


@pytest.mark.parametrize(
    "changes", [{"batch_size": 3}, {"batch_size": None}, {"world_size": 2}, {"batch_size": 2, "world_size": 3}]
)
def test_another_batch_size_continues_at_the_same_position(changes: dict[str, Any]) -> None:
    """The step is counted in batches of the new size."""
    whose = identity(**changes)
    cursor, _ = read_state(write_state(Cursor(3, 5, 20), PLAIN), whose)

    assert (cursor.epoch, cursor.position, cursor.ahead) == (3, 20, ())
    assert cursor.step == 20 // whose.step_size


def test_steps_ahead_need_the_same_batch_size() -> None:
    """Their numbers are meaningless for batches of another size; the message shows both sides."""
    assert_refused(states(), identity(batch_size=8), match=r"batch_size=4 .*batch_size=8 .*in_order=False")


# --- invalid states


def test_only_a_dict_is_a_state() -> None:
    """Other values may be very long, very deep, or an object of another program."""
    for state in HOSTILE.values():
        assert_refused(state)


@pytest.mark.parametrize("name", states())
def test_a_state_without_a_field_is_rejected_or_read_without_it(name: str) -> None:
    """Any field; an unknown batch size counts as another one, and ``ahead`` may be missing."""
    state = states()
    del state[name]
    if name == "ahead":
        assert read_state(state, PLAIN)[0] == Cursor(3, 5, 20)
    else:
        error = assert_refused(state)
        assert name in str(error)


@pytest.mark.parametrize("name", [name for name in states() if name not in ("batch_size", "world_size")])
def test_a_field_with_an_invalid_value_is_rejected(name: str) -> None:
    """Wrong types, out of range, or an object that compares as equal."""
    for value in HOSTILE.values():
        if not (name == "num_samples" and value is None):
            assert_refused({**states(), name: value}, match=name)


@pytest.mark.parametrize("name", ["batch_size", "world_size"])
def test_an_invalid_batch_size_or_number_of_ranks_is_rejected_or_counts_as_another(name: str) -> None:
    """The result is a cursor or a StateError."""
    for value in HOSTILE.values():
        state = {**write_state(Cursor(3, 5, 20), PLAIN), name: value}
        try:
            cursor, _ = read_state(state, PLAIN)
        except StateError:
            continue
        assert cursor.position == 20


def test_an_object_that_equals_the_batch_size_is_not_it() -> None:
    """The step of a state with an unknown batch size cannot be trusted."""
    state = {**write_state(Cursor(3, 5, 21), PLAIN), "batch_size": Agreeable(), "world_size": Agreeable()}
    assert_refused(state)


@pytest.mark.parametrize("name", ["stream", "turn", "shares", "rows", "ended", "share"])
def test_an_invalid_value_inside_the_state_of_an_iterable_dataset_is_rejected(name: str) -> None:
    """Each level of it is checked."""
    for value in HOSTILE.values():
        state = stream_states()
        if name == "stream":
            state["stream"] = value
        elif name in ("turn", "shares"):
            state["stream"][name] = value
        elif name == "share":
            state["stream"]["shares"][1] = value
        else:
            state["stream"]["shares"][1][name] = value
        is_good = (name == "ended" and value is True) or (name == "stream" and value is None)  # For the latter, see below.
        if not is_good:
            assert_refused(state, STREAMED)


@pytest.mark.parametrize("how", ["missing", "nothing"])
def test_a_state_in_mid_epoch_without_its_iterable_dataset_is_rejected(how: str) -> None:
    """It is truncated: starting from the beginning would repeat everything."""
    state = stream_states()
    if how == "missing":
        del state["stream"]
    else:
        state["stream"] = None
    assert_refused(state, STREAMED)


@pytest.mark.parametrize("missing", ["turn", "shares"])
def test_a_truncated_state_of_an_iterable_dataset_is_rejected(missing: str) -> None:
    """An incomplete position is invalid."""
    state = stream_states()
    del state["stream"][missing]
    assert_refused(state, STREAMED, match=missing)


@pytest.mark.parametrize("missing", ["rows", "ended"])
def test_a_truncated_state_of_a_shard_is_rejected(missing: str) -> None:
    """The same for the shard of each worker."""
    state = stream_states()
    del state["stream"]["shares"][0][missing]
    assert_refused(state, STREAMED, match=missing)


def test_another_dict_is_rejected() -> None:
    """Such as a checkpoint that contains the state under another name."""
    assert_refused({"a": 1}, match="state has no 'version', so it is not a state of infeed; pass")


def test_another_version_is_rejected_with_both_numbers() -> None:
    """Older and newer."""
    for version in (0, 2, 10**9):
        assert_refused({**states(), "version": version}, match=rf"version={version}, .*reads version 1")


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("order", "'sequential'", "'shuffled'"),
        ("length", "99", "100"),
        ("num_samples", "50", "None"),
        ("seed", "8", "7"),
    ],
)
def test_a_state_of_another_loader_shows_both_sides(name: str, theirs: str, ours: str) -> None:
    """The state's values, the loader's values, and the fix."""
    values: dict[str, Any] = {"order": "sequential", "length": 99, "num_samples": 50, "seed": 8}
    error = assert_refused({**states(), name: values[name]}, match=f"it has {name}={theirs}, this loader has {name}={ours}")
    assert "same dataset and options" in str(error)


def test_all_differences_are_shown_at_once() -> None:
    """Users need not correct them one by one."""
    assert_refused({**states(), "length": 99, "seed": 8}, match=r"length=99, seed=8, this loader has length=100, seed=7")


def test_a_position_beyond_the_epoch_is_rejected_with_both_numbers() -> None:
    """It is not of this dataset."""
    assert_refused({**states(), "position": 101}, match=r"position=101.*100")
    assert_refused(write_state(Cursor(0, 6, 24), identity(num_samples=20)), identity(num_samples=20), match=r"24.*20")


@pytest.mark.parametrize("order", ["sampler", "batch_sampler"])
def test_a_sampler_may_yield_more_than_the_dataset_has(order: str) -> None:
    """Its epoch may have any length."""
    whose = identity(order=order)
    assert read_state(write_state(Cursor(0, 30, 120), whose), whose)[0].position == 120


@pytest.mark.parametrize("ahead", [[4], [10**30], ["7"], [7, None], [7.0], [True], 7, {"7": 7}, list(range(5, 5000)), "79"])
def test_invalid_steps_ahead_are_rejected(ahead: Any) -> None:
    """Below the step, too many, or none."""
    assert_refused({**states(), "ahead": ahead}, match="ahead")


def test_steps_ahead_are_sorted_and_unique() -> None:
    """In whatever order they were written."""
    assert read_state({**states(), "ahead": [9, 7, 9]}, PLAIN)[0].ahead == (7, 9)


def test_shards_of_other_workers_are_rejected_with_both_numbers() -> None:
    """Only the dataset knows how it shards itself."""
    whose = identity(order="stream", length=None, worker_count=3)
    assert_refused(stream_states(), whose, match=r"with 2 workers.* 3; use num_workers=2")


def test_too_many_shards_are_rejected_at_once() -> None:
    """The state is damaged."""
    state = stream_states()
    state["stream"]["shares"] *= 50_000
    assert_refused(state, STREAMED, match="shares")


def test_a_dict_subclass_is_harmless() -> None:
    """It may override anything, and none of its methods is called."""
    assert read_state(Traps(states()), PLAIN) == read_state(states(), PLAIN)


# --- fuzzing

LONG = 10**4000  # The most that Hypothesis can show.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(LONG) | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)
NAMES = [*states(), "stream"]


@given(JSON | st.dictionaries(st.sampled_from(NAMES), JSON))
@settings(max_examples=150)
def test_any_json_is_a_cursor_or_a_state_error(value: Any) -> None:
    """Quickly."""
    for whose in (PLAIN, STREAMED):
        try:
            cursor, seed = read_state(value, whose)
        except StateError:
            continue
        assert isinstance(cursor, Cursor)
        assert isinstance(seed, int)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Any, Identity]:
    """Returns a valid state with one or several parts, at any depth, replaced, removed or added."""
    state, whose = draw(st.sampled_from([(states(), PLAIN), (stream_states(), STREAMED)]))
    state = json.loads(json.dumps(state))
    for _ in range(draw(st.integers(1, 3))):
        part: Any = state
        while True:
            keys = list(part) if isinstance(part, dict) else list(range(len(part)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(part[key], dict | list) and draw(st.booleans()):
                part = part[key]
                continue
            action = draw(st.sampled_from(["replace", "remove", "nudge"]))
            if action == "remove":
                del part[key]
            elif action == "nudge" and type(part[key]) is int:
                part[key] += draw(st.sampled_from([-1, 1, -(1 << 64), 1 << 64, LONG]))
            else:
                part[key] = draw(JSON)
            break
    return state, whose


@given(mutations())
@settings(max_examples=300)
def test_any_mutation_of_a_state_is_a_cursor_or_a_state_error(mutation: tuple[Any, Identity]) -> None:
    """Quickly."""
    state, whose = mutation
    try:
        cursor, _ = read_state(state, whose)
    except StateError:
        return
    # What is read can be written and read again.
    assert read_state(write_state(cursor, whose), whose)[0] == cursor


# --- the loader stays usable


def loaders() -> dict[str, infeed.DataLoader]:
    return {
        "shuffled": infeed.DataLoader(Squares(20), batch_size=4, shuffle=True, seed=3),
        "stream": infeed.DataLoader(Stream(20), batch_size=4, seed=3),
        "sampler": infeed.DataLoader(Squares(20), batch_size=4, sampler=range(19, -1, -1), seed=3),
    }


@pytest.mark.parametrize("kind", loaders())
def test_a_loader_works_after_an_invalid_state(kind: str) -> None:
    """It continues in mid-epoch with its own state; the next epoch is unaffected."""
    loader, untouched = loaders()[kind], loaders()[kind]
    expected = collected(untouched) + collected(untouched)
    iterator = iter(loader)
    got = [plain(next(iterator)) for _ in range(2)]
    state = loader.state_dict()
    bad: list[Any] = [ENDLESS, -1, "x", [[]], Unshowable()]
    for name in state:
        for value in bad:
            if name not in ("batch_size", "world_size"):
                with pytest.raises(infeed.StateError):
                    loader.load_state_dict({**state, name: value})
    junk: list[Any] = [None, [], "state", 3, {"version": 1}, {"state": {}}]
    for value in junk:
        with pytest.raises(infeed.StateError):
            loader.load_state_dict(value)

    assert loader.state_dict() == state
    got += [plain(batch) for batch in iterator]
    assert got + collected(loader) == expected


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1 << 64, id="65 bits"),
        pytest.param(-1, id="negative"),
        pytest.param(1 << 300, id="long"),
        pytest.param(-(1 << 300), id="long, negative"),
    ],
)
def test_a_valid_seed_of_a_loader_is_valid_in_a_state(seed: int) -> None:
    """Every accepted seed can be resumed."""
    try:
        loader = infeed.DataLoader(Squares(20), batch_size=4, shuffle=True, seed=seed)
    except infeed.ConfigError:
        return
    next(iter(loader))
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert len(collected(loader)) == 4


class Underestimated(Stream):
    """An iterable dataset whose length is an estimate."""

    def __len__(self) -> int:
        return 10


def test_an_iterable_dataset_may_be_longer_than_its_length() -> None:
    """Its length is an estimate; its position is counted."""
    loader = infeed.DataLoader(Underestimated(20), batch_size=4, seed=3)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert collected(loader) == [[16, 17, 18, 19]]


@pytest.mark.parametrize("kind", loaders())
def test_a_truncated_state_is_harmless(kind: str) -> None:
    """As in an incomplete file: the loader rejects it, or continues."""
    loader, other = loaders()[kind], loaders()[kind]
    next(iter(other))
    fields = list(other.state_dict().items())
    for count in range(1, len(fields)):
        try:
            loader.load_state_dict(dict(fields[:count]))
        except infeed.StateError:
            continue
        assert len(collected(loader)) <= 5
    loader.set_epoch(0)
    assert len(collected(loader)) == 5


def test_a_shard_with_a_huge_position_ends_with_the_dataset() -> None:
    """The dataset is read only to its end."""
    loader = loaders()["stream"]
    next(iter(loader))
    state = loader.state_dict()
    state["stream"]["shares"][0]["rows"] = 400_000  # With 2**62 it would never return.

    loader.load_state_dict(state)
    with assert_faster_than(0.5):
        assert collected(loader) == []
    assert len(collected(loader)) == 5


@pytest.mark.process
def test_the_last_possible_epoch_of_a_state_can_be_loaded(forkserver: dict[str, Any]) -> None:
    """An accepted epoch can be iterated, and the next one too."""
    with infeed.DataLoader(Squares(8), batch_size=4, seed=3, **forkserver) as loader:
        state = {**loader.state_dict(), "epoch": MOST}
        try:
            loader.load_state_dict(state)
        except infeed.StateError:
            return
        counts = []
        with suppress(struct.error):  # Its traceback would reference the engine.
            counts = [len(collected(loader)) for _ in range(2)]
        assert counts == [2, 2]
