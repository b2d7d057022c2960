"""Which modules the fork server should import before it forks.

Only installed ones: the standard library and what lies in ``site-packages``. The user's own modules may do anything when they
are imported, and the server must stay a process in which no user code has run; they are imported in each worker, which is
quick once what *they* import is there already.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final, final

# Of packages that lie elsewhere than this Python's own: module systems of clusters name such folders in PYTHONPATH.
_INSTALL_FOLDERS: Final = {"site-packages", "dist-packages"}
# What one write puts into a pipe as a whole (PIPE_BUF).
_CHUNK: Final = 4096


def preloadable(names: Iterable[str]) -> list[str]:
    """The installed modules among ``names``, and those that the user's own modules among them have imported."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or name == "__main__" or module is None:
            continue
        seen.add(name)
        if _is_installed(module):
            found.add(name)
        elif name.partition(".")[0] != "infeed":
            todo.extend(_imported_by(module))
    return sorted(found)


def is_right_guess(guessed: Iterable[str], needed: Iterable[str]) -> bool:
    """Whether workers that need some modules may have others that a program was guessed to import.

    Not if the program has a module of its own under such a name. And not torch, unless they need it: it costs memory, and
    time for every sample.
    """
    roots = {name.partition(".")[0] for name in guessed}
    own = [module for root in roots if (module := sys.modules.get(root)) is not None and not _is_installed(module)]
    return not own and ("torch" not in roots or _lead_to_torch(needed))


def _lead_to_torch(names: Iterable[str]) -> bool:
    """Whether importing these imports torch, as far as their packages show: modules of them refer to it."""
    roots = {name.partition(".")[0] for name in names}
    torch = sys.modules.get("torch")
    if torch is None or "torch" in roots:
        return torch is not None
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in roots]
    return any(value is torch for module in modules for value in list(getattr(module, "__dict__", {}).values()))


def _imported_by(module: ModuleType) -> set[str]:
    names = set()
    for value in list(vars(module).values()):
        # By types, because an object's own attributes may be made when they are asked for, with an import or a warning.
        kind = type(value)
        if issubclass(kind, ModuleType):
            names.add(value.__name__)
            continue
        origin = getattr(value if issubclass(kind, type | FunctionType | BuiltinFunctionType) else kind, "__module__", None)
        if isinstance(origin, str):
            names.add(origin)
    return names


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    # Else it is built in, or made at run time: nothing to gain, or nothing to import.
    return isinstance(file, str) and is_installed_file(file)


@lru_cache(maxsize=4096)
def is_installed_file(file: str) -> bool:
    """Whether a module lies where Python and packages are installed."""
    path = Path(file)
    return any(path.is_relative_to(root) for root in _installed_roots()) or not _INSTALL_FOLDERS.isdisjoint(path.parts)


@lru_cache(maxsize=1)
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages())
    roots.add(site.getusersitepackages())
    return tuple(Path(root) for root in roots)


@final
class ImportReports:
    """Tells the fork server which installed modules this worker has imported since the fork: the next workers need them, too.

    Of a package that is new only its own name is reported: most of what it has comes with it, and the rest is reported by
    workers that find the package imported.
    """

    def __init__(self, fd: int) -> None:
        """``fd`` is a pipe that does not block: if the server does not read, nothing is reported."""
        self._fd = fd
        self._known = set(sys.modules)
        self._count = len(sys.modules)

    def look(self) -> None:
        if len(sys.modules) != self._count:
            self._report()

    def _report(self) -> None:
        modules = dict(sys.modules)
        self._count = len(modules)
        new = modules.keys() - self._known
        self._known |= new
        data = b""
        for name in modules:  # in the order of their import
            if name in new and name.rpartition(".")[0] not in new and _is_reported(name, modules[name]):
                line = f"{name}\n".encode()
                if len(data) + len(line) > _CHUNK:
                    self._write(data)
                    data = b""
                data += line
        self._write(data)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            os.write(self._fd, data)


def _is_reported(name: str, module: ModuleType) -> bool:
    try:
        return name.partition(".")[0] != "infeed" and _is_installed(module)
    except Exception:  # user code may put any object there
        return False
