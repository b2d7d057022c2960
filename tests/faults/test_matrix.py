"""The crash matrix: each fault at each place in a worker, with the expected outcome.

Each fault happens once, in one worker. The outcome is what the user sees: which batches arrive, with which random numbers,
what is raised and how soon. The leak guard checks for leftovers.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import infeed
from tests.conftest import make_portable
from tests.helpers import DEADLINE_S, assert_faster_than, plain, wait_until

pytestmark = [pytest.mark.process, pytest.mark.linux("SIGSTOP, SIGKILL and the fork server")]

FAULTS: Final = ("exception", "SystemExit", "os._exit", "SIGKILL", "SIGSEGV", "hang", "memory")
PLACES: Final = (
    "start",  # Of the process, before it has read anything.
    "unpickle",  # Unpickling the dataset.
    "worker_init_fn",
    "load",
    "collate",
    "write",  # Rows into the slot as they are loaded.
    "place",  # Rows into the slot, held until there was one.
    "report",
    "between epochs",
    "close",
)
LENGTH, BATCH = 48, 4
HANG_S = 1.5  # `timeout`, where nothing else ends a hang.
SAMPLE_S = 0.3  # `sample_timeout`, where it ends the hang.


@dataclass(frozen=True)
class Same:
    """All batches are delivered as without the fault."""


@dataclass(frozen=True)
class Raises:
    """Raises in place of one batch; all others are delivered as without the fault."""

    error: type[BaseException]
    text: str = ""


@dataclass(frozen=True)
class Fails:
    """Ends the epoch; iterating again delivers all batches."""

    error: type[BaseException]
    text: str = ""


@dataclass(frozen=True)
class Cannot:
    """This combination does not exist."""

    why: str


Outcome = Same | Raises | Fails | Cannot


class Struck(Exception):
    """Raised by faults of the kind ``exception``."""


DIES = Same()  # Another worker does its work.
NO_CODE = Cannot("no code but infeed's and Python's own runs before the dataset is built")
THREAD = Same()  # It happens in a thread of the user's, which ends; the worker continues.
OTHERS = Same()  # They do all the work, and the hanging one is killed in the end.
EXITS = Fails(SystemExit)  # As it would end a loop without workers.
OVERDUE = Raises(infeed.LoadTimeoutError, "sample_timeout")
LATE = Fails(infeed.LoadTimeoutError, f"timeout={HANG_S}")
START = infeed.WorkerStartError
# With a row for each place, and a column for each fault as in FAULTS.
TABLE: Final[dict[str, tuple[Outcome, ...]]] = {
    "start": (NO_CODE, NO_CODE, NO_CODE, DIES, DIES, OTHERS, NO_CODE),
    "unpickle": (Fails(START, "Struck"), Fails(START, "SystemExit"), DIES, DIES, DIES, OTHERS, Fails(START, "MemoryError")),
    "worker_init_fn": (Fails(Struck), EXITS, DIES, DIES, DIES, OTHERS, Fails(MemoryError)),
    "load": (Raises(Struck), EXITS, DIES, DIES, DIES, OVERDUE, Raises(MemoryError)),
    "collate": (Raises(Struck), EXITS, DIES, DIES, DIES, OVERDUE, Raises(MemoryError)),
    "write": (Raises(Struck), EXITS, DIES, DIES, DIES, OVERDUE, Raises(MemoryError)),
    "place": (Raises(Struck), EXITS, DIES, DIES, DIES, OVERDUE, Raises(MemoryError)),
    "report": (Raises(Struck), EXITS, DIES, DIES, DIES, OVERDUE, Raises(MemoryError)),
    "between epochs": (THREAD, THREAD, DIES, DIES, DIES, LATE, THREAD),
    "close": (Same(), Same(), Same(), Same(), Same(), Same(), Same()),
}
CELLS: Final = {(place, fault): TABLE[place][column] for place in PLACES for column, fault in enumerate(FAULTS)}
# Cells that run with every other start method too: one of each kind of outcome.
CHOSEN: Final = [
    ("start", "SIGKILL"),
    ("unpickle", "exception"),
    ("load", "SIGSEGV"),
    ("place", "exception"),
    ("report", "hang"),
    ("close", "hang"),
]


class Fault:
    """Occurs in the first worker that reaches it. The main process is spared."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.owner_pid = kind, folder, os.getpid()

    @property
    def has_struck(self) -> bool:
        return (self.folder / "struck").exists()

    def is_first(self) -> bool:
        if os.getpid() == self.owner_pid:
            return False
        try:
            os.close(os.open(self.folder / "struck", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def strike(self) -> None:
        if self.is_first():
            self.do()

    def do(self) -> None:
        match self.kind:
            case "exception":
                raise Struck("by the test")
            case "SystemExit":
                raise SystemExit(7)
            case "os._exit":
                os._exit(7)
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGSEGV":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                threading.Event().wait()
            case "memory":
                hoard()
            case _:
                raise NotImplementedError(self.kind)


def hoard() -> None:
    """Allocates memory without end, under a limit for this process below that of the machine."""
    import resource  # Not on Windows.

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    taken = []
    try:
        while True:
            taken.append(bytearray(16 << 20))
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


class Draws:
    """Sample ``i`` is ``i`` and a random number. Injects its fault at the configured place."""

    def __init__(self, fault: Fault, place: str) -> None:
        self.fault, self.place = fault, place

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        if self.place == "load" and index == 9:
            self.fault.strike()
        return index, random.random()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.place == "unpickle":
            self.fault.strike()


class Collate:
    """Makes a batch of samples; injects the fault at the third."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __call__(self, samples: list[Any]) -> list[Any]:
        if samples[0][0] == 8:
            self.fault.strike()
        return [[index for index, _ in samples], [number for _, number in samples]]


class Init:
    """A worker_init_fn that arranges the fault at places that no other user code reaches."""

    def __init__(self, fault: Fault, place: str) -> None:
        self.fault, self.place = fault, place

    def __call__(self, _worker: int) -> None:
        match self.place:
            case "worker_init_fn":
                self.fault.strike()
            case "write":
                self.patch_writer("write")
            case "place":
                self.patch_writer("write_any")
            case "report":
                self.patch_report()
            case "between epochs":
                threading.Thread(target=self.strike_when_told, daemon=True).start()
            case "close":
                sys.stdout = _Stream(self.fault)

    def patch_writer(self, name: str) -> None:
        from infeed.collate.rows import RowWriter

        real = getattr(RowWriter, name)

        def write(*arguments: Any) -> None:
            self.fault.strike()
            real(*arguments)

        setattr(RowWriter, name, write)

    def patch_report(self) -> None:
        from infeed.workers import protocol

        real = protocol.dumps

        def dumps(value: object) -> bytes:
            if isinstance(value, protocol.RowsLoaded | protocol.PackedLoaded):
                self.fault.strike()
            return real(value)

        protocol.dumps = dumps

    def strike_when_told(self) -> None:
        threading.excepthook = lambda _: None
        wait_until((self.fault.folder / "now").exists, "the end of an epoch", 2 * DEADLINE_S)
        if self.fault.is_first():
            if self.fault.kind == "hang":  # A hanging thread harms nothing; stopping the process stops all.
                os.kill(os.getpid(), signal.SIGSTOP)
            self.fault.do()


class _Stream:
    """Replaces standard output, which a worker flushes when it ends."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        self.fault.strike()


def strike_at_start(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injects the fault into the first process that starts."""
    from infeed.workers.launcher import Launch, Starter

    real = Starter.start
    number = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "hang": signal.SIGSTOP}[fault.kind]

    def start(starter: Starter, launch: Launch) -> None:
        real(starter, launch)
        if not fault.has_struck:
            (fault.folder / "struck").touch()
            assert launch.process is not None
            os.kill(launch.process.pid, number)

    monkeypatch.setattr(Starter, "start", start)


class Got:
    """Batches of an epoch, and exceptions in place of some."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.errors: list[BaseException] = []
        self.is_over = False

    def take(self, batches: Any) -> None:
        try:
            self.batches.append(plain(next(batches)))
        except StopIteration:
            self.is_over = True
        except (Exception, SystemExit) as error:
            self.errors.append(error)


def iterate(loader: infeed.DataLoader, *, is_to_end: bool) -> Got:
    got = Got()
    batches = iter(loader)
    while not got.is_over and len(got.errors) < (2 if is_to_end else 1):
        got.take(batches)
    return got


def check_cell(place: str, fault_kind: str, engine: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = CELLS[place, fault_kind]
    fault = Fault(fault_kind, folder)
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 3, "shuffle": False, "prefetch": 2}
    if place == "collate":
        options["collate_fn"] = Collate(fault)
    with infeed.DataLoader(Draws(fault, ""), **options) as plain_loader:
        expected = [[plain(batch) for batch in plain_loader] for _ in range(2)]
    if outcome == LATE:
        engine = {**engine, "timeout": HANG_S}
    elif outcome == OVERDUE:
        options["sample_timeout"] = SAMPLE_S
    if isinstance(outcome, Fails) and place in ("unpickle", "worker_init_fn"):
        engine = {**engine, "num_workers": 1}  # Other workers might finish everything before the fault is noticed.
    if place == "start":
        strike_at_start(fault, monkeypatch)
    loader = infeed.DataLoader(Draws(fault, place), worker_init_fn=Init(fault, place), **options, **engine)
    with assert_faster_than(20), loader:
        if place == "between epochs":
            assert iterate(loader, is_to_end=True).batches == expected.pop(0)
            (folder / "now").touch()
            wait_until(lambda: fault.has_struck, "the fault")
        got = iterate(loader, is_to_end=not isinstance(outcome, Fails))
        if isinstance(outcome, Fails) and outcome != LATE:
            assert [plain(batch) for batch in loader] in expected  # It may be the next epoch by now.
    assert fault.has_struck, "the fault did not strike"
    check_outcome(outcome, got, expected[0])


def check_outcome(outcome: Outcome, got: Got, expected: list[Any]) -> None:
    if isinstance(outcome, Same):
        assert got.errors == []
        assert got.batches == expected
    elif isinstance(outcome, Raises | Fails):
        (error,) = got.errors
        assert isinstance(error, outcome.error), f"{type(error)}: {error}"
        assert outcome.text in str(error)
        if isinstance(outcome, Raises):
            assert len(got.batches) == len(expected) - 1
            assert [batch for batch in expected if batch in got.batches] == got.batches
        else:
            assert got.batches == expected[: len(got.batches)]


def cells() -> list[Any]:
    return [
        pytest.param(place, fault, id=f"{place}-{fault}")
        for (place, fault), outcome in CELLS.items()
        if not isinstance(outcome, Cannot)
    ]


@pytest.mark.parametrize(("place", "fault"), cells())
def test_every_fault_has_the_outcome_of_the_table(
    place: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check_cell(place, fault, {"num_workers": 2, "timeout": DEADLINE_S}, tmp_path, monkeypatch)
    if place == "close":
        assert capfd.readouterr().err == ""  # No process is left that it concerns.


@pytest.mark.parametrize(("place", "fault"), [pytest.param(*cell, id="-".join(cell)) for cell in CHOSEN])
@pytest.mark.parametrize("start_method", ["spawn", "portable"])
def test_the_outcome_does_not_depend_on_the_start_method(
    start_method: str, place: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if start_method == "portable":
        make_portable(monkeypatch)
    engine = {"num_workers": 2, "timeout": DEADLINE_S, "start_method": "auto" if start_method == "portable" else "spawn"}
    check_cell(place, fault, engine, tmp_path, monkeypatch)


def test_the_table_has_a_cell_for_every_fault_and_place() -> None:
    assert list(TABLE) == list(PLACES)
    assert all(len(row) == len(FAULTS) for row in TABLE.values())
    assert all(outcome.why for outcome in CELLS.values() if isinstance(outcome, Cannot))
