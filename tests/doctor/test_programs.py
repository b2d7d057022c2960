"""``infeed doctor`` survives every behavior of a program, stops it in time, and reports how it ended."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from infeed.doctor.child import ChildOptions
from infeed.doctor.runner import survey
from tests.helpers import Journal, ScriptResult, assert_faster_than, start_python

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.linux("signals of POSIX")]

# infeed's own loader: these programs need no torch, which takes seconds to import.
HEAD = """
import os, signal, sys, threading, time
import infeed
def load(count=8, num_workers=1):
    for batch in infeed.DataLoader(range(count), batch_size=2, num_workers=num_workers):
        time.sleep(0.02)
"""


def doctor(tmp_path: Path, code: str, *options: str, program: str = "program.py") -> ScriptResult:
    (tmp_path / "program.py").write_text(HEAD + code)
    return start_python(["-m", "infeed", "doctor", *options, program], cwd=tmp_path).finish(60)


def test_an_endless_program_is_stopped_in_the_middle_of_its_epoch(tmp_path: Path) -> None:
    """Code after the training loop does not run. The program's output is shown."""
    code = "print('begun', flush=True)\ntry:\n    load(10_000_000)\nfinally:\n    print('went on')"

    with assert_faster_than(30):
        result = doctor(tmp_path, code, "--seconds", "1")

    assert result.out.startswith("begun\n")
    assert "went on" not in result.out
    assert "was stopped at the time limit" in result.out
    assert result.code == 0


def test_a_program_that_requests_no_more_batches_is_stopped(tmp_path: Path) -> None:
    """Findings up to that point are reported."""
    with assert_faster_than(30):
        result = doctor(tmp_path, "load(num_workers=0)\nthreading.Event().wait()", "--seconds", "0.5")

    assert "requested no more batches and was stopped" in result.out
    assert "4 batches" in result.out


def test_a_program_that_cannot_be_stopped_is_killed(tmp_path: Path) -> None:
    """The program ignores signals while it is in a blocking call."""
    code = "load(num_workers=0)\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(1000)"

    with assert_faster_than(30):
        result = doctor(tmp_path, code, "--seconds", "0.5")

    assert "4 batches" in result.out


def test_a_program_that_dies_of_the_stop_signal_has_not_failed(tmp_path: Path) -> None:
    """The program resets all signals to their defaults."""
    code = "load(num_workers=0)\nfor number in range(34, 65): signal.signal(number, signal.SIG_DFL)\ntime.sleep(1000)"

    result = doctor(tmp_path, code, "--seconds", "0.5")

    assert "requested no more batches and was stopped" in result.out
    assert result.code == 0


@pytest.mark.parametrize(("leave", "count"), [("break", 15), ("raise ValueError", 5)], ids=["break", "error"])
def test_batches_of_an_abandoned_loop_count(tmp_path: Path, leave: str, count: int) -> None:
    """Three loops over the first five batches are too short for an intermediate record; or a loop fails."""
    code = f"""
for epoch in range(3):
    for number, batch in enumerate(infeed.DataLoader(range(100), batch_size=2)):
        if number == 4: {leave}
"""
    loader = json.loads(doctor(tmp_path, code, "--json", "-").out)["loaders"][0]

    assert (loader["epochs"], loader["batches"]) == (count // 5, count)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.exit(7)", "exited with code 7"),
        ("raise ValueError('bad label')", "failed: ValueError: bad label"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
    ids=["exit", "error", "death"],
)
def test_a_failing_program_is_not_reported_as_clean(tmp_path: Path, code: str, text: str) -> None:
    """The error is reported and earlier findings count, but the absence of findings proves nothing."""
    result = doctor(tmp_path, f"load()\n{code}", "--html", "found.html")

    assert f"no problems found, but the program {text}" in result.out
    assert "1 loader, 1 epoch, 4 batches" in result.out
    assert f"No problems found, but the program {text}." in (tmp_path / "found.html").read_text()
    assert result.code == 3


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit()", "os._exit(0)"])
def test_a_program_that_exits_with_0_has_not_failed(tmp_path: Path, code: str) -> None:
    """Whichever way it exits."""
    result = doctor(tmp_path, f"load()\n{code}")

    assert "no problems found\n" in result.out
    assert result.code == 0


@pytest.mark.parametrize(
    ("code", "program", "text"),
    [
        ("", "program:broken", "failed: ValueError: no such disk"),
        ("", "program:empty", "failed: the dataset list is empty; pass one with samples"),
        ("for batch in infeed.DataLoader([]): pass", "program.py", "ran to its end"),
        ("for batch in infeed.DataLoader(broken): pass", "program.py", "failed: ValueError: no such disk"),
    ],
    ids=["broken dataset", "empty dataset", "empty", "broken"],
)
def test_a_program_without_a_batch_was_not_examined(tmp_path: Path, code: str, program: str, text: str) -> None:
    """There is an exit code for this, and the reason is printed, also with JSON output elsewhere."""
    broken = """
class Broken:
    def __len__(self): return 8
    def __getitem__(self, index): raise ValueError("no such disk")
broken, empty = Broken(), []
"""
    message = f"no batch arrived, so nothing was examined: the program {text}"

    result = doctor(tmp_path, broken + code, "--seconds", "0.5", program=program)
    beside = doctor(tmp_path, broken + code, "--seconds", "0.5", "--json", "-", program=program)

    assert message in result.out
    assert f"infeed doctor: {program}: {message}" in beside.err
    assert json.loads(beside.out)["findings"] == []
    assert (result.code, beside.code) == (3, 3)


@pytest.mark.torch
def test_an_error_in_a_torch_worker_is_reported_in_one_line(tmp_path: Path) -> None:
    """The exception message contains the worker's traceback, whose last line matters."""
    pytest.importorskip("torch")
    code = """
from torch.utils.data import DataLoader
class Bad:
    def __len__(self): return 40
    def __getitem__(self, index): return index if index < 30 else [][0]
for batch in DataLoader(Bad(), batch_size=4, num_workers=1): pass
"""
    result = doctor(tmp_path, code)

    assert "failed: IndexError: list index out of range, in a worker\n" in result.out
    assert result.code == 3


def test_an_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    """The traceback contains frames of the program and none of infeed."""
    result = doctor(tmp_path, "load()\nraise ValueError('bad label')")

    assert "ValueError: bad label" in result.err
    assert 'File "program.py"' in result.err
    assert "infeed/doctor" not in result.err


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("", "iterated no DataLoader of torch or infeed"),
        ("sys.exit(3)", "program.py exited with code 3"),
        ("import absent_module", "program.py failed: ModuleNotFoundError: No module named 'absent_module'"),
        ("threading.Event().wait()", "iterated no DataLoader within 0.5 s; raise --start-seconds"),
    ],
    ids=["no loader", "exit", "error", "hang"],
)
def test_a_program_without_a_loader_is_not_reported_as_clean(tmp_path: Path, code: str, text: str) -> None:
    """Nothing was examined; there is an exit code for this."""
    options = ("--start-seconds", "0.5") if "wait" in code else ()

    result = doctor(tmp_path, code, *options)

    assert text in result.err
    assert result.code == 3


@pytest.mark.parametrize(
    ("options", "program", "text"),
    [
        ((), "absent.py", "'absent.py' is not a file; pass a script, a module with -m, or module:dataset"),
        (("--",), "absent.py", "'absent.py' is not a file; pass a script"),
        (("--ignore", "boredom"), "program.py", "--ignore boredom: unknown finding; choose from no-batch, "),
        (("--seconds", "0"), "program.py", "'0' must be a number of seconds above 0"),
        (("--seconds", "soon"), "program.py", "'soon' must be a number of seconds above 0"),
        (("--batch-size", "0"), "data:dataset", "'0' must be an int, at least 1"),
        (("--num-workers", "-1"), "data:dataset", "'-1' must be an int, at least 0"),
        (("--num-workers", "2"), "program.py", "--num-workers is only for module:dataset; program.py sets"),
        (("--batch-size", "2", "-m"), "program", "--batch-size is only for module:dataset; program sets"),
    ],
)
def test_invalid_usage_is_reported(tmp_path: Path, options: tuple[str, ...], program: str, text: str) -> None:
    """Usage errors print the fix and have their own exit code."""
    result = doctor(tmp_path, "", *options, program=program)

    assert text in result.err
    assert result.code == 2


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("program:absent", "module 'program' has no 'absent'; it defines "),
        ("absent:dataset", "no module 'absent' in sys.path"),
        ("program:number", "program:number is a int, not a dataset"),
    ],
)
def test_a_missing_dataset_is_reported(tmp_path: Path, target: str, text: str) -> None:
    """The error shows the argument and the names that exist."""
    result = doctor(tmp_path, "number = 7", program=target)

    assert text in result.err
    assert result.code == 3


LOCKED = """
class Locked:
    def __init__(self): self.lock = threading.Lock()
    def __len__(self): return 8
    def __getitem__(self, index): return index
plain = list(range(100))
"""


def test_a_dataset_is_examined_without_a_program(tmp_path: Path) -> None:
    """A class without arguments, or an instance; there is no training loop that could wait."""
    bad = doctor(tmp_path, LOCKED, "--seconds", "0.5", program="program:Locked")
    good = doctor(tmp_path, LOCKED, "--seconds", "0.5", program="program:plain")

    assert "dataset.lock is a _thread.lock" in bad.out
    assert bad.code == 1
    assert "no problems found" in good.out
    assert good.code == 0


DICE = """
import random
class Dice:
    def __init__(self): self.rng = random.Random(0)
    def __len__(self): return 8
    def __getitem__(self, index): return self.rng.random()
"""


def test_a_finding_can_be_ignored_and_written_to_files(tmp_path: Path) -> None:
    """For CI: an ignored finding does not count in the exit code and is missing from the page and the data."""
    files = ("--json", "found.json", "--html", "found.html")

    counted = doctor(tmp_path, DICE, "--seconds", "0.5", *files, program="program:Dice")
    report = json.loads((tmp_path / "found.json").read_text())
    page = (tmp_path / "found.html").read_text()
    ignored = doctor(tmp_path, DICE, "--seconds", "0.5", "--ignore", "same-random-numbers", *files, program="program:Dice")

    assert counted.code == 1
    assert [finding["name"] for finding in report["findings"]] == ["same-random-numbers"]
    assert "dataset.rng" in page
    assert ignored.code == 0
    assert json.loads((tmp_path / "found.json").read_text())["findings"] == []
    assert "No problems found." in (tmp_path / "found.html").read_text()


def test_options_after_a_dataset_are_rejected(tmp_path: Path) -> None:
    """They would be passed to a program, and there is none."""
    (tmp_path / "program.py").write_text(DICE)
    result = start_python(["-m", "infeed", "doctor", "program:Dice", "--num-workers", "1"], cwd=tmp_path).finish()
    assert (result.code, result.out) == (2, "")
    assert result.err == ("infeed doctor: --num-workers 1: a dataset takes no arguments; put options before program:Dice\n")


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize(
    ("file", "text"),
    [("absent/x", "does not exist"), (".", "it is a folder"), ("", "needs a file name")],
    ids=["no folder", "folder", "empty"],
)
def test_an_unwritable_file_is_reported_before_the_program_runs(tmp_path: Path, option: str, file: str, text: str) -> None:
    """It is a usage error."""
    result = doctor(tmp_path, "print('ran')", option, file)

    assert text in result.err
    assert result.out == ""
    assert result.code == 2


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_findings_are_printed_even_if_they_cannot_be_written(tmp_path: Path, option: str) -> None:
    """The disk turns out to be full: no traceback, and not the exit code for findings."""
    result = doctor(tmp_path, DICE, "--seconds", "0.5", option, "/dev/full", program="program:Dice")

    assert "dataset.rng" in result.out
    assert f"infeed doctor: {option} /dev/full cannot be written: No space left on device" in result.err
    assert "Traceback" not in result.err
    assert result.code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl+C", "kill"])
def test_nothing_is_left_after_the_doctor_ends(tmp_path: Path, number: int) -> None:
    """After Ctrl+C, which the terminal sends to all processes, or SIGKILL, which only the doctor receives."""
    journal = Journal(tmp_path / "lines")
    code = f"""
from pathlib import Path
from tests.helpers import Journal
for number, batch in enumerate(infeed.DataLoader(range(10**9), num_workers=1)):
    if number == 3: Journal(Path({str(journal.path)!r})).write("loading")
    time.sleep(0.01)
"""
    (tmp_path / "program.py").write_text(HEAD + code)
    script = start_python(["-m", "infeed", "doctor", "--seconds", "1", "program.py"], cwd=tmp_path)
    script.wait_line(journal, "loading")

    if number == signal.SIGKILL:
        script.process.kill()
    else:
        os.killpg(script.pid, number)

    # It fails if one of its processes is alive; the program itself ends when its time is up.
    assert script.finish().code == (130 if number == signal.SIGINT else -number)


@pytest.mark.parametrize("options", ["num_workers='auto'", "num_workers=2, worker='auto'"])
def test_auto_workers_are_reported_with_their_actual_number(tmp_path: Path, options: str) -> None:
    """Not 64, the maximum. Findings about processes apply to them. Gathered arrays have no workers."""
    code = f"""
import random
import numpy as np
class Random:
    def __init__(self): self.rng = random.Random(0)
    def __len__(self): return 8
    def __getitem__(self, index): return self.rng.random()
for batch in infeed.DataLoader(Random(), batch_size=2, {options}): time.sleep(0.01)
for rows in infeed.DataLoader(np.zeros((8, 3)), batch_size=2, {options}): time.sleep(0.01)
"""
    result = doctor(tmp_path, code, "--json", "-")

    report = json.loads(result.out)
    assert [finding["name"] for finding in report["findings"]] == ["same-random-numbers"]
    assert 0 < report["loaders"][0]["num_workers"] < 64
    assert report["loaders"][1]["num_workers"] == 0
    assert "'auto'), now " in report["loaders"][0]["loader"]


def test_cores_are_those_of_this_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor counts cores as loaders do: within the container's quota, and shared with the other ranks of the machine."""
    (tmp_path / "program.py").write_text(HEAD)
    monkeypatch.chdir(tmp_path)
    orders = ChildOptions(journal="", kind="script", seconds=1.0)
    counts = []
    for ranks in ("1", "1000"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        counts.append(survey(orders, ["program.py"], start_seconds=30).core_count)

    assert counts[1] == pytest.approx(counts[0] / 1000)


def test_the_run_time_comes_from_the_loader_if_the_exit_was_not_observed(tmp_path: Path) -> None:
    """The doctor's clock stands still, as on a busy machine: costs are still shares of a positive run time."""
    (tmp_path / "program.py").write_text(HEAD + "load(num_workers=0)\nos._exit(3)")
    orders = ChildOptions(journal="", kind="script", seconds=30.0)

    seen = survey(orders, [str(tmp_path / "program.py")], start_seconds=30, clock=lambda: 0.0)

    assert (seen.ending, seen.exit_code) == ("died", 3)
    assert seen.seconds == seen.loaders[0].iterated_s > 0


def test_arguments_and_modules_reach_the_program(tmp_path: Path) -> None:
    """Also arguments that look like options of the doctor."""
    (tmp_path / "part.py").write_text(HEAD + "print(__name__, sys.argv[1:], flush=True)\nload()")

    result = start_python(["-m", "infeed", "doctor", "-m", "part", "--json", "--seconds"], cwd=tmp_path).finish(60)

    assert result.out.startswith("__main__ ['--json', '--seconds']\n")
    assert result.code == 0


def test_the_doctor_imports_nothing_heavy_before_the_program(tmp_path: Path) -> None:
    """A program may set NumPy's number of threads in its first lines."""
    names = ("numpy", "torch", "psutil", "cloudpickle")
    (tmp_path / "program.py").write_text(f"import sys\nprint([name for name in {names} if name in sys.modules], flush=True)")

    result = start_python(["-m", "infeed", "doctor", "program.py"], cwd=tmp_path).finish()

    assert result.out.strip() == "[]"


@pytest.mark.torch
@pytest.mark.parametrize("way", ["torch", "run on infeed", "auto", "torchdata", "spawn"])
def test_all_kinds_of_loaders_are_observed(tmp_path: Path, way: str) -> None:
    """Loaders of torch (both start methods), torch on infeed's engine, infeed and torchdata are observed.

    infeed uses num_workers="auto", and its workers end with each epoch: the report contains those that existed.
    """
    pytest.importorskip("torch")
    name = "StatefulDataLoader" if way == "torchdata" else "DataLoader"
    source = {"auto": "infeed.torch", "torchdata": "torchdata.stateful_dataloader"}.get(way, "torch.utils.data")
    if way == "torchdata":
        pytest.importorskip("torchdata")
    count: int | str = "auto" if way == "auto" else 1
    context = 'multiprocessing_context="spawn", ' if way == "spawn" else ""
    code = f"""
from {source} import {name}
if __name__ == "__main__":
    loader = {name}(list(range(8)), batch_size=2, {context}num_workers={count!r}, persistent_workers={way != "auto"})
    for epoch in range(2):
        for batch in loader: time.sleep(0.02)
"""
    options = ("--infeed",) if way == "run on infeed" else ()

    result = doctor(tmp_path, code, "--json", "-", *options)

    loader = json.loads(result.out)["loaders"][0]
    expected = "infeed.torch" if way in ("run on infeed", "auto") else "torch"
    assert (loader["library"], loader["epochs"], loader["batches"]) == (expected, 2, 8)
    assert 0 < loader["num_workers"] < 64
    assert ("num_workers='auto'), now " in loader["loader"]) is (way == "auto")


def test_a_terminal_with_a_limited_encoding_gets_replacements(tmp_path: Path) -> None:
    """Names and units are replaced. The program's own output is not changed."""
    code = """
class Däta:
    def __init__(self): self.kept = __import__("random").Random(0)
    def __len__(self): return 8
    def __getitem__(self, index): return self.kept.random()
for batch in infeed.DataLoader(Däta(), batch_size=2, num_workers=2): pass
print(sys.stdout.errors)
"""
    (tmp_path / "program.py").write_text(HEAD + code, encoding="utf-8")
    arguments = ["-m", "infeed", "doctor", "program.py"]
    result = start_python(arguments, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}).finish(60)

    assert result.out.startswith("strict\n")
    assert "infeed.DataLoader(D?ta, " in result.out
    assert result.code == 1
