"""The stand-in behaves like Windows in everything that infeed could notice."""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the stand-in is for Linux", allow_module_level=True)

from infeed.memory import segments
from infeed.memory.segments import NamedReader, NamedStore
from infeed.workers.process_tools import MemoryUse, memory_use, open_process
from infeed.workers.transport import can_use_poll
from tests.helpers import start_script
from tests.stand_in.windows_stand_in import active, live_names


@pytest.mark.usefixtures("windows_stand_in")
def test_named_memory_disappears_with_its_last_mapping() -> None:
    """Also if its creator never removed the name, and not earlier."""
    store = NamedStore(holds_segments=False)
    segment = store.create(1)
    other = NamedReader().attach(segment.handle)
    handle = segment.handle
    del segment
    gc.collect()
    assert live_names() == {str(handle.name).lstrip("/")}
    del other
    gc.collect()

    assert live_names() == set()
    with pytest.raises(FileNotFoundError):
        segments._map_named(str(handle.name), handle.size, create=False)
    store.close()


@pytest.mark.usefixtures("windows_stand_in")
def test_a_name_is_not_removed_while_it_is_open() -> None:
    store = NamedStore()
    segment = store.create(1)
    store.release(segment.handle)
    segment.memory[:1] = b"x"

    assert NamedReader().attach(segment.handle)[:1] == b"x"


@pytest.mark.usefixtures("windows_stand_in")
def test_an_open_file_cannot_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w", encoding="utf-8"), pytest.raises(PermissionError):
        path.unlink()
    code = "file = open('file'); print('open', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == b"open"
        with pytest.raises(PermissionError):
            path.rename(tmp_path / "other")
    finally:
        child.communicate(b"\n")
    path.unlink()


@pytest.mark.usefixtures("windows_stand_in")
def test_a_folder_with_an_open_file_cannot_be_removed(tmp_path: Path) -> None:
    """`shutil.rmtree` removes files relative to descriptors of their folders."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with (folder / "file").open("w", encoding="utf-8"), pytest.raises(PermissionError):
        shutil.rmtree(folder)
    shutil.rmtree(folder)


def test_infeed_lacks_what_windows_lacks_and_other_libraries_do_not() -> None:
    code = "found = [hasattr(os, 'fork'), hasattr(signal, 'SIGKILL'), hasattr(select, 'poll')]"
    names = {"os": os, "signal": signal, "select": select}
    with active():
        ours, theirs = {**names, "__name__": "infeed.somewhere"}, {**names, "__name__": "another.library"}
        exec(code, ours)
        exec(code, theirs)
        assert (ours["found"], theirs["found"]) == ([False] * 3, [True] * 3)
        assert not can_use_poll()
        assert memory_use() == MemoryUse()  # No /proc.
        assert open_process(os.getpid()) is None
        for ask in ("Path('/proc/self/stat').read_text()", "list(Path('/sys').iterdir())", "open('/proc/self/stat')"):
            exec(f"def ask(): {ask}", ours := {"Path": Path, "__name__": "infeed.somewhere"})
            with pytest.raises(FileNotFoundError):
                ours["ask"]()
    assert can_use_poll()
    assert memory_use().resident_bytes > 0


@pytest.mark.process
def test_a_program_and_its_children_have_a_windows_console(tmp_path: Path) -> None:
    code = """
from tests.stand_in.windows_stand_in import install
install()
import subprocess, sys
print(sys.stdout.encoding, flush=True)
print(subprocess.run([sys.executable, "-c", "print('\\xe9')"], capture_output=True).stdout)
"""
    result = start_script(tmp_path, code).finish()
    assert (result.code, result.err) == (0, "")
    assert result.out == "cp1252\nb'\\xe9\\r\\n'\n"
