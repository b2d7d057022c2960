"""The user's exceptions on their way from a worker to the user's loop."""

import pickle
import threading
import traceback
from typing import Any

import pytest

from infeed.errors import SampleError
from infeed.workers.exceptions import Failure


class Needy(Exception):
    """A constructor with several required arguments, which plain pickling cannot call again."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


class Holding(ValueError):
    """State that cannot travel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Shown(KeyError):
    """A text of its own."""

    def __str__(self) -> str:
        return "shown otherwise"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Changing(Exception):
    """Pickles, and comes back as something else."""

    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class Impossible(Exception):
    """Neither it nor a stand-in can be made."""

    def __new__(cls, *args: Any) -> "Impossible":
        if args != ("first",):
            raise RuntimeError("only once")
        return super().__new__(cls, *args)

    def __init_subclass__(cls) -> None:
        raise RuntimeError("not derived from")

    def __reduce__(self) -> Any:
        raise RuntimeError("not pickled")


def raised(error: BaseException) -> BaseException:
    """The same, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def travelled(error: BaseException, **place: Any) -> BaseException:
    """The exception as it arrives from another process."""
    failure = Failure.of(raised(error), "loading sample", **place).packed()
    return pickle.loads(pickle.dumps(failure)).exception("position 5 of epoch 0, worker 1")


ERRORS: dict[str, BaseException] = {
    "plain": ValueError("bad value"),
    "KeyError": KeyError("key"),
    "several arguments": OSError(2, "No such file", "a.jpg"),
    "several required arguments": Needy("a.jpg", 3),
    "state that cannot travel": Holding("text"),
    "a text of its own": Shown("x"),
    "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "comes back as something else": Changing("text"),
    "group": ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    "empty": ValueError(),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_exception_arrives_with_its_type_and_text(error: BaseException) -> None:
    """Except clauses work as they do without workers, whatever the constructor takes and whatever the instance holds."""
    again = travelled(error)

    assert isinstance(again, type(error))
    assert type(again).__name__ == type(error).__name__
    assert str(again) == str(error)


def test_what_can_be_built_again_is_the_very_type_with_its_attributes() -> None:
    """Not a stand-in: also attributes and arguments come along."""
    error = FileNotFoundError(2, "No such file", "a.jpg")
    error.extra = [1, 2]  # type: ignore[attr-defined]

    again = travelled(error)

    assert type(again) is FileNotFoundError
    assert (again.errno, again.filename, again.extra) == (2, "a.jpg", [1, 2])  # type: ignore[attr-defined]


def test_a_class_of_a_script_arrives_as_that_class() -> None:
    """Classes of __main__ travel by value, and the user's own except clause still knows them."""

    class Local(Exception):
        pass

    assert isinstance(travelled(Local("x")), Local)


def test_an_exception_without_a_readable_text_arrives_all_the_same() -> None:
    """Its own __str__ raises; that is said in place of it, or left to the user's own call of it."""
    again = travelled(Mute())

    assert isinstance(again, Mute | SampleError)
    assert again.__notes__


def test_what_cannot_be_made_at_all_is_a_sample_error_with_its_name() -> None:
    """The last resort still tells what it was."""
    again = travelled(Impossible("first"))

    assert type(again) is SampleError
    assert str(again) == "Impossible: first"


def test_the_traceback_of_the_worker_is_the_cause() -> None:
    """The user sees the line in their dataset."""
    again = travelled(ValueError("bad"))
    shown = "".join(traceback.format_exception(again))

    assert "raise error" in str(again.__cause__)
    assert "test_exceptions.py" in shown
    assert "direct cause" in shown


def test_the_exceptions_own_cause_is_in_the_traceback() -> None:
    """What it was raised from is not lost on the way."""
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))

    assert "KeyError: 'inner'" in str(travelled(error).__cause__)


@pytest.mark.parametrize("error", [ValueError("x"), Needy("a", 1)], ids=["rebuilt", "stand-in"])
def test_notes_are_kept_and_the_place_is_added(error: BaseException) -> None:
    """The user's notes first, each once, then which sample it was and where."""
    error.add_note("while parsing the header")
    again = travelled(error, index=13, position=5)

    assert again.__notes__ == [
        "while parsing the header",
        "while loading sample index=13 (position 5 of epoch 0, worker 1)",
    ]


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (5, "index=5"),
        ("a/b.jpg", "index='a/b.jpg'"),
        ((1, 2), "index=(1, 2)"),
        (list(range(1000)), "index=[0, 1, 2, 3, 4, 5, ...]"),
    ],
    ids=["int", "text", "tuple", "a whole batch"],
)
def test_the_index_is_shown_and_kept_short(index: Any, shown: str) -> None:
    """Whatever it is."""
    assert shown in travelled(ValueError("x"), index=index).__notes__[0]


def test_an_index_that_cannot_travel_is_shown_all_the_same() -> None:
    """It is only text on the other side."""
    lock = threading.Lock()

    assert "lock" in travelled(ValueError("x"), index=lock).__notes__[0]


def test_within_one_process_the_exception_is_the_one_that_was_raised() -> None:
    """Threads and inline need no copy: same object, same traceback."""
    error = raised(Holding("x"))

    again = Failure.of(error, "loading sample", index=1).exception("inline")

    assert again is error
    assert again.__traceback__ is not None
    assert again.__notes__ == ["while loading sample index=1 (inline)"]


@pytest.mark.parametrize("error", [StopIteration(5), StopAsyncIteration()], ids=["StopIteration", "StopAsyncIteration"])
@pytest.mark.parametrize("from_worker", [True, False], ids=["process", "inline"])
def test_the_end_of_an_iteration_does_not_end_the_epoch_in_silence(error: Exception, from_worker: bool) -> None:
    """Raised in the user's loop it would look like the end of the data."""
    again = travelled(error) if from_worker else Failure.of(raised(error), "loading sample").exception("inline")

    assert type(again) is RuntimeError
    assert f"{type(error).__name__} was raised while loading sample" in str(again)
    assert isinstance(again.__cause__, type(error))
