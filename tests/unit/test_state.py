"""Reading and writing states: whatever is given, the answer is a cursor or one clear error."""

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
# More digits than Python writes out, and more than any other program means.
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
    """Does not let itself be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("not for you")


class Agreeable:
    """Says that it equals anything, and is greater and less than it too."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __le__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return True


class Refusing:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("incomparable")

    __hash__ = None  # type: ignore[assignment]


class Number(int):
    """An integer that is not quite one."""


class Traps(dict[str, Any]):
    """A dict that does not want to be asked."""

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
    """Reading it gives one StateError with a message that can be shown, in no time."""
    with assert_faster_than(10), pytest.raises(StateError, match=match) as caught:
        read_state(state, whose)
    message = str(caught.value)
    assert len(message) < 1000
    assert "\x1b" not in message
    return caught.value


# --- what is written can be read


@pytest.mark.parametrize(("cursor", "whose"), [(PLAIN_CURSOR, PLAIN), (STREAM_CURSOR, STREAMED), (Cursor(), PLAIN)])
def test_what_is_written_is_read(cursor: Cursor, whose: Identity) -> None:
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
def test_every_cursor_of_an_indexed_dataset_survives(epoch: int, step: int, position: int, later: set[int], seed: int) -> None:
    """Whatever the numbers, what was written comes back."""
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
def test_every_cursor_of_a_stream_survives(turn: int, shares: list[ShareCursor]) -> None:
    """With as many workers as there are shares."""
    cursor = Cursor(0, 3, 12, (), StreamCursor(turn, tuple(shares)))
    whose = identity(order="stream", length=None, worker_count=len(shares))
    state = json.loads(json.dumps(write_state(cursor, whose)))

    assert read_state(state, whose) == (cursor, 7)


def test_a_drawn_seed_is_taken_from_the_state() -> None:
    """A loader that was given none has no opinion."""
    assert read_state(states(), identity(seed=8, is_seed_given=False)) == (PLAIN_CURSOR, 7)


@pytest.mark.parametrize(
    "changes", [{"batch_size": 3}, {"batch_size": None}, {"world_size": 2}, {"batch_size": 2, "world_size": 3}]
)
def test_another_cut_goes_on_at_the_same_position(changes: dict[str, Any]) -> None:
    """The step is counted in batches of the new size."""
    whose = identity(**changes)
    cursor, _ = read_state(write_state(Cursor(3, 5, 20), PLAIN), whose)

    assert (cursor.epoch, cursor.position, cursor.ahead) == (3, 20, ())
    assert cursor.step == 20 // whose.step_size


def test_batches_that_came_early_need_the_same_cut() -> None:
    """Their numbers mean nothing for batches of another size; the message shows both sides."""
    assert_refused(states(), identity(batch_size=8), match=r"batch_size=4 .*batch_size=8 .*in_order=False")


# --- what cannot be read


def test_what_is_no_dict_is_no_state() -> None:
    """Also if it is very long, very deep, or an object of another program."""
    for state in HOSTILE.values():
        assert_refused(state)


@pytest.mark.parametrize("name", states())
def test_a_state_without_a_field_is_refused_or_read_without_it(name: str) -> None:
    """Cut off anywhere; a batch size that is not known is another one, and ``ahead`` may be missing."""
    state = states()
    del state[name]
    if name == "ahead":
        assert read_state(state, PLAIN)[0] == Cursor(3, 5, 20)
    else:
        error = assert_refused(state)
        assert name in str(error)


@pytest.mark.parametrize("name", [name for name in states() if name not in ("batch_size", "world_size")])
def test_a_field_with_a_wrong_value_is_refused(name: str) -> None:
    """Whatever it is: a type, a range, or an object that says it is equal."""
    for value in HOSTILE.values():
        if not (name == "num_samples" and value is None):
            assert_refused({**states(), name: value}, match=name)


@pytest.mark.parametrize("name", ["batch_size", "world_size"])
def test_a_wrong_batch_size_or_number_of_ranks_is_refused_or_another_cut(name: str) -> None:
    """It says only how the rest was cut: nothing but a cursor or a StateError may come of it."""
    for value in HOSTILE.values():
        state = {**write_state(Cursor(3, 5, 20), PLAIN), name: value}
        try:
            cursor, _ = read_state(state, PLAIN)
        except StateError:
            continue
        assert cursor.position == 20


def test_an_object_that_says_it_equals_the_batch_size_is_not_it() -> None:
    """The step of a state whose cut is not known cannot be trusted."""
    state = {**write_state(Cursor(3, 5, 21), PLAIN), "batch_size": Agreeable(), "world_size": Agreeable()}
    assert_refused(state)


@pytest.mark.parametrize("name", ["stream", "turn", "shares", "rows", "ended", "share"])
def test_a_wrong_value_inside_a_stream_is_refused(name: str) -> None:
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
        is_good = (name == "ended" and value is True) or (name == "stream" and value is None)  # the latter: see below
        if not is_good:
            assert_refused(state, STREAMED)


@pytest.mark.parametrize("how", ["missing", "nothing"])
def test_a_state_of_a_stream_under_way_without_the_stream_is_refused(how: str) -> None:
    """It was cut off: going on at the beginning would give everything again."""
    state = stream_states()
    if how == "missing":
        del state["stream"]
    else:
        state["stream"] = None
    assert_refused(state, STREAMED)


@pytest.mark.parametrize("missing", ["turn", "shares"])
def test_a_stream_that_was_cut_off_is_refused(missing: str) -> None:
    """A part of its place is no place."""
    state = stream_states()
    del state["stream"][missing]
    assert_refused(state, STREAMED, match=missing)


@pytest.mark.parametrize("missing", ["rows", "ended"])
def test_a_share_that_was_cut_off_is_refused(missing: str) -> None:
    """The same for each worker's share."""
    state = stream_states()
    del state["stream"]["shares"][0][missing]
    assert_refused(state, STREAMED, match=missing)


def test_a_dict_that_is_no_state_is_refused() -> None:
    """Such as a checkpoint that contains the state under another name."""
    assert_refused({"a": 1}, match="state has no 'version', so it is not a state of infeed; pass")


def test_another_version_is_refused_with_both_numbers() -> None:
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
    """What the state has, what this loader has, and what to do."""
    values: dict[str, Any] = {"order": "sequential", "length": 99, "num_samples": 50, "seed": 8}
    error = assert_refused({**states(), name: values[name]}, match=f"it has {name}={theirs}, this loader has {name}={ours}")
    assert "same dataset and options" in str(error)


def test_all_that_differs_is_shown_at_once() -> None:
    """Nobody wants to correct one after another."""
    assert_refused({**states(), "length": 99, "seed": 8}, match=r"length=99, seed=8, this loader has length=100, seed=7")


def test_a_position_beyond_the_epoch_is_refused_with_both_numbers() -> None:
    """It is not of this dataset."""
    assert_refused({**states(), "position": 101}, match=r"position=101.*100")
    assert_refused(write_state(Cursor(0, 6, 24), identity(num_samples=20)), identity(num_samples=20), match=r"24.*20")


@pytest.mark.parametrize("order", ["sampler", "batch_sampler"])
def test_a_sampler_may_yield_more_than_the_dataset_has(order: str) -> None:
    """Its epoch is as long as it likes, whatever the length of the dataset."""
    whose = identity(order=order)
    assert read_state(write_state(Cursor(0, 30, 120), whose), whose)[0].position == 120


@pytest.mark.parametrize("ahead", [[4], [10**30], ["7"], [7, None], [7.0], [True], 7, {"7": 7}, list(range(5, 5000)), "79"])
def test_wrong_steps_ahead_are_refused(ahead: Any) -> None:
    """Earlier than the step, too many, or none."""
    assert_refused({**states(), "ahead": ahead}, match="ahead")


def test_steps_ahead_come_sorted_and_once() -> None:
    """In whatever order they were written."""
    assert read_state({**states(), "ahead": [9, 7, 9]}, PLAIN)[0].ahead == (7, 9)


def test_shares_of_other_workers_are_refused_with_both_numbers() -> None:
    """Nobody else knows how the dataset would cut itself."""
    whose = identity(order="stream", length=None, worker_count=3)
    assert_refused(stream_states(), whose, match=r"with 2 workers.* 3; use num_workers=2")


def test_very_many_shares_are_refused_at_once() -> None:
    """Too many are damage."""
    state = stream_states()
    state["stream"]["shares"] *= 50_000
    assert_refused(state, STREAMED, match="shares")


def test_a_dict_with_ideas_of_its_own_is_no_danger() -> None:
    """A subclass may override anything, and nothing of it is called."""
    assert read_state(Traps(states()), PLAIN) == read_state(states(), PLAIN)


# --- fuzzing

LONG = 10**4000  # the most that Hypothesis can show
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(LONG) | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)
NAMES = [*states(), "stream"]


@given(JSON | st.dictionaries(st.sampled_from(NAMES), JSON))
@settings(max_examples=150, deadline=1000)
def test_any_json_is_a_cursor_or_a_state_error(value: Any) -> None:
    """And nothing else, quickly."""
    for whose in (PLAIN, STREAMED):
        try:
            cursor, seed = read_state(value, whose)
        except StateError:
            continue
        assert isinstance(cursor, Cursor)
        assert isinstance(seed, int)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Any, Identity]:
    """A valid state with one or several parts, at any depth, replaced, removed or added to."""
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
@settings(max_examples=300, deadline=1000)
def test_any_mutation_of_a_state_is_a_cursor_or_a_state_error(mutation: tuple[Any, Identity]) -> None:
    """And nothing else, quickly."""
    state, whose = mutation
    try:
        cursor, _ = read_state(state, whose)
    except StateError:
        return
    # What is read can be written and read again.
    assert read_state(write_state(cursor, whose), whose)[0] == cursor


# --- the loader works on


def loaders() -> dict[str, infeed.DataLoader]:
    return {
        "shuffled": infeed.DataLoader(Squares(20), batch_size=4, shuffle=True, seed=3),
        "stream": infeed.DataLoader(Stream(20), batch_size=4, seed=3),
        "sampler": infeed.DataLoader(Squares(20), batch_size=4, sampler=range(19, -1, -1), seed=3),
    }


@pytest.mark.parametrize("kind", loaders())
def test_a_loader_works_on_after_a_bad_state(kind: str) -> None:
    """In mid-epoch, where it was, with the state that it had; and the next epoch is as it would have been."""
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
def test_a_seed_that_a_loader_takes_its_state_may_have(seed: int) -> None:
    """What is accepted at the door can be resumed."""
    try:
        loader = infeed.DataLoader(Squares(20), batch_size=4, shuffle=True, seed=seed)
    except infeed.ConfigError:
        return
    next(iter(loader))
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert len(collected(loader)) == 4


class Underestimated(Stream):
    """A stream that says how long it is, about."""

    def __len__(self) -> int:
        return 10


def test_a_stream_may_be_longer_than_it_says() -> None:
    """Its length is a guess; where it stands is counted."""
    loader = infeed.DataLoader(Underestimated(20), batch_size=4, seed=3)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert collected(loader) == [[16, 17, 18, 19]]


@pytest.mark.parametrize("kind", loaders())
def test_a_state_cut_off_anywhere_does_no_harm(kind: str) -> None:
    """As a file that was not written to its end: the loader refuses it, or goes on."""
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


def test_a_share_that_is_said_to_be_far_ends_with_the_stream() -> None:
    """A number of elements that the stream does not have is read no further than the stream goes."""
    loader = loaders()["stream"]
    next(iter(loader))
    state = loader.state_dict()
    state["stream"]["shares"][0]["rows"] = 400_000  # with 2**62 it would never come back

    loader.load_state_dict(state)
    with assert_faster_than(0.5):
        assert collected(loader) == []
    assert len(collected(loader)) == 5


@pytest.mark.process
def test_the_last_epoch_that_a_state_may_have_can_be_loaded(forkserver: dict[str, Any]) -> None:
    """An epoch that is accepted is one that can be iterated, and the one after it too."""
    with infeed.DataLoader(Squares(8), batch_size=4, seed=3, **forkserver) as loader:
        state = {**loader.state_dict(), "epoch": MOST}
        try:
            loader.load_state_dict(state)
        except infeed.StateError:
            return
        counts = []
        with suppress(struct.error):  # with its traceback it would hold the engine
            counts = [len(collected(loader)) for _ in range(2)]
        assert counts == [2, 2]
