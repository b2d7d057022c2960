"""``infeed run`` runs a program as Python does, with torch's loader replaced."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.helpers import DEADLINE_S, ScriptResult, start_python

pytestmark = [pytest.mark.process]


# Several processes import torch at the same time, which takes seconds each.
SLOW_S = 120.0


def run(tmp_path: Path, code: str, *arguments: str, seconds: float = DEADLINE_S) -> ScriptResult:
    folder = tmp_path / "scripts"
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(code)
    return start_python(["-m", "infeed", "run", "scripts/program.py", *arguments], cwd=tmp_path).finish(seconds)


def test_a_script_runs_as_under_python(tmp_path: Path) -> None:
    """Name, file, arguments (also those that look like our options), working directory and `sys.path` are the same."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("VALUE = 7")
    code = """
import os, sys, neighbour
is_main = sys.modules["__main__"].__dict__ is globals()
print([__name__, __file__, sys.argv, os.path.basename(os.getcwd()), neighbour.VALUE, is_main])
"""
    result = run(tmp_path, code, "-m", "--epochs", "3")

    expected = ["__main__", "scripts/program.py", ["scripts/program.py", "-m", "--epochs", "3"], tmp_path.name, 7, True]
    assert result.out.strip() == str(expected)
    assert result.code == 0
    assert result.err == "infeed: the main process iterated no torch DataLoader\n"


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    """The module is imported as part of its package."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text(
        "import sys\nfrom . import __name__ as package\nprint([__name__, package, sys.argv[1:]])"
    )

    result = start_python(["-m", "infeed", "run", "-m", "package.part", "--x"], cwd=tmp_path).finish()

    assert result.out.strip() == str(["__main__", "package", ["--x"]])


def test_two_dashes_before_the_program_are_ignored(tmp_path: Path) -> None:
    """A `--` before the program is ignored; later ones are passed to the program."""
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv)")

    result = start_python(["-m", "infeed", "run", "--", "program.py", "--", "-v"], cwd=tmp_path).finish()

    assert result.out.strip() == str(["program.py", "--", "-v"])


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [("import sys; sys.exit(3)", 3, ""), ("raise SystemExit('no data')", 1, "no data\n"), ("import sys; sys.exit()", 0, "")],
)
def test_the_exit_code_of_the_program_is_returned(tmp_path: Path, code: str, exit_code: int, text: str) -> None:
    """The exit code is the same as without `infeed run`."""
    result = run(tmp_path, code)

    assert result.code == exit_code
    assert result.err.startswith(text)


def test_a_traceback_shows_only_frames_of_the_program(tmp_path: Path) -> None:
    """A traceback contains no frames of infeed."""
    result = run(tmp_path, "def fail():\n    raise ValueError('bad')\nfail()\n")

    assert result.code == 1
    assert "ValueError: bad" in result.err
    assert 'File "scripts/program.py", line 3, in <module>' in result.err
    assert "infeed/cli" not in result.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "missing program; pass a script or -m MODULE"), (["absent.py"], "'absent.py' is not a file; pass a script")],
)
def test_invalid_usage_is_reported(tmp_path: Path, arguments: list[str], text: str) -> None:
    """Invalid usage prints the fix and exits with the code for usage errors."""
    result = start_python(["-m", "infeed", "run", *arguments], cwd=tmp_path).finish()

    assert result.code == 2
    assert text in result.err


@pytest.mark.torch
def test_loaders_are_replaced_however_they_are_imported(tmp_path: Path) -> None:
    """Aliases, subclasses, earlier and later imports, scripts without a main guard, and lambdas work."""
    code = """
import os
import torch.utils.data
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import DataLoader as Other

class Mine(DataLoader):
    pass

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return i * i, os.getpid()

for cls in (DataLoader, Other, torch.utils.data.DataLoader, Mine):
    loader = cls(Squares(), batch_size=3, num_workers=1, collate_fn=lambda s: [x for x, _ in s] + [s[0][1] != os.getppid()])
    assert isinstance(loader, DataLoader)
    print(*loader)
"""
    result = run(tmp_path, code)

    assert result.out.splitlines() == ["[0, 1, 4, True] [9, 16, 25, True]"] * 4
    assert result.err == "infeed: 4 loaders on infeed's engine, 8 batches\n"


@pytest.mark.torch
@pytest.mark.linux("needs os.fork")
def test_an_unsupported_loader_uses_torch_workers(tmp_path: Path) -> None:
    """One line gives the reason, when the loader is created and at the end."""
    code = """
from torch.utils.data import DataLoader
print([batch.tolist() for batch in DataLoader(list(range(4)), batch_size=2, num_workers=1, multiprocessing_context="fork")])
"""
    result = run(tmp_path, code)

    assert result.out.strip() == "[[0, 1], [2, 3]]"
    assert result.err.count("RuntimeWarning: this loader runs on torch's own workers") == 1
    summary = result.err.splitlines()[-1]
    assert "1 loader on torch's own workers: DataLoader(list), because multiprocessing_context='fork' was passed" in summary


@pytest.mark.torch
def test_install_can_be_undone(tmp_path: Path) -> None:
    """`install` can replace the loaders of a whole program or of a part of it."""
    code = """
import infeed.torch
from torch.utils.data import DataLoader, dataloader
kinds = []
for change in (infeed.torch.install, infeed.torch.install, infeed.torch.uninstall):
    change()
    kinds.append(type(iter(DataLoader([1, 2]))).__module__)
print(kinds)
"""
    (tmp_path / "program.py").write_text(code)
    result = start_python(["program.py"], cwd=tmp_path).finish()

    assert result.out.strip() == str(["infeed.torch.iterator"] * 2 + ["torch.utils.data.dataloader"])
    assert result.err == ""


@pytest.mark.torch
def test_loaders_are_replaced_if_torch_was_searched_for_before_its_import(tmp_path: Path) -> None:
    """Transformers, datasets, polars and seaborn search for torch without importing it."""
    code = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
from torch.utils.data import DataLoader
print([batch.tolist() for batch in DataLoader(list(range(4)), batch_size=2)])
"""
    result = run(tmp_path, code)

    assert result.out.strip() == "[[0, 1], [2, 3]]"
    assert "1 loader on infeed's engine" in result.err


TRAINING = """
import os
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): return i
data = Data()
{}
with open("runs", "a") as file:
    file.write("run ")
print([batch.tolist() for batch in DataLoader(data, batch_size=2, num_workers=2, timeout=30)])
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "1 loader on infeed's engine"),
        pytest.param(
            "import parts; data.part = parts.Part()",
            "cannot import name 'Data' from 'training' (not imported: workers do not run training, which",
            marks=pytest.mark.linux("torch forks its workers there"),
        ),
    ],
    ids=["alone", "needed by another module"],
)
def test_training_in_an_imported_module_runs_once(tmp_path: Path, more: str, reason: str) -> None:
    """As with torch's forked workers; and on these, with a warning, where a module that workers import needs that module."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "training.py").write_text(TRAINING.format(more))
    (tmp_path / "scripts" / "parts.py").write_text("from training import Data\nclass Part:\n    pass\n")

    result = run(tmp_path, "import training", seconds=SLOW_S)

    assert result.out.strip() == "[[0, 1], [2, 3]]", result.err
    assert reason in result.err
    assert (tmp_path / "runs").read_text() == "run "


CHILDREN = """
import multiprocessing, subprocess, sys
from torch.utils.data import DataLoader, Dataset

class Loaded(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        import torch
        return [name in sys.modules for name in ("torch", "infeed.torch")]

def show(who):
    iterator = iter(DataLoader([1, 2]))
    print(who, type(iterator).__module__, len(list(iterator)), flush=True)

if __name__ == "__main__":
    if "command" in sys.argv:
        show("command")
    else:
        command = subprocess.Popen([sys.executable, sys.argv[0], "command"])
        processes = [
            multiprocessing.get_context(method).Process(target=show, args=(method,))
            for method in sys.argv[1:]
        ]
        for process in processes:
            process.start()
        print("worker", next(iter(DataLoader(Loaded(), batch_size=None, num_workers=1))))
        for process in processes:
            process.join()
        sys.exit(command.wait())
"""


@pytest.mark.torch
@pytest.mark.slow
def test_child_processes_use_infeed_however_they_are_started(tmp_path: Path) -> None:
    """Each child counts its own loaders. Workers of infeed are not affected."""
    methods = sorted({"fork", "spawn"} & {*multiprocessing.get_all_start_methods()})
    result = run(tmp_path, CHILDREN, *methods, seconds=SLOW_S)

    assert result.code == 0, result.err
    children = [f"{who} infeed.torch.iterator 2" for who in ("command", *methods)]
    assert sorted(result.out.splitlines()) == sorted([*children, "worker [True, False]"])
    lines = result.err.splitlines()
    assert [line.split(": ")[1] for line in lines if line.startswith("infeed (pid ")] == [
        "1 loader on infeed's engine, 2 batches"
    ] * len(children)
    assert lines[-1] == "infeed: 1 loader on infeed's engine, 1 batch"


@pytest.mark.torch
@pytest.mark.slow
def test_install_reaches_spawned_processes_until_it_is_undone(tmp_path: Path) -> None:
    """Spawned processes import the program again without its main block."""
    code = """
import multiprocessing
from torch.utils.data import DataLoader

def show(who):
    print(who, type(iter(DataLoader([1, 2]))).__module__, flush=True)

if __name__ == "__main__":
    import infeed.torch
    context = multiprocessing.get_context("spawn")
    infeed.torch.install()
    processes = [context.Process(target=show, args=("installed",))]
    infeed.torch.uninstall()
    processes.append(context.Process(target=show, args=("uninstalled",)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""
    (tmp_path / "program.py").write_text(code)
    result = start_python(["program.py"], cwd=tmp_path).finish(SLOW_S)

    assert sorted(result.out.splitlines()) == ["installed infeed.torch.iterator", "uninstalled torch.utils.data.dataloader"]
    assert result.err == ""


@pytest.mark.torch
def test_an_import_hook_that_missed_torch_is_reported(tmp_path: Path) -> None:
    """An importer of the program may come before the one of infeed."""
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "infeed" not in type(finder).__module__]
import torch
"""
    result = run(tmp_path, code)

    assert result.code == 0
    assert "infeed.torch.install()" in result.err
