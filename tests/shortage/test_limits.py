"""System limits: descriptors, processes, address space, folders. Loading works, or one error says what to change."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import PORTABLE, ROOT, ScriptResult, assert_clean, run_script

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.linux("limits and mounts of Linux")]

HEAD = """
import os, resource, signal, sys, time
import numpy as np
import infeed

class Data:
    def __init__(self, length, kib):
        self.length, self.kib = length, kib
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return np.full(self.kib << 10, index % 251, np.uint8)

KINDS = {"forkserver": {"start_method": "forkserver"}, "spawn": {"start_method": "spawn"}, "thread": {"worker": "thread"}}

def limit(what, value):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (hard if value is None else value, hard))

def files():
    return len(os.listdir("/proc/self/fd"))

def report(act):
    try:
        act()
    except Exception as error:
        print(type(error).__name__, "|", str(error).replace(chr(10), " "))
    else:
        print("works")
"""


def lines(result: ScriptResult) -> list[str]:
    assert result.code == 0, result.err
    assert "Traceback" not in result.err, result.err
    return result.out.splitlines()


def test_64_descriptors_are_enough(tmp_path: Path) -> None:
    """Eight workers, three epochs, hundreds of batches kept: no batch takes a descriptor."""
    code = """
    limit(resource.RLIMIT_NOFILE, 64)
    for kind in ("forkserver", "spawn"):
        kept, before = [], files()
        with infeed.DataLoader(Data(800, 16), batch_size=2, num_workers=8, timeout=30, **KINDS[kind]) as loader:
            for epoch in range(3):
                for number, batch in enumerate(loader):
                    assert batch[:, 0].tolist() == [2 * number % 251, (2 * number + 1) % 251]
                    if number % 2:
                        kept.append((number, batch))
        assert all(batch[0, -1] == 2 * number % 251 for number, batch in kept)
        assert len(kept) == 600
        del kept, batch, loader
        print(kind, files() - before <= 1)  # the connection to the fork server stays
    """
    result = run_script(tmp_path, HEAD + dedent(code))
    assert_clean(result)
    assert lines(result) == ["forkserver True", "spawn True"]


def test_too_few_descriptors_raise_and_none_leaks(tmp_path: Path) -> None:
    """WorkerStartError with the limit, also when a worker is replaced; with more descriptors the same loader works."""
    code = """
    limit(resource.RLIMIT_NOFILE, 64)
    infeed.DataLoader(Data(8, 1), num_workers=1)  # imports everything
    for kind in ("forkserver", "spawn"):
        with infeed.DataLoader(Data(4000, 1), batch_size=2, num_workers=4, timeout=30, **KINDS[kind]) as loader:
            before = files()
            limit(resource.RLIMIT_NOFILE, before + 6)
            report(lambda: next(iter(loader)))
            limit(resource.RLIMIT_NOFILE, 64)
            assert files() - before <= 1, (before, files())
            batches = iter(loader)
            next(batches)
            pids = batches.worker_pids()
            limit(resource.RLIMIT_NOFILE, files() - 8)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            report(lambda: list(batches))
            limit(resource.RLIMIT_NOFILE, 64)
            report(lambda: next(iter(loader)))
    """
    first, replaced, after = range(3)
    result = run_script(tmp_path, HEAD + dedent(code))
    reported = lines(result)
    for part in (reported[:3], reported[3:]):
        for line in (part[first], part[replaced]):
            assert line.startswith("WorkerStartError | cannot start a worker: this process has reached its limit of ")
            assert line.endswith(
                "open files (ulimit -n), and each worker needs two; raise the limit, use fewer workers, or close files"
            )
        assert part[after] == "works"


def test_a_limit_of_processes_or_threads_raises(tmp_path: Path) -> None:
    """WorkerStartError with the limit, for each kind of worker."""
    code = """
    import infeed.workers.forkserver
    for kind in ("spawn", "thread"):
        list(infeed.DataLoader(Data(2, 1), num_workers=1, timeout=30, **KINDS[kind]))  # imports everything
    if os.getuid() == 0:
        os.setuid(65534)  # the limit does not apply to root
    limit(resource.RLIMIT_NPROC, 1)
    for kind in KINDS:
        report(lambda: list(infeed.DataLoader(Data(8, 1), num_workers=2, timeout=30, **KINDS[kind])))
    """
    result = run_script(tmp_path, HEAD + dedent(code))
    for line in lines(result):
        assert line == (
            "WorkerStartError | cannot start a worker: the limit of processes and threads is reached (ulimit -u: 1; a "
            "container may have its own limit); raise the limit, use fewer workers, or close other programs"
        )
    assert len(lines(result)) == 3


def test_a_fork_server_that_cannot_fork_is_replaced_by_spawning(tmp_path: Path) -> None:
    """It keeps running; the log says why workers are spawned."""
    (tmp_path / "sitecustomize.py").write_text(
        dedent("""
        import os
        def fork():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork = fork
        """)
    )
    code = """
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]])
    report(lambda: list(infeed.DataLoader(Data(8, 1), num_workers=2, timeout=30)))
    """
    result = run_script(tmp_path, HEAD + dedent(code))
    assert lines(result) == ["works"]
    assert result.err == (
        "spawning workers instead of forking them, which takes longer: "
        "the fork server cannot fork: Resource temporarily unavailable\n"
    )


def test_memory_limits_are_reported_by_name(tmp_path: Path) -> None:
    """Address space and file size: too small for a batch, for the dataset, or for the result of a worker."""
    code = """
    MIB = 1 << 20
    TABLE = np.ones(300 * MIB, np.uint8)
    class Grows(Data):
        def __setstate__(self, state):
            self.__dict__.update(state, all=np.ones(1 << 30, np.uint8))
    loaders = {
        "batch": lambda options: infeed.DataLoader(Data(8, 150 << 10), batch_size=2, num_workers=1, timeout=30, **options),
        "dataset": lambda options: infeed.DataLoader(
            Data(8, 1), collate_fn=__import__("functools").partial(stack, TABLE), num_workers=1,
            timeout=30, **options),
        "worker": lambda options: infeed.DataLoader(Grows(8, 1), num_workers=1, timeout=30, **options),
    }
    def stack(table, samples):
        return np.stack(samples)
    for kind in ("forkserver", "spawn"):
        limit(resource.RLIMIT_AS, 700 * MIB)
        for name, make in loaders.items():
            report(lambda: next(iter(make(KINDS[kind]))))
        limit(resource.RLIMIT_AS, None)
        limit(resource.RLIMIT_FSIZE, 2 * MIB)
        report(lambda: next(iter(infeed.DataLoader(Data(8, 4 << 10), num_workers=1, timeout=30, **KINDS[kind]))))
        limit(resource.RLIMIT_FSIZE, None)
    """
    result = run_script(tmp_path, HEAD + dedent(code))
    reported = lines(result)
    assert len(reported) == 8
    for batch, dataset, worker, file in (reported[:4], reported[4:]):
        assert "MemoryError" in batch or "MemoryLimitError" in batch, batch
        assert "MiB" in batch, batch
        assert dataset.startswith(
            "MemoryLimitError | cannot allocate 300.0 MiB of shared memory: address space is limited to "
        ), dataset
        assert dataset.endswith("or use worker='thread'"), dataset
        assert worker.startswith("WorkerStartError | worker 0 could not build the dataset: "), worker
        assert "Unable to allocate 1.00 GiB" in worker, worker
        assert worker.endswith("use fewer workers, memory-map its files, or use worker='thread'"), worker
        assert file.startswith(
            "MemoryLimitError | cannot allocate 4.0 MiB of shared memory: files, and so shared memory, are limited to 2.0 MiB "
        ), file


def test_one_cpu_and_no_folder_for_temporary_files_suffice(tmp_path: Path) -> None:
    """infeed writes nothing to disk, and no process busy-waits."""
    code = """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for folder in ("/nonexistent", "/proc"):
        os.environ["TMPDIR"] = folder
        for kind in KINDS:
            report(lambda: list(infeed.DataLoader(Data(400, 4), batch_size=4, num_workers=4, timeout=30, **KINDS[kind])))
    """
    result = run_script(tmp_path, HEAD + dedent(code))
    assert_clean(result)
    assert lines(result) == ["works"] * 6


# --- in a mount namespace


def run_with_mounts(folder: Path, mounts: str, code: str) -> ScriptResult:
    """Runs a script with these mounts, visible to it alone; skips if mounting is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    path = folder / "script.py"
    path.write_text(code)
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", f'{mounts} && exec "{sys.executable}" "{path}"'],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return ScriptResult(done.returncode, done.stdout, done.stderr)


def test_a_small_shared_memory_folder_does_not_matter_on_linux(tmp_path: Path) -> None:
    """Docker gives 64 MB to /dev/shm; anonymous memory does not count there."""
    code = """
    report(lambda: [None for batch in infeed.DataLoader(Data(8, 40 << 10), batch_size=2, num_workers=2, timeout=30)])
    """
    result = run_with_mounts(tmp_path, "mount -t tmpfs -o size=64m,ro none /dev/shm", HEAD + dedent(code))
    assert lines(result) == ["works"]


def test_a_small_shared_memory_folder_raises_where_memory_is_named(tmp_path: Path) -> None:
    """Batches that fit work, others are rejected with the size of the folder; never SIGBUS, and no name is left."""
    code = """
    for kib in (1 << 10, 40 << 10):
        report(lambda: [None for batch in infeed.DataLoader(Data(20, kib), batch_size=2, num_workers=2, timeout=30)])
    report(lambda: next(iter(infeed.DataLoader(np.ones(200, np.uint8), num_workers=2))))
    data = Data(20, 1)
    data.table = np.ones(100 << 20, np.uint8)
    report(lambda: next(iter(infeed.DataLoader(data, num_workers=2, timeout=30))))
    import gc
    gc.collect()
    print(os.listdir("/dev/shm"))
    """
    mounts = "mount -t tmpfs -o size=64m none /dev/shm"
    result = run_with_mounts(tmp_path, mounts, f"import multiprocessing.connection\n{PORTABLE}{HEAD}{dedent(code)}")
    fits, batch, arrays, dataset, left = lines(result)
    assert fits == arrays == "works"
    free = r"6[34]\.\d MiB of 64\.0 MiB is free in /dev/shm; "  # Except for the status boards and recorders of workers.
    assert re.match(rf"MemoryLimitError \| cannot allocate 80\.0 MiB of shared memory: {free}", batch), batch
    assert "enlarge it (docker run --shm-size), or lower batch_size or prefetch" in batch
    assert re.match(rf"MemoryLimitError \| cannot allocate 100\.0 MiB of shared memory: {free}", dataset), dataset
    assert left == "[]"


def test_a_missing_shared_memory_folder_raises_where_memory_is_named(tmp_path: Path) -> None:
    """The error says that the folder cannot be written to; threads still work."""
    code = """
    report(lambda: next(iter(infeed.DataLoader(Data(20, 1), num_workers=2, timeout=30))))
    report(lambda: next(iter(infeed.DataLoader(Data(20, 1), num_workers=2, timeout=30, worker="thread"))))
    """
    mounts = "mount -t tmpfs -o ro none /dev/shm"
    result = run_with_mounts(tmp_path, mounts, f"import multiprocessing.connection\n{PORTABLE}{HEAD}{dedent(code)}")
    refused, works = lines(result)
    assert re.fullmatch(
        r"MemoryLimitError \| cannot allocate [\d.]+ KiB of shared memory: Read-only file system; "
        "make /dev/shm writable, or use worker='thread'",
        refused,
    ), refused
    assert works == "works"


def test_without_proc_workers_are_spawned(tmp_path: Path) -> None:
    """Without /proc, threads of the fork server cannot be counted, so it does not fork; the log says so."""
    code = """
    for kind in KINDS:
        report(lambda: list(infeed.DataLoader(Data(20, 1), num_workers=2, timeout=30, **KINDS[kind])))
    """
    result = run_with_mounts(tmp_path, "mount -t tmpfs none /proc", HEAD + dedent(code))
    assert lines(result) == ["works"] * 3
    assert result.err == (
        "spawning workers instead of forking them, which takes longer: "
        "the number of threads is unknown without /proc, and a process with threads cannot fork safely\n"
    )
