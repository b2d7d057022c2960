"""``infeed run``: runs an unmodified PyTorch program with infeed instead of torch's data loading."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

from infeed.cli.arguments import complain, program_of
from infeed.programs.children import carry_into_commands, install_when_imported
from infeed.programs.script import exit_code_of, run_module, run_script, show_error
from infeed.workers.preload import start_for_module, start_for_program

__all__ = ["add_parser", "run"]

_FAILED: Final = 1


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a PyTorch program with infeed instead of torch's data loading",
        description="Runs a program without changes, as `python` would, with torch's DataLoader on infeed's engine.",
        usage="infeed run [-m] program [arguments ...]",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="program is a module, as with `python -m`")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script, or with -m a module, and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the program and return its exit code; print a summary to standard error at the end."""
    program = program_of(arguments.program)
    if not program:
        return complain("run", "missing program; pass a script or -m MODULE; for example: infeed run train.py --epochs 3")
    if not arguments.is_module and not Path(program[0]).is_file():
        return complain("run", f"{program[0]!r} is not a file; pass a script, or a module with -m")
    install_when_imported()
    carry_into_commands()
    pid = os.getpid()
    try:
        if arguments.is_module:
            run_module(program, start_for_module)
        else:
            run_script(program, start_for_program)
    except SystemExit as leaving:
        return exit_code_of(leaving)
    except Exception as error:
        show_error(error, [__file__])
        return _FAILED
    finally:
        if os.getpid() == pid:  # a child that the program forked reaches this line too
            sys.stdout.flush()
            print(f"infeed: {_summary()}", file=sys.stderr)
    return 0


def _summary() -> str:
    tally: Any = sys.modules.get("infeed.torch.summary")
    if tally is None and "torch" in sys.modules:
        return (
            "torch was imported without infeed's import hook, so all loaders ran on torch's own workers; call "
            "infeed.torch.install() after importing torch"
        )
    return str(tally.TALLY) if tally is not None and tally.TALLY else "the main process iterated no torch DataLoader"
