"""Every way in which a program can end: quickly, with only the user's output, and without leftovers (P5).

See also ``tests/engine/test_close.py``, ``test_interpreter_exit.py`` and ``test_deaths.py``.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, press_ctrl_c, wait_until
from tests.stopping.watching import Ended, Program

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.linux("signals, terminals and sessions of POSIX")]

PROCESSES = ("forkserver", "spawn", "portable")
ALL = (*PROCESSES, "thread")


class Started:
    """Programs of several kinds that run in parallel."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.programs: list[Program] = []

    def start(self, kinds: tuple[str, ...], samples: str, ending: str) -> list[Program]:
        folder = self._folder / str(len(self.programs))
        started = [Program(folder, kind, samples, ending) for kind in kinds]
        self.programs += started
        return started


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    running = Started(tmp_path)
    yield running
    for program in running.programs:
        if not program.is_over:
            program.script.kill_all()


def end_by(program: Program, line: str, send: Callable[[Program], object]) -> Ended:
    """Waits until the program has reached a line, then does something to it."""
    program.wait_line(line)
    return program.ended(lambda: send(program))


def end_by_itself(program: Program) -> Ended:
    """Waits until the program is about to end, then for its end; the time of its imports does not count."""
    return end_by(program, "leaving", lambda program: None)


def signalled(number: int) -> Callable[[Program], object]:
    return lambda program: os.kill(program.pid, number)


def assert_one_interrupt(ended: Ended) -> None:
    assert ended.code == -signal.SIGINT, ended.err
    assert ended.tracebacks == 1, ended.err
    assert ended.err.rstrip().endswith("KeyboardInterrupt"), ended.err


@pytest.mark.parametrize(
    ("kinds", "samples"), [(("forkserver", "spawn"), "slow"), (("portable", "thread"), "quick")], ids=["slow", "quick"]
)
def test_endings_that_the_process_survives_leave_nothing(started: Started, kinds: tuple[str, ...], samples: str) -> None:
    """``break``, an exception, garbage collection, close() from two threads and in the middle of next()."""
    programs = started.start(kinds, samples, "inside")
    for program in programs:
        ended = end_by_itself(program)
        assert (ended.code, ended.err) == (0, ""), program.name
        lines = (program.folder / "ended").read_text().splitlines()
        assert len(lines) == 6
        assert [line for line in lines if not line.endswith("left: []")] == [], program.name


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        pytest.param("exit", 5, "", id="sys.exit with a kept iterator"),
        pytest.param("os._exit", 6, "", id="os._exit"),
        pytest.param(
            "unhandled", 1, "ArithmeticError: the user's own, with EpochIterator in its frames", id="unhandled exception"
        ),
    ],
)
def test_exit_does_not_wait_for_native_code(started: Started, ending: str, code: int, last: str) -> None:
    """Workers run native code that ignores signals for a minute; the exit code and the output are the user's."""
    for program in started.start(ALL, "native", ending):
        ended = end_by_itself(program)
        assert ended.code == code, program.name
        assert ended.tracebacks == bool(last), ended.err
        assert ended.err.strip().splitlines()[-1:] == ([last] if last else []), program.name


@pytest.mark.torch
def test_the_torch_loader_ends_the_same_way(started: Started) -> None:
    """Persistent workers at exit, and Ctrl+C twice, through ``infeed.torch.DataLoader``."""
    (leaving,) = started.start(("torch kept",), "native", "exit")
    (looping,) = started.start(("torch",), "slow", "loop")
    (closing,) = started.start(("torch",), "slow", "handler closes")
    assert end_by_itself(leaving).code == 5
    assert_one_interrupt(end_by(looping, "blocked", interrupt_twice))
    ended = end_by(closing, "blocked", signalled(signal.SIGTERM))
    assert (ended.code, ended.err) == (0, "")
    assert "the loader was closed during iteration" in ended.out


def interrupt_twice(program: Program) -> None:
    """The second signal arrives while the first is being handled."""
    press_ctrl_c(program.script)
    time.sleep(0.1)
    if program.script.process.poll() is None:
        press_ctrl_c(program.script)


def test_ctrl_c_twice_is_one_traceback(started: Started) -> None:
    """The second signal ends the wait for workers in user code, and is not printed."""
    for program in started.start(ALL, "slow", "loop"):
        assert_one_interrupt(end_by(program, "blocked", interrupt_twice))


def test_ctrl_c_while_workers_start(started: Started) -> None:
    """Workers are in a worker_init_fn that takes a minute."""
    for program in started.start(ALL, "slow", "starting"):
        assert_one_interrupt(end_by(program, "starting", lambda program: press_ctrl_c(program.script)))


def test_ctrl_c_while_close_runs(started: Started) -> None:
    """It ends the wait of close(), and workers are killed."""

    def is_cut_short(kind: str) -> bool:
        (program,) = started.start((kind,), "slow", "closing")
        assert_one_interrupt(end_by(program, "closing", lambda program: press_ctrl_c(program.script)))
        return "closed" not in program.journal.lines()

    for kind in ("forkserver", "thread"):
        assert any(is_cut_short(kind) for _ in range(3)), kind  # On a busy machine the signal may arrive too late.


def test_a_loader_works_after_a_caught_ctrl_c(started: Started) -> None:
    """As in a notebook: each time the same loader continues with the next epoch."""

    def interrupt_thrice(program: Program) -> None:
        for number in (1, 2, 3):
            wait_until(lambda number=number: batches_after(program, number - 1) > 5, "batches after an interrupt")  # type: ignore[misc]  # mypy and default arguments
            press_ctrl_c(program.script)
            wait_until(lambda number=number: program.journal.lines().count("interrupted") == number, "the interrupt")  # type: ignore[misc]

    for program in started.start(ALL, "quick", "go on"):
        ended = program.ended(lambda program=program: interrupt_thrice(program))  # type: ignore[misc]
        assert (ended.code, ended.err) == (0, ""), program.name


def batches_after(program: Program, interrupts: int) -> int:
    """Returns the number of batches after this many interrupts; 0 if there were fewer."""
    lines = program.journal.lines()
    for _ in range(interrupts):
        if "interrupted" not in lines:
            return 0
        lines = lines[lines.index("interrupted") + 1 :]
    return sum(line.startswith("batch") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_fatal_signal_ends_all_processes(started: Started, number: int) -> None:
    """infeed has no handler: the process ends at once as without infeed, also with workers in native code."""
    for program in started.start(("forkserver", "spawn", "thread"), "native", "loop"):
        ended = end_by(program, "blocked", signalled(number))
        assert (ended.code, ended.err) == (-number, ""), program.name


def test_a_fatal_signal_removes_named_memory(started: Started) -> None:
    """Where memory is named, the workers remove the names; the leak guard looks for them."""
    (program,) = started.start(("portable",), "slow", "loop")
    assert end_by(program, "blocked", signalled(signal.SIGTERM)).code == -signal.SIGTERM


def test_a_handler_that_exits_works(started: Started) -> None:
    """The user's SIGTERM handler raises SystemExit during a wait: the exit code is the user's, without output."""
    for program in started.start(ALL, "slow", "handler exits"):
        ended = end_by(program, "blocked", signalled(signal.SIGTERM))
        assert (ended.code, ended.err) == (7, ""), program.name


@pytest.mark.parametrize(("samples", "line"), [("slow", "blocked"), ("quick", "batch 20")])
def test_a_handler_may_close_the_loader_during_a_wait(started: Started, samples: str, line: str) -> None:
    """It runs inside next(), which then raises LoaderClosedError."""
    for program in started.start(ALL, samples, "handler closes"):
        ended = end_by(program, line, signalled(signal.SIGTERM))
        assert (ended.code, ended.err) == (0, ""), program.name
        assert "the loader was closed during iteration" in ended.out or "this loader is closed" in ended.out


def test_closing_a_terminal_ends_all_processes(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the session of a terminal; worker processes in their own groups end as well."""
    import pty

    for kind in ("forkserver", "spawn"):
        folder = tmp_path / kind
        folder.mkdir()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may have been started with nohup.
            os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("program.py")), kind, "slow", "loop"])
        journal = folder / "journal"
        try:
            wait_until(lambda journal=journal: journal.exists() and "blocked" in journal.read_text(), "a worker in a sample")  # type: ignore[misc]
            os.close(terminal)
            wait_until(lambda pid=pid: not in_session(pid), "the end of all processes of the terminal", 10)  # type: ignore[misc]
        finally:
            for one in in_session(pid):
                os.kill(one, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGHUP


def in_session(session: int) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_no_cleanup_depends_on_a_del_method() -> None:
    """``__del__`` runs at any time in any thread, maybe with its module half torn down: finalizers and owners clean up."""
    sources = list((ROOT / "src" / "infeed").rglob("*.py"))
    assert len(sources) > 50
    methods = [
        (path, node)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    # An empty one may disable that of a base class.
    assert [str(path) for path, node in methods if ast.get_docstring(node) is None or len(node.body) > 1] == []
