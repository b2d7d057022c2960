"""Shared objects in datasets, and in processes of all kinds."""

import gc
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.memory.segments import open_store
from infeed.memory.serialized_dataset import send
from infeed.workers.launcher import IDLE_WORKERS
from tests.helpers import (
    DEADLINE_S,
    PORTABLE,
    ROOT,
    Journal,
    assert_clean,
    flat,
    kill_process,
    run_script,
    shm_names,
    start_script,
    wait_until,
)


class Shared:
    """A dataset with only shared parts."""

    def __init__(self, length: int) -> None:
        self.names = infeed.share([f"name {number}" for number in range(length)])
        self.labels = infeed.share({f"name {number}": number for number in range(length)})
        self.boxes = infeed.share([(number, [number], {"n": np.full(2, number)}) for number in range(length)])
        self.rows = infeed.share(np.arange(2.0 * length).reshape(length, 2))
        self.tail = self.rows[1:]
        self.ranges = infeed.share([np.arange(number) for number in range(length)])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        number, (same,), more = self.boxes[index]
        assert number == same == more["n"][0] == len(self.ranges[index])
        assert not self.rows.flags.writeable
        row = self.rows[index]
        return {"label": self.labels[self.names[index]], "row": row, "name": self.names[index], "pid": os.getpid()}


def test_a_dataset_of_shared_parts_loads_in_every_kind_of_worker(every_engine: dict[str, Any]) -> None:
    """Without workers, in threads, forked, spawned, and with named memory; two epochs, and a second loader."""
    dataset = Shared(20)
    for _ in range(2):
        with infeed.DataLoader(dataset, batch_size=4, shuffle=True, seed=3, **every_engine) as loader:
            for _ in range(2):
                batches = [dict(batch) for batch in loader]
                labels = flat([batch["label"].tolist() for batch in batches])
                assert sorted(labels) == list(range(20))
                assert flat([batch["name"] for batch in batches]) == [f"name {label}" for label in labels]
                assert [row[0] / 2 for batch in batches for row in batch["row"]] == labels


def test_a_shared_list_is_a_dataset(process_engine: dict[str, Any]) -> None:
    """So is a shared dict with integer keys from 0."""
    for dataset in (infeed.share([10, 20, 30]), infeed.share({0: 10, 1: 20, 2: 30})):
        with infeed.DataLoader(dataset, batch_size=2, **process_engine) as loader:
            assert [batch.tolist() for batch in loader] == [[10, 20], [30]]


def test_a_shared_dataset_is_pickled_by_reference() -> None:
    """A list of a million elements and an array of 8 MB are pickled as references."""
    store = open_store()
    dataset = Shared(5)
    dataset.names = infeed.share(list(range(1_000_000)))
    dataset.rows = infeed.share(np.zeros(1_000_000))
    dataset.tail = dataset.rows[1:]
    serialized = send({}, dataset, store)
    store.close()

    assert sum(serialized.sizes) < 20_000


@pytest.mark.process
def test_a_replacement_worker_finds_the_shared_object(forkserver: dict[str, Any]) -> None:
    """The object outlives workers."""
    with infeed.DataLoader(Shared(40), batch_size=2, **forkserver) as loader:
        labels: list[int] = []
        for step, batch in enumerate(loader):
            labels += batch["label"].tolist()
            if step == 2:
                kill_process(int(batch["pid"][0]))
        assert labels == list(range(40))


@pytest.mark.process
def test_a_reference_to_a_freed_object_is_an_error_with_a_fix(forkserver: dict[str, Any]) -> None:
    """A dataset that holds only the reference is a user error, and does not hang."""
    gc.collect()  # Loaders of other tests, whose datasets may be in the same memory.
    IDLE_WORKERS.clear()  # On Windows memory stays as long as any process has mapped it.
    reference = pickle.dumps(infeed.share(["gone"]))

    class Dangling:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return pickle.loads(reference)[index]

    with (
        infeed.DataLoader(Dangling(), **forkserver) as loader,
        pytest.raises(infeed.InfeedError, match=rf"cannot open a shared object of process {os.getpid()}"),
    ):
        list(loader)


# --- processes of the user


def total(shared: Any) -> tuple[int, Any]:
    """Returns what another process reads from a shared object."""
    return os.getpid(), sum(shared["numbers"]) + shared["array"].sum() + len(shared["more"]["names"])


def total_of_parts(numbers: Any, array: Any, more: Any) -> tuple[int, Any]:
    return total({"numbers": numbers, "array": array, "more": more})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_of_the_user_read_shared_objects(method: str) -> None:
    """concurrent.futures with every start method; objects that they return are shared objects again."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    numbers, array = infeed.share(list(range(1000))), infeed.share(np.arange(1000))
    more = infeed.share({"names": ["a", "b"]})
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pid, found = pool.submit(total_of_parts, numbers, array, more).result(DEADLINE_S)
        returned = pool.submit(_identity, numbers).result(DEADLINE_S)

    assert pid != os.getpid()
    assert found == 2 * sum(range(1000)) + 2
    assert returned == numbers
    stop_helpers_of_multiprocessing()


def _identity(value: Any) -> Any:
    return value


def stop_helpers_of_multiprocessing() -> None:
    """Its fork server and its tracker would stay until the end of the tests."""
    from multiprocessing import forkserver, resource_tracker

    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


READER = """
import pickle, sys
data = sys.stdin.buffer.read()
shared = pickle.loads(data)
print(type(shared).__name__, len(shared), shared[-1])
"""


@pytest.mark.process
def test_an_unrelated_process_reads_shared_objects() -> None:
    """Between ranks of one machine, pickled in any way."""
    shared = infeed.share([f"sample {number}" for number in range(5000)])
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=pickle.dumps(shared),
        capture_output=True,
        env=environ,
        timeout=DEADLINE_S,
        check=True,
    )

    assert done.stdout.decode().split() == ["SharedList", "5000", "sample", "4999"]


@pytest.fixture(
    params=[
        pytest.param("best"),
        pytest.param("names stay", marks=pytest.mark.linux("macOS has no other way")),
        pytest.param("names vanish", marks=pytest.mark.linux("Windows has no other way")),
    ]
)
def prelude(request: pytest.FixtureRequest) -> str:
    """The first lines of a script that shares memory in this way: names stay as on macOS, or go with the last handle."""
    if request.param == "names vanish":
        request.getfixturevalue("windows_stand_in")  # the script's names are in the same table as those of this process
    return PORTABLE if request.param == "names stay" else ""


HOLDER = """
import pickle, sys, time
from pathlib import Path
import infeed
shared = infeed.share(["a"] * 1000)
Path("reference.tmp").write_bytes(pickle.dumps(shared))
Path("reference.tmp").rename("reference")
time.sleep(1000)
"""


@pytest.mark.process
def test_an_object_outlives_its_owner_where_it_was_opened(prelude: str, tmp_path: Path) -> None:
    """After SIGKILL of the owner: processes that had opened it still read it, later ones get an error."""
    script = start_script(tmp_path, prelude + HOLDER)
    wait_until((tmp_path / "reference").exists, "the script's reference")
    reference = (tmp_path / "reference").read_bytes()
    early = pickle.loads(reference)
    script.process.kill()
    script.process.communicate()

    assert list(early) == ["a"] * 1000
    del early
    if prelude:
        from infeed.memory.segments import remove_attached_names

        remove_attached_names()  # As a worker does when it ends.
    with pytest.raises(infeed.InfeedError, match=rf"cannot open a shared object of process {script.pid}"):
        pickle.loads(reference)


MAIN = """
from collections import namedtuple
import infeed

Sample = namedtuple("Sample", "path label")


class Dataset:
    def __init__(self):
        self.samples = infeed.share([Sample(f"{n}.jpg", n) for n in range(100)])

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        assert type(sample) is Sample
        return sample


for options in ({}, {"start_method": "spawn"}):
    with infeed.DataLoader(Dataset(), batch_size=10, num_workers=2, timeout=30, **options) as loader:
        assert [label for batch in loader for label in batch.label.tolist()] == list(range(100))
        assert type(next(iter(loader))) is Sample
"""


@pytest.mark.process
def test_elements_may_have_a_class_of_the_script(prelude: str, tmp_path: Path) -> None:
    """Without a main guard: workers never run the script, and still know its classes."""
    assert_clean(run_script(tmp_path, prelude + MAIN))


KILLED = """
import sys
from pathlib import Path
import infeed


class Dataset:
    def __init__(self):
        self.names = infeed.share(["name"] * 1000)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return len(self.names[index])


from tests.helpers import Journal
loader = infeed.DataLoader(Dataset(), batch_size=10, num_workers=2, timeout=30)
next(iter(loader))
Journal(Path("journal")).write("loading")
import time
time.sleep(1000)
"""


@pytest.mark.process
def test_a_killed_process_and_its_workers_leave_nothing(prelude: str, tmp_path: Path) -> None:
    """Neither process nor name: where memory is named, the workers remove the names."""
    script = start_script(tmp_path, prelude + KILLED)
    script.wait_line(Journal(tmp_path / "journal"), "loading")
    assert bool(shm_names(script.pid)) is bool(prelude)
    script.process.kill()
    script.finish()

    wait_until(lambda: not shm_names(script.pid), "the end of the names")


DAEMON = """
import os
import infeed

shared = infeed.share(list(range(100)))
read, write = os.pipe()
pid = os.fork()
if pid:
    os._exit(0)  # as daemons do: the child goes on
os.close(write)
os.read(read, 1)  # ends when the parent has
with infeed.DataLoader(shared, batch_size=10, num_workers=2, timeout=30) as loader:
    assert sum(int(batch.sum()) for batch in loader) == sum(range(100))
with open("done", "w"):
    pass
"""


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
def test_a_forked_child_that_outlives_its_parent_can_send_objects_to_workers(tmp_path: Path) -> None:
    """It has the descriptor too."""
    script = start_script(tmp_path, DAEMON)
    result = script.finish()

    assert result.err == ""
    assert (tmp_path / "done").exists()


# --- torch and the advice


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.slow
def test_shared_tensors_in_workers(torch: ModuleType, forkserver: dict[str, Any]) -> None:
    """Whole, as samples, and through torch's loader."""
    import infeed.torch

    class Tensors:
        def __init__(self) -> None:
            self.rows = infeed.share(torch.arange(24.0).view(12, 2))
            self.mask = infeed.share(torch.ones(3))

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return self.rows[index], self.mask

    for cls in (infeed.DataLoader, infeed.torch.DataLoader):
        for rows, mask in cls(Tensors(), batch_size=4, **forkserver):
            assert type(rows) is type(mask) is torch.Tensor
            assert mask.shape == (4, 3)
            assert rows.shape == (4, 2)


@pytest.fixture
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch")
    return module


class Files:
    def __init__(self, count: int) -> None:
        self.samples = [f"train/image_{number:08d}.jpg" for number in range(count)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.process
def test_a_loader_logs_the_advice_once(
    forkserver: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again when its workers are restarted, and not for threads; another loader logs its own."""
    caplog.set_level(logging.INFO, "infeed")
    dataset = Files(200_000)

    def advice_count() -> int:
        return sum("dataset.samples is a list of 200,000 str, about" in record.getMessage() for record in caplog.records)

    with infeed.DataLoader(dataset, batch_size=4, **forkserver) as loader:
        for _ in zip(loader, loader, strict=True):  # Two engines of one loader.
            pass
        assert advice_count() == 1
    with infeed.DataLoader(dataset, batch_size=4, num_workers=2, worker="thread") as loader:
        list(loader)
    assert advice_count() == 1
    with infeed.DataLoader(dataset, batch_size=4, **forkserver) as loader:
        list(loader)
    assert advice_count() == 2
