"""The ``infeed`` command: parses arguments and calls one module per subcommand.

Importing this package imports no Pillow, tqdm, rich or torch: each subcommand imports its dependencies when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from infeed import __version__
from infeed.cli import bench, demo, doctor, run, shards
from infeed.cli.arguments import replacing

__all__ = ["main"]

# Exit codes by shell convention: wrong usage, and 128 + SIGINT.
_USAGE: Final = 2
_INTERRUPTED: Final = 130
_EPILOG: Final = """\
examples:
  infeed demo                                   compare infeed with torch on generated images
  infeed run train.py --epochs 3                run a PyTorch program with infeed's workers, without changes
  infeed run -m package.train                   the same for a module
  infeed doctor train.py                        find problems in its data loading
  infeed doctor -v --html report.html train.py  the same with all evidence, and as an HTML report
  infeed bench data:train_set --batch-size 64   find the best worker settings for a dataset
  infeed pack images/ shards/ --shard-size 1GB  write tar shards from a folder of files
  infeed index "s3://bucket/{000..127}.tar"     index shards for infeed.open

help for one command: infeed COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: The arguments without the program's name; ``None`` uses ``sys.argv``.

    Raises:
        SystemExit: The arguments are invalid (code 2), or request help or the version (code 0).
    """
    parser = argparse.ArgumentParser(
        prog="infeed",
        description="A parallel data loader for deep learning.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"infeed {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    run.add_parser(commands)
    doctor.add_parser(commands)
    bench.add_parser(commands)
    demo.add_parser(commands)
    shards.add_parsers(commands)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return _USAGE
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        if command is run.run:  # leave the program's stdout and stderr unchanged; `run` itself prints only plain words
            return command(arguments)
        with replacing():
            return command(arguments)
    except KeyboardInterrupt:
        print(f"infeed {arguments.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
