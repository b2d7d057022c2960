"""A training script that ends in one of many ways: ``python program.py KIND SAMPLES ENDING``.

It records its actions in the file ``journal`` of the working folder, and leaks in the file ``left``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers import Journal

KIND, SAMPLES, ENDING = sys.argv[1:]
if KIND == "portable":
    import multiprocessing.connection  # noqa: F401  # looks for what is taken away here
    import select
    import socket

    del os.memfd_create, socket.send_fds, socket.recv_fds, select.poll

import numpy as np  # noqa: E402

import infeed  # noqa: E402
from infeed.workers.launcher import IDLE_WORKERS  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "forkserver": {"num_workers": 2, "start_method": "forkserver"},
    "spawn": {"num_workers": 2, "start_method": "spawn"},
    "portable": {"num_workers": 2},
    "thread": {"num_workers": 2, "worker": "thread"},
    "torch": {"num_workers": 2},
    "torch kept": {"num_workers": 2, "persistent_workers": True},
}
JOURNAL = Journal(Path("journal").absolute())
ENDED = Journal(Path("ended").absolute())
# From this index, samples may take a minute.
SLOW_FROM = 8


class Data:
    """Samples that are fast, or take a minute from the ninth on: in sleep or in native code."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        if index < SLOW_FROM or SAMPLES == "quick":
            time.sleep(0.002)
        else:
            JOURNAL.write("blocked")
            if SAMPLES == "slow":
                time.sleep(60)
            elif KIND == "thread":
                ctypes.CDLL(None).sleep(60)  # A library that waits and ignores all signals.
            else:
                ctypes.PyDLL(None).sleep(60)  # It also holds the GIL.
        return np.full(1000, index)


def begin_slowly(worker: int) -> None:
    JOURNAL.write("starting")
    time.sleep(60)


def make_loader(**options: Any) -> Any:
    options = {"batch_size": 2, **OPTIONS[KIND], **options}
    if KIND.startswith("torch"):
        from infeed.torch import DataLoader

        return DataLoader(Data(), **options)
    return infeed.DataLoader(Data(), **options)


def loop() -> None:
    """Loads forever, or until a sample blocks forever."""
    for batch in make_loader():
        JOURNAL.write(f"batch {int(batch[0, 0])}")


def in_mid_epoch() -> tuple[Any, Iterator[Any]]:
    """A loader and an iterator in mid-epoch; if samples are slow, workers are loading one."""
    loader = make_loader(timeout=0.2)
    batches = iter(loader)
    count = 0
    while count < 3 or (SAMPLES != "quick" and "blocked" not in JOURNAL.lines()):
        try:
            next(batches)
            count += 1
        except infeed.LoadTimeoutError:
            continue
    return loader, batches


def leave_by_exit() -> None:
    globals()["kept"] = in_mid_epoch()
    JOURNAL.write("leaving")
    sys.exit(5)


def leave_at_once() -> None:
    in_mid_epoch()
    JOURNAL.write("leaving")
    os._exit(6)


def raise_unhandled() -> None:
    _, batches = in_mid_epoch()
    JOURNAL.write("leaving")
    raise ArithmeticError(f"the user's own, with {type(batches).__name__} in its frames")


def raise_from_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    loop()


def close_in_handler() -> None:
    """Like scripts that save a checkpoint on preemption."""
    loader = make_loader()

    def handle(*_: Any) -> None:
        loader.close()
        JOURNAL.write("closed")

    signal.signal(signal.SIGTERM, handle)
    try:
        for batch in loader:
            JOURNAL.write(f"batch {int(batch[0, 0])}")
    except infeed.LoaderClosedError as error:
        print(error)


def start_slowly() -> None:
    for _ in make_loader(worker_init_fn=begin_slowly):
        raise AssertionError("not reached")


def close_slowly() -> None:
    """Ctrl+C arrives while close() waits for workers that do not return."""
    loader, batches = in_mid_epoch()
    JOURNAL.write("closing")
    if KIND.startswith("torch"):
        del batches, loader
    else:
        loader.close()
    JOURNAL.write("closed")
    time.sleep(60)


def go_on() -> None:
    """Like a notebook: the cell is interrupted, and the next one iterates the same loader."""
    loader = make_loader()
    for _ in range(3):
        try:
            for batch in loader:
                JOURNAL.write(f"batch {int(batch[0, 0])}")
        except KeyboardInterrupt:
            JOURNAL.write("interrupted")
    del loader, batch


def end_inside() -> None:
    """Endings that the process survives, one after another; the test reads what each left behind."""
    from tests.resources import current_resources

    endings: list[Callable[[], None]] = [_break, _raise, _collect, _close_from_two_threads, _close_in_next, _drop_in_thread]
    warm = make_loader()  # Imports and the fork server do not count as leaks.
    next(iter(warm))
    del warm
    gc.collect()
    for ending in endings:
        JOURNAL.path.unlink(missing_ok=True)
        before = current_resources()
        start = time.monotonic()
        ending()
        gc.collect()
        IDLE_WORKERS.clear()  # They would stay idle for a minute, for the next loader.
        took = time.monotonic() - start
        left = current_resources().new_since(before)
        while left and time.monotonic() < start + 10:
            left = current_resources().new_since(before)
        took_all = time.monotonic() - start
        ENDED.write(f"{ending.__name__} took {took:.2f} s, all gone after {took_all:.2f} s, left: {left}")
    JOURNAL.write("leaving")


def _break() -> None:
    for _ in make_loader():
        break


def _raise() -> None:
    try:
        for batch in make_loader():
            raise ArithmeticError(batch)
    except ArithmeticError:
        return


def _collect() -> None:
    """The iterator in mid-epoch is part of a cycle, as in a trainer that holds its state."""

    class Trainer:
        me: Any

    trainer = Trainer()
    trainer.me = [trainer, *in_mid_epoch()]


def _close_from_two_threads() -> None:
    loader, batches = in_mid_epoch()
    closers = [threading.Thread(target=_close, args=(loader, batches)) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


def _close_in_next() -> None:
    """Another thread closes the loader at any point while this one is in next()."""
    loader = make_loader()
    batches = iter(loader)
    next(batches)
    closer = threading.Timer(0.05, _close, args=(loader, batches))
    closer.start()
    try:
        for _ in batches:
            pass
    except infeed.LoaderClosedError:
        pass
    closer.join()


def _drop_in_thread() -> None:
    """The last reference is dropped in an unrelated thread."""
    held = list(in_mid_epoch())
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    dropper.join()


def _close(loader: Any, batches: Any) -> None:
    if KIND.startswith("torch"):
        batches._shutdown_workers()
    else:
        loader.close()


ENDINGS: dict[str, Callable[[], None]] = {
    "loop": loop,
    "exit": leave_by_exit,
    "os._exit": leave_at_once,
    "unhandled": raise_unhandled,
    "handler exits": raise_from_handler,
    "handler closes": close_in_handler,
    "starting": start_slowly,
    "closing": close_slowly,
    "go on": go_on,
    "inside": end_inside,
}
ENDINGS[ENDING]()
