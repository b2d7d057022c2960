"""Thread pools of libraries in workers: `threads_per_worker` threads, one by default; the main process is not changed."""

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

# How to read the number of threads of each library.
ASK: dict[str, Callable[[ModuleType], Any]] = {
    "numpy": lambda numpy: {info["num_threads"] for info in threadpoolctl.threadpool_info() if "numpy" in info["filepath"]},
    "cv2": lambda cv2: (cv2.getNumThreads(), cv2.ocl.useOpenCL()),
    "numexpr": lambda numexpr: numexpr.get_num_threads(),
    "pyarrow": lambda pyarrow: (pyarrow.cpu_count(), pyarrow.io_thread_count()),
    "polars": lambda polars: polars.thread_pool_size(),
    "torch": lambda torch: (torch.get_num_threads(), torch.get_num_interop_threads()),
}
# The number with this limit. Arrow deadlocks with a single thread for reading.
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
    """References the libraries, so that a fork server imports them before it forks a worker."""
    modules = {name: importlib.import_module(name) for name in names}
    return lambda _: {name: ASK[name](module) for name, module in modules.items()}


def installed(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is not None]


def in_a_worker(make: Callable[[int], Any], options: dict[str, Any]) -> Any:
    with infeed.DataLoader(Tree(1, make), batch_size=None, **{**options, "num_workers": 1}) as loader:
        (counts,) = loader
    return counts


@pytest.mark.parametrize("threads", [1, 3])
def test_libraries_use_the_configured_number_of_threads(process_engine: dict[str, Any], threads: int) -> None:
    """Libraries that read the environment and others, imported by the fork server or with the first sample."""
    options = {**process_engine, **({} if threads == 1 else {"threads_per_worker": threads})}
    names = installed("numpy", "cv2", "numexpr")

    assert in_a_worker(early(names), options) == {name: EXPECTED[name](threads) for name in names}
    # Polars starts threads on import, so only workers import it.
    names = installed("numpy", "cv2", "numexpr", "pyarrow", "polars")
    assert in_a_worker(late(names), options) == {name: EXPECTED[name](threads) for name in names}


@pytest.mark.torch
@pytest.mark.parametrize(("when", "threads"), [(early, 3), (late, 1)], ids=["early", "late"])
def test_torch_uses_the_configured_number_of_threads(
    forkserver: dict[str, Any], when: Callable[..., Any], threads: int
) -> None:
    """Within an operation, and for operations in parallel."""
    pytest.importorskip("torch")
    assert in_a_worker(when(["torch"]), {**forkserver, "threads_per_worker": threads}) == {"torch": (threads, threads)}


@pytest.mark.torch
def test_the_torch_loader_has_the_option_too() -> None:
    """A program that sets torch's second pool in its workers, which torch allows once, still runs."""
    torch = pytest.importorskip("torch")
    from infeed.torch import DataLoader

    def count(_index: int) -> list[int]:
        torch.set_num_interop_threads(5)
        return [torch.get_num_threads(), torch.get_num_interop_threads()]

    loader = DataLoader(Tree(1, count), batch_size=None, num_workers=1, timeout=30, threads_per_worker=2)
    assert loader.threads_per_worker == 2
    assert list(loader) == [[2, 2]]


def test_environment_variables_for_threads_affect_only_the_main_process(
    process_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS=8 with 16 workers would be 128 threads: workers get the option's number in these variables."""
    names = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "RAYON_NUM_THREADS"]
    for name in names:
        monkeypatch.setenv(name, "8")

    assert in_a_worker(lambda _: {os.environ[name] for name in names}, process_engine) == {"1"}
    assert in_a_worker(lambda _: {os.environ[name] for name in names}, {**process_engine, "threads_per_worker": 2}) == {"2"}
    assert {os.environ[name] for name in names} == {"8"}


@pytest.mark.parametrize("options", [{"worker": "thread"}, {"start_method": "auto"}], ids=["thread", "process"])
def test_the_user_s_process_keeps_its_thread_counts(options: dict[str, Any]) -> None:
    """Whatever is set in workers; thread workers use the pools of the process unchanged (P8)."""
    names = installed("numpy", "cv2", "numexpr")
    ask = early(names)
    environ, counts = dict(os.environ), ask(0)
    with infeed.DataLoader(Tree(2, lambda i: i), num_workers=1, threads_per_worker=3, timeout=30, **options) as loader:
        list(loader)

    assert ask(0) == counts
    assert dict(os.environ) == environ


def test_a_module_with_the_name_of_a_library_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cv2 module without setNumThreads is no error."""
    (tmp_path / "cv2.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(_index: int) -> int:
        import cv2

        return int(cv2.ANSWER)

    assert in_a_worker(answer, {"start_method": "spawn", "timeout": 30}) == 42


def test_arrow_reads_and_writes_concurrently_in_a_worker(forkserver: dict[str, Any], tmp_path: Path) -> None:
    """With a single thread for reading it would deadlock."""
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
