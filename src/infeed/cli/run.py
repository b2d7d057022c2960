"""``infeed run``: a PyTorch program, unchanged, with infeed in the place of torch's data loading."""

import argparse
import importlib
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from infeed.importing import when_imported

__all__ = ["add_parser", "run"]

_FAILED: Final = 1
_USAGE: Final = 2


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a PyTorch program with infeed in place of torch's data loading",
        description="Runs a program unchanged, as `python` would, with torch's DataLoader on infeed's engine.",
        usage="infeed run [-m] program [arguments ...]",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="program is a module, as with `python -m`")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script, or with -m a module, and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the program; its exit code is ours, and what infeed did is said on standard error at the end."""
    program: list[str] = arguments.program
    if not program:
        print("infeed run: name a script, or -m and a module; for example: infeed run train.py --epochs 3", file=sys.stderr)
        return _USAGE
    if not arguments.is_module and not Path(program[0]).is_file():
        print(f"infeed run: {program[0]!r} is not a file; name a script, or a module with -m", file=sys.stderr)
        return _USAGE
    when_imported("torch", _install)
    # By itself too: it imports torch while it is being imported, and then it is too late to wait for it.
    when_imported("torchdata.stateful_dataloader", _install)
    try:
        if arguments.is_module:
            _run_module(program)
        else:
            _run_script(program)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except Exception as error:
        # As without us: the program's own frames, and not those that led to it.
        traceback = error.__traceback__
        while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return _FAILED
    finally:
        sys.stdout.flush()
        print(f"infeed: {_summary()}", file=sys.stderr)
    return 0


def _run_script(program: Sequence[str]) -> None:
    path = program[0]
    sys.argv = list(program)
    sys.path[0] = str(Path(path).resolve().parent)
    # A module of its own that stays: threads and exit handlers of the program may need it until the very end.
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]  # as Python sets it
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, module.__dict__)


def _run_module(program: Sequence[str]) -> None:
    sys.argv = list(program)
    sys.path[0] = os.getcwd()
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


def _install() -> None:
    installing: Any = importlib.import_module("infeed.torch.installing")
    installing.install()


def _summary() -> str:
    tally: Any = sys.modules.get("infeed.torch.tally")
    if tally is None or not (tally.TALLY.loader_count or tally.TALLY.refused):
        return "the program iterated no torch DataLoader"
    return str(tally.TALLY)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return _FAILED


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename == runpy.__file__ or filename == "<frozen runpy>"
