"""``infeed demo``: loads the same images with every kind of worker and prints a comparison table.

Creates a folder of JPEG files in a temporary directory. Loads it in the main process, with threads, with processes, and with
torch's DataLoader if torch is installed. The folder is always deleted at the end.

This module imports only the standard library and infeed; the demo checks for Pillow, tqdm, rich and torch when it runs.
"""

import argparse
import importlib
import importlib.util
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final

from infeed.cli import numbers
from infeed.formatting import format_count, format_seconds
from infeed.memory.limits import available_cores

if TYPE_CHECKING:
    from infeed.cli.pictures import PictureFolder

__all__ = ["DemoOptions", "Timing", "add_parser", "measure", "run"]

# Any loader: infeed's and torch's have the same interface here but no common type.
Loader: TypeAlias = Any
OpenLoader: TypeAlias = Callable[[], AbstractContextManager[Loader]]

# Packages of the `demo` extra: import name and PyPI name.
_NEEDED: Final = {"PIL": "Pillow", "tqdm": "tqdm", "rich": "rich"}
# With more workers, process start-up would dominate the demo's few hundred images.
_MAX_DEFAULT_WORKERS: Final = 8
_FAILED: Final = 2
_END: Final[Any] = object()


@final
@dataclass(frozen=True)
class DemoOptions:
    """Command-line options of the demo; each is at least 1."""

    pictures: int
    workers: int
    batch_size: int
    epochs: int


@final
@dataclass(frozen=True)
class Timing:
    """Times of one loader, measured from before its creation, so they include worker start-up."""

    loader: str
    image_count: int
    total_s: float
    first_batch_s: float
    waited_s: float

    @property
    def images_per_s(self) -> float:
        return self.image_count / self.total_s

    @property
    def waited_share(self) -> float:
        return self.waited_s / self.total_s


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand and its options to ``commands``."""
    parser = commands.add_parser(
        "demo",
        help="see it work, on pictures that it makes itself",
        description="Load a folder of JPEG pictures with each kind of worker, and compare.",
    )
    workers = min(max(1, int(available_cores())), _MAX_DEFAULT_WORKERS)
    for option, default, text in (
        ("--pictures", 640, "how many pictures to make"),
        ("--workers", workers, "threads or processes that load"),
        ("--batch-size", 32, "pictures in one batch"),
        ("--epochs", 4, "how often to read all pictures"),
    ):
        parser.add_argument(option, type=numbers.count, default=default, metavar="N", help=f"{text} (default here: {default})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code."""
    absent = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if absent:
        print(f"infeed demo needs {', '.join(absent)}; install with: pip install infeed[demo]", file=sys.stderr)
        return _FAILED
    options = DemoOptions(arguments.pictures, arguments.workers, arguments.batch_size, arguments.epochs)
    with tempfile.TemporaryDirectory(prefix="infeed-demo-") as folder:
        _compare(options, Path(folder))
    return 0


def measure(
    name: str,
    open_loader: OpenLoader,
    epochs: int,
    on_batch: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Read all batches of a loader and measure how long the training loop worked and waited.

    Everything outside the loop body counts as waiting: creating the loader, worker start-up, the gap between two epochs.
    Closing the loader does not count.

    Args:
        name: The loader's name in the table.
        open_loader: Creates the loader; called once, inside the measured time.
        epochs: Number of epochs.
        on_batch: Called after each batch with its number of images.
        clock: Returns seconds from an arbitrary start.
    """
    image_count = 0
    waited_s = 0.0
    first_batch_s = 0.0
    start = asked = clock()
    with open_loader() as loader:
        for _ in range(epochs):
            batches = iter(loader)
            while (batch := next(batches, _END)) is not _END:
                got = clock()
                waited_s += got - asked
                if not image_count:
                    first_batch_s = got - start
                batch_images = batch[0]
                _work_on(batch_images)
                image_count += len(batch_images)
                on_batch(len(batch_images))
                # Release the batch before waiting: a loader may reuse its memory only after the batch is dropped.
                del batch, batch_images
                asked = clock()
        end = clock()
    return Timing(name, image_count, end - start, first_batch_s, waited_s + end - asked)


def _compare(options: DemoOptions, folder: Path) -> None:
    from infeed.cli.pictures import PictureFolder, make_pictures

    bar_type = _make_bar_type()

    def show_bar(title: str, total: int) -> Any:
        return bar_type(total=total, desc=f"{title:<17}", unit="img")

    def time_loader(title: str, open_loader: OpenLoader) -> Timing:
        with show_bar(title, options.pictures * options.epochs) as bar:
            return measure(title, open_loader, options.epochs, bar.update)

    with show_bar("making pictures", options.pictures) as bar:
        for _ in make_pictures(folder, options.pictures):
            bar.update()
    dataset = PictureFolder(folder)
    timings = [
        time_loader("infeed, inline", partial(_open_infeed, dataset, options, "inline")),
        time_loader("infeed, threads", partial(_open_infeed, dataset, options, "thread")),
        time_loader("infeed, processes", partial(_open_infeed, dataset, options, "process")),
    ]
    notes = [_describe(options)]
    if importlib.util.find_spec("torch") is None:
        notes.append("torch is not installed, so there is no row for its DataLoader")
    else:
        importlib.import_module("torch.utils.data")  # outside the measured time
        try:
            timings.append(time_loader("torch DataLoader", partial(_open_torch, dataset, options)))
        except RuntimeError as error:
            # Usually a container whose /dev/shm is too small for torch's batches. infeed's rows are still valid.
            notes.append(f"torch's DataLoader failed: {str(error).splitlines()[0]}")
    _print_table(timings, notes)


def _open_infeed(
    dataset: "PictureFolder", options: DemoOptions, worker: Literal["inline", "thread", "process"]
) -> AbstractContextManager[Loader]:
    import infeed

    return infeed.DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=0 if worker == "inline" else options.workers,
        worker=worker,
        seed=0,
    )


def _open_torch(dataset: "PictureFolder", options: DemoOptions) -> AbstractContextManager[Loader]:
    from torch.utils.data import DataLoader

    from infeed.cli.pictures import TorchPictures

    # torch accepts any object with these two methods, but its annotations require a subclass.
    samples: Any = TorchPictures(dataset)
    return nullcontext(DataLoader(samples, batch_size=options.batch_size, shuffle=True, num_workers=options.workers))


def _work_on(images: Any) -> None:
    """Simulate training: compute the mean of each channel, which reads every value of the batch."""
    import numpy as np

    # Convert torch tensors too: torch's mean would use several threads and take CPU time from the workers.
    np.asarray(images).mean(axis=(0, 2, 3))


def _make_bar_type() -> Any:
    """Return tqdm's bar class without its monitor thread and its multiprocessing lock.

    torch forks while a bar is shown, so neither may exist then; neither should remain after the demo.
    """
    from tqdm import tqdm

    bar_type: Any = type("DemoBar", (tqdm,), {"monitor_interval": 0})
    bar_type.set_lock(threading.RLock())
    return bar_type


def _print_table(timings: Sequence[Timing], notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("loader", "images/s", "first batch", "loop waited"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", overflow="fold")
    for timing in timings:
        table.add_row(
            timing.loader,
            f"{timing.images_per_s:,.0f}",
            format_seconds(timing.first_batch_s),
            f"{format_seconds(timing.waited_s)} ({timing.waited_share:.0%})",
        )
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _describe(options: DemoOptions) -> str:
    counted = (
        (available_cores(), "core"),
        (options.workers, "worker"),
        (options.pictures, "picture"),
        (options.epochs, "epoch"),
    )
    parts = [format_count(count, noun) for count, noun in counted]
    parts.insert(2, f"batch size {options.batch_size}")
    return f"{', '.join(parts)}; {platform.system()}, Python {platform.python_version()}"
