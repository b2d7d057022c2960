"""The fork server starts with the program and imports its libraries meanwhile; wrong guesses have no effect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import ROOT, Journal, Script, ScriptResult, kill_process, start_python, wait_until

pytestmark = [pytest.mark.process, pytest.mark.linux("is about the fork server")]

# Replaces a library that takes long to import: it records which process imports it.
LIBRARY = """
import os
from pathlib import Path
PID, VALUE = os.getpid(), os.environ.get("FOR_KORNIA")
with open(Path(__file__).parent / "importers", "a") as file:
    file.write(f"{PID}\\n")
"""
PROGRAM = """
import os, time
from pathlib import Path
import infeed

def wait_for_server():
    importers = Path("site-packages/importers")
    while not importers.exists() or set(importers.read_text().split()) <= {str(os.getpid())}:
        time.sleep(0.01)

class Data:
    def __len__(self): return 2
    def __getitem__(self, index): return [kornia.PID == os.getppid(), str(kornia.VALUE)]

def epoch():
    with infeed.DataLoader(Data(), batch_size=2, num_workers=1, timeout=60) as loader:
        ((is_server, values),) = loader
        return is_server.tolist(), values
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "kornia.py").write_text(LIBRARY)
    return tmp_path


def start(folder: Path, code: str, *, head: str = PROGRAM) -> Script:
    (folder / "program.py").write_text(head + code)
    path = os.pathsep.join([str(folder / "site-packages"), str(ROOT / "src"), str(ROOT)])
    return start_python(["-m", "infeed", "run", "program.py"], cwd=folder, env={"PYTHONPATH": path})


def printed(result: ScriptResult) -> str:
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    return result.out.strip()


def test_the_server_imports_libraries_while_the_program_does(folder: Path) -> None:
    """The server imports the program's libraries before the program creates a loader, so workers inherit them."""
    script = start(folder, "import kornia\nwait_for_server()\nprint(epoch())\n")

    assert printed(script.finish()) == "([True, True], ['None', 'None'])"
    assert len((folder / "site-packages" / "importers").read_text().split()) == 2


def test_variables_that_a_program_sets_before_an_import_reach_workers(folder: Path) -> None:
    """A library that was imported ahead has read an outdated environment variable, so workers import it again."""
    script = start(folder, "wait_for_server()\nos.environ['FOR_KORNIA'] = '7'\nimport kornia\nprint(epoch())\n")

    assert printed(script.finish()) == "([True, True], ['7', '7'])"


def test_variables_that_no_library_reads_do_not_matter(folder: Path) -> None:
    code = "import kornia\nwait_for_server()\nos.environ['SOMETHING_ELSE'] = '7'\nprint(epoch())\n"
    script = start(folder, code)

    assert printed(script.finish()) == "([True, True], ['None', 'None'])"
    assert len((folder / "site-packages" / "importers").read_text().split()) == 2


def test_a_module_of_the_program_is_not_mistaken_for_a_library(folder: Path) -> None:
    """The program's folder is added to `sys.path` only when the program runs."""
    (folder / "own").mkdir()
    (folder / "own" / "kornia.py").write_text("import os\nPID, VALUE = os.getpid(), 'own'\n")
    script = start(folder, "import sys\nwait_for_server()\nsys.path.insert(0, 'own')\nimport kornia\nprint(epoch())\n")

    assert printed(script.finish()) == "([False, False], ['own', 'own'])"


@pytest.mark.torch
def test_workers_have_torch_only_if_the_dataset_needs_it(folder: Path) -> None:
    """Workers do not import torch just because the program does and the server has imported it ahead."""
    code = """
import sys, infeed, torch
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 2
    def __getitem__(self, index): return "torch" in sys.modules
print([batch.tolist() for batch in DataLoader(Data(), batch_size=2, num_workers=1)])
"""
    script = start(folder, code, head="")

    assert printed(script.finish()) == "[[False, False]]"


def test_a_program_that_does_not_mention_workers_starts_no_process(folder: Path) -> None:
    code = "import kornia, psutil\nprint(len(psutil.Process().children()))\n"

    assert printed(start(folder, code, head="").finish()) == "0"


ENDLESS = """
import os, time
with open("importers", "a") as file:
    file.write(f"{os.getpid()}\\n")
if not os.path.exists("program") or os.getpid() != int(open("program").read()):
    time.sleep(1000)
"""
WAITING = """
import os, time
open("program", "w").write(str(os.getpid()))
while not os.path.exists("importers"):  # by the server, for its workers
    time.sleep(0.01)
"""


def test_program_exit_does_not_wait_for_the_server(folder: Path) -> None:
    """The program has no workers and the server is importing a library when the program exits."""
    (folder / "site-packages" / "kornia.py").write_text(ENDLESS)

    assert printed(start(folder, "import kornia\n", head=WAITING).finish()) == ""


def test_killing_the_program_ends_the_server(folder: Path) -> None:
    """The server ends with its program even in the middle of an import."""
    (folder / "site-packages" / "kornia.py").write_text(ENDLESS)
    script = start(folder, "import kornia\ntime.sleep(1000)\n", head=WAITING)
    journal = Journal(folder / "importers")
    wait_until(lambda: journal.lines(), "the server's import")
    kill_process(script.pid)

    script.finish()  # Fails if one of its processes is still alive.


@pytest.mark.torch
def test_the_server_starts_when_infeed_torch_is_imported(folder: Path) -> None:
    """Importing `infeed.torch` starts the server without `infeed run`."""
    code = PROGRAM.replace("import infeed\n", "from infeed import torch as _\nimport infeed\n")
    (folder / "program.py").write_text(code + "import kornia\nwait_for_server()\nprint(epoch())\n")
    path = os.pathsep.join([str(folder / "site-packages"), str(ROOT / "src"), str(ROOT)])

    script = start_python(["program.py"], cwd=folder, env={"PYTHONPATH": path})
    assert printed(script.finish()) == "([True, True], ['None', 'None'])"
