"""Makes a Python on Linux behave like one on Windows in some respects, so that the quick tests cover those too.

What it changes, in this process and in every Python that it starts:

* Named memory disappears with its last handle. Nothing else removes it.
* A file that is open, here or in a direct child process, cannot be removed or replaced.
* For infeed and for scripts, `os.fork`, sessions, process groups, `signal.SIGKILL`, `select.poll`, memfd, pidfd and passing of
  descriptors are missing, and /proc, /sys and /dev/shm cannot be opened or listed, also through pathlib and other standard
  modules. Other libraries find all of these: they have code of their own for Windows.
* In programs and workers, standard output is cp1252 with `\\r\\n`.

What it does not change: `sys.platform`, so code behind `sys.platform == "win32"` runs in the Windows tier only
(`python dev.py test --windows`), which has the last word; modules that Windows lacks (`fcntl`, `resource`, `pwd`); the start
methods of `multiprocessing`, so a test can still use `fork`; signals between processes; `os.stat` of hidden folders; slashes
in paths; case-sensitive names of files.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import io
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

# Its value is the folder that stands for the system's table of names.
VARIABLE: Final = "INFEED_WINDOWS_STAND_IN"
_MISSING: Final[Mapping[ModuleType, tuple[str, ...]]] = {
    os: ("fork", "forkpty", "getsid", "setsid", "getpgid", "setpgid", "killpg", "waitid", "memfd_create", "pidfd_open"),
    signal: ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "setitimer"),
    select: ("poll", "epoll"),
    socket: ("send_fds", "recv_fds"),
}
_HIDDEN_FOLDERS: Final = ("/proc", "/sys", "/dev/shm")
_real: Final[dict[tuple[str, str], Any]] = {}
_active: Final[list[Path]] = []  # the table of names, while the stand-in is on


class _Patched(ModuleType):
    """A module without some of its names, which only other libraries still find."""

    def __getattr__(self, name: str) -> Any:
        value = _real.get((self.__name__, name))
        if value is None or _is_ours(sys._getframe(1)):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return value


# They open files for their callers.
_HELPERS: Final = frozenset(("pathlib", "os", "io", "codecs", "glob", "fnmatch", "shutil", "tempfile", "contextlib"))


def _is_ours(frame: Any) -> bool:
    """Whether code of infeed is asking, or a script that a test runs, also through helpers of the standard library."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _HELPERS:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return name == "__main__" or name.partition(".")[0] == "infeed"


@contextmanager
def active() -> Iterator[None]:
    """Behave like Windows inside, and let programs and workers that are started inside do so too."""
    # Memory that something holds beyond the end of this block stays usable: only its name goes.
    with tempfile.TemporaryDirectory(prefix="windows-stand-in-", dir="/dev/shm") as folder:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", VARIABLE)}
        os.environ.update({"PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: folder})
        memory = sys.modules.get("_posixshmem")
        _take_away(Path(folder))
        try:
            yield
        finally:
            _give_back(memory)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def install() -> None:
    """Behave like Windows from here on: for a script, as its first line."""
    block = active()
    block.__enter__()
    atexit.register(block.__exit__, None, None, None)
    _change_streams()


def install_in_child() -> None:
    """What `sitecustomize` does in every Python that is started while the stand-in is on."""
    _take_away(Path(os.environ[VARIABLE]))
    _change_streams()


def _change_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="cp1252", newline="\r\n")


def live_names() -> set[str]:
    """The names of memory that some process still holds."""
    return {path.name for folder in _active for path in folder.iterdir() if not _remove_if_unheld(path)}


def _take_away(folder: Path) -> None:
    if not _hooks:
        sys.addaudithook(_audit)  # for good: it does nothing while the stand-in is off
        _hooks.append(True)
    _active.append(folder)
    for module, names in _MISSING.items():
        for name in names:
            if name in vars(module):
                _real[module.__name__, name] = vars(module)[name]
                delattr(module, name)
        module.__class__ = _Patched
    segments = sys.modules.get("infeed.memory.segments")
    fake = _NamedMemory()
    sys.modules["_posixshmem"] = fake
    if segments is not None:
        segments._posixshmem = fake  # type: ignore[attr-defined]


def _give_back(memory: ModuleType | None) -> None:
    _active.pop()
    for module in _MISSING:
        module.__class__ = ModuleType
    for (module_name, name), value in _real.items():
        setattr(sys.modules[module_name], name, value)
    _real.clear()
    if memory is None:
        import importlib

        del sys.modules["_posixshmem"]
        memory = importlib.import_module("_posixshmem")
    sys.modules["_posixshmem"] = memory
    segments = sys.modules.get("infeed.memory.segments")
    if segments is not None:
        segments._posixshmem = memory  # type: ignore[attr-defined]


_hooks: Final[list[bool]] = []


# --- named memory


class _NamedMemory(ModuleType):
    """In the place of `_posixshmem`: a name lives for as long as anything holds what `shm_open` gave, or a mapping of it.

    A handle is a shared lock on a file. The kernel drops it with the last duplicate of the descriptor, of which a mapping has
    one, and so also when a process is killed.
    """

    def __init__(self) -> None:
        super().__init__("_posixshmem")

    @staticmethod
    def shm_open(name: str, flags: int, mode: int = 0o600) -> int:
        path = _active[-1] / name.lstrip("/")
        if path.exists():
            _remove_if_unheld(path)
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    @staticmethod
    def shm_unlink(name: str) -> None:
        """Nothing: on Windows a name cannot be removed."""
        del name


def _remove_if_unheld(path: Path) -> bool:
    """Let a name disappear that no process holds any more; whether it has."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return True
    finally:
        os.close(fd)


# --- files


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0]
        if isinstance(path, str) and path.startswith(_HIDDEN_FOLDERS) and _is_ours(sys._getframe(1)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    elif event in ("os.remove", "os.rename"):
        # One path and its folder's descriptor, or two of each; the descriptor is -1 if there is none.
        count = len(arguments) // 2
        for path, folder_fd in zip(arguments[:count], arguments[count:], strict=True):
            folder = "" if folder_fd == -1 else os.readlink(f"/proc/self/fd/{folder_fd}")
            if _is_in_use(os.path.realpath(os.path.join(folder, os.fsdecode(path)))):
                raise PermissionError(errno.EACCES, "it is open in a process", os.fsdecode(path))


def _is_in_use(path: str) -> bool:
    if not os.path.isfile(path) or any(path.startswith(str(folder)) for folder in _active):
        return False
    for pid in ["self", *_children()]:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}") == path:
                        return True
    return False


def _children() -> list[str]:
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as children:
            found += children.read().split()
    return found
