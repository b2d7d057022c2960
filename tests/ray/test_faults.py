"""Actors and nodes are killed at random times: batches are the same as without faults, exactly once and in order."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import pytest

import infeed
import ray
from tests.helpers import DEADLINE_S, assert_same, plain, wait_until
from tests.ray.clusters import TwoNodes

pytestmark = [pytest.mark.process, pytest.mark.slow]


class Work:
    """Samples of 2 ms with random numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        time.sleep(0.002)
        return np.random.rand(50).astype(np.float32), index


def actors() -> list[int]:
    """Returns the processes of all remote workers, on all nodes of this test's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith("ray::RemoteWorker"):
                found.append(process.pid)
    return found


@contextmanager
def repeated(act: Callable[[], bool], every_s: Callable[[], float], most: int) -> Iterator[list[float]]:
    """Calls ``act`` from another thread until it has returned True ``most`` times; yields the times at which it has."""
    times: list[float] = []
    is_over = threading.Event()

    def run() -> None:
        while len(times) < most and not is_over.wait(every_s()):
            if act():
                times.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()


ARGUMENTS: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 3}


def assert_survives_kills(count: int, kills: int, worker: Any, seed: int) -> None:
    """Kills an actor at random times between batches, until there were enough kills."""
    with infeed.DataLoader(Work(count), **ARGUMENTS) as inline:
        expected = list(inline)
    draw = random.Random(seed)
    killed = 0
    with infeed.DataLoader(Work(count), num_workers=4, worker=worker, timeout=4 * DEADLINE_S, **ARGUMENTS) as loader:
        while killed < kills:
            loader.set_epoch(0)
            got = []
            for batch in loader:
                got.append(batch)
                found = actors() if draw.random() < 0.1 and killed < kills else []
                if found:
                    time.sleep(draw.uniform(0, 0.02))
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(found), signal.SIGKILL)
                        killed += 1
            assert_same(got, expected)


def test_batches_survive_killed_actors() -> None:
    """Three kills during one or more epochs."""
    assert_survives_kills(600, 3, "ray", 1)


@pytest.mark.long
@pytest.mark.parametrize("worker", ["ray", infeed.RayWorkers(local=1)], ids=["remote", "mixed"])
def test_batches_survive_fifty_kills(worker: Any) -> None:
    """Fifty kills by another thread, at any time: while actors start, load, or send a batch.

    At least one batch arrives between two kills: eight actors that die before they load anything are an error.
    """
    with infeed.DataLoader(Work(4000), **ARGUMENTS) as inline:
        expected = list(inline)
    draw = random.Random(2)
    delivered_count, count_at_kill = 0, -1

    def kill() -> bool:
        nonlocal count_at_kill
        found = actors() if delivered_count > count_at_kill else []
        if not found:
            return False
        count_at_kill = delivered_count
        with suppress(ProcessLookupError):
            os.kill(draw.choice(found), signal.SIGKILL)
            return True
        return False

    with (
        infeed.DataLoader(Work(4000), num_workers=4, worker=worker, timeout=8 * DEADLINE_S, **ARGUMENTS) as loader,
        repeated(kill, lambda: draw.uniform(0.05, 1.5), 50) as times,
    ):
        while len(times) < 50:
            loader.set_epoch(0)
            got = []
            for batch in loader:
                got.append(batch)
                delivered_count += 1
            assert_same(got, expected)


def _epochs_until(loader: Any, expected: list[Any], is_enough: Callable[[], bool]) -> None:
    while not is_enough():
        loader.set_epoch(0)
        assert_same(list(loader), expected)


def test_the_batches_of_a_lost_node_are_loaded_elsewhere(cluster: TwoNodes, caplog: pytest.LogCaptureFixture) -> None:
    """Exactly once, in order."""
    with infeed.DataLoader(Work(1000), **ARGUMENTS) as inline:
        expected = list(inline)
    third = cluster.add_node(cpus=3)
    with infeed.DataLoader(Work(1000), num_workers=9, worker="ray", timeout=4 * DEADLINE_S, **ARGUMENTS) as loader:
        _epochs_until(loader, expected, lambda: loader.statistics().worker_count == 9)
        loader.set_epoch(0)
        batches = iter(loader)
        got = [next(batches) for _ in range(10)]
        cluster.kill_node(third)
        got += [next(batches) for _ in range(40)]
        got += list(batches)
        assert_same(got, expected)
        _epochs_until(loader, expected, lambda: loader.statistics().worker_count == 6)
    assert "died" in caplog.text
    cluster.remove(third)


def test_a_worker_starts_and_loads_on_a_node_that_joins_in_mid_epoch(cluster: TwoNodes) -> None:
    """A local worker loads until then; the order stays that of the plan."""

    class Endless:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> tuple[int, int]:
            time.sleep(0.005)
            return index, os.getpid()

    worker = infeed.RayWorkers(local=1, resources={"late": 1})
    with infeed.DataLoader(Endless(), batch_size=4, num_workers=2, worker=worker, timeout=2 * DEADLINE_S) as loader:
        batches = iter(loader)
        pids = {plain(next(batches)[1])[0] for _ in range(10)}
        assert len(pids) == 1
        late = cluster.add_node(cpus=1, late=1)
        deadline = time.monotonic() + 2 * DEADLINE_S
        step = 10
        while len(pids) == 1 and time.monotonic() < deadline:
            index, pid = next(batches)
            assert plain(index) == list(range(4 * step, 4 * step + 4))
            pids |= set(plain(pid))
            step += 1
    cluster.remove(late)
    assert len(pids) == 2


@pytest.mark.long
def test_batches_survive_fifty_kills_of_actors_and_raylets(cluster: TwoNodes) -> None:
    """One in four kills ends a raylet, and another node joins."""
    with infeed.DataLoader(Work(3000), **ARGUMENTS) as inline:
        expected = list(inline)
    draw = random.Random(4)
    nodes, lost = [cluster.add_node(cpus=2)], []
    delivered_count, count_at_kill = 0, -1

    def kill() -> bool:
        nonlocal count_at_kill
        found = actors() if delivered_count > count_at_kill else []
        if not found:
            return False
        count_at_kill = delivered_count
        if nodes and draw.random() < 0.25:
            cluster.kill_node(nodes[0])
            lost.append(nodes.pop())
        else:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
        return True

    with (
        infeed.DataLoader(Work(3000), num_workers=7, worker="ray", timeout=8 * DEADLINE_S, **ARGUMENTS) as loader,
        repeated(kill, lambda: draw.uniform(0.2, 3), 50) as times,
    ):
        while len(times) < 50:
            loader.set_epoch(0)
            got = []
            for batch in loader:
                got.append(batch)
                delivered_count += 1
                if lost:  # Ray adds nodes only in the main thread
                    cluster.remove(lost.pop())
                    nodes.append(cluster.add_node(cpus=2))
            assert_same(got, expected)
    for node in (*nodes, *lost):
        cluster.remove(node)


@pytest.mark.long
def test_an_iterable_dataset_continues_after_a_kill() -> None:
    """The replacement continues after the last delivered element."""

    class Stream:
        def __iter__(self) -> Iterator[int]:
            info = infeed.get_worker_info()
            assert info is not None
            for number in range(info.id, 300, info.num_workers):
                time.sleep(0.005)
                yield number

    with infeed.DataLoader(Stream(), batch_size=10, num_workers=2, worker="ray", timeout=4 * DEADLINE_S) as loader:
        expected = [plain(batch) for batch in loader]
        batches = iter(loader)
        got = [plain(next(batches)) for _ in range(5)]
        os.kill(actors()[0], signal.SIGKILL)
        got += [plain(batch) for batch in batches]
    assert got == expected


@pytest.mark.long
def test_a_sample_that_kills_every_worker_is_an_error_with_its_indices() -> None:
    """There is no endless series of new actors."""

    class Deadly:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    with infeed.DataLoader(Deadly(), batch_size=2, num_workers=2, worker="ray", timeout=4 * DEADLINE_S) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(infeed.WorkerDiedError, match=r"indices \[4, 5\].*on node"):
            next(batches)


def test_a_dataset_that_cannot_be_built_on_a_node_is_an_error() -> None:
    """It is not retried endlessly."""

    class Unbuildable:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

        def __setstate__(self, state: Any) -> None:
            raise OSError("no such disk here")

        def __getstate__(self) -> dict[str, int]:
            return {"a": 1}

    with (
        infeed.DataLoader(Unbuildable(), num_workers=2, worker="ray", timeout=4 * DEADLINE_S) as loader,
        pytest.raises(infeed.WorkerStartError, match="no such disk here"),
    ):
        next(iter(loader))


@pytest.mark.long
@pytest.mark.parametrize("is_waiting", [False, True], ids=["between batches", "waiting"])
def test_after_ray_shutdown_the_loader_raises_and_does_not_reconnect(cluster: TwoNodes, is_waiting: bool) -> None:
    """Most functions of Ray connect to any cluster that they find."""

    class Slow:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> int:
            time.sleep(3600 if is_waiting and index >= 20 else 0.001)
            return index

    loader = infeed.DataLoader(Slow(), batch_size=10, num_workers=2, worker="ray", timeout=4 * DEADLINE_S)
    try:
        batches = iter(loader)
        next(batches)
        shutdown = threading.Timer(0.5 if is_waiting else 0, ray.shutdown)
        shutdown.start()
        if not is_waiting:
            shutdown.join()
        with pytest.raises(infeed.WorkerDiedError, match=r"ray\.shutdown"):
            list(batches)
        shutdown.join()
        with pytest.raises(infeed.ConfigError, match=r"ray\.init"):
            next(iter(loader))
        assert not ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.connect()
    assert plain(next(iter(loader))) == list(range(10))
    loader.close()


def test_the_training_process_leaves_no_actor_when_it_is_killed(cluster: TwoNodes) -> None:
    """Ray ends the actors of a job whose driver has died."""
    import subprocess
    import sys

    program = (
        "import time, sys, ray, infeed\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False)\n"
        "class Slow:\n"
        "    def __len__(self): return 10**6\n"
        "    def __getitem__(self, index): time.sleep(0.01); return index\n"
        "for number, _ in enumerate(infeed.DataLoader(Slow(), batch_size=4, num_workers=2, worker='ray')):\n"
        "    print(number, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline()
    assert ray.available_resources()["CPU"] < ray.cluster_resources()["CPU"]
    process.kill()
    process.wait()
    process.stdout.close()
    # The leak guard then waits until nothing is in use.


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # Python's own, from 3.12 on
def test_in_a_forked_child_a_loader_raises_before_it_calls_ray() -> None:
    """The child has its parent's connection, in which its objects would get the ids of the next objects of the parent."""
    reader, writer = os.pipe()
    with infeed.DataLoader(range(40), batch_size=4, num_workers=1, worker="ray", timeout=2 * DEADLINE_S) as loader:
        next(iter(loader))
        child = os.fork()
        if not child:
            signal.alarm(int(DEADLINE_S))
            try:
                next(iter(infeed.DataLoader(range(1000, 1040), batch_size=4, num_workers=1, worker="ray", timeout=3)))
            except BaseException as error:
                os.write(writer, repr(error).encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    text = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert text.startswith("ConfigError(")
    assert "forked after ray.init()" in text
    with infeed.DataLoader(range(40), batch_size=4, num_workers=1, worker="ray", timeout=2 * DEADLINE_S) as loader:
        assert plain(next(iter(loader))) == [0, 1, 2, 3]


@pytest.mark.parametrize("where", [pytest.param("callback", marks=pytest.mark.long), "pool"])
def test_the_garbage_collector_may_end_a_loader_in_any_thread(
    where: str, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread in which Ray calls back, and in that of the pool itself."""
    is_collected = threading.Event()
    is_initialized = ray.is_initialized

    def collect(thread: str) -> None:
        if threading.current_thread().name.startswith(thread) and not is_collected.is_set():
            gc.collect()
            is_collected.set()

    def check() -> bool:
        collect("infeed:ray")
        return is_initialized()

    @ray.remote(num_cpus=0)
    def wait() -> None:
        time.sleep(0.1)

    garbage: dict[str, Any] = {}
    garbage["cycle"] = garbage
    garbage["loader"] = infeed.DataLoader(Work(1000), num_workers=1, worker="ray", timeout=2 * DEADLINE_S)
    garbage["batches"] = iter(garbage["loader"])
    next(garbage["batches"])
    gc.disable()
    try:
        del garbage
        if where == "pool":
            monkeypatch.setattr(ray, "is_initialized", check)
        else:
            wait.remote().future().add_done_callback(lambda _: collect("Dummy-"))
        assert is_collected.wait(DEADLINE_S)
    finally:
        gc.enable()
    wait_until(lambda: not cluster.left_behind(), "the end of the actor")
