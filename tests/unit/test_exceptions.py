"""User exceptions on their way from a worker to the training loop."""

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
    """Has state that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Shown(KeyError):
    """Has its own `__str__`."""

    def __str__(self) -> str:
        return "shown otherwise"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Changing(Exception):
    """Pickles to an object of another type."""

    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class Impossible(Exception):
    """Neither it nor a stand-in can be created."""

    def __new__(cls, *args: Any) -> "Impossible":
        if args != ("first",):
            raise RuntimeError("only once")
        return super().__new__(cls, *args)

    def __init_subclass__(cls) -> None:
        raise RuntimeError("not derived from")

    def __reduce__(self) -> Any:
        raise RuntimeError("not pickled")


def raised(error: BaseException) -> BaseException:
    """Returns the same exception with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def transferred(error: BaseException, **place: Any) -> BaseException:
    """Returns the exception as it arrives from another process."""
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
def test_an_exception_arrives_with_its_type_and_message(error: BaseException) -> None:
    """Except clauses work as without workers, whatever the constructor needs and the instance holds."""
    again = transferred(error)

    assert isinstance(again, type(error))
    assert type(again).__name__ == type(error).__name__
    assert str(again) == str(error)


def test_an_exception_that_can_be_rebuilt_keeps_type_and_attributes() -> None:
    """It is no stand-in and has its attributes and arguments."""
    error = FileNotFoundError(2, "No such file", "a.jpg")
    error.extra = [1, 2]  # type: ignore[attr-defined]

    again = transferred(error)

    assert type(again) is FileNotFoundError
    assert (again.errno, again.filename, again.extra) == (2, "a.jpg", [1, 2])  # type: ignore[attr-defined]


def test_a_class_of_a_script_arrives_as_that_class() -> None:
    """Classes of __main__ are pickled by value, and the user's except clause catches them."""

    class Local(Exception):
        pass

    assert isinstance(transferred(Local("x")), Local)


def test_an_exception_with_a_failing_str_arrives() -> None:
    """Its own __str__ raises; the message says so, or the user's call raises."""
    again = transferred(Mute())

    assert isinstance(again, Mute | SampleError)
    assert again.__notes__


def test_an_exception_that_cannot_be_created_becomes_a_sample_error_with_its_name() -> None:
    """The last resort still says what it was."""
    again = transferred(Impossible("first"))

    assert type(again) is SampleError
    assert str(again) == "Impossible: first"


def test_the_traceback_of_the_worker_is_the_cause() -> None:
    """The user sees the line in the dataset."""
    again = transferred(ValueError("bad"))
    shown = "".join(traceback.format_exception(again))

    assert "raise error" in str(again.__cause__)
    assert "test_exceptions.py" in shown
    assert "direct cause" in shown


def test_the_exceptions_own_cause_is_in_the_traceback() -> None:
    """The chain of `raise ... from` is kept."""
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))

    assert "KeyError: 'inner'" in str(transferred(error).__cause__)


@pytest.mark.parametrize("error", [ValueError("x"), Needy("a", 1)], ids=["rebuilt", "stand-in"])
def test_notes_are_kept_and_the_location_is_added(error: BaseException) -> None:
    """The user's notes first, each once, then the sample and its position."""
    error.add_note("while parsing the header")
    again = transferred(error, index=13, position=5)

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
def test_the_index_is_shown_and_shortened(index: Any, shown: str) -> None:
    """For any type of index."""
    assert shown in transferred(ValueError("x"), index=index).__notes__[0]


def test_an_index_that_cannot_be_pickled_is_shown() -> None:
    """On the other side it is only text."""
    lock = threading.Lock()

    assert "lock" in transferred(ValueError("x"), index=lock).__notes__[0]


def test_within_one_process_the_exception_is_the_same_object() -> None:
    """Threads and the main process need no copy: same object, same traceback."""
    error = raised(Holding("x"))

    again = Failure.of(error, "loading sample", index=1).exception("inline")

    assert again is error
    assert again.__traceback__ is not None
    assert again.__notes__ == ["while loading sample index=1 (inline)"]


@pytest.mark.parametrize("error", [StopIteration(5), StopAsyncIteration()], ids=["StopIteration", "StopAsyncIteration"])
@pytest.mark.parametrize("from_worker", [True, False], ids=["process", "inline"])
def test_stop_iteration_does_not_end_the_epoch(error: Exception, from_worker: bool) -> None:
    """Raised in the training loop it would look like the end of the data."""
    again = transferred(error) if from_worker else Failure.of(raised(error), "loading sample").exception("inline")

    assert type(again) is RuntimeError
    assert f"{type(error).__name__} was raised while loading sample" in str(again)
    assert isinstance(again.__cause__, type(error))
