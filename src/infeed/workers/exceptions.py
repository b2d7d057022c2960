"""The user's exceptions, carried from a worker to the user's loop as what they are.

An exception crosses a process in one of two forms. If it can be pickled and built again, it is. If not (a constructor with
other arguments than ``args``, state that cannot travel), its class is, and the user gets an instance of a subclass of it with
the same text. Either way ``except`` clauses work as they do without workers, the worker's traceback is its cause, and a note
says which sample it was.
"""

from __future__ import annotations

import pickle
import reprlib
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import cloudpickle

from infeed.errors import SampleError

# Letters of an error's text that are shown where many are listed.
_LINE: Final = 200
# What a worker does before it is ready; what goes wrong then is about the dataset's way here, not about its samples.
BUILDING: Final = "building the dataset in a worker"


class WorkerTraceback(Exception):
    """The cause of an exception that was raised in a worker: the traceback there, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def kept(error: Exception) -> Exception:
    """An exception that waits for its turn. Its frames hold the iteration, which would never end, so they are kept as text."""
    if error.__cause__ is None:
        import traceback  # takes a while to import, and most workers never fail

        error.__cause__ = WorkerTraceback("".join(traceback.format_exception(error)))
    return error.with_traceback(None)


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a worker, and at which sample."""

    error: BaseException | None  # as raised; only within one process
    kind: str
    text: str
    trace: str
    doing: str  # "loading sample", "collating", "worker_init_fn"
    index: str | None = None  # as it is shown; the index itself may be anything and need not travel
    position: int | None = None
    pickled: bytes | None = None  # the exception
    pickled_class: bytes | None = None
    notes: tuple[str, ...] = field(default=())

    @staticmethod
    def of(error: BaseException, doing: str, *, index: Any = None, position: int | None = None) -> Failure:
        # Short: the index may be a list of all the batch's.
        shown = None if index is None else reprlib.repr(index)
        return Failure(error, type(error).__name__, text_of(error), "", doing, shown, position)

    @property
    def line(self) -> str:
        """Kind and text in one short line."""
        first = self.text.strip().splitlines()[:1]
        return f"{self.kind}: {first[0][:_LINE]}" if first else self.kind

    def packed(self) -> Failure:
        """The same, fit to travel to another process."""
        error = self.error
        assert error is not None
        import traceback  # takes a while to import, and most workers never fail

        trace = "".join(traceback.format_exception(error))
        notes = tuple(map(str, getattr(error, "__notes__", ())))
        pickled = _pickle_exception(error)
        pickled_class = None if pickled else _pickle_class(type(error))
        return replace(self, error=None, trace=trace, pickled=pickled, pickled_class=pickled_class, notes=notes)

    def exception(self, place: str) -> BaseException:
        """The exception to raise in the user's loop. ``place`` tells which batch and worker."""
        error = self.error
        if error is None:
            error = self._rebuilt()
            error.__cause__ = WorkerTraceback(self.trace)
            for note in self.notes:
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
        if isinstance(error, StopIteration | StopAsyncIteration):
            # Raised in the user's loop it would end the epoch in silence.
            ended, error = error, RuntimeError(f"{type(error).__name__} was raised while {self._what()}")
            error.__cause__ = ended
        error.add_note(f"while {self._what()} ({place})")
        return error

    def _what(self) -> str:
        return self.doing if self.index is None else f"{self.doing} index={self.index}"

    def _rebuilt(self) -> BaseException:
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # it built in the worker, but not here
                pass
            else:
                if isinstance(error, BaseException):
                    return error
        if self.pickled_class is not None:
            try:
                return _stand_in(pickle.loads(self.pickled_class), self.text)
            except Exception:  # a class that cannot be derived from or instantiated
                pass
        return SampleError(f"{self.kind}: {self.text}")


def text_of(error: BaseException) -> str:
    """The text of an exception, whatever its ``__str__`` does."""
    try:
        return str(error)
    except Exception:  # the user's own __str__
        return f"<{type(error).__name__} whose text cannot be read>"


def _pickle_exception(error: BaseException) -> bytes | None:
    # Built again here once: many exceptions pickle well and then fail to unpickle, or come back as something else.
    try:
        data: bytes = cloudpickle.dumps(error)
        again = pickle.loads(data)
        return data if type(again) is type(error) and text_of(again) == text_of(error) else None
    except Exception:  # the user's __reduce__ and __init__ may raise anything
        return None


def _pickle_class(cls: type[BaseException]) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(cls)
        return data
    except Exception:  # a class that holds something that cannot travel
        return None


def _stand_in(cls: type[BaseException], text: str) -> BaseException:
    def show(_self: BaseException) -> str:
        return text

    body = {"__str__": show, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    stand_in = type(cls.__name__, (cls,), body)
    error = stand_in.__new__(stand_in, text)
    assert isinstance(error, BaseException)
    error.args = (text,)
    return error
