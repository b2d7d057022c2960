"""Unusual interpreters: zip files, non-ASCII folders, changing paths, a venv, no site, and embedded Python."""

from __future__ import annotations

import os
import subprocess
import sys
import zipapp
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import assert_clean, run_script, start_python

pytestmark = [pytest.mark.process, pytest.mark.slow]

# The folder of NumPy and others, for interpreters that do not find them.
PACKAGES = [path for path in sys.path if path.endswith("site-packages")]

DATA = """
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): return i * 2
"""
LOAD = """
import infeed
def load(dataset, **options):
    with infeed.DataLoader(dataset, batch_size=2, num_workers=2, timeout=30, **options) as loader:
        return [batch.tolist() for batch in loader]
"""
# An ASCII locale, and a Python that does not correct it.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LOADED = "[[0, 2], [4, 6]]\n"


def test_a_zip_file_in_a_folder_with_a_strange_name_runs(tmp_path: Path) -> None:
    """``python app.pyz``: workers import classes of its modules from the zip; those of its __main__ are pickled by value."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "inside.py").write_text(DATA)
    (source / "__main__.py").write_text(LOAD + dedent("""
        import inside
        class Main(inside.Data):
            pass
        for dataset in (inside.Data(), Main()):
            for method in ("auto", "spawn"):
                print(load(dataset, start_method=method))
    """))  # fmt: skip
    folder = tmp_path / "Früh und spät 早い"
    folder.mkdir()
    zipapp.create_archive(source, folder / "the app.pyz")
    result = start_python([str(folder / "the app.pyz")], cwd=tmp_path, env={"PYTHONHASHSEED": "7"}).finish()
    assert_clean(result)
    assert result.out == LOADED * 4


def test_a_script_in_a_folder_with_an_unusual_name_finds_its_modules(tmp_path: Path) -> None:
    """Spaces, quotes and non-ASCII letters in the path of the program, under an ASCII locale."""
    folder = tmp_path / 'it\'s "mine" Größe 数据'
    folder.mkdir()
    (folder / "inside.py").write_text(DATA)
    code = LOAD + dedent("""
        from inside import Data
        for method in ("auto", "spawn"):
            print(load(Data(), start_method=method))
    """)
    (folder / "script.py").write_text(code)
    result = start_python([str(folder / "script.py")], cwd=tmp_path, env=ASCII).finish()
    assert_clean(result)
    assert result.out == LOADED * 2


def test_modules_from_relative_paths_are_found_after_a_chdir(tmp_path: Path) -> None:
    """They stay imported in the user's process: from "", from a relative entry; also with a Path, which Python ignores."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "first.py").write_text(DATA)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from first import Data\nclass More(Data): pass\n")
    (tmp_path / "lib" / "second.py").write_text(DATA)
    code = LOAD + dedent("""
        import os, sys
        from pathlib import Path
        sys.path += ["lib", Path("nowhere")]
        import first, second, package
        os.chdir("elsewhere")
        before = list(sys.path)
        for dataset in (first.Data(), second.Data(), package.More()):
            for method in ("auto", "spawn"):
                print(load(dataset, start_method=method))
        assert sys.path == before
    """)
    result = start_python(["-c", code], cwd=tmp_path).finish()
    assert_clean(result)
    assert result.out == LOADED * 6


def test_without_site_and_in_a_virtual_environment(tmp_path: Path) -> None:
    """Workers use the environment of the program that starts them: same prefix, same flags."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=60)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    path = tmp_path / "script.py"
    path.write_text(f"import sys; sys.path += {PACKAGES!r}\n" + LOAD + dedent("""
        class Where:
            def __len__(self): return 1
            def __getitem__(self, i): return f"{sys.prefix} {sys.flags.no_site} {hash('a')}"
        here = f"{sys.prefix} {sys.flags.no_site} {hash('a')}"
        for method in ("auto", "spawn"):
            with infeed.DataLoader(Where(), num_workers=1, start_method=method, timeout=30) as loader:
                print(*[batch == [here] for batch in loader])
    """))  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONHASHSEED": "3"}
    for flags in ([], ["-S"]):
        done = subprocess.run([python, *flags, path], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_without_a_python_executable_one_error_says_so(tmp_path: Path) -> None:
    """Embedded and frozen programs. Threads work there, and so do processes once multiprocessing knows a Python."""
    result = run_script(tmp_path, DATA + LOAD + dedent("""
        import sys
        python = sys.executable

        def attempt(**options):
            try:
                print(load(Data(), **options))
            except infeed.WorkerStartError as error:
                print(error)

        for executable, frozen in ((None, False), ("", False), ("/nowhere/python", False), (python, True)):
            sys.executable, sys.frozen = executable, frozen
            for method in ("auto", "spawn"):
                attempt(start_method=method)
        attempt(worker="thread")
        sys.executable = "/nowhere/the program"
        import multiprocessing
        multiprocessing.set_executable(python)
        attempt()
        multiprocessing.set_executable(__file__)
        attempt(start_method="spawn")
    """))  # fmt: skip
    assert_clean(result)
    cure = "set one with multiprocessing.set_executable(path), or use worker='thread'"
    lines = result.out.splitlines()
    assert lines[:10] == [
        *[f"sys.executable=None is not a Python interpreter that can run workers; {cure}"] * 2,
        *[f"sys.executable='' is not a Python interpreter that can run workers; {cure}"] * 2,
        *[f"'/nowhere/python' cannot be run as the Python interpreter of workers; {cure}"] * 2,
        *[f"sys.executable={sys.executable!r} is a frozen program, not a Python interpreter that can run workers; {cure}"] * 2,
        *[LOADED.rstrip()] * 2,
    ]
    script = str(tmp_path / "script.py")  # It may not be executed.
    assert lines[10:] == [f"{script!r} cannot be run as the Python interpreter of workers; {cure}"]


@pytest.mark.linux("closes descriptors before exec")
@pytest.mark.parametrize("closed", [[0, 1, 2], [1], [2]], ids=str)
def test_a_program_whose_standard_streams_are_closed_loads(tmp_path: Path, closed: list[int]) -> None:
    """A daemon's pipes get the descriptors of its streams: output of workers must not go there, from Python or a library."""
    (tmp_path / "script.py").write_text(LOAD + dedent("""
        import os
        class Data:
            def __len__(self): return 4
            def __getitem__(self, i):
                print("a word")
                os.write(1, b"and another\\n")
                os.write(2, b"and another\\n")
                return 2 * i
        for method in ("auto", "spawn"):
            said = str(load(Data(), start_method=method))
            with open("said", "a") as file:
                file.write(said + "\\n")
    """))  # fmt: skip
    closing = f"import os, sys; [os.close(fd) for fd in {closed}]; os.execv(sys.executable, [sys.executable, 'script.py'])"
    result = start_python(["-c", closing], cwd=tmp_path).finish()
    assert result.code == 0, result.out + result.err
    assert "Traceback" not in result.err
    assert (tmp_path / "said").read_text() == LOADED * 2


@pytest.mark.linux("Windows does not remove a current directory")
@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0 itself fails there: fixed in 3.13.1")
def test_a_program_whose_folder_was_removed_loads(tmp_path: Path) -> None:
    """The working directory is gone: only files that are looked up in it are missing."""
    result = run_script(tmp_path, DATA + LOAD + dedent("""
        import os
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir(os.getcwd())
        for method in ("auto", "spawn"):
            print(load(Data(), start_method=method))
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == LOADED * 2


def test_a_dataset_that_removes_standard_output_ends_without_errors(tmp_path: Path) -> None:
    """``sys.stdout = None`` in a worker, as in code that silences a library."""
    result = run_script(tmp_path, LOAD + dedent("""
        import sys
        class Data:
            def __len__(self): return 4
            def __getitem__(self, i):
                sys.stdout = None
                return 2 * i
        for method in ("auto", "spawn"):
            print(load(Data(), start_method=method))
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == LOADED * 2
