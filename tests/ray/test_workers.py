"""Features of workers on a Ray cluster: placement, errors, limits, mixed pools."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray._private.internal_api import memory_summary

import infeed
import ray
from infeed.engine.session import cores_of_workers
from infeed.options import Options
from infeed.plan.sharding import Shard
from infeed.workers.ray_cluster import capacity
from tests.delivery.fake import FakeBackend
from tests.helpers import DEADLINE_S, assert_same, plain
from tests.ray.clusters import CPUS, STORE_BYTES, TwoNodes

pytestmark = [pytest.mark.process, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"num_workers": 2, "worker": "ray", "timeout": 2 * DEADLINE_S}


class Noisy:
    """Samples with random numbers, some of which contain text."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.random.rand(3, 4).astype(np.float32), "i": index, "t": str(index)}


@pytest.mark.long
def test_every_mix_of_workers_delivers_the_same_batches() -> None:
    """Local, remote and both together: bit-identical to the main process."""
    arguments: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 5}
    with infeed.DataLoader(Noisy(), **arguments) as inline:
        expected = [list(inline), list(inline)]
    for worker, count in (("ray", 3), (infeed.RayWorkers(local=1), 3), (infeed.RayWorkers(local=2), 2)):
        with infeed.DataLoader(Noisy(), num_workers=count, worker=worker, timeout=2 * DEADLINE_S, **arguments) as loader:
            assert_same([list(loader), list(loader)], expected)


class Slow:
    """Samples that take 10 ms and return the process that loaded them."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(0.01)
        return index, os.getpid()


def test_a_mixed_pool_uses_local_and_remote_workers() -> None:
    """Both kinds load, and each delivers in the order of the plan."""
    with infeed.DataLoader(
        Slow(), batch_size=4, num_workers=3, worker=infeed.RayWorkers(local=1), timeout=2 * DEADLINE_S
    ) as loader:
        seen: set[int] = set()
        indices: list[int] = []
        epochs = 0
        deadline = time.monotonic() + 2 * DEADLINE_S  # A busy machine starts actors late.
        while len(seen) < 3 and time.monotonic() < deadline:
            epochs += 1
            for index, pid in loader:
                indices += plain(index)
                seen |= set(plain(pid))
    assert len(seen) == 3
    assert indices == list(range(400)) * epochs


@pytest.mark.long
def test_workers_are_spread_over_the_nodes(cluster: TwoNodes) -> None:
    """They are not packed onto the first node, whose cores the training process needs."""

    class Where:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> str:
            time.sleep(0.005)
            return ray.get_runtime_context().get_node_id()

    with infeed.DataLoader(Where(), batch_size=2, num_workers=4, worker="ray", timeout=2 * DEADLINE_S) as loader:
        nodes: set[str] = set()
        deadline = time.monotonic() + 2 * DEADLINE_S
        while len(nodes) < 2 and time.monotonic() < deadline:
            nodes |= {node for batch in loader for node in batch}
    assert len(nodes) == 2


def test_an_error_has_index_position_worker_and_node() -> None:
    """With the type that it has in the dataset, and the traceback of the worker."""

    class Broken:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise LookupError("five is missing")
            return index

    with infeed.DataLoader(Broken(), batch_size=4, **OPTIONS) as loader:
        batches = iter(loader)
        assert plain(next(batches)) == [0, 1, 2, 3]
        with pytest.raises(LookupError, match="five is missing") as caught:
            next(batches)
    (note,) = caught.value.__notes__
    assert "index=5" in note
    assert "position 5 of epoch 0" in note
    assert f"on node {ray.util.get_node_ip_address()} (" in note


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    """As for workers on this machine."""

    class Locked:
        def __init__(self) -> None:
            self.cache = {"lock": threading.Lock()}

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    with (
        infeed.DataLoader(Locked(), **OPTIONS) as loader,
        pytest.raises(infeed.WorkerStartError, match=r"dataset\.cache\['lock'\]"),
    ):
        next(iter(loader))


def test_shared_objects_are_copied_to_the_workers() -> None:
    """Memory of this machine cannot be mapped on another, so its contents are copied."""

    class Sharing:
        def __init__(self) -> None:
            self.names = infeed.share([f"name {number}" for number in range(50)])
            self.sizes = infeed.share({f"name {number}": number for number in range(50)})
            self.array = infeed.share(np.arange(100.0))

        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> tuple[str, int, float]:
            name = self.names[index]
            return name, self.sizes[name], self.array[index]

    dataset = Sharing()
    with infeed.DataLoader(dataset, batch_size=50, **OPTIONS) as loader:
        names, sizes, values = next(iter(loader))
    assert names == list(dataset.names)
    assert plain(sizes) == plain(values) == list(range(50))


def test_a_large_dataset_is_stored_once_and_read_without_a_copy() -> None:
    """Its arrays are read-only views of the object store, one copy for all workers of a node, on two nodes."""

    class Large:
        def __init__(self) -> None:
            self.table = np.arange(9_000_000, dtype=np.float64)  # 72 MB

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[float, bool]:
            return self.table[index], self.table.flags.writeable

    with infeed.DataLoader(Large(), batch_size=10, num_workers=4, worker="ray", timeout=2 * DEADLINE_S) as loader:
        values = [value for batch in loader for value in plain(batch[0])]
        assert not any(flag for batch in loader for flag in plain(batch[1]))
        used = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
    assert used < 2.5 * 72e6
    assert values == list(range(100))


@pytest.mark.long
def test_workers_without_resources_are_reported_and_the_others_load(caplog: pytest.LogCaptureFixture) -> None:
    """A pool that is larger than the cluster works with the workers that fit, and reports why the others wait."""
    with (
        caplog.at_level(logging.WARNING, "infeed"),
        infeed.DataLoader(range(20), batch_size=4, num_workers=9, worker="ray", timeout=2 * DEADLINE_S) as loader,
    ):
        assert [plain(batch) for batch in loader] == [list(range(begin, begin + 4)) for begin in range(0, 20, 4)]
        deadline = time.monotonic() + DEADLINE_S
        while "Ray has not started" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "Ray has not started 3 of 9 workers; each needs 1 CPU (0 of 6 free); waited " in caplog.text


class Sleeping:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.doze()
        return index

    def doze(self) -> None:
        time.sleep(self.seconds)


@pytest.mark.long
def test_a_hanging_worker_is_reported_with_index_node_and_stack(caplog: pytest.LogCaptureFixture) -> None:
    """While user code runs, another thread of the actor reports its status."""
    with (
        caplog.at_level(logging.WARNING, "infeed"),
        infeed.DataLoader(Sleeping(4.0), batch_size=1, hang_warning=1.0, **OPTIONS) as loader,
    ):
        assert [value for batch in loader for value in plain(batch)] == list(range(6))
    assert "index=3" in caplog.text
    assert "on node" in caplog.text
    assert "in doze" in caplog.text


@pytest.mark.long
def test_a_sample_that_exceeds_its_timeout_is_skipped_and_its_worker_replaced() -> None:
    """sample_timeout kills the actor, and on_error='skip' omits the sample."""
    with infeed.DataLoader(Sleeping(3600.0), batch_size=2, sample_timeout=1.0, on_error="skip", **OPTIONS) as loader:
        assert [plain(batch) for batch in loader] == [[0, 1], [2], [4, 5]]
        (bad,) = loader.bad_samples
    assert bad.index == "3"


def test_close_does_not_wait_for_user_code() -> None:
    """Actors in user code are killed after half a second."""
    loader = infeed.DataLoader(Sleeping(3600.0), batch_size=1, **OPTIONS)
    batches = iter(loader)
    assert [plain(next(batches)) for _ in range(3)] == [[0], [1], [2]]
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5


@pytest.mark.long
def test_results_in_flight_do_not_fill_the_object_store() -> None:
    """Tasks wait in the training process while results of others would take about half of a node's store."""

    class Big:
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            return np.full(20 << 20, index, np.uint8)

    least = float(2 * STORE_BYTES)
    with infeed.DataLoader(Big(), batch_size=1, num_workers=4, worker="ray", timeout=2 * DEADLINE_S) as loader:
        for number, batch in enumerate(loader):
            assert batch[0, 0] == batch[0, -1] == number
            least = min(least, ray.available_resources().get("object_store_memory", 0.0))
            time.sleep(0.01)
    assert least > 0.3 * STORE_BYTES


def spilled() -> list[str]:
    # Without an address, Ray looks for a cluster on this machine and fails if there are several.
    summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    return [line for line in summary.splitlines() if "Spilled" in line]


def test_results_do_not_push_the_dataset_to_disk() -> None:
    """It takes 130 of 200 MB of the object store, a batch 20 MB."""

    class Stored:
        def __init__(self) -> None:
            self.table = np.zeros(130 << 20, np.uint8)

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            return self.table[: 20 << 20] + np.uint8(index)

    before = spilled()
    with infeed.DataLoader(Stored(), batch_size=1, num_workers=3, worker="ray", timeout=2 * DEADLINE_S) as loader:
        for number, batch in enumerate(loader):
            assert batch[0, 0] == batch[0, -1] == number
    assert spilled() == before


@pytest.mark.long
def test_a_state_can_be_loaded_with_another_kind_of_worker() -> None:
    """A run on a cluster continues in the main process, and vice versa."""
    arguments: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 5}
    with infeed.DataLoader(Noisy(), **arguments) as inline:
        expected = list(inline)
    with infeed.DataLoader(Noisy(), **OPTIONS, **arguments) as loader:
        batches = iter(loader)
        got = [next(batches) for _ in range(3)]
        state = loader.state_dict()
    with infeed.DataLoader(Noisy(), **arguments) as inline:
        inline.load_state_dict(state)
        batches = iter(inline)
        got += [next(batches) for _ in range(2)]
        state = inline.state_dict()
    with infeed.DataLoader(Noisy(), **OPTIONS, **arguments) as loader:
        loader.load_state_dict(state)
        got += list(loader)
    assert_same(got, expected)


@pytest.mark.long
def test_statistics_count_the_work_of_remote_workers() -> None:
    """Samples and times arrive with the replies."""
    with infeed.DataLoader(Slow(), batch_size=20, **OPTIONS) as loader:
        for _ in loader:
            pass
        seen = loader.statistics()
    assert seen.sample_count == 400
    assert sum(one.sample_count for one in seen.workers) >= 400  # Workers may have loaded batches of the next epoch.
    assert seen.sample_times["median"] > 0.009  # A busy machine takes longer than the 10 ms that a sample sleeps.


class Stream:
    """Numbers, sharded among the workers."""

    def __iter__(self) -> Iterator[int]:
        info = infeed.get_worker_info()
        yield from range(0 if info is None else info.id, 30, 1 if info is None else info.num_workers)


@pytest.mark.long
def test_an_iterable_dataset_is_shared_among_local_and_remote_workers() -> None:
    """Every element is delivered once."""
    with infeed.DataLoader(
        Stream(), batch_size=4, num_workers=3, worker=infeed.RayWorkers(local=1), timeout=2 * DEADLINE_S
    ) as loader:
        for _ in range(2):
            assert sorted(value for batch in loader for value in plain(batch)) == list(range(30))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_the_torch_loader_has_remote_workers_too() -> None:
    """With tensors, and with worker_init_fn, whose workers may lack a place on the cluster."""
    torch = pytest.importorskip("torch")
    from infeed.torch import DataLoader

    def seed_own(worker: int) -> None:
        os.environ["OWN"] = str(worker)

    class Tensors:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index), int(os.environ["OWN"])

    # One worker per node: the third has no place, and no batch waits for it.
    worker = infeed.RayWorkers(cpus=CPUS)
    batches = list(
        DataLoader(Tensors(), batch_size=3, num_workers=3, worker=worker, worker_init_fn=seed_own, timeout=DEADLINE_S)
    )
    assert torch.equal(torch.cat([batch[0] for batch in batches]), torch.arange(12)[:, None].expand(12, 2))
    assert {number for batch in batches for number in batch[1].tolist()} < {0, 1, 2}


def test_without_a_cluster_the_error_has_the_fix() -> None:
    """infeed starts no cluster by itself."""
    program = "import infeed; next(iter(infeed.DataLoader(range(4), num_workers=1, worker='ray')))"
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=100, check=False
    )
    assert "ConfigError: worker='ray' needs a Ray cluster; call ray.init() first, or set RAY_ADDRESS" in done.stderr


def test_ray_is_imported_only_on_request() -> None:
    """Neither infeed nor a loader with other workers imports it."""
    program = "import sys, infeed; list(infeed.DataLoader(range(4), num_workers=1)); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


@pytest.mark.long
def test_auto_adds_workers_on_the_cluster() -> None:
    """With one core here, the tuner continues with workers on the cluster."""
    with infeed.DataLoader(
        Slow(), batch_size=4, num_workers="auto", worker=infeed.RayWorkers(local=1), cpu_limit=1, timeout=2 * DEADLINE_S
    ) as loader:
        deadline = time.monotonic() + 2 * DEADLINE_S
        seen: set[int] = set()
        while len(seen) < 3 and time.monotonic() < deadline:
            for _, pid in loader:
                seen |= set(plain(pid))
    assert len(seen) >= 3


def test_ranks_share_the_cluster_that_auto_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a sampler divides the epoch, not shard=."""
    ray_workers = infeed.RayWorkers(local=1)
    config = Options(dataset=range(4), num_workers="auto", worker=ray_workers)
    alone = cores_of_workers(config, 2.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert alone - 1 == 2 * (cores_of_workers(config, 2.0) - 1) > 0
    assert alone - 1 == 3 * (cores_of_workers(replace(config, shard=Shard(0, 3)), 2.0) - 1)


def test_the_cpus_of_a_worker_are_on_one_node() -> None:
    """Two nodes of 3 CPUs have room for two workers of 2 CPUs, although there are 6 CPUs."""
    assert capacity(infeed.RayWorkers(cpus=1)) == 6
    assert capacity(infeed.RayWorkers(cpus=2)) == 2
    assert capacity(infeed.RayWorkers(resources={"nowhere": 1})) == 0


def test_a_loader_that_gets_no_worker_times_out() -> None:
    """Other loaders may hold all CPUs forever."""
    nowhere = infeed.RayWorkers(resources={"node_that_never_joins": 1})
    with (
        infeed.DataLoader(range(4), num_workers=1, worker=nowhere, timeout=1) as loader,
        pytest.raises(
            infeed.LoadTimeoutError,
            match=r"Ray has not started 1 of 1 worker; each needs 1 CPU \(\d of 6 free\), 1 node_that_never_joins \(0 of 0",
        ),
    ):
        next(iter(loader))


class Arrays:
    """Samples of 1 MiB."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 17, index)


def test_a_held_batch_keeps_its_values() -> None:
    """Later batches, and those of the next epoch, arrive in other memory."""
    with infeed.DataLoader(Arrays(), batch_size=2, prefetch=2, **OPTIONS) as loader:
        batches = iter(loader)
        held = next(batches)
        for later in (batches, loader, loader):
            assert [batch[0, 0] for batch in later][-1] == 22
        assert held.shape == (2, 1 << 17)
        assert (held[0] == 0).all()
        assert (held[1] == 1).all()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr("infeed.engine.build.find_backend", lambda: fake)
    monkeypatch.setattr("infeed.engine.epoch_iterator.open_stage", lambda _, device, convert: fake.open_stage(device, convert))
    return fake


@pytest.mark.long
def test_a_slot_is_not_reused_while_the_device_reads_it(device: FakeBackend) -> None:
    """The copy from pinned memory is late, and the user does not keep the batch."""
    copies = []
    with infeed.DataLoader(Arrays(), batch_size=2, prefetch=2, pin_memory=True, **OPTIONS) as loader:
        for batch in loader:
            copies.append(device.copy_later(batch))
            del batch
        device.user.run()
    assert [copy[:, -1].tolist() for copy in copies] == [[begin, begin + 1] for begin in range(0, 24, 2)]


def test_batches_arrive_on_the_device(device: FakeBackend) -> None:
    """In order."""
    with infeed.DataLoader(Arrays(), batch_size=2, device=infeed.Device("fake"), **OPTIONS) as loader:
        batches = []
        for batch in loader:
            device.copies.run()
            batches.append(batch[:, -1].tolist())
    assert batches == [[begin, begin + 1] for begin in range(0, 24, 2)]
