"""``infeed doctor`` finds each problem in a small program that has it, and nothing in a clean program."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import start_python

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.torch, pytest.mark.linux("forks and reads /proc")]

HEAD = """
import os, threading, time
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Base(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.zeros(4)

def step(): time.sleep(0.03)  # Like a GPU: it uses no CPU.
"""

CLEAN = """
class Clean(Base):
    def __init__(self): self.names = [str(i) for i in range(64)]
    def __getitem__(self, index):
        return torch.zeros(1000) + float(np.random.rand()), torch.rand(1), int(self.names[index])

loader = DataLoader(Clean(), batch_size=8, num_workers=1, persistent_workers=True)
for epoch in range(3):
    for batch in loader: step()
"""

# In the order of the list of findings: its name, a word of its text, and a program that has the problem.
PROBLEMS = {
    "no-batch": (
        "all workers are idle",
        """
class Stuck(Base):
    def __getitem__(self, index): threading.Event().wait()

for batch in DataLoader(Stuck(), batch_size=4, num_workers=1): step()
""",
    ),
    "fork-with-threads": (
        "numexpr",
        """
import numexpr
for batch in DataLoader(Base(), batch_size=8, num_workers=1): step()
""",
    ),
    "not-picklable": (
        "dataset.lock is a _thread.lock",
        """
class Locked(Base):
    def __init__(self): self.lock = threading.Lock()

for batch in DataLoader(Locked(), batch_size=8, num_workers=1): step()
""",
    ),
    "same-random-numbers": (
        "dataset.rng",
        """
class Random(Base):
    def __init__(self): self.rng = np.random.default_rng(0)
    def __getitem__(self, index): return self.rng.random()

for batch in DataLoader(Random(), batch_size=8, num_workers=2): step()
""",
    ),
    "same-samples": (
        "each worker reads the whole iterable dataset",
        """
class Stream(IterableDataset):
    def __iter__(self): return iter(range(200))

for batch in DataLoader(Stream(), batch_size=8, num_workers=2): step()
""",
    ),
    "data-bound": (
        "main-process",
        """
class Slow(Base):
    def __getitem__(self, index): return sum(range(1_500_000))

for batch in DataLoader(Slow(), batch_size=8): time.sleep(0.01)
""",
    ),
    "num-workers": (
        "instead of 0",
        """
class Slow(Base):
    def __getitem__(self, index): return sum(range(1_500_000))

for batch in DataLoader(Slow(), batch_size=8): step()
""",
    ),
    "slow-storage": (
        "samples wait",
        """
class Far(Base):
    def __getitem__(self, index):
        time.sleep(0.02)  # a disk's
        with open(__file__, "rb") as file: return len(file.read())

for batch in DataLoader(Far(), batch_size=8, num_workers=1): step()
""",
    ),
    "slow-samples": (
        "index 40",
        """
class Uneven(Base):
    def __getitem__(self, index):
        if index == 40: time.sleep(0.7)
        return index

for batch in DataLoader(Uneven(), batch_size=8, num_workers=1): step()
""",
    ),
    "restarted-workers": (
        "persistent_workers=True",
        """
def connect(worker): time.sleep(0.05)

for epoch in range(5):
    for batch in DataLoader(Base(), batch_size=32, num_workers=2, worker_init_fn=connect): step()
""",
    ),
    "thread-pools": (
        "OpenBLAS",
        """
class Heavy(Base):
    def __getitem__(self, index): return float(np.linalg.norm(np.ones((300, 300)) @ np.ones((300, 300))))
    def __len__(self): return 1_000_000

for batch in DataLoader(Heavy(), batch_size=8, num_workers=os.cpu_count()): pass
""",
    ),
    "no-pinning": (
        "pin_memory=True",
        """
torch.cuda.is_available = lambda: True

class Large(Base):
    def __getitem__(self, index): return torch.zeros(100_000)

for batch in DataLoader(Large(), batch_size=8, num_workers=1): step()
""",
    ),
    "memory-growth": (
        "per minute",
        """
class Leaky(Base):
    kept = []
    def __getitem__(self, index):
        self.kept.append(os.urandom(1 << 20))
        return index
    def __len__(self): return 1_000_000

for batch in DataLoader(Leaky(), batch_size=1, num_workers=1): step()
""",
    ),
    "large-objects": (
        "dataset.names, a list of 600,000 str",
        """
class Names(Base):
    def __init__(self): self.names = [f"a name of some length {i}" for i in range(600_000)]

for batch in DataLoader(Names(), batch_size=8, num_workers=2): step()
""",
    ),
}
# These findings depend on times, and so on the load of the machine: they run with the long tests. test_time_checks.py tests
# without a program that findings follow from times.
TIMED = {"data-bound", "num-workers", "slow-storage", "slow-samples", "restarted-workers", "thread-pools", "memory-growth"}
SECONDS = {"no-batch": 1.0, "memory-growth": 3.0, "thread-pools": 4.0}


def diagnose(tmp_path: Path, code: str, *options: str, until: str = "") -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the doctor's JSON report.

    Args:
        until: Text expected in the JSON of the findings; "[]" means that there are none. While it is missing the doctor runs
            again, up to three times, because load on the machine distorts times.
    """
    (tmp_path / "program.py").write_text(HEAD + code)
    arguments = ["-m", "infeed", "doctor", "--json", "-", *options, "program.py"]
    for _ in range(3):
        result = start_python(arguments, cwd=tmp_path).finish(60)
        assert result.out, result.err
        report = json.loads(result.out)
        if until in json.dumps(report["findings"]):
            break
    return result.code, report


def test_nothing_is_found_in_a_clean_program(tmp_path: Path) -> None:
    """With persistent workers, seeded random numbers and a loop that does not wait, the exit code is 0."""
    code, report = diagnose(tmp_path, CLEAN, until="[]")

    assert [finding["title"] for finding in report["findings"]] == []
    assert code == 0
    assert (report["ending"], report["loaders"][0]["batches"]) == ("finished", 24)


WARMS_UP = """
import infeed

class Remote(Base):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.008)
        return index

loader = infeed.DataLoader(Remote(), batch_size=16, num_workers="auto", worker="auto")
left = 100
for batch in loader:
    step()
    statistics = loader.statistics()
    left -= statistics.is_settled and statistics.worker_count > 2
    if not left: break
"""


@pytest.mark.long
def test_nothing_is_found_in_a_program_with_auto_workers(tmp_path: Path) -> None:
    """The program starts with two workers and waits half of the time; the doctor judges the workers it settles on."""
    code, report = diagnose(tmp_path, WARMS_UP, "--seconds", "40")

    assert [finding["title"] for finding in report["findings"]] == []
    assert code == 0
    assert report["loaders"][0]["num_workers"] > 2
    assert 0 < report["loaders"][0]["judged_batches"] < report["loaders"][0]["batches"]


ROWS = """
from torch.utils.data import TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(12800, 32), torch.zeros(12800)), batch_size=64, shuffle=True)
for epoch in range(1_000):
    for rows, labels in loader: sum(range(20_000))
"""


def test_no_workers_are_proposed_for_rows_of_a_tensor(tmp_path: Path) -> None:
    """The training loop always waits, but loading a batch takes less time than its transfer from a worker."""
    _, report = diagnose(tmp_path, ROWS, "--seconds", "1")

    assert report["loaders"][0]["batches"] > 4
    assert "num-workers" not in [finding["name"] for finding in report["findings"]]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name in TIMED else []) for name in PROBLEMS])
def test_a_problem_is_found_in_a_program_that_has_it(tmp_path: Path, name: str) -> None:
    """The evidence names the cause, and there is a fix for torch's loader and for infeed's."""
    if name == "thread-pools" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core no library starts threads")
    word, program = PROBLEMS[name]

    code, report = diagnose(tmp_path, program, "--seconds", str(SECONDS.get(name, 2.0)), until=f'"name": "{name}"')

    found = {finding["name"]: finding for finding in report["findings"]}
    assert name in found, report
    assert word in json.dumps(found[name])
    assert set(found[name]["fix"]) == {"torch", "infeed"}
    assert code == 1


@pytest.mark.long
def test_thread_pools_in_workers_are_the_bottleneck(tmp_path: Path) -> None:
    """Transfer is not the bottleneck, although a sample is faster when it is probed alone. Thread pools cost most."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core no library starts threads")
    program = """
class Product(Base):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        matrix = np.random.rand(300, 300)
        return (matrix @ matrix)[:2, :2].copy()

for batch in DataLoader(Product(), batch_size=16, num_workers=len(os.sched_getaffinity(0))): pass
"""
    _, report = diagnose(tmp_path, program, "--seconds", "4", until='"bottleneck": "thread-pools"')

    first, second = report["findings"][:2]
    assert (first["name"], second["name"]) == ("data-bound", "thread-pools")
    assert first["bottleneck"] == "thread-pools"
    assert first["fix"]["torch"] == second["fix"]["torch"]


SLOW_COLLATE = """
import infeed, infeed.torch

def collate(samples):
    time.sleep(0.08)
    return torch.stack(samples)

class Quick(Base):
    def __len__(self): return 320

for batch in {library}(Quick(), batch_size=8, num_workers=2, collate_fn=collate): time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize("library", ["DataLoader", "infeed.DataLoader"])
def test_a_slow_collate_fn_is_the_bottleneck(tmp_path: Path, library: str) -> None:
    """The function is I/O-bound, so more workers help even on few cores. Samples cost next to nothing."""
    _, report = diagnose(tmp_path, SLOW_COLLATE.format(library=library), until='"bottleneck": "collate"')

    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["data-bound"]["bottleneck"] == "collate"
    assert "a cheaper collate_fn" in found["data-bound"]["fix"]["infeed"]
    assert int(found["num-workers"]["fix"]["infeed"].removeprefix("num_workers=")) > 2


IN_PYTHON = """
import infeed

class Computed(Base):
    def __len__(self): return 1_000_000
    def __getitem__(self, index): return sum(i for i in range(40_000))

for batch in infeed.DataLoader(Computed(), batch_size=8, num_workers=2, worker="thread"): pass
"""


@pytest.mark.long
def test_cpu_bound_python_threads_have_a_gil_finding(tmp_path: Path) -> None:
    """Together the threads use one core, however many there are."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core processes are no better")
    _, report = diagnose(tmp_path, IN_PYTHON, "--seconds", "2", until='"bottleneck": "gil"')

    first = report["findings"][0]
    assert first["name"] == "data-bound"
    assert first["bottleneck"] == "gil"
    assert first["fix"]["infeed"].startswith("worker='process'")
    assert "worker='thread'" in first["loader"]


def test_there_is_a_program_for_each_finding() -> None:
    """Every finding has a program that shows it."""
    from infeed.doctor.checks import NAMES

    assert tuple(PROBLEMS) == NAMES
