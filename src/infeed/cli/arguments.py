"""Arguments of commands: numbers, and output files whose paths are checked before the work starts; plain terminals."""

import argparse
import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

__all__ = ["Output", "complain", "count", "find_problem", "program_of", "replacing", "seconds", "workers"]

# Replacements for outputs that can encode only ASCII or Latin-1.
_PLAIN: Final = {"µ": "u", "█": "#", "…": "..."}
_HANDLER: Final = "infeed-plain"


@final
class Output:
    """Destination of a result, from a command-line option: a file, standard output (``-``), or none.

    Args:
        option: the option's name, for error messages.
        where: the option's value.
        may_print: whether ``-`` means standard output.
    """

    def __init__(self, option: str, where: str | None, *, may_print: bool = False) -> None:
        self._option = option
        self._where = where
        self.is_wanted = bool(where)
        self.is_stdout = may_print and where == "-"
        # Resolve the path now: user code of the dataset may change the working directory.
        self._path = Path(where).absolute() if where and not self.is_stdout else None

    def problem(self) -> str:
        """Return why the file cannot be written, as far as this is known without writing it."""
        if self._where == "":
            return f"{self._option} needs a file name"
        if self._path is None:
            return ""
        if self._path.is_dir():
            return self._error("it is a folder; pass a file name")
        if not self._path.parent.is_dir():
            return self._error(f"folder {str(self._path.parent)!r} does not exist; create it, or pass another")
        if not os.access(self._path if self._path.exists() else self._path.parent, os.W_OK):
            return self._error("permission denied; pass another file")
        return ""

    def write(self, text: str) -> str:
        """Write the text. Return an error message, or an empty string on success."""
        if self._path is None:
            sys.stdout.write(text)
            return ""
        try:
            self._path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return self._error(error.strerror or str(error))
        return ""

    def _error(self, why: str) -> str:
        return f"{self._option} {self._where} cannot be written: {why}"


def complain(command: str, text: str, code: int = 2) -> int:
    """Print an error of a subcommand to standard error and return the exit code; by default, that of wrong usage."""
    print(f"infeed {command}: {text}", file=sys.stderr)
    return code


def find_problem(outputs: list[Output]) -> str:
    """Return the first problem of these outputs, or an empty string."""
    return next((problem for one in outputs if (problem := one.problem())), "")


def program_of(words: list[str]) -> list[str]:
    """Return a program and its arguments without the ``--`` that may precede them."""
    return words[1:] if words[:1] == ["--"] else words


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _at_least(1, text)


def workers(text: str) -> int:
    """Parse a number of workers, at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an int, at least {least}")
    return int(text)


@contextmanager
def replacing() -> Iterator[None]:
    """Make standard output and error replace characters that they cannot encode, instead of raising."""
    codecs.register_error(_HANDLER, _replace)
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, io.TextIOWrapper)]
    before = [(one, one.errors) for one in streams]
    for one in streams:
        one.reconfigure(errors=_HANDLER)
    try:
        yield
    finally:
        for one, errors in before:
            with suppress(OSError, ValueError):  # reconfigure flushes, and the pipe may be closed
                one.reconfigure(errors=errors)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end
