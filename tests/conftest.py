"""Fixtures for all tests: the leak guard and the kinds of workers."""

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
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers import DEADLINE_S  # noqa: E402  # after the line that is about it
from tests.resources import current_resources  # noqa: E402

# Terminated processes take a moment to exit. When torch's iterator is collected, it waits 5 s for each of its
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
# With these, a hang fails one test and does not end the run.
_NO_HANG: dict[str, Any] = {"timeout": DEADLINE_S}

# Run the same examples every time, so that a failure points to a change; INFEED_FUZZ=1 draws new ones. No time limits: on a
# busy machine any example may take long.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fuzz", **_UNTIMED)
settings.register_profile("steady", derandomize=True, **_UNTIMED)
settings.load_profile("fuzz" if os.environ.get("INFEED_FUZZ") else "steady")


# A shell makes background jobs ignore these signals, and every program that a test starts and interrupts would inherit that.
for _number in (signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


# Packages that tests may import at the top of a file. `infeed.torch` needs torch too.
_OPTIONAL = ("torch", "PIL", "plotly", "matplotlib", "jax", "cv2")
_HEAD_IMPORTS = re.compile(rf"^(?:import|from) (?:infeed\.)?({'|'.join(_OPTIONAL)})\b", re.MULTILINE)
_MISSING = {name for name in _OPTIONAL if importlib.util.find_spec(name) is None}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignores test files that import a package which is not installed; the header of the run lists these packages."""
    if _MISSING and collection_path.suffix == ".py":
        needed = set(_HEAD_IMPORTS.findall(collection_path.read_text(encoding="utf-8")))
        return True if needed & _MISSING else None
    return None


def pytest_report_header() -> str:
    return f"not installed, so tests that need it are left out: {', '.join(sorted(_MISSING))}" if _MISSING else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need Linux on other platforms, with the reason from the mark."""
    for item in items:
        for mark in item.iter_markers("linux"):
            (reason,) = mark.args
            if sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason=f"Linux only: {reason}"))


def pytest_collection_finish() -> None:
    """Freezes the objects that exist before the first test, because every later collection would take 0.1 s longer."""
    gc.collect()
    gc.freeze()


def engine_params(*names: str) -> list[Any]:
    """Kinds of workers as parameters, with the marks that they need."""
    marks = {"forkserver": [pytest.mark.process, pytest.mark.linux("only Linux has the fork server")]}
    marks |= {name: [pytest.mark.process] for name in ("spawn", "portable", "macos")}
    if sys.platform != "linux":
        # Stand-ins for other platforms, where they equal spawned workers.
        names = tuple(name for name in names if name not in ("portable", "macos") or "spawn" not in names)
    return [pytest.param(name, id=name, marks=marks.get(name, [])) for name in names]


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fails a test that leaves a thread, process, descriptor or shared memory behind."""
    before = current_resources()
    yield
    idle = sys.modules.get("infeed.workers.launcher")
    if idle is not None:
        idle.IDLE_WORKERS.clear()  # Otherwise they stay idle for a minute, for the next loader.
    deadline = time.monotonic() + _VANISH_S
    while left := current_resources().new_since(before):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.01)


@pytest.fixture
def windows_stand_in() -> Iterator[None]:
    """Makes this process and its children behave like Windows, and checks that no named memory is left at the end."""
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
    """Removes what only Linux has and keeps what macOS has: named memory, connections of multiprocessing, and spawning."""
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
    """Like `every_engine`, without spawned workers on Linux: those start like portable ones and work like forked ones."""
    return _engine_options(request)


@pytest.fixture(params=engine_params("inline", "thread", "forkserver"))
def light_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The kinds of workers that start quickly, for tests that do not depend on how workers start."""
    return _engine_options(request)


@pytest.fixture(params=engine_params("forkserver", "spawn", "portable"))
def process_engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of ``DataLoader`` for each kind of worker process."""
    return _engine_options(request)


@pytest.fixture
def forkserver() -> dict[str, Any]:
    """Arguments for the default kind of worker processes, where the kind does not matter."""
    return {"num_workers": 2, **_NO_HANG}
