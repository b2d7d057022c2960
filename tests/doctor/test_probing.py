"""What the doctor finds out about threads, datasets and their random number generators."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infeed.doctor.evidence import Journal, JournalReader
from infeed.doctor.monitor import Watched, measure, settings_of, workers_of
from infeed.doctor.probe import find_generators, probe
from infeed.doctor.thread_owners import PYTHON, find_owners, parse_maps
from infeed.loader import DataLoader
from infeed.workers.info import get_worker_info
from infeed.workers.ray_options import RayWorkers
from tests.helpers import run_script


class Dice:
    """Draws from one of its two generators."""

    def __init__(self) -> None:
        self.rng, self.unused = random.Random(1), np.random.default_rng(1)
        self.parts = [{"inner": np.random.RandomState(1)}]

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


def probed(dataset: Any, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Returns all facts of a probe."""
    path = tmp_path / "journal"
    journal = Journal(path)
    probe(Watched(0, DataLoader(dataset, batch_size=4, **options)), journal, 1.0)
    journal.close()
    return {name: value for event in JournalReader(path).read() for name, value in event.items()}


def test_generators_are_found_by_their_paths() -> None:
    """Generators of Python and NumPy are found, also inside lists and dicts."""
    assert [path for path, _ in find_generators(Dice())] == [
        "dataset.rng",
        "dataset.unused",
        "dataset.parts[0]['inner']",
    ]


def test_a_generator_counts_if_samples_draw_from_it(tmp_path: Path) -> None:
    """A generator that no sample draws from is harmless."""
    assert probed(Dice(), tmp_path)["generators"] == ["dataset.rng"]


def test_a_dataset_that_raises_is_reported_without_a_crash_of_the_doctor(tmp_path: Path) -> None:
    """Facts that need no sample are still reported."""

    class Broken(Dice):
        def __getitem__(self, index: int) -> float:
            raise OSError("no such disk")

    facts = probed(Broken(), tmp_path)

    assert facts["error"] == "OSError: no such disk"
    assert facts["heavy"] == []


def test_an_iterable_dataset_is_probed_too(tmp_path: Path) -> None:
    """It is read from its beginning."""

    class Stream:
        def __iter__(self) -> Any:
            return iter(range(7))

    assert probed(Stream(), tmp_path)["sample_count"] == 5  # The first ones warm up.


class Damaged:
    """Some samples cannot be loaded; one of the others is slow."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"broken: {index}")
        if index == 40:
            threading.Event().wait(0.02)
        return index


def test_a_bad_sample_does_not_end_the_probe(tmp_path: Path) -> None:
    """The loader may skip it. Findings about other samples have the right index."""
    facts = probed(Damaged({0, 7, 8}), tmp_path)

    assert (facts["sample_count"], facts.get("error")) == (46, None)
    assert [which for which, _ in facts["slow"]] == ["40"]


def test_if_no_sample_can_be_loaded_the_reason_is_reported(tmp_path: Path) -> None:
    facts = probed(Damaged(set(range(50))), tmp_path)

    assert facts["error"] == "ValueError: broken: 0"
    assert "sample_count" not in facts


@pytest.mark.parametrize("asks", [True, False])
def test_an_iterable_dataset_that_calls_get_worker_info_shards_itself(tmp_path: Path, asks: bool) -> None:
    """Tools that trace calls are not disturbed."""

    class Stream:
        def __iter__(self) -> Any:
            if asks:
                get_worker_info()
            yield from range(7)

    before = sys.getprofile()
    facts = probed(Stream(), tmp_path)

    assert (facts["shards_itself"], facts["sample_count"]) == (asks, 5)
    assert sys.getprofile() is before


@pytest.mark.torch
def test_an_iterable_dataset_of_torch_is_iterated(tmp_path: Path) -> None:
    """It inherits `__getitem__`. For torch's loader it must call torch's get_worker_info to shard itself."""
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            assert data.get_worker_info() is None
            return iter(range(7))

    path = tmp_path / "journal"
    journal = Journal(path)
    watched = Watched(0, data.DataLoader(Stream(), batch_size=4))
    probe(watched, journal, 1.0)
    journal.close()
    facts = {name: value for event in JournalReader(path).read() for name, value in event.items()}

    assert watched.settings["is_stream"]
    assert (facts["shards_itself"], facts["sample_count"]) == (True, 5)
    assert not probed(Stream(), tmp_path)["shards_itself"]


def test_objects_that_cannot_be_pickled_are_named(tmp_path: Path) -> None:
    """Functions as well as datasets."""
    lock = threading.Lock()

    facts = probed(Dice(), tmp_path, collate_fn=lambda samples: (lock, samples))

    assert "collate_fn -> lock (closed over) is a _thread.lock" in facts["unsendable"]


def test_a_collate_fn_is_timed_on_a_batch_of_samples(tmp_path: Path) -> None:
    """The function sleeps, and so releases the CPU."""
    given: list[int] = []

    def collate(samples: list[float]) -> list[float]:
        given.append(len(samples))
        threading.Event().wait(0.02)
        return samples

    facts = probed(Dice(), tmp_path, collate_fn=collate)

    assert set(given) == {4}
    assert facts["collate_s"] >= 0.02 > facts["collate_cpu_s"]
    assert (facts["has_collate_fn"], facts["is_collate_known"]) == (True, True)
    if sys.platform == "linux":
        assert facts["collate_switches"] >= 1


def test_the_time_of_a_failing_collate_fn_is_unknown(tmp_path: Path) -> None:
    """It fails in the main process, where nothing is set up as in a worker."""

    def collate(samples: list[float]) -> list[float]:
        raise OSError("no such device")

    facts = probed(Dice(), tmp_path, collate_fn=collate)

    assert (facts["has_collate_fn"], facts["is_collate_known"]) == (True, False)
    assert facts["sample_count"] > 0


@pytest.mark.linux("reads /proc")
def test_a_call_for_many_samples_is_io_bound_if_it_releases_the_cpu_once(tmp_path: Path) -> None:
    """Each of its samples has less than one context switch."""

    class Remote(Dice):
        def __getitems__(self, indices: list[int]) -> list[int]:
            threading.Event().wait(0.001)
            return indices

    assert probed(Remote(), tmp_path)["switches"] >= 1


def test_a_batch_is_measured_wherever_its_arrays_are() -> None:
    """Bytes, rows, and whether it is on a device."""
    batch = {"image": np.zeros((8, 3), np.float32), "more": [np.zeros(8), "text"]}

    assert measure(batch) == (8 * 3 * 4 + 8 * 8, 8, False)
    assert measure("text") == (0, 0, False)


@pytest.mark.parametrize(
    ("asked", "kind", "is_auto"),
    [
        ({"num_workers": "auto", "worker": "auto"}, "process", True),
        ({"num_workers": "auto", "worker": "thread"}, "thread", True),
        ({"num_workers": 8, "worker": "auto"}, "process", True),
        ({"num_workers": 0, "worker": "auto"}, "inline", False),
        ({"num_workers": 2}, "process", False),
        ({"num_workers": 2, "worker": "thread"}, "thread", False),
        ({"num_workers": 2, "worker": "ray"}, "process", False),
        ({"num_workers": 2, "worker": RayWorkers(local=1)}, "process", False),
    ],
)
def test_auto_is_neither_a_kind_nor_a_number_of_workers(asked: dict[str, Any], kind: str, is_auto: bool) -> None:
    """It starts with a few processes; the maximum says nothing about the current number."""
    settings = settings_of(DataLoader(range(8), **asked))

    assert (settings["kind"], settings["is_auto"]) == (kind, is_auto)
    assert settings["num_workers"] == (1 if is_auto else asked["num_workers"])
    assert ("'auto'" in settings["asked"]) is ("auto" in asked.values())
    assert ("worker='thread'" in settings["asked"]) is (asked.get("worker") == "thread")
    assert ("worker='ray'" in settings["asked"]) is (
        asked.get("worker") == "ray" or isinstance(asked.get("worker"), RayWorkers)
    )


@pytest.mark.parametrize("observe", ["timeline", "off"])
def test_workers_are_found_through_an_active_iteration(observe: Any) -> None:
    """Loaders without statistics work too, while an iteration is active."""
    count: Any = "auto" if observe == "timeline" else 2  # It needs statistics.
    with DataLoader(Dice(), batch_size=5, num_workers=count, worker="thread", observe=observe) as loader:
        batches = iter(loader)
        next(batches)
        now = workers_of(batches)
        for _ in batches:
            pass
        after = workers_of(batches)

    assert now is not None
    assert (now["kind"], now["is_gathered"], now["pids"]) == ("thread", False, [])
    if observe == "timeline":
        assert 0 < now["count"] < 64
        assert after is not None
        assert after["kind"] == "thread"


def test_array_rows_have_no_workers() -> None:
    """Whatever `num_workers` is."""
    with DataLoader(np.zeros((50, 3)), batch_size=5, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)

        assert workers_of(batches) == {"kind": "inline", "count": 0, "is_gathered": True, "is_settled": True, "pids": []}


def test_a_journal_is_disabled_in_a_forked_process_and_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete line is read later."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write("one", value=1)
    reader = JournalReader(path)
    assert reader.read() == [{"event": "one", "value": 1}]
    with open(path, "a") as file:
        file.write('{"event": ')
    assert reader.read() == []
    with open(path, "a") as file:
        file.write('"two"}\n')
    assert [event["event"] for event in reader.read()] == ["two"]
    assert reader.has("one")
    assert not reader.has("three")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)  # As in a child.
        journal.write("three")
    assert reader.read() == []
    journal.close()


@pytest.mark.linux("reads /proc")
def test_threads_are_attributed_to_their_library() -> None:
    """The thread in this test belongs to Python."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert find_owners()[thread.native_id or 0] == PYTHON
    finally:
        end.set()
        thread.join()


@pytest.mark.linux("reads /proc")
@pytest.mark.process
def test_native_threads_are_attributed_from_outside(tmp_path: Path) -> None:
    """numexpr starts two when it is imported. A process that is inspected from outside continues afterwards."""
    pytest.importorskip("numexpr")
    code = """
import json, os, subprocess, sys
from infeed.doctor.thread_owners import find_owners
os.environ["NUMEXPR_NUM_THREADS"] = "2"
program = "import numexpr, sys; print(flush=True); sys.stdin.read(); print('end')"
child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
owners = sorted(find_owners(child.pid, halts=True).values())
print(json.dumps([owners.count("numexpr"), child.communicate()[0].strip()]))
"""
    result = run_script(tmp_path, code)

    assert json.loads(result.out) == [2, "end"], result.err


def test_maps_are_parsed_as_linux_writes_them() -> None:
    """With and without a file."""
    text = "7f00-7f80 r-xp 00000000 08:01 12   /usr/lib/a name.so\n8000-9000 rw-p 00000000 00:00 0 \n"

    assert parse_maps(text) == [(0x7F00, 0x7F80, True, "/usr/lib/a name.so"), (0x8000, 0x9000, False, "")]


@pytest.mark.skipif(sys.platform == "linux", reason="there it is known")
def test_threads_are_unknown_on_other_platforms() -> None:
    """Nothing is reported."""
    assert find_owners(os.getpid()) == {}
