"""The pool of workers on a simulated cluster, which fails in ways that a real one rarely does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import infeed
import ray
from infeed.scheduler.messages import WorkerId
from infeed.workers.ray_cluster import Connection
from infeed.workers.ray_options import RayWorkers
from infeed.workers.ray_pool import RayPool
from infeed.workers.status import StatusBoard
from tests.helpers import DEADLINE_S

pytestmark = pytest.mark.slow  # Like all tests here: their leak guard starts a cluster.


class FakeRay:
    """A cluster whose actors never reply, except that their first call fails."""

    exceptions = ray.exceptions

    def __init__(self, kill: Callable[[Any], None]) -> None:
        self.kill = kill
        self.job = "1"
        self._refs: list[Future[Any]] = []

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: self.job, get_node_id=lambda: "node")

    def nodes(self) -> list[Any]:
        return []

    def put(self, value: Any) -> None:
        del value

    def remote(self, **options: Any) -> Any:
        call = SimpleNamespace(remote=self._call)
        call.options = lambda **_: call
        actor = SimpleNamespace(start=call, look=call, handle=call)
        actors = SimpleNamespace(remote=lambda: actor)
        actors.options = lambda **_: actors
        return lambda _: actors

    def _call(self, *arguments: Any) -> Any:
        self._refs.append(Future())
        return SimpleNamespace(future=lambda ref=self._refs[-1]: ref)

    def fail_calls(self) -> None:
        for ref in self._refs:
            ref.set_exception(ray.exceptions.ObjectLostError("", None, ""))


def fake_pool(fake: FakeRay) -> RayPool:
    return RayPool(
        connection=Connection(fake),
        parts=[],
        segments=SimpleNamespace(memory=bytearray),
        status_board=StatusBoard([WorkerId(0)], None),
        specs={WorkerId(0): SimpleNamespace()},
        options=RayWorkers(),
        threads=1,
        sample_timeout_s=0.0,
    )


def test_an_unexpected_error_in_the_thread_of_the_pool_reaches_the_training_loop() -> None:
    """With its cause; the wait for a batch ends."""

    def fail(actor: Any) -> None:
        del actor
        raise RuntimeError("no route to the cluster")

    fake = FakeRay(kill=fail)
    pool = fake_pool(fake)
    pool.start(WorkerId(0))
    fake.fail_calls()
    for _ in range(2):
        with pytest.raises(infeed.WorkerDiedError, match="no route to the cluster") as caught:
            pool.receive(DEADLINE_S)
        assert isinstance(caught.value.__cause__, RuntimeError)
    fake.kill = lambda actor: None
    pool.close()


def test_no_actor_is_called_through_another_connection() -> None:
    """After ray.shutdown() and ray.init(), actors of this pool have no owner."""
    killed: list[Any] = []
    fake = FakeRay(kill=killed.append)
    pool = fake_pool(fake)
    pool.start(WorkerId(0))
    fake.job = "2"
    pool.kill(WorkerId(0))
    with pytest.raises(infeed.WorkerDiedError, match=r"ray\.shutdown"):
        pool.receive(DEADLINE_S)
    pool.close()
    assert killed == []
