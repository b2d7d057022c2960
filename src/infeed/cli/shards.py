"""``infeed index`` and ``infeed pack``: build and check an index of shards; write shards."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from infeed.cli.arguments import complain
from infeed.formatting import format_count

__all__ = ["add_parsers", "index", "pack"]

_USAGE: Final = 2
_FAILED: Final = 1


def add_parsers(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "index",
        help="build and check the index of tar shards or Parquet files",
        description="Indexes shards for infeed.open, and stores the index beside them, including on object storage.",
    )
    parser.add_argument("pattern", nargs="+", help="paths, folders or URLs, with {000..127} and globs (in quotes)")
    parser.add_argument("--index", metavar="FOLDER", help="folder or URL prefix for the index (default: beside the shards)")
    parser.add_argument("--format", choices=("tar", "parquet"), help="format of the shards (default: from the extension)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="storage option, such as endpoint=http://host:9000"
    )
    parser.set_defaults(run=index)
    parser = commands.add_parser(
        "pack",
        help="write tar shards from a folder of files or a dataset",
        description="Writes tar shards in WebDataset's conventions. After an interruption, run it again to continue.",
    )
    parser.add_argument("source", help="a folder, in which 0001.jpg and 0001.cls are one sample; or module:dataset")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--shard-size", default="1GB", metavar="SIZE", help="size of a shard (default: 1GB)")
    parser.add_argument("--prefix", default="shard", help="prefix of the shards' file names (default: shard)")
    parser.set_defaults(run=pack)


def index(arguments: argparse.Namespace) -> int:
    """Index shards, and print what they contain."""
    from infeed.data.opening import build_index
    from infeed.errors import ConfigError, ShardError, StorageError

    options = dict(option.partition("=")[::2] for option in arguments.option)
    try:
        dataset, where = build_index(arguments.pattern, arguments.format, arguments.index, options or None)
    except (ConfigError, ShardError, StorageError) as error:
        return complain("index", str(error), _USAGE if isinstance(error, ConfigError) else _FAILED)
    samples, shards = format_count(len(dataset), "sample"), format_count(len(dataset.urls), "shard")
    print(f"{samples} in {shards}; columns: {', '.join(dataset.columns)}")
    print(f"index: {where or 'up to date'}")
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Write shards, and print how many."""
    from infeed.errors import InfeedError
    from infeed.memory.limits import parse_bytes

    try:
        shard_bytes = parse_bytes(arguments.shard_size, "--shard-size")
        packed = _pack(arguments.source, Path(arguments.out), arguments.prefix, shard_bytes)
    except (InfeedError, OSError) as error:
        return complain("pack", str(error), _FAILED)
    resumed = f", {packed.resumed_samples:,} of them in an earlier run" if packed.resumed_samples else ""
    samples, shards = format_count(packed.samples, "sample"), format_count(packed.shards, "shard")
    print(f"wrote {samples} to {shards} in {arguments.out}{resumed}")
    if packed.skipped_files:
        print(
            f"skipped {format_count(packed.skipped_files, 'file')}: hidden, without an extension, or in a folder such as __x__"
        )
    print(f"open them with infeed.open({arguments.out!r})")
    return 0


def _pack(source: str, out: Path, prefix: str, shard_bytes: int) -> Any:
    from infeed.data.pack import PackResult, check_resumed, samples_of_dataset, samples_of_folder, write_shards, written_shards
    from infeed.doctor import targets

    done, count, last = written_shards(out, prefix)
    samples: Iterable[Any]
    skipped_count = 0
    if not Path(source).is_dir() and targets.names_dataset(source):
        dataset = targets.load_dataset(source)
        total = len(dataset)
        samples = samples_of_dataset(dataset, count)
        expected = f"{count - 1:09d}" if count else None
    else:
        found, skipped_count = samples_of_folder(Path(source), out)
        total, samples = len(found), islice(found, count, None)
        expected = found[count - 1].key if 0 < count <= total else None
    check_resumed(out, last, expected)
    number = len(done) - 1
    for number in _shown(write_shards(samples, out, prefix, shard_bytes, len(done)), count, total):  # noqa: B007
        pass
    return PackResult(number + 1, total, count, skipped_count)


def _shown(numbers: Iterator[int], start: int, total: int) -> Iterator[int]:
    """Show a progress bar in a terminal, if tqdm is installed."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(numbers, initial=start, total=total, desc="packing", unit="sample")
            return
    yield from numbers
