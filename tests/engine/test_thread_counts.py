"""Thread pools of libraries in workers: as many threads as the user says, one unless they do, and the user's own left alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import threadpoolctl

import infeed
from tests.helpers import Tree

pytestmark = pytest.mark.process

# How each library says how many threads it would use.
ASK: dict[str, Callable[[ModuleType], Any]] = {
    "numpy": lambda numpy: {info["num_threads"] for info in threadpoolctl.threadpool_info() if "numpy" in info["filepath"]},
    "cv2": lambda cv2: (cv2.getNumThreads(), cv2.ocl.useOpenCL()),
    "numexpr": lambda numexpr: numexpr.get_num_threads(),
    "pyarrow": lambda pyarrow: (pyarrow.cpu_count(), pyarrow.io_thread_count()),
    "polars": lambda polars: polars.thread_pool_size(),
    "torch": lambda torch: (torch.get_num_threads(), torch.get_num_interop_threads()),
}
# What it says where it may use so many. Arrow deadlocks with a single thread for reading.
EXPECTED: dict[str, Callable[[int], Any]] = {
    "numpy": lambda n: {n},
    "cv2": lambda n: (n, False),
    "numexpr": lambda n: n,
    "pyarrow": lambda n: (n, max(2, n)),
    "polars": lambda n: n,
    "torch": lambda n: (n, n),
}


def late(names: list[str]) -> Callable[[int], dict[str, Any]]:
    """Imports the libraries when a sample is loaded."""
    return lambda _: {name: ASK[name](importlib.import_module(name)) for name in names}


def early(names: list[str]) -> Callable[[int], dict[str, Any]]:
    """Holds the libraries, so that a fork server has imported them before it forks a worker."""
    modules = {name: importlib.import_module(name) for name in names}
    return lambda _: {name: ASK[name](module) for name, module in modules.items()}


def installed(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is not None]


def in_a_worker(make: Callable[[int], Any], options: dict[str, Any]) -> Any:
    with infeed.DataLoader(Tree(1, make), batch_size=None, **{**options, "num_workers": 1}) as loader:
        (counts,) = loader
    return counts


@pytest.mark.parametrize("threads", [1, 3])
def test_libraries_use_as_many_threads_as_a_worker_may(process_engine: dict[str, Any], threads: int) -> None:
    """Those that listen to the environment and those that do not, imported by the fork server or only with the first sample."""
    options = {**process_engine, **({} if threads == 1 else {"threads_per_worker": threads})}
    names = installed("numpy", "cv2", "numexpr")

    assert in_a_worker(early(names), options) == {name: EXPECTED[name](threads) for name in names}
    # Polars starts threads when it is imported, so only workers import it.
    names = installed("numpy", "cv2", "numexpr", "pyarrow", "polars")
    assert in_a_worker(late(names), options) == {name: EXPECTED[name](threads) for name in names}


@pytest.mark.torch
@pytest.mark.parametrize(("when", "threads"), [(early, 3), (late, 1)], ids=["early", "late"])
def test_torch_uses_as_many_threads_as_a_worker_may(forkserver: dict[str, Any], when: Callable[..., Any], threads: int) -> None:
    """For one operation, and for operations side by side."""
    pytest.importorskip("torch")
    assert in_a_worker(when(["torch"]), {**forkserver, "threads_per_worker": threads}) == {"torch": (threads, threads)}


@pytest.mark.torch
def test_torch_s_class_has_the_option_too() -> None:
    """And a program that sets torch's second pool in its workers itself, which torch allows once, still runs."""
    torch = pytest.importorskip("torch")
    from infeed.torch import DataLoader

    def count(_index: int) -> list[int]:
        torch.set_num_interop_threads(5)
        return [torch.get_num_threads(), torch.get_num_interop_threads()]

    loader = DataLoader(Tree(1, count), batch_size=None, num_workers=1, timeout=30, threads_per_worker=2)
    assert loader.threads_per_worker == 2
    assert list(loader) == [[2, 2]]


def test_the_user_s_environment_is_for_the_user_s_process(
    process_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS=8 with 16 workers would be 128 threads: the option decides in workers, and the variables say so there."""
    names = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "RAYON_NUM_THREADS"]
    for name in names:
        monkeypatch.setenv(name, "8")

    assert in_a_worker(lambda _: {os.environ[name] for name in names}, process_engine) == {"1"}
    assert in_a_worker(lambda _: {os.environ[name] for name in names}, {**process_engine, "threads_per_worker": 2}) == {"2"}
    assert {os.environ[name] for name in names} == {"8"}


@pytest.mark.parametrize("options", [{"worker": "thread"}, {"start_method": "auto"}], ids=["thread", "process"])
def test_the_user_s_process_keeps_its_thread_counts(options: dict[str, Any]) -> None:
    """Whatever is set in workers; thread workers use the process's pools as they are (P8)."""
    names = installed("numpy", "cv2", "numexpr")
    ask = early(names)
    environ, counts = dict(os.environ), ask(0)
    with infeed.DataLoader(Tree(2, lambda i: i), num_workers=1, threads_per_worker=3, timeout=30, **options) as loader:
        list(loader)

    assert ask(0) == counts
    assert dict(os.environ) == environ


def test_a_module_of_the_same_name_is_imported_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cv2 module without setNumThreads is no error."""
    (tmp_path / "cv2.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(_index: int) -> int:
        import cv2

        return int(cv2.ANSWER)

    assert in_a_worker(answer, {"start_method": "spawn", "timeout": 30}) == 42


def test_arrow_reads_and_writes_at_once_in_a_worker(forkserver: dict[str, Any], tmp_path: Path) -> None:
    """With a single thread for reading it would wait for itself for ever."""
    if not installed("pyarrow"):
        pytest.skip("pyarrow is not installed")

    def rewrite(_index: int) -> int:
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        table = pa.table({"a": list(range(1000))})
        for number in range(4):
            pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=100)
        files = [str(tmp_path / f"{number}.parquet") for number in range(4)]
        ds.write_dataset(ds.dataset(files).to_batches(), tmp_path / "out", schema=table.schema, format="parquet")
        return int(ds.dataset(tmp_path / "out").count_rows())

    assert in_a_worker(rewrite, forkserver) == 4000
