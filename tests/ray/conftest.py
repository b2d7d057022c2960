"""A real Ray cluster of two nodes on this machine, and the leak guard for it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import DEADLINE_S

if TYPE_CHECKING:
    from tests.ray.clusters import TwoNodes

# Without infeed[ray] there is nothing to test; the test modules import Ray.
collect_ignore_glob = [] if find_spec("ray") is not None else ["test_*.py"]

_VANISH_S = 20.0
_FOLDER = Path(__file__).parent


_RUNNING: list[TwoNodes] = []


@pytest.fixture
def cluster() -> TwoNodes:
    """Two nodes of 3 CPUs and 200 MB of object store each, for all tests of this folder; this process is on the first."""
    from tests.ray.clusters import TwoNodes  # Imports Ray.

    if not _RUNNING:
        _RUNNING.append(TwoNodes().__enter__())
    return _RUNNING[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the cluster after the last test of this folder: an idle cluster takes CPU time from the tests that follow."""
    if nextitem is None or _FOLDER not in nextitem.path.parents:
        while _RUNNING:
            _RUNNING.pop().__exit__(None, None, None)


@pytest.fixture(autouse=True)
def leak_guard(cluster: TwoNodes) -> Iterator[None]:
    """Fails a test that leaves an actor, placement group or object on the cluster, or a thread of infeed."""
    cluster.settle(_VANISH_S)
    yield
    deadline = time.monotonic() + _VANISH_S
    while left := [*cluster.left_behind(), *_threads()]:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.05)


def _threads() -> list[str]:
    return [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("infeed")]


_RAY: dict[str, Any] = {"num_workers": 2, "worker": "ray", "timeout": 2 * DEADLINE_S}


@pytest.fixture
def engine(cluster: TwoNodes) -> dict[str, Any]:
    """The fixture of the same name in the engine tests, for workers on the cluster."""
    return _RAY


@pytest.fixture
def every_engine(cluster: TwoNodes) -> dict[str, Any]:
    return _RAY


@pytest.fixture
def light_engine(cluster: TwoNodes) -> dict[str, Any]:
    return _RAY


@pytest.fixture
def process_engine(cluster: TwoNodes) -> dict[str, Any]:
    return _RAY
