"""Runs a user's program in this interpreter as ``python`` would."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from infeed.errors import InfeedError

_FAILED: Final = 1


def run_script(program: Sequence[str], ahead: Callable[[str], None] | None = None) -> None:
    """Run a script with its arguments; its exceptions propagate.

    Args:
        ahead: called with the script's path just before it runs, when the interpreter is set up for the script.
    """
    path = program[0]
    sys.argv = list(program)
    sys.path[0] = str(Path(path).resolve().parent)
    # Keep the module in sys.modules: threads and exit handlers of the program may need it until the process ends.
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]  # as Python sets it
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec")
    if ahead is not None:
        ahead(path)
    exec(code, module.__dict__)


def run_module(program: Sequence[str], ahead: Callable[[str], None] | None = None) -> None:
    """Run a module with its arguments, as ``python -m`` does; calls ``ahead`` with the module's name before that."""
    sys.argv = list(program)
    sys.path[0] = os.getcwd()
    if ahead is not None:
        ahead(program[0])
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


def exit_code_of(leaving: SystemExit) -> int:
    """Return the exit code of a ``SystemExit``; print a text code to standard error, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return _FAILED


def describe_error(error: BaseException) -> str:
    """Format an error in one line, with its type unless it is infeed's, and with the failing sample if known."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, InfeedError):
        return lines[0]
    # torch's message contains the worker's whole traceback; its last line is the original exception.
    if lines[0].startswith("Caught ") and "Original Traceback" in str(error):
        return f"{lines[-1]}, in a worker"
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ())[:1] if note.startswith("while loading"))
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ") + where


def show_error(error: BaseException, ours: Collection[str]) -> None:
    """Print an exception as Python would, without the frames of infeed that lead to the program's own.

    Args:
        ours: files whose frames are omitted, besides this one.
    """
    hidden = {__file__, runpy.__file__, "<frozen runpy>", *ours}
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in hidden:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
