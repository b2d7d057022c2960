"""``infeed demo``: loads the same images with every kind of worker and with torch, and writes a report of the run.

Creates a folder of JPEG files in a temporary directory and deletes it at the end. Loads the images in the main process, with
threads, with processes, and with torch's DataLoader if torch is installed.

This module imports only the standard library and infeed; the demo checks for Pillow, tqdm, rich and torch when it runs.
"""

import argparse
import importlib
import importlib.util
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from infeed.autotune.capacity import WorkerKind
from infeed.cli import arguments as types
from infeed.cli.arguments import Output, complain
from infeed.cli.terminal import open_console, print_table
from infeed.formatting import format_count, format_seconds
from infeed.memory.limits import available_cores

if TYPE_CHECKING:
    from infeed.cli.demo_images import ImageFolder

__all__ = ["DemoOptions", "Timing", "add_parser", "measure", "run"]

# Any loader: infeed's and torch's have the same interface here but no common type.
Loader: TypeAlias = Any
OpenLoader: TypeAlias = Callable[[], AbstractContextManager[Loader]]

# Packages of the `demo` extra: import name and PyPI name.
_NEEDED: Final = {"PIL": "Pillow", "tqdm": "tqdm", "rich": "rich"}
# With more workers, process start-up would dominate the demo's few hundred images.
_MAX_DEFAULT_WORKERS: Final = 8
_complain: Final = partial(complain, "demo")
_END: Final[Any] = object()
_PROCESSES: Final = "infeed, processes"
_TORCH: Final = "torch DataLoader"
_NEXT: Final = """\
Next steps:
  infeed run train.py                     run your PyTorch program with infeed, without changes
  from infeed.torch import DataLoader     or change one import
  infeed doctor train.py                  find what slows down its data loading"""


@final
@dataclass(frozen=True)
class DemoOptions:
    """Command-line options of the demo; numbers are above 0."""

    images: int
    workers: int
    batch_size: int
    seconds: float


@final
@dataclass(frozen=True)
class Timing:
    """Times of one loader. The rate and the wait cover the time from the first batch on, without worker start-up time."""

    loader: str
    image_count: int
    seconds: float
    first_batch_s: float
    waited_s: float

    @property
    def images_per_s(self) -> float:
        return self.image_count / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        return self.waited_s / self.seconds if self.seconds else 0.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand and its options to ``commands``."""
    parser = commands.add_parser(
        "demo",
        help="compare infeed with torch on generated images",
        description="Loads generated JPEG images with each kind of worker and with torch's DataLoader, compares the "
        "throughput, and writes a report of the run.",
    )
    workers = min(max(1, int(available_cores())), _MAX_DEFAULT_WORKERS)
    for option, default, text in (
        ("--images", 640, "number of images to generate"),
        ("--workers", workers, "number of threads or processes"),
        ("--batch-size", 32, "images per batch"),
    ):
        parser.add_argument(option, type=types.count, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--seconds", type=types.seconds, default=4.0, help="measuring time per loader (default: 4)")
    parser.add_argument(
        "--report",
        metavar="FILE",
        default="infeed-demo.html" if importlib.util.find_spec("plotly") else "infeed-demo.json",
        help="report (.html) or timeline (.json, .png, .svg) to write (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code."""
    absent = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if absent:
        return _complain(f'missing packages: {", ".join(absent)}; install them with: pip install "infeed[demo]"')
    problem = Output("--report", arguments.report).problem()
    if problem:
        return _complain(problem)
    options = DemoOptions(arguments.images, arguments.workers, arguments.batch_size, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="infeed-demo-") as folder:
        return _compare(options, Path(folder), Path(arguments.report).absolute())


def measure(
    name: str,
    open_loader: OpenLoader,
    seconds: float,
    on_batch: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Iterate a loader, epoch after epoch, and measure its throughput and how long the training loop waits.

    The rate covers at least ``seconds`` after the first batch, up to the end of a batch. Time between epochs counts as waiting.

    Args:
        name: The loader's name in the table.
        open_loader: Creates the loader; called once, inside the time to the first batch.
        seconds: Measuring time.
        on_batch: Called after each batch with its number of images.
        clock: Returns seconds from an arbitrary start.
    """
    image_count = 0
    waited_s = first_batch_s = began = now = 0.0
    start = asked = clock()
    with open_loader() as loader:
        while not began or now - began < seconds:
            batches = iter(loader)
            while (batch := next(batches, _END)) is not _END:
                got = clock()
                if not began:
                    began, first_batch_s = got, got - start
                else:
                    waited_s += got - asked
                batch_images = batch[0]
                _work_on(batch_images)
                count = len(batch_images)
                on_batch(count)
                # Release the batch before waiting: a loader may reuse its memory only after the batch is dropped.
                del batch, batch_images
                asked = now = clock()
                image_count += count
                if now - began >= seconds:
                    break
    return Timing(name, image_count, now - began, first_batch_s, waited_s)


def _compare(options: DemoOptions, folder: Path, report: Path) -> int:
    from infeed.cli.demo_images import ImageFolder, make_images

    bar_type = _make_bar_type()

    def time_loader(title: str, open_loader: OpenLoader) -> Timing:
        with bar_type(desc=f"{title:<17}", unit="img") as bar:
            return measure(title, open_loader, options.seconds, bar.update)

    with bar_type(total=options.images, desc="generating images", unit="img") as bar:
        for _ in make_images(folder, options.images):
            bar.update()
    dataset = ImageFolder(folder)
    notes = [_describe(options)]
    timings = []
    loaders: list[Loader] = []
    kinds: dict[str, WorkerKind]
    kinds = {"infeed, no workers": "inline", "infeed, threads": "thread", _PROCESSES: "process"}
    for name, worker in kinds.items():
        timings.append(time_loader(name, partial(_open_infeed, dataset, options, worker, loaders)))
    if importlib.util.find_spec("torch") is None:
        notes.append("torch is not installed, so there is no row for its DataLoader.")
    else:
        importlib.import_module("torch.utils.data")  # outside the measured time
        try:
            with warnings.catch_warnings():  # about forks, which the user of the demo did not ask for
                warnings.simplefilter("ignore")
                timings.append(time_loader(_TORCH, partial(_open_torch, dataset, options)))
        except RuntimeError as error:
            # Usually a container whose /dev/shm is too small for torch's batches. infeed's rows are still valid.
            notes.append(f"torch's DataLoader failed: {str(error).splitlines()[0]}")
    _print_table(timings, [*notes, *_ranking(timings)])
    return _write_report(loaders[-1], report)


def _write_report(loader: Loader, path: Path) -> int:
    from infeed.errors import ConfigError

    try:
        (loader.report if path.suffix.lower() in (".html", ".htm") else loader.timeline)(path)
    except (ConfigError, OSError) as error:
        return _complain(f"--report {path}: {error}")
    where = "ui.perfetto.dev" if path.suffix.lower() == ".json" else "a browser"
    print(f"\nReport of the run with processes: {path}\n(open it in {where})\n\n{_NEXT}")
    return 0


def _ranking(timings: Sequence[Timing]) -> list[str]:
    """Return the comparison with torch, if there is one."""
    rates = {timing.loader: timing.images_per_s for timing in timings}
    if not rates.get(_TORCH) or not rates.get(_PROCESSES):
        return []
    ratio = rates[_PROCESSES] / rates[_TORCH]
    return [f"infeed with processes: {ratio:.2f} times the throughput of torch's DataLoader."]


def _open_infeed(
    dataset: "ImageFolder", options: DemoOptions, worker: WorkerKind, loaders: list[Loader]
) -> AbstractContextManager[Loader]:
    """Create a loader and append it to ``loaders``; its statistics outlive its workers."""
    import infeed

    loader = infeed.DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=0 if worker == "inline" else options.workers,
        worker=worker,
        seed=0,
    )
    loaders.append(loader)
    return loader


def _open_torch(dataset: "ImageFolder", options: DemoOptions) -> AbstractContextManager[Loader]:
    from torch.utils.data import DataLoader

    from infeed.cli.demo_images import TorchImages

    # torch accepts any object with these two methods, but its annotations require a subclass.
    samples: Any = TorchImages(dataset)
    workers = options.workers
    return nullcontext(
        DataLoader(samples, batch_size=options.batch_size, shuffle=True, num_workers=workers, persistent_workers=True)
    )


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
    rows = [["loader", "images/s", "first batch", "waits for data"]]
    for one in timings:
        waits = f"{one.waited_share:.0%} of the time"
        rows.append([one.loader, f"{one.images_per_s:,.0f}", format_seconds(one.first_batch_s), waits])
    print_table(open_console(), rows)
    print(*notes, sep="\n")


def _describe(options: DemoOptions) -> str:
    counted = ((available_cores(), "core"), (options.workers, "worker"), (options.images, "image"))
    parts = [format_count(count, noun) for count, noun in counted]
    parts.insert(2, f"batch size {options.batch_size}")
    return f"{', '.join(parts)}; {platform.system()}, Python {platform.python_version()}"
