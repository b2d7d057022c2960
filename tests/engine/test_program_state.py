"""Workers get the library settings and the module globals that the program has set since it imported them."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import engine_params
from tests.helpers import DEADLINE_S, WINDOWS, assert_clean, run_script

pytestmark = [pytest.mark.process, pytest.mark.slow]

METHODS = pytest.mark.parametrize("method", engine_params("forkserver", "spawn", "portable"))

CONFIG = """
import threading

SIZE = 32
OPTIONS = {"scale": 1}
NAMES = []
LOCK = threading.Lock()
OBJECT = None
_ready = False
_file = None

class Config:
    depth = 1

    def __init__(self):
        self.width = 10
        self.ready = False
        self.connection = None

    def connect(self):
        self.connection = open(__file__)
        self.ready = True

class Store(Config):
    pass

settings = Config()
store = Store()

def set_size(size):
    global SIZE
    SIZE = size

def open_file():
    global _ready, _file
    if not _ready:
        _file = open(__file__)
        _ready = True
    return _file

def register(name):
    assert name not in NAMES, name
    NAMES.append(name)
"""
DATA = """
import config
from config import OPTIONS

config.register("data")

class Data:
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return repr(self.read())

def read_globals():
    config.open_file().readable()
    shared = config.OPTIONS is OPTIONS
    return config.SIZE, OPTIONS, shared, config.NAMES, config.NEW, config.OBJECT

def read_attributes():
    if not config.store.ready:
        config.store.connect()
    config.store.connection.readable()
    return config.Config.depth, config.settings.width, config.settings.ready
"""
HEAD = """
import sys
import infeed

def loader(read):
    return infeed.DataLoader(data.Data(read), num_workers=2, start_method=sys.argv[1], batch_size=None, timeout=30)

def show(read):
    print(*sorted(set(loader(read))), sep="\\n")

import config, data
"""


def shown(folder: Path, method: str, code: str, *, seconds: float = DEADLINE_S) -> str:
    """Return what a script prints that uses the two modules above."""
    (folder / "config.py").write_text(CONFIG)
    (folder / "data.py").write_text(DATA)
    script, start_method = (WINDOWS, "auto") if method == "portable" else ("", method)
    result = run_script(folder, script + HEAD + dedent(code), start_method, seconds=seconds)
    assert_clean(result)
    return result.out


@METHODS
def test_globals_of_user_modules_reach_workers(tmp_path: Path, method: str) -> None:
    """Changes by a function, in place, after an import of the name, and globals that did not exist at import.

    A worker opens what a module opens on import, and objects that register themselves on import do so once.
    """
    out = shown(
        tmp_path,
        method,
        """
        config.set_size(64)
        config.OPTIONS["scale"] = 5
        config.NEW = ("a", 1.5)
        config.open_file()
        config.OBJECT = lambda: 1
        show(data.read_globals)
        config.SIZE = 65
        show(data.read_globals)
        """,
    )
    line = "({}, {{'scale': 5}}, True, ['data'], ('a', 1.5), None)\n"
    assert out == line.format(64) + line.format(65)


@METHODS
def test_attributes_of_classes_and_objects_of_user_modules_reach_workers(tmp_path: Path, method: str) -> None:
    """A module often keeps its configuration in a class or an object. An object that has opened a connection is not changed."""
    out = shown(
        tmp_path,
        method,
        """
        config.Config.depth = 2
        config.settings.width = 20
        config.store.connect()
        show(data.read_attributes)
        """,
    )
    assert out == "(2, 20, False)\n"


@METHODS
def test_settings_of_libraries_reach_workers(tmp_path: Path, method: str) -> None:
    out = shown(
        tmp_path,
        method,
        """
        import csv, decimal, os, sys, warnings
        import numpy
        from PIL import Image, ImageFile

        sys.setrecursionlimit(2345)
        csv.field_size_limit(77)
        decimal.getcontext().prec = 7
        numpy.seterr(divide="raise")
        warnings.filterwarnings("error", message="mine")
        Image.MAX_IMAGE_PIXELS = None
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        os.umask(0o027)

        def read():
            mask = os.umask(0)
            os.umask(mask)
            return (
                sys.getrecursionlimit(), csv.field_size_limit(), decimal.getcontext().prec, numpy.geterr()["divide"],
                warnings.filters[0][0], Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, mask,
            )

        show(read)
        """,
    )
    assert out.startswith("(2345, 77, 7, 'raise', 'error', None, True, ")
    if sys.platform == "linux":
        assert out.endswith(f"{0o027})\n")


@pytest.mark.torch
def test_settings_of_torch_reach_workers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = shown(
        tmp_path,
        "auto",
        """
        import torch

        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)

        def read():
            deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            return torch.zeros(1).dtype, *deterministic, torch.is_grad_enabled()

        with torch.no_grad():
            show(read)
        """,
        seconds=3 * DEADLINE_S,  # under Wine, importing torch takes 20 s in each process
    )
    assert out == "(torch.float64, True, True, False)\n"


def test_nothing_is_imported_to_transfer_the_state_of_modules(tmp_path: Path) -> None:
    """Neither a library with settings nor a user module. A module that a sample imports later has its state."""
    (tmp_path / "other.py").write_text("VALUE = 1\n")
    out = shown(
        tmp_path,
        "auto",
        """
        import csv, decimal
        import other
        from PIL import Image

        other.VALUE = 2
        csv.field_size_limit(77)

        def read():
            found = [name for name in ("csv", "PIL.Image", "other") if name in sys.modules]
            import csv as late, other as later
            return found, late.field_size_limit(), later.VALUE

        show(read)
        """,
    )
    lines = set(out.splitlines())
    assert "([], 77, 2)" in lines
    assert lines <= {"([], 77, 2)", "(['csv', 'other'], 77, 2)"}


@METHODS
def test_a_replacement_worker_has_the_state_of_the_first(tmp_path: Path, method: str) -> None:
    out = shown(
        tmp_path,
        method,
        """
        import logging, os
        from pathlib import Path

        logging.getLogger("infeed").setLevel("ERROR")  # it warns of the death

        def read():
            try:
                Path("flag").unlink()
            except OSError:  # it is not there, or on Windows the other worker is removing it
                return config.SIZE
            os._exit(1)

        batches = iter(loader(read))
        config.SIZE = 64  # workers start with the first batch
        found = {next(batches)}
        config.SIZE = 65
        Path("flag").touch()
        found.update(batches)
        print(found, Path("flag").exists())
        """,
    )
    assert out == "{'64'} False\n"


@METHODS
def test_a_name_of_the_script_that_workers_lack_is_explained(tmp_path: Path, method: str) -> None:
    out = shown(
        tmp_path,
        method,
        """
        NAME = 1

        class Text(str):
            __repr__ = str.__str__

        def read():
            import __main__

            assert not hasattr(__main__, "NAME")
            assert not hasattr(__main__, "__file__")
            try:
                return __main__.NAME
            except AttributeError as error:
                return Text(error)

        show(read)
        """,
    )
    assert out == (
        "module '__main__' has no attribute 'NAME' in a worker, because workers do not run the script; "
        "move NAME to another module, or store it in the dataset\n"
    )
