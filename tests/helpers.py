"""Shared test helpers: datasets, comparisons, waits with a deadline, scripts in new interpreters.

Workers import this module for its datasets, so only the standard library and NumPy are imported at the top.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# On an idle machine everything takes less than a tenth of this; a longer wait is a hang.
DEADLINE_S = 30.0


# --- waiting


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Returns the condition's value as soon as it is true; fails after the timeout."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} seconds in vain for: {what}")
        time.sleep(0.005)
    return value


def patient_next(batches: Iterator[Any]) -> Any:
    """Returns the next batch of a loader with a short ``timeout``; retries, because a busy machine may need longer."""
    from infeed import LoadTimeoutError

    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return next(batches)
        except LoadTimeoutError:
            if time.monotonic() > deadline:
                raise


@contextmanager
def assert_faster_than(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer. For deadlines, not for measurements."""
    start = time.monotonic()
    yield
    elapsed = time.monotonic() - start
    assert elapsed < seconds, f"took {elapsed:.2f} s, allowed are {seconds} s"


# --- datasets


class Squares:
    """Sample ``i`` is a tuple of an array that contains ``i``, and ``i`` squared."""

    def __init__(self, length: int, width: int = 3) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return np.full(self.width, index, dtype=np.float32), index * index


class Tree:
    """Sample ``i`` is the result of a function of ``i``."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Pids:
    """Sample ``i`` is the id of the process that loads it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Stream:
    """Yields ``0`` to ``count - 1``; has neither length nor index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Blocking:
    """Sample ``at`` blocks until a file exists; another file shows that it is being loaded."""

    def __init__(self, length: int, at: int, folder: Path) -> None:
        self.length, self.at, self.folder = length, at, folder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            (self.folder / "blocked").touch()
            wait_until((self.folder / "go").exists, "the test's permission to go on", 2 * DEADLINE_S)
        return index

    @property
    def is_blocked(self) -> bool:
        return (self.folder / "blocked").exists()

    def wait_blocked(self) -> None:
        wait_until(lambda: self.is_blocked, "a worker at the blocking sample")

    def let_go(self) -> None:
        (self.folder / "go").touch()

    @property
    def may_go(self) -> bool:
        return (self.folder / "go").exists()


class Journal:
    """A file to which processes append lines; each line is written atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, line: object) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


# --- comparing


def plain(value: Any) -> Any:
    """Returns a batch as plain Python values, arrays and tensors as nested lists."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def collected(loader: Any) -> list[Any]:
    """Returns one epoch as plain values; keeps no batch."""
    return [plain(batch) for batch in loader]


def flat(batches: list[Any]) -> list[Any]:
    """Returns all elements of batches that are lists of numbers."""
    return [element for batch in batches for element in batch]


def assert_same(left: Any, right: Any, path: str = "batch") -> None:
    """Fails unless both have the same types at all levels, dtypes and shapes, and the same values."""
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype, f"{path}: {left.dtype} and {right.dtype}"
        assert left.shape == right.shape, f"{path}: {left.shape} and {right.shape}"
        np.testing.assert_array_equal(left, right, err_msg=path)
    elif type(left).__module__.partition(".")[0] == "torch" or hasattr(left, "is_sparse"):
        assert left.dtype == right.dtype, f"{path}: {left.dtype} and {right.dtype}"
        assert left.shape == right.shape, f"{path}: {left.shape} and {right.shape}"
        dense, other = (left.to_dense(), right.to_dense()) if left.is_sparse else (left, right)
        assert bool((dense == other).all()), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}[{number}]")
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}")
    else:
        assert left == right, path


# --- processes


def descendants() -> list[Any]:
    """Returns all descendants of this process.

    psutil reads the parent of every process of the machine, which takes milliseconds, twice per test. Linux lists children.
    """
    import psutil

    if not _LISTS_CHILDREN:
        return psutil.Process().children(recursive=True)
    found: list[Any] = []
    parents = [os.getpid()]
    while parents:
        for file in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with suppress(OSError):  # The thread or the process has ended.
                pids = [int(pid) for pid in file.read_text().split()]
                parents += pids
                for pid in pids:
                    with suppress(psutil.NoSuchProcess):
                        found.append(psutil.Process(pid))
    return found


_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def worker_processes() -> list[Any]:
    """Returns all live descendants except servers that outlive loaders: the workers, and anything else there is."""
    import psutil

    found = []
    for process in descendants():
        try:
            if not (has_ended(process) or is_fork_server(process) or is_resource_tracker(process) or is_of_tests(process)):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def is_of_tests(process: Any) -> bool:
    """Returns whether a process belongs to the S3 server of tests/shards or the cluster of tests/ray."""
    if sys.platform == "win32":
        return False  # Both need Linux; and Wine cannot name a process.
    words = process.cmdline()
    is_script = any(word.endswith(".py") and "/ray/" in word for word in words)
    is_server = process.name() in ("node", "raylet", "gcs_server")
    return is_script or is_server or (bool(words) and words[0].startswith("ray::"))


def has_ended(process: Any) -> bool:
    """Returns whether a process of `psutil` has ended, though it is still listed: a zombie, or with an open handle."""
    import psutil

    if sys.platform != "win32":
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    try:
        process.wait(0)
    except psutil.TimeoutExpired:
        return False
    return True


def session_of(loader: Any) -> Any:
    """Returns the session of a loader of either class, for what has no public name: spans, tuning, the engine."""
    return vars(loader).get("_infeed_session") or loader._session


def engine_of(loader: Any) -> Any:
    """Returns the engine of the active epoch."""
    (engine,) = session_of(loader).engine_cache.engines_out
    return engine


def fork_server() -> Any:
    """Returns the live fork server of this process; one that has ended may still be a zombie."""
    import psutil

    living = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    (server,) = filter(is_fork_server, living)
    return server


def close_fork_server() -> None:
    """Closes the fork server of this process, which the test has killed, so that the next test finds none."""
    from infeed.workers.forkserver import FORK_SERVER  # On Linux only.

    FORK_SERVER.close()


def is_fork_server(process: Any) -> bool:
    """Returns whether this is the fork server of this process."""
    return process.ppid() == os.getpid() and any("infeed.workers.server" in word for word in process.cmdline())


def is_resource_tracker(process: Any) -> bool:
    """Returns whether this is the process that multiprocessing starts beside the first named semaphore, and keeps."""
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def shm_names(owner: int | None = None) -> set[str]:
    """Returns infeed's names in the system's shared memory: of one process, or of all processes."""
    folder = Path("/dev/shm")
    names = {path.name for path in folder.glob("infeed*")} if folder.is_dir() else set()
    return names if owner is None else {name for name in names if owner_of(name) == owner}


def owner_of(name: str) -> int:
    """Returns the process that created a name."""
    return int(name.split(".")[1])


def is_foreign(name: str) -> bool:
    """Returns whether it belongs to a live process that is no descendant: to another test run."""
    import psutil

    owner = owner_of(name)
    return psutil.pid_exists(owner) and owner not in {
        os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))
    }  # fmt: skip


class ScriptResult(NamedTuple):
    """How a script ended and what it printed."""

    code: int
    out: str
    err: str


@dataclass
class Script:
    """A script in a new interpreter. Its processes are found by session id, on Windows by a marker in their environment."""

    process: subprocess.Popen[str]
    marker: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_line(self, journal: Journal, line: str) -> None:
        """Waits until the script has written this line."""

        def arrived() -> bool:
            assert self.process.poll() is None or line in journal.lines(), f"the script ended: {self.process.communicate()}"
            return line in journal.lines()

        wait_until(arrived, f"{line!r} from the script")

    def finish(self, seconds: float = DEADLINE_S) -> ScriptResult:
        """Waits for its end; fails if it does not end, or if one of its processes is still alive."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            stacks = self.kill_all()
            raise AssertionError(f"the script has not ended within {seconds} s\n{stacks}") from None
        wait_until(lambda: not self.survivors(), f"the end of the script's processes {self.survivors()}", 10)
        return ScriptResult(self.process.returncode, out, err)

    def survivors(self) -> list[str]:
        """Returns its processes that are still alive, wherever they are in the process tree."""
        import psutil

        found = []
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):  # It has just ended.
                found.append(f"{process.cmdline()} {process.pid}")
        return found

    def kill_all(self) -> str:
        """Kills all processes; returns what the script had printed."""
        import psutil

        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        out, err = self.process.communicate()
        return f"stdout:\n{out}\nstderr:\n{err}"

    def _processes(self) -> list[Any]:
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                if self._owns(process) and not has_ended(process):
                    found.append(process)
            except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _owns(self, process: Any) -> bool:
        if sys.platform == "win32":
            # Only Python: a console host and Wine's desktop are not processes of the script.
            return process.environ().get(_MARKER) == self.marker and "python" in process.cmdline()[0]
        return os.getsid(process.pid) == self.pid


def start_python(
    arguments: list[str],
    *,
    cwd: Path,
    stdin: str | None = None,
    env: dict[str, str] | None = None,
    has_console: bool = False,
) -> Script:
    """Starts a new interpreter that can import infeed and the test helpers; `has_console` allows interrupting it."""
    marker = uuid.uuid4().hex
    paths = [str(ROOT / "src"), str(ROOT)]
    if _STAND_IN in os.environ:
        paths.insert(0, str(ROOT / "tests" / "stand_in"))  # its sitecustomize, which the script needs too
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {}), _MARKER: marker}
    environ.pop("PYTHONWARNINGS", None)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environ,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **_of_its_own(has_console=has_console),
    )
    if stdin is not None:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None
    return Script(process, marker)


# In the environment of a script and of all its processes.
_MARKER = "INFEED_TEST_SCRIPT"
# Set while this process behaves like Windows: see `tests/stand_in`.
_STAND_IN = "INFEED_WINDOWS_STAND_IN"


def _of_its_own(*, has_console: bool) -> dict[str, Any]:
    """Options of `Popen` for a program that can be interrupted alone; on Windows it needs a console for that."""
    if sys.platform != "win32":
        return {"start_new_session": True}
    if not has_console:
        return {}
    hidden = subprocess.STARTUPINFO(dwFlags=subprocess.STARTF_USESHOWWINDOW, wShowWindow=subprocess.SW_HIDE)
    return {"creationflags": subprocess.CREATE_NEW_CONSOLE, "startupinfo": hidden}


def start_script(
    folder: Path, code: str, *arguments: str, env: dict[str, str] | None = None, has_console: bool = False
) -> Script:
    """Writes a script into a folder and starts it."""
    path = folder / "script.py"
    path.write_text(code)
    return start_python([str(path), *arguments], cwd=folder, env=env, has_console=has_console)


def run_script(folder: Path, code: str, *arguments: str, seconds: float = DEADLINE_S) -> ScriptResult:
    """Runs a script to its end; fails if it hangs or leaves a process behind."""
    return start_script(folder, code, *arguments).finish(seconds)


def assert_clean(result: ScriptResult) -> None:
    """Fails unless the script exited with 0 and printed nothing to standard error."""
    assert result.code == 0, result.err
    assert result.err == "", result.err


def press_ctrl_c(script: Script) -> None:
    """Interrupts as a terminal does: the foreground process group, or on Windows every process of the console."""
    if sys.platform == "win32":
        press = (
            "import ctypes, sys; kernel = ctypes.windll.kernel32; kernel.FreeConsole();"
            "assert kernel.AttachConsole(int(sys.argv[1]));"
            "kernel.SetConsoleCtrlHandler(None, 1); assert kernel.GenerateConsoleCtrlEvent(0, 0)"
        )
        subprocess.run([sys.executable, "-c", press, str(script.pid)], check=True)
    else:
        os.killpg(script.pid, signal.SIGINT)


def kill_process(pid: int) -> None:
    """Kills a process at once: SIGKILL, or TerminateProcess on Windows."""
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


# `Popen.returncode` of a killed process, and its name in messages: Windows and its stand-in have no SIGKILL.
KILLED_CODE = 15 if sys.platform == "win32" else -9
KILLED_TEXT = r"(SIGKILL|SIGTERM|code 15)"


# For scripts: removes calls that only Linux has, so that the portable code runs, as on macOS.
PORTABLE = """
import os, select, socket
del os.memfd_create, socket.send_fds, socket.recv_fds, select.poll
"""
# For scripts: the same as on Windows.
WINDOWS = """
from tests.stand_in.windows_stand_in import install
install()
"""


# --- choosing the kind of worker


def always_threads(monkeypatch: Any) -> None:
    """Makes ``worker="auto"`` choose threads after one epoch of processes, whatever is measured, and stay with them."""
    from infeed.autotune.tuner import KindAdvice
    from infeed.engine.scaling import WorkerTuning

    reconsider = WorkerTuning.reconsider
    monkeypatch.setattr("infeed.engine.scaling.better_kind", lambda *_args, **_options: KindAdvice("thread", "threads: forced"))
    monkeypatch.setattr("infeed.engine.scaling.WORSE", 1e9)
    monkeypatch.setattr(
        WorkerTuning,
        "reconsider",
        lambda worker_tuning, work, cores: reconsider(worker_tuning, work._replace(gil_share=0.0), cores),
    )
