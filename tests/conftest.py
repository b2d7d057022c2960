"""Fixtures for all tests: the guard against leaks, and the kinds of workers."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers import DEADLINE_S  # noqa: E402  # after the line that is about it
from tests.possessions import possessions  # noqa: E402

# Processes that were told to end take a moment to be gone. When torch's iterator is collected, it waits 5 s for each of its
# workers before it kills them.
_VANISH_S = 15.0

_ENGINES = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "worker": "thread"},
    "forkserver": {"num_workers": 2, "start_method": "forkserver"},
    "spawn": {"num_workers": 2, "start_method": "spawn"},
    "portable": {"num_workers": 2, "start_method": "auto"},
    "macos": {"num_workers": 2, "start_method": "auto"},
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


# Packages that tests may import at the head of a file. `infeed.torch` needs torch too.
_OPTIONAL = ("torch", "PIL", "plotly", "matplotlib", "jax", "cv2")
_HEAD_IMPORTS = re.compile(rf"^(?:import|from) (?:infeed\.)?({'|'.join(_OPTIONAL)})\b", re.MULTILINE)
_MISSING = {name for name in _OPTIONAL if importlib.util.find_spec(name) is None}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out test files that import a package which is not installed; the header of the run names these packages."""
    if _MISSING and collection_path.suffix == ".py":
        needed = set(_HEAD_IMPORTS.findall(collection_path.read_text(encoding="utf-8")))
        return True if needed & _MISSING else None
    return None


def pytest_report_header() -> str:
    return f"not installed, so tests that need it are left out: {', '.join(sorted(_MISSING))}" if _MISSING else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs Linux elsewhere, with the reason that the mark gives."""
    for item in items:
        for mark in item.iter_markers("linux"):
            (reason,) = mark.args
            if sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason=f"Linux only: {reason}"))


def pytest_collection_finish() -> None:
    """Keep what is there before the first test out of every collection: torch and all tests take it a tenth of a second."""
    gc.collect()
    gc.freeze()


def engine_params(*names: str) -> list[Any]:
    """Kinds of workers as parameters, marked as what they need."""
    marks = {"forkserver": [pytest.mark.process, pytest.mark.linux("only Linux has the fork server")]}
    marks |= {name: [pytest.mark.process] for name in ("spawn", "portable", "macos")}
    if sys.platform != "linux":
        # Stand-ins for other platforms: there they are the same as spawned workers.
        names = tuple(name for name in names if name not in ("portable", "macos") or "spawn" not in names)
    return [pytest.param(name, id=name, marks=marks.get(name, [])) for name in names]


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Whatever a test does, afterwards there is no thread, process, descriptor or shared memory more than before."""
    before = possessions()
    yield
    idle = sys.modules.get("infeed.workers.launcher")
    if idle is not None:
        idle.IDLE_WORKERS.clear()  # they would wait for the next loader for a minute
    deadline = time.monotonic() + _VANISH_S
    while left := possessions().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.01)


@pytest.fixture
def windows_stand_in() -> Iterator[None]:
    """Let this process and all that it starts behave like Windows, and check that no named memory is held at the end."""
    from tests.stand_in.windows_stand_in import active, live_names

    with active():
        yield
        deadline = time.monotonic() + _VANISH_S
        while left := live_names():
            gc.collect()
            if time.monotonic() > deadline:
                pytest.fail(f"named memory is still held: {sorted(left)}")
            time.sleep(0.01)


def make_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what only Linux has, and leave what macOS has: named memory, connections of multiprocessing, and spawning."""
    for module, name in ((os, "memfd_create"), (socket, "send_fds"), (socket, "recv_fds"), (select, "poll")):
        monkeypatch.delattr(module, name, raising=False)


def _engine_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "portable" and sys.platform == "linux":
        request.getfixturevalue("windows_stand_in")
    if request.param == "macos":
        monkeypatch = request.getfixturevalue("monkeypatch")
        for module, name in ((os, "memfd_create"), (socket, "send_fds"), (socket, "recv_fds")):
            monkeypatch.delattr(module, name, raising=False)
    return {**_ENGINES[request.param], **(_NO_HANG if request.param != "inline" else {})}


@pytest.fixture(params=engine_params(*_ENGINES))
def every_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of ``DataLoader`` for each kind of worker."""
    return _engine_options(request)


@pytest.fixture(params=engine_params("inline", "thread", "forkserver", "portable"))
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same without spawned workers on Linux: they start as the portable ones do, and then work as the forked ones do."""
    return _engine_options(request)


@pytest.fixture(params=engine_params("inline", "thread", "forkserver"))
def light_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The kinds of workers that start quickly, for what does not depend on how they are started."""
    return _engine_options(request)


@pytest.fixture(params=engine_params("forkserver", "spawn", "portable"))
def process_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of ``DataLoader`` for each kind of worker that is a process."""
    return _engine_options(request)


@pytest.fixture
def forkserver() -> dict[str, Any]:
    """Arguments for the usual kind of process workers, where the kind does not matter."""
    return {"num_workers": 2, **_NO_HANG}
