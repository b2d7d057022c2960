"""The pool of workers on a simulated cluster, which fails in ways that a real one rarely does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import infeed
import ray
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.protocol import FromWorker, LoadGrains, RowsLoaded, Started, encode_answer
from infeed.workers.ray_cluster import Connection
from infeed.workers.ray_options import RayWorkers
from infeed.workers.ray_pool import RayPool
from infeed.workers.remote import ClusterNode, Reply, Report
from infeed.workers.status import StatusBoard
from tests.helpers import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow  # Like all tests here: their leak guard starts a cluster.


class Ref:
    """A reference to the result of a call."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = lambda: future


class FakeRay:
    """A cluster whose actors answer only what a test says. Their node has an object store of 100 bytes."""

    exceptions = ray.exceptions

    def __init__(self, kill: Callable[[Any], None] = lambda actor: None) -> None:
        self.kill = kill
        self.job = "1"
        self.calls: list[tuple[str, Future[Any]]] = []

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: self.job, get_node_id=lambda: "node")

    def nodes(self) -> list[Any]:
        return [{"NodeID": "node", "Resources": {"object_store_memory": 100.0}, "Alive": True}]

    def put(self, value: Any) -> None:
        del value

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        return refs, []

    def remote(self, **options: Any) -> Any:
        names = ("start", "look", "handle", "__ray_terminate__")
        actor = SimpleNamespace(**{name: self._method(name) for name in names})
        actors = SimpleNamespace(remote=lambda: actor)
        actors.options = lambda **_: actors
        return lambda _: actors

    def _method(self, name: str) -> Any:
        method = SimpleNamespace(remote=lambda *_: self._call(name))
        method.options = lambda **_: method
        return method

    def _call(self, name: str) -> Any:
        future: Future[Any] = Future()
        self.calls.append((name, future))
        return Ref(future)

    def futures(self, name: str, first: int = 0) -> list[Future[Any]]:
        return [future for called, future in self.calls[first:] if called == name]

    def fail_calls(self) -> None:
        for _, future in self.calls:
            future.set_exception(ray.exceptions.ObjectLostError("", None, ""))


WORKERS = (WorkerId(0), WorkerId(1))


def reply(answer: FromWorker, nbytes: int) -> Reply:
    board = StatusBoard((WorkerId(0),), None)
    report = Report(0, board.copy_of_cell(WorkerId(0)), board.reader(WorkerId(0)).counters(), b"", 1, ClusterNode("node", "a"))
    return Reply(encode_answer(answer), np.zeros(nbytes, np.uint8) if nbytes else None, report)


def fake_pool(fake: FakeRay, *, parts: Sequence[bytes] = (), ranks: int = 1) -> RayPool:
    return RayPool(
        connection=Connection(fake),
        parts=parts,
        segments=SimpleNamespace(memory=bytearray),
        status_board=StatusBoard(WORKERS, None),
        specs={worker: SimpleNamespace() for worker in WORKERS},
        options=RayWorkers(),
        threads=1,
        sample_timeout_s=0.0,
        ranks=ranks,
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


def load(task: int) -> LoadGrains:
    return LoadGrains(TaskId(task), 0, 0, 1, 0, None, None, True, [0], False, None)


def started(fake: FakeRay, **arguments: Any) -> RayPool:
    """Return a pool whose two workers have started, and of which the first has loaded a batch of 20 bytes."""
    pool = fake_pool(fake, **arguments)
    before = len(fake.calls)
    for worker in WORKERS:
        pool.start(worker)
    for future in fake.futures("start", before):
        future.set_result(reply(Started(), 0))
    pool.send(WORKERS[0], load(1))
    fake.futures("handle", before)[0].set_result(reply(RowsLoaded(TaskId(1), 1, 1, None, []), 20))
    news: list[Any] = []
    wait_until(lambda: news.extend(pool.receive(0.1)) or len(news) == 3, "the first batch")
    return pool


def submitted_of_six(fake: FakeRay, pool: RayPool) -> int:
    before = len(fake.calls)
    for task in range(2, 8):
        pool.send(WORKERS[task % 2], load(task))
    return len(fake.futures("handle", before))


def test_tasks_wait_for_room_beside_the_datasets_and_the_results_of_other_loaders_and_ranks() -> None:
    """Half of 100 bytes has room for two batches of 20. Each loader may have one anyway."""
    fake = FakeRay()
    first = started(fake)
    assert submitted_of_six(fake, first) == 2
    second = started(fake)
    assert submitted_of_six(fake, second) == 1
    first.close()
    second.close()
    for arguments in ({"parts": [bytes(30)]}, {"ranks": 2}):
        pool = started(fake, **arguments)
        assert submitted_of_six(fake, pool) == 1
        pool.close()


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.RayTaskError("handle", "", RuntimeError("no room")), ray.exceptions.ActorDiedError()],
    ids=["failed", "died"],
)
def test_tasks_that_wait_for_room_are_submitted_after_a_failure(error: Exception) -> None:
    """Batches of 20 bytes: half of the store has room for two. A task that fails makes room for another."""
    fake = FakeRay()
    pool = started(fake)
    for task in (2, 3):
        pool.send(WORKERS[0], load(task))
        pool.send(WORKERS[1], load(task + 2))
    before = len(fake.futures("handle"))
    fake.futures("handle")[1].set_exception(error)
    wait_until(lambda: len(fake.futures("handle")) > before, "the task that waited")
    pool.close()


def test_an_actor_that_ray_has_not_placed_is_killed_when_its_worker_is_stopped() -> None:
    """It could not exit by itself. A started one exits, and the pool keeps it only until then."""
    killed: list[Any] = []
    fake = FakeRay(kill=killed.append)
    pool = fake_pool(fake)
    pool.start(WORKERS[0])
    pool.stop(WORKERS[0])
    assert len(killed) == 1
    pool.close()
    killed.clear()
    pool = started(fake)
    for worker in WORKERS:
        pool.stop(worker)
    pool.close()
    assert killed == []


def test_an_actor_without_contact_is_killed_and_its_batch_is_not_blamed() -> None:
    """It may live, so another must not load in its place before."""
    killed: list[Any] = []
    fake = FakeRay(kill=killed.append)
    pool = started(fake)
    pool.send(WORKERS[0], load(2))
    fake.futures("handle")[1].set_exception(ray.exceptions.ActorUnavailableError("no contact", None))
    news = wait_until(lambda: pool.receive(0.1), "the death")
    assert [(worker, death.is_blamed) for worker, death in news] == [(WORKERS[0], False)]
    assert len(killed) == 1
    pool.close()
