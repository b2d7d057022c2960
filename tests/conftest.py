"""Fixtures for all tests: the guard against leaks, and the kinds of workers."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers import DEADLINE_S  # noqa: E402  # after the line that is about it
from tests.possessions import possessions  # noqa: E402

# Processes that were told to end take a moment to be gone.
_VANISH_S = 5.0

_ENGINES = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "worker": "thread"},
    "forkserver": {"num_workers": 2, "start_method": "forkserver"},
    "spawn": {"num_workers": 2, "start_method": "spawn"},
    "portable": {"num_workers": 2, "start_method": "auto"},
}
# With these, a hang is an error of one test and not the end of all.
_NO_HANG: dict[str, Any] = {"timeout": DEADLINE_S}

# The same examples every time, so that a red run means a change; INFEED_FUZZ=1 looks for new ones.
settings.register_profile("steady", derandomize=True)
if not os.environ.get("INFEED_FUZZ"):
    settings.load_profile("steady")


# A shell lets its jobs in the background ignore these, and so would every program that a test starts and interrupts.
for _number in (signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Keep what is there before the first test out of every collection: torch and all tests take it a tenth of a second."""
    gc.collect()
    gc.freeze()


def engine_params(*names: str) -> list[Any]:
    """Kinds of workers as parameters, marked as what they need."""
    marks = {"forkserver": [pytest.mark.process, pytest.mark.linux]}
    marks |= {name: [pytest.mark.process] for name in ("spawn", "portable")}
    return [pytest.param(name, id=name, marks=marks.get(name, [])) for name in names]


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Whatever a test does, afterwards there is no thread, process, descriptor or shared memory more than before."""
    before = possessions()
    yield
    deadline = time.monotonic() + _VANISH_S
    while left := possessions().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.01)


def make_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what only Linux has: named shared memory, connections of multiprocessing and spawning are left."""
    for module, name in ((os, "memfd_create"), (socket, "send_fds"), (socket, "recv_fds"), (select, "poll")):
        monkeypatch.delattr(module, name, raising=False)


@pytest.fixture(params=engine_params(*_ENGINES))
def every_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of ``DataLoader`` for each kind of worker."""
    if request.param == "portable":
        make_portable(monkeypatch)
    return {**_ENGINES[request.param], **(_NO_HANG if request.param != "inline" else {})}


@pytest.fixture(params=engine_params(*(name for name in _ENGINES if name != "spawn")))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same without spawned workers on Linux: they start as the portable ones do, and then work as the forked ones do."""
    if request.param == "portable":
        make_portable(monkeypatch)
    return {**_ENGINES[request.param], **(_NO_HANG if request.param != "inline" else {})}


@pytest.fixture(params=engine_params("inline", "thread", "forkserver"))
def light_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The kinds of workers that start quickly, for what does not depend on how they are started."""
    return {**_ENGINES[request.param], **(_NO_HANG if request.param != "inline" else {})}


@pytest.fixture(params=engine_params("forkserver", "spawn", "portable"))
def process_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of ``DataLoader`` for each kind of worker that is a process."""
    if request.param == "portable":
        make_portable(monkeypatch)
    return {**_ENGINES[request.param], **_NO_HANG}


@pytest.fixture
def forkserver() -> dict[str, Any]:
    """Arguments for the usual kind of process workers, where the kind does not matter."""
    return {"num_workers": 2, **_NO_HANG}
