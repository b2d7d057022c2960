"""What the fork server imports: all that workers need, except modules that start a thread on import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Journal, Tree, close_fork_server, fork_server, patient_next, plain, run_script, wait_until

pytestmark = [pytest.mark.process, pytest.mark.linux("is about the fork server")]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs modules that each record the process which imported them; the test has its own fork server."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    close_fork_server()
    names: list[str] = []

    def write(**sources: str) -> None:
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(f"import os\nPID = os.getpid()\n{dedent(source)}")
        names.extend(sources)
        importlib.invalidate_caches()

    yield write
    for name in names:
        sys.modules.pop(name, None)
    close_fork_server()


# Starts a thread on import, except in the process of the test.
THREAD = f"""
import os, threading
if os.getpid() != {os.getpid()}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


class Importing:
    """Its samples say which process imported modules: the server, the worker, or another one."""

    def __init__(self, module: Any, *names: str) -> None:
        self.module, self.names = module, names

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        known = {os.getpid(): "worker", os.getppid(): "server"}
        return [known.get(importlib.import_module(name).PID, "another") for name in self.names]


def importers(dataset: Importing, options: dict[str, Any]) -> list[list[str]]:
    """Returns the distinct samples of an epoch."""
    with infeed.DataLoader(dataset, batch_size=None, **options) as loader:
        return sorted(map(list, {tuple(sample) for sample in loader}))


def test_only_workers_import_a_module_that_starts_a_thread(install: Install, forkserver: dict[str, Any]) -> None:
    """Workers are still forked. The server imports what comes before such a module; its importers are left to workers."""
    install(fk_heavy="", fk_threads=THREAD, fk_data="import fk_heavy, fk_threads, fk_after", fk_after="")
    dataset = Importing(importlib.import_module("fk_data"), "fk_heavy", "fk_threads", "fk_data")

    assert importers(dataset, forkserver) == [["server", "worker", "worker"]]


def test_the_server_does_not_import_modules_known_to_start_threads(install: Install, forkserver: dict[str, Any]) -> None:
    """This one starts none: its name is enough, so that the server need not restart to find out."""
    install(polars="")
    dataset = Importing(importlib.import_module("polars"), "polars")

    assert [importers(dataset, forkserver) for _ in range(2)] == [[["worker"]], [["worker"]]]


def test_workers_of_other_loaders_survive_a_module_that_starts_a_thread(install: Install, forkserver: dict[str, Any]) -> None:
    """The server stays the same process."""
    install(fk_threads=THREAD)
    with infeed.DataLoader(Tree(200, lambda index: os.getpid()), batch_size=None, **forkserver) as other:
        batches = iter(other)
        pids = {patient_next(batches)}
        server = fork_server().pid

        assert importers(Importing(importlib.import_module("fk_threads"), "fk_threads"), forkserver) == [["worker"]]
        pids |= set(batches)

    assert fork_server().pid == server
    assert len(pids) <= 2


def test_workers_are_forked_although_many_modules_start_threads(install: Install, forkserver: dict[str, Any]) -> None:
    """After some attempts the server imports no more of them."""
    install(fk_first="", **{f"fk_threads_{number}": THREAD for number in range(5)})
    names = ["fk_first", *(f"fk_threads_{number}" for number in range(5))]
    modules = [importlib.import_module(name) for name in names]

    assert importers(Importing(modules, *names), forkserver) == [["server", *["worker"] * 5]]


def test_the_server_imports_what_earlier_workers_imported(install: Install, forkserver: dict[str, Any]) -> None:
    """Also what they import when they load samples, but not the user's own modules."""
    install(fk_lazy="import fk_below", fk_below="")
    dataset = Importing(None, "fk_lazy", "fk_below")

    assert importers(dataset, forkserver) == [["worker", "worker"]]
    assert importers(dataset, forkserver) == [["server", "server"]]


def test_only_workers_import_modules_of_the_user(
    install: Install, forkserver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such modules may do anything on import."""
    (tmp_path / "fk_own.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(tmp_path)
    dataset = Importing(None, "fk_own")

    assert [importers(dataset, forkserver) for _ in range(2)] == [[["worker"]], [["worker"]]]


def test_the_server_starts_when_a_loader_is_created(install: Install, forkserver: dict[str, Any], tmp_path: Path) -> None:
    """It imports what the dataset's class needs while the program continues."""
    source = f"""
        with open({str(tmp_path / "importers")!r}, "a") as file: file.write(f"{{PID}}\\n")
        class Data:
            def __len__(self): return 1
            def __getitem__(self, index): return PID == os.getppid()
    """
    install(fk_data=source)
    journal = Journal(tmp_path / "importers")
    with infeed.DataLoader(importlib.import_module("fk_data").Data(), batch_size=None, **forkserver) as loader:
        wait_until(lambda: len(journal.lines()) == 2, "the server's import")

        assert list(loader) == [True]
    assert journal.lines()[0] == str(os.getpid())
    assert len(journal.lines()) == 2


def test_a_loader_of_arrays_starts_no_server(install: Install, forkserver: dict[str, Any]) -> None:
    """It has no workers, whatever `num_workers` is."""
    loader = infeed.DataLoader(np.arange(8), 4, **forkserver)

    assert plain(list(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="not enough values"):
        fork_server()


@pytest.mark.parametrize("given", [None, "narenas:1"], ids=["not set", "set by the user"])
def test_arrow_starts_no_thread_in_the_server(
    install: Install, forkserver: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Workers do not inherit the environment variable that ensures this."""
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    if given is not None:
        monkeypatch.setenv("JE_ARROW_MALLOC_CONF", given)
    install(fk_reads="import os\nCONF = os.environ.get('JE_ARROW_MALLOC_CONF')")
    module = importlib.import_module("fk_reads")

    def confs(_: int) -> list[Any]:
        return [module.CONF, os.environ.get("JE_ARROW_MALLOC_CONF")]

    with infeed.DataLoader(Tree(1, confs), batch_size=None, **forkserver) as loader:
        assert plain(list(loader)) == [[given or "background_thread:false", given]]


def test_spawned_workers_are_kept_for_the_next_epoch_if_the_server_cannot_fork(tmp_path: Path) -> None:
    """The server is asked once, and the log says so once."""
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    code = """
        import os, sys
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]])
        import infeed
        class Data:
            def __len__(self): return 8
            def __getitem__(self, i): return os.getpid()
        epochs = [set(infeed.DataLoader(Data(), batch_size=None, num_workers=1, timeout=30)) for _ in range(3)]
        print(len(set.union(*epochs)))
    """
    result = run_script(tmp_path, dedent(code))

    assert (result.code, result.out) == (0, "1\n")
    assert result.err.count("spawning workers instead of forking") == 1


def test_workers_of_a_dataset_with_arrow_tables_are_forked(install: Install, forkserver: dict[str, Any]) -> None:
    """Importing Arrow starts no thread in the server."""
    table = pytest.importorskip("pyarrow").table({"x": list(range(4))})
    install(fk_imports_arrow="import pyarrow")
    module = importlib.import_module("fk_imports_arrow")
    dataset = Tree(4, lambda index: (os.getppid(), module.PID, table["x"][index].as_py()))

    with infeed.DataLoader(dataset, batch_size=None, **forkserver) as loader:
        samples = plain(list(loader))
        server = fork_server().pid

    assert samples == [[server, server, index] for index in range(4)]


def test_a_lock_that_a_thread_of_the_parent_holds_is_free_in_workers(install: Install, forkserver: dict[str, Any]) -> None:
    """A worker forked from the parent would have a copy of the lock without its thread, as with OpenCV's threads."""
    install(fk_library="import threading\nlock = threading.Lock()")
    library = importlib.import_module("fk_library")
    dataset = Tree(4, lambda _: library.lock.acquire(timeout=0.1) and library.lock.release() is None)

    with library.lock, infeed.DataLoader(dataset, batch_size=None, **forkserver) as loader:
        assert list(loader) == [True] * 4


def test_opencv_runs_in_workers_after_the_parent_has_used_its_threads(tmp_path: Path) -> None:
    """In a fork of the parent, ``setNumThreads`` would wait for threads that do not exist there."""
    pytest.importorskip("cv2")
    code = """
        import cv2, infeed, numpy as np
        PIXELS = np.zeros((1500, 1500, 3), np.uint8)
        class Photos:
            def __len__(self): return 4
            def __getitem__(self, index):
                cv2.setNumThreads(3)
                return cv2.GaussianBlur(PIXELS + index, (31, 31), 0)[0, 0, 0]
        cv2.setNumThreads(4)
        cv2.GaussianBlur(PIXELS, (31, 31), 0)
        print(sorted(int(pixel) for batch in infeed.DataLoader(Photos(), 2, num_workers=2, timeout=30) for pixel in batch))
    """
    result = run_script(tmp_path, dedent(code))

    assert (result.code, result.out) == (0, "[0, 1, 2, 3]\n"), result.err
