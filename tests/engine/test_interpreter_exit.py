"""How a process that uses a loader ends: exit, Ctrl+C, SIGKILL. Quickly, without output, and without leftovers (P5)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import engine_params
from tests.helpers import (
    KILLED_CODE,
    PORTABLE,
    Journal,
    assert_clean,
    assert_faster_than,
    kill_process,
    press_ctrl_c,
    run_script,
    start_script,
    wait_until,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Both have named memory: on macOS names stay ("portable"), on Windows they go with the last handle.
PROCESSES = engine_params("forkserver", "spawn", "portable")
WINDOWS = pytest.param("windows", marks=[pytest.mark.process, pytest.mark.linux("the same as spawn there")])
METHODS = pytest.mark.parametrize("method", [*PROCESSES, WINDOWS, *engine_params("thread", "inline")], indirect=True)
PROCESS_METHODS = pytest.mark.parametrize("method", [*PROCESSES, WINDOWS], indirect=True)

# Arguments: start method, journal, seconds per sample, action after the first batch.
SCRIPT = """
import sys, time, os
{head}
import numpy as np
import infeed
from pathlib import Path
from tests.helpers import Journal

method, path, seconds, ending = sys.argv[1:]
journal = Journal(Path(path))

class Data:
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        journal.write("loading")
        time.sleep(float(seconds))
        return np.full(1000, index)

options = {{"thread": {{"num_workers": 2, "worker": "thread"}}, "inline": {{"num_workers": 0}},
           "forkserver": {{"num_workers": 2, "start_method": method}},
           "spawn": {{"num_workers": 2, "start_method": method}}}}.get(method, {{"num_workers": 2}})
loader = infeed.DataLoader(Data(), batch_size=2, **options)
for batch in loader:
    journal.write("first batch")
    {body}
{tail}
"""


@pytest.fixture
def method(request: pytest.FixtureRequest) -> str:
    """The way in which a script starts workers."""
    if request.param == "windows":
        request.getfixturevalue("windows_stand_in")
    return str(request.param)


def script(method: str, body: str, *, head: str = "", tail: str = "") -> str:
    if method == "portable":
        head = f"import multiprocessing.connection\n{PORTABLE}\n{head}"
    return SCRIPT.format(head=head, body=body, tail=tail)


@METHODS
def test_the_interpreter_exits_quickly_and_silently_with_iterator_and_batch(tmp_path: Path, method: str) -> None:
    assert_exits_silently(tmp_path, method, "kept = batch; break", "iterator = iter(loader); next(iterator)", 0)


@pytest.mark.parametrize("method", engine_params("forkserver", "spawn"))
@pytest.mark.parametrize(
    ("body", "tail", "code"),
    [
        pytest.param("break", "", 0, id="break"),
        pytest.param("if batch[0, 0] == 4: break", "del loader", 0, id="break and del"),
        pytest.param("sys.exit(3)", "", 3, id="sys.exit"),
    ],
)
def test_the_interpreter_exits_quickly_and_silently(tmp_path: Path, method: str, body: str, tail: str, code: int) -> None:
    assert_exits_silently(tmp_path, method, body, tail, code)


def assert_exits_silently(tmp_path: Path, method: str, body: str, tail: str, code: int) -> None:
    """Without close(), in mid-epoch, with batches in flight."""
    with assert_faster_than(20):
        result = run_script(tmp_path, script(method, body, tail=tail), method, str(tmp_path / "journal"), "0.01", "")
    assert result.code == code, result.err
    assert result.err == ""


DAEMON = """
import threading

def iterate():
    while True:
        for batch in infeed.DataLoader(range(8), **options):
            pass
        for number, batch in enumerate(loader):
            if number == 3:
                came.set()

came = threading.Event()
threading.Thread(target=iterate, daemon=True).start()
came.wait()
"""


@METHODS
def test_a_daemon_thread_that_iterates_does_not_disturb_the_exit(tmp_path: Path, method: str) -> None:
    """Python closes the loader and does not wait for the thread."""
    code = script(method, "break", tail=DAEMON)
    assert_clean(run_script(tmp_path, code, method, str(tmp_path / "journal"), "0.001", ""))


@PROCESS_METHODS
def test_earlier_finalizers_do_not_disturb_the_exit(tmp_path: Path, method: str) -> None:
    """Another library's weakref.finalize (tempfile has one) changes the order of finalization; there is still no output."""
    head = "import tempfile; folder = tempfile.TemporaryDirectory()"
    result = run_script(tmp_path, script(method, "break", head=head), method, str(tmp_path / "journal"), "0.01", "")
    assert_clean(result)


@pytest.mark.parametrize("method", engine_params("forkserver", "spawn"))
def test_an_error_in_the_loop_is_the_only_traceback(tmp_path: Path, method: str) -> None:
    """The user's exception ends the script with its own traceback and nothing else."""
    result = run_script(tmp_path, script(method, "1 / 0"), method, str(tmp_path / "journal"), "0.01", "")
    assert result.code == 1
    assert result.err.count("Traceback") == 1
    assert result.err.rstrip().endswith("ZeroDivisionError: division by zero")


def last_line(err: str) -> str:
    """Returns the last line of a traceback.

    On Windows, Ctrl+C may interrupt a wait of Python itself, which prints a message.
    """
    return [line for line in err.splitlines() if line and "destroying Overlapped object" not in line][-1]


@METHODS
@pytest.mark.parametrize("seconds", ["0.01", "60"], ids=["quick samples", "slow samples"])
def test_ctrl_c_ends_the_process_with_one_traceback(tmp_path: Path, method: str, seconds: str) -> None:
    """SIGINT to the process group, as a terminal sends it: one quick KeyboardInterrupt, in the main process."""
    journal = Journal(tmp_path / "journal")
    running = start_script(tmp_path, script(method, "pass"), method, str(journal.path), seconds, "", has_console=True)
    running.wait_line(journal, "loading" if seconds == "60" else "first batch")
    press_ctrl_c(running)
    with assert_faster_than(15):
        result = running.finish()
    assert result.code != 0
    assert result.err.count("Traceback (most recent call last)") == 1, result.err
    assert last_line(result.err) == "KeyboardInterrupt"


@METHODS
@pytest.mark.parametrize("seconds", ["0.01", "60"], ids=["quick samples", "slow samples"])
def test_sigkill_of_the_main_process_ends_all_workers(tmp_path: Path, method: str, seconds: str) -> None:
    """Nothing outlives it, not even a worker in a sample that takes a minute, nor shared memory."""
    journal = Journal(tmp_path / "journal")
    running = start_script(tmp_path, script(method, "pass"), method, str(journal.path), seconds, "")
    running.wait_line(journal, "loading" if seconds == "60" else "first batch")
    kill_process(running.pid)
    with assert_faster_than(15):
        result = running.finish()
    assert result.code == KILLED_CODE
    assert "Traceback" not in result.err


@pytest.mark.linux("needs os.fork")
@pytest.mark.parametrize("method", PROCESSES)
def test_sigkill_ends_all_workers_although_a_forked_child_lives(tmp_path: Path, method: str) -> None:
    """A forked child inherits all descriptors and may live on: infeed's processes must not."""
    head = "import os, signal\n"
    body = "\n    ".join([
        "pass",
        "if not globals().get('child'):",
        "    child = os.fork()",
        "    if child == 0:",
        "        journal.write(f'child {os.getpid()}')",
        "        time.sleep(60)",
        "        os._exit(0)",
    ])  # fmt: skip
    journal = Journal(tmp_path / "journal")
    running = start_script(tmp_path, script(method, body, head=head), method, str(journal.path), "0.01", "")
    try:
        running.wait_line(journal, "first batch")

        def child() -> str:
            return next((line.split()[1] for line in journal.lines() if line.startswith("child")), "")

        pid = wait_until(child, "the forked child")
        os.kill(running.pid, signal.SIGKILL)
        wait_until(
            lambda: [process for process in running.survivors() if not process.endswith(f" {pid}")] == [],
            f"the end of all but the child {pid}",
            15,
        )
    finally:
        running.kill_all()


@pytest.mark.linux("on Windows SIGTERM is TerminateProcess")
def test_sigterm_ends_the_process_as_usual(tmp_path: Path) -> None:
    """infeed keeps the default of SIGTERM: the process ends at once, and so do all workers."""
    journal = Journal(tmp_path / "journal")
    running = start_script(tmp_path, script("forkserver", "pass"), "forkserver", str(journal.path), "0.01", "")
    running.wait_line(journal, "first batch")
    os.kill(running.pid, signal.SIGTERM)
    result = running.finish()
    assert result.code == -signal.SIGTERM
    assert "Traceback" not in result.err


@pytest.mark.linux("needs os.killpg")
def test_a_sigint_handler_of_the_user_may_continue_the_loop(tmp_path: Path) -> None:
    """A handler that does not raise (save a checkpoint, then continue) does not disturb the loader."""
    code = """
    import os, signal, time
    import infeed
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    class Data:
        def __len__(self): return 40
        def __getitem__(self, i):
            time.sleep(0.005)
            return i
    for method in ({"worker": "thread"}, {"start_method": "forkserver"}, {"start_method": "spawn"}):
        got = []
        for batch in infeed.DataLoader(Data(), batch_size=2, num_workers=2, timeout=30, **method):
            got += batch.tolist()
            if len(got) == 10:
                os.killpg(0, signal.SIGINT)
        print(got == list(range(40)), len(asked))
    """
    result = run_script(tmp_path, dedent(code))
    assert_clean(result)
    assert result.out == "True 1\nTrue 2\nTrue 3\n"


def test_an_interrupted_loader_can_be_used_again(tmp_path: Path) -> None:
    """In a notebook Ctrl+C ends a cell and not the process: the next cell iterates the same loader."""
    code = """
    import os, signal, threading, time
    import infeed
    class Data:
        def __len__(self): return 8
        def __getitem__(self, i):
            if not os.path.exists("go"):
                open("here", "w").close()
                time.sleep(60)
            return i
    loader = infeed.DataLoader(Data(), batch_size=2, num_workers=2)
    def interrupt():
        while not os.path.exists("here"):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
    threading.Thread(target=interrupt).start()
    batches = iter(loader)
    try:
        for batch in batches:
            print("not reached")
    except KeyboardInterrupt:
        print("interrupted")
    open("go", "w").close()
    print([batch.tolist() for batch in loader])
    """
    result = run_script(tmp_path, dedent(code))
    assert_clean(result)
    assert result.out == "interrupted\n[[0, 1], [2, 3], [4, 5], [6, 7]]\n"


def test_a_loader_in_a_daemon_thread_does_not_delay_the_exit(tmp_path: Path) -> None:
    """A background thread that iterates endlessly is ended with the main thread, without output."""
    code = """
    import threading
    import infeed
    from infeed.testing import SlowDataset
    began = threading.Event()
    def run():
        while True:
            for batch in infeed.DataLoader(SlowDataset(1000, 0.005), batch_size=2, num_workers=2):
                began.set()
    threading.Thread(target=run, daemon=True).start()
    began.wait()
    """
    with assert_faster_than(20):
        result = run_script(tmp_path, dedent(code))
    assert result.code == 0, result.err
    assert "Fatal" not in result.err


@pytest.mark.linux("needs SIGALRM")
def test_a_loader_may_be_finalized_inside_another(tmp_path: Path) -> None:
    """A finalizer runs wherever the garbage collector or a signal interrupts, also inside another loader: no deadlock (P4)."""
    code = """
    import signal
    import infeed
    class Data:
        def __len__(self): return 4
        def __getitem__(self, i): return i
    victims = []
    signal.signal(signal.SIGALRM, lambda *_: victims.clear())  # the last references go here
    for turn in range(60):
        victims.append(infeed.DataLoader(Data(), batch_size=2, num_workers=2))
        next(iter(victims[0]))
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0002 * turn)
        with infeed.DataLoader(Data(), batch_size=2, num_workers=2, timeout=30) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        signal.setitimer(signal.ITIMER_REAL, 0)
        victims.clear()
    print("done")
    """
    result = run_script(tmp_path, dedent(code))
    assert_clean(result)
    assert result.out == "done\n"
