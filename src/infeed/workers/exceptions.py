"""Transfer exceptions of user code from a worker to the training loop with their original type.

If the exception survives a pickle round trip, the exception itself is sent. If not (a constructor whose arguments differ from
``args``, state that cannot be pickled), its class is sent, and an instance of a subclass with the same text is raised. Either
way ``except`` clauses work as without workers, the worker's traceback is the cause, and a note names the sample.
"""

from __future__ import annotations

import pickle
import reprlib
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import cloudpickle

from infeed.errors import SampleError

# Maximum length of an error text in a list of errors.
_LINE: Final = 200
# Used for failures at worker start-up: they concern the transfer of the dataset to the worker, not its samples.
BUILDING: Final = "building the dataset in a worker"


class WorkerTraceback(Exception):
    """The traceback in the worker, as text; set as the cause of an exception that was raised there."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def kept(error: Exception) -> Exception:
    """Prepare an exception that is raised later.

    Its frames reference the iterator, which could then never be freed, so the traceback is kept as text.
    """
    if error.__cause__ is None:
        import traceback  # slow to import, and most workers never fail

        error.__cause__ = WorkerTraceback("".join(traceback.format_exception(error)))
    return error.with_traceback(None)


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a worker, and the sample or step that raised it."""

    error: BaseException | None  # the original; only within one process
    kind: str
    text: str
    trace: str
    doing: str  # "loading sample", "collating", "worker_init_fn"
    index: str | None = None  # its repr: the index may be any object and need not be picklable
    position: int | None = None
    pickled: bytes | None = None  # the exception
    pickled_class: bytes | None = None
    notes: tuple[str, ...] = field(default=())

    @staticmethod
    def of(error: BaseException, doing: str, *, index: Any = None, position: int | None = None) -> Failure:
        # Shortened: the index may be a list of all indices of the batch.
        shown = None if index is None else reprlib.repr(index)
        return Failure(error, type(error).__name__, text_of(error), "", doing, shown, position)

    @property
    def line(self) -> str:
        """The exception type and its text in one short line."""
        first = self.text.strip().splitlines()[:1]
        return f"{self.kind}: {first[0][:_LINE]}" if first else self.kind

    def packed(self) -> Failure:
        """Return a copy that can be pickled."""
        error = self.error
        if error is None:
            return self
        import traceback  # slow to import, and most workers never fail

        trace = "".join(traceback.format_exception(error))
        notes = tuple(map(str, getattr(error, "__notes__", ())))
        pickled = _pickle_exception(error)
        pickled_class = None if pickled else _pickle_class(type(error))
        return replace(self, error=None, trace=trace, pickled=pickled, pickled_class=pickled_class, notes=notes)

    def exception(self, place: str) -> BaseException:
        """Return the exception to raise in the training loop. ``place`` names the batch and the worker."""
        error = self.error
        if error is None:
            error = self._rebuilt()
            error.__cause__ = WorkerTraceback(self.trace)
            for note in self.notes:
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
        if isinstance(error, StopIteration | StopAsyncIteration):
            # Raised in the training loop, it would end the epoch silently.
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
            except Exception:  # it can be unpickled in the worker, but not here
                pass
            else:
                if isinstance(error, BaseException):
                    return error
        if self.pickled_class is not None:
            try:
                return _stand_in(pickle.loads(self.pickled_class), self.text)
            except Exception:  # a class that cannot be subclassed or instantiated
                pass
        return SampleError(f"{self.kind}: {self.text}")


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # user-defined __str__
        return f"<{type(error).__name__} whose text cannot be read>"


def _pickle_exception(error: BaseException) -> bytes | None:
    # Test the round trip here: many exceptions can be pickled but fail to unpickle, or change their type or text.
    try:
        data: bytes = cloudpickle.dumps(error)
        again = pickle.loads(data)
        return data if type(again) is type(error) and text_of(again) == text_of(error) else None
    except Exception:  # user-defined __reduce__ and __init__ may raise anything
        return None


def _pickle_class(cls: type[BaseException]) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(cls)
        return data
    except Exception:  # a class that references an object that cannot be pickled
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
