"""Selects the modules that the fork server imports before it forks, and reports imports of workers to the server.

The server imports only installed modules: the standard library and ``site-packages``. User modules may do anything at import,
and no user code may run in the server. Each worker imports them, which is fast once the libraries that they use are imported.
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

# Folders of packages outside this Python's installation: environment modules on clusters add such folders to PYTHONPATH.
_INSTALL_FOLDERS: Final = {"site-packages", "dist-packages"}
# The size up to which a write to a pipe is atomic (PIPE_BUF).
_CHUNK: Final = 4096


def preloadable(names: Iterable[str]) -> list[str]:
    """Return the installed modules among ``names``, and those that the user modules among them have imported."""
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
    """Whether workers that need the ``needed`` modules may also have the ``guessed`` ones.

    False if a guessed name is a user module in this program. Also False for torch, unless the workers need it: torch costs
    memory, and time for every sample.
    """
    roots = {name.partition(".")[0] for name in guessed}
    own = [module for root in roots if (module := sys.modules.get(root)) is not None and not _is_installed(module)]
    return not own and ("torch" not in roots or _lead_to_torch(needed))


def _lead_to_torch(names: Iterable[str]) -> bool:
    """Whether importing these modules imports torch, judged by references to torch in modules of their packages."""
    roots = {name.partition(".")[0] for name in names}
    torch = sys.modules.get("torch")
    if torch is None or "torch" in roots:
        return torch is not None
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in roots]
    return any(value is torch for module in modules for value in list(getattr(module, "__dict__", {}).values()))


def _imported_by(module: ModuleType) -> set[str]:
    names = set()
    for value in list(vars(module).values()):
        # Check the type only: reading an attribute of the object may trigger an import or a warning.
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
    # Modules without a file are built in or created at run time: importing them early saves nothing or is impossible.
    return isinstance(file, str) and is_installed_file(file)


@lru_cache(maxsize=4096)
def is_installed_file(file: str) -> bool:
    """Whether a module file is in a folder of Python or of installed packages."""
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
    """Reports to the fork server the installed modules that this worker imported since the fork: later workers need them too.

    For a new package, only the package name is reported. Importing it imports most of its submodules; later workers, which find
    the package already imported, report the rest.
    """

    def __init__(self, fd: int) -> None:
        """
        Args:
            fd: a non-blocking pipe; if the server does not read, reports are lost.
        """
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
        for name in modules:  # in import order
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
