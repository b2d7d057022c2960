"""Selects the modules that the fork server imports before it forks, and starts the server before the first loader exists.

The server imports only installed modules: the standard library and ``site-packages``. User modules may do anything at import,
and no user code may run in the server. Each worker imports them, which is fast once the libraries that they use are imported.

Without an early start, the first batch would wait for the server to import the libraries that the program has just imported,
which can take seconds. The server starts when `infeed run` starts the program, or when the program imports `infeed.torch`, if
the program mentions workers and the machine has at least two CPU cores. It guesses its imports from the program's source. The
first loader sends the modules that it needs: the server then imports missing ones, and a server that guessed wrong is replaced.

This module must not import anything slow.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from infeed.memory.limits import available_cores
from infeed.memory.scripts import SCRIPTS
from infeed.workers.info import is_in_worker
from infeed.workers.process_tools import is_importing

if TYPE_CHECKING:
    from infeed.workers.interpreter import StartMethod

# Folders of packages outside this Python's installation: environment modules on clusters add such folders to PYTHONPATH.
_INSTALL_FOLDERS: Final = {"site-packages", "dist-packages"}


def preloadable(names: Iterable[str]) -> list[str]:
    """Return the installed modules among ``names``, and those that the user modules among them have imported."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or name in SCRIPTS or module is None:
            continue
        seen.add(name)
        if is_installed(module):
            # A module that creates a loader when it is imported may go on to iterate it.
            if not getattr(getattr(module, "__spec__", None), "_initializing", False):
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
    own = [module for root in roots if (module := sys.modules.get(root)) is not None and not is_installed(module)]
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


def is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    # Modules without a file are built in or created at run time: importing them early saves nothing or is impossible.
    return isinstance(file, str) and is_installed_file(file)


@lru_cache(maxsize=4096)
def is_installed_file(file: str) -> bool:
    """Whether a module file is in a folder of Python or of installed packages."""
    if file.startswith(_installed_prefixes()):  # 100 times as fast as the following, for most of thousands of modules
        return True
    path = Path(file)
    return any(path.is_relative_to(root) for root in _installed_roots()) or not _INSTALL_FOLDERS.isdisjoint(path.parts)


@lru_cache(maxsize=1)
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages())
    roots.add(site.getusersitepackages())
    return tuple(Path(root) for root in roots)


@lru_cache(maxsize=1)
def _installed_prefixes() -> tuple[str, ...]:
    return tuple(f"{root}{os.sep}" for root in _installed_roots())


# --- early start of the fork server

# Libraries that datasets use, with slow imports that have no side effects. Other libraries may open devices or connections,
# which only a program that needs them should do.
_LIBRARIES: Final = frozenset({
    "albumentations", "cv2", "datasets", "h5py", "kornia", "librosa", "lightning", "monai", "nibabel", "numpy", "pandas", "PIL",
    "pyarrow", "pytorch_lightning", "scipy", "skimage", "sklearn", "skorch", "timm", "tokenizers", "torch", "torch_geometric",
    "torchaudio", "torchdata", "torchvision", "transformers", "webdataset",
})  # fmt: skip
# Import statements at the beginning of a line. False matches inside strings do no harm.
_IMPORT: Final = re.compile(r"^(?:import[ \t]+([^#;\n]+)|from[ \t]+([\w.]+)[ \t]+import[ \t]+([^#;\n]+))", re.MULTILINE)
# A program without this word in its source is unlikely to create loaders with workers.
_HINT: Final = "workers"
# Limits on how much of the program's source is read.
_MOST_FILES: Final = 64
_MOST_CHARACTERS: Final = 1_000_000


def start_for_program(script: str) -> None:
    """Start the server for a script, once ``sys.argv`` and ``sys.path`` are set. Does nothing if no libraries are guessed.

    Never raises: the first loader that needs the server reports the error.
    """
    with suppress(Exception):
        if _is_to_start() and not is_installed_file(script):
            _start("auto", likely_imports(script))


def start_for_module(name: str) -> None:
    """Like ``start_for_program``, for a program that is run as a module (``python -m``)."""
    with suppress(Exception):
        files = [spec.origin for spec in _specs(name) if spec.origin is not None]
        start_for_program(files[-1])


def start_for_main() -> None:
    """Like ``start_for_program``, for a program that has imported ``infeed.torch``."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(script, str):
        start_for_program(script)


def start_for_loader(start_method: StartMethod, *given: Any) -> None:
    """Start the server for a new loader with process workers, so that it imports modules before the first batch.

    Workers need the modules of the ``given`` objects. Never raises, like ``start_for_program``.
    """
    if is_importing() or is_in_worker():
        return  # workers rarely iterate over the loaders that they create
    with suppress(Exception):
        classes = [cls for one in given for cls in type(one).__mro__]
        named = [one for one in given if isinstance(getattr(one, "__module__", None), str)]
        _start(start_method, preloadable({one.__module__ for one in [*classes, *named]}), is_always=True)


def _start(start_method: StartMethod, modules: list[str], *, is_always: bool = False) -> None:
    from infeed.workers.interpreter import uses_fork  # not above: the server also imports this module

    if sys.platform == "linux" and (modules or is_always) and uses_fork(start_method):
        from infeed.workers.forkserver import FORK_SERVER

        FORK_SERVER.get().guess(modules)


def _is_to_start() -> bool:
    """Whether this is the first call in this process and there is a CPU core for the server.

    False in ``multiprocessing`` children: they import the program again for any purpose, and there may be many of them.
    """
    is_first = os.getpid() not in _ASKED
    _ASKED.add(os.getpid())
    process: Any = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    return is_first and not is_child and available_cores() >= 2


_ASKED: Final[set[int]] = set()  # pids, because a forked child inherits its parent's set


def likely_imports(script: str) -> list[str]:
    """Return the libraries that a script and its user modules import, in order.

    Reads the source and imports nothing. Returns an empty list if the source does not mention workers.
    """
    found: dict[str, None] = {}
    todo: list[tuple[str, str]] = [(script, "")]  # (file, package that contains it)
    seen = {script}
    read = 0
    is_hinted = False
    while todo and len(seen) <= _MOST_FILES and read < _MOST_CHARACTERS:
        file, package = todo.pop(0)
        source = Path(file).read_text(encoding="utf-8", errors="replace")
        read += len(source)
        is_hinted |= _HINT in source
        for name in _imported_names(source, package):
            specs = _specs(name)
            if not specs or specs[0].origin is None:
                continue
            if is_installed_file(specs[0].origin):
                if name.partition(".")[0] in _LIBRARIES:
                    found[name] = None
                continue
            for spec in specs:
                if spec.origin is not None and spec.origin.endswith(".py") and spec.origin not in seen:
                    seen.add(spec.origin)
                    todo.append((spec.origin, spec.name if spec.submodule_search_locations is not None else spec.parent or ""))
    return list(found) if is_hinted else []


def _imported_names(source: str, package: str) -> Iterator[str]:
    for plain, origin, members in _IMPORT.findall(source):
        if plain:
            yield from (part.split()[0] for part in plain.split(",") if part.split())
            continue
        name = origin.lstrip(".")
        level = len(origin) - len(name)
        if level:
            parents = package.split(".")[: max(0, len(package.split(".")) - level + 1)]
            name = ".".join(part for part in (*parents, name) if part)
        yield name
        if name.partition(".")[0] not in _LIBRARIES:  # members of libraries are rarely modules with slow imports
            yield from (f"{name}.{part.split()[0]}" for part in members.strip(" \t()\\").split(",") if part.split())


def _specs(name: str) -> list[ModuleSpec]:
    """Return the specs of a module's parent packages and of the module, as far as ``sys.path`` has them. Imports nothing."""
    specs: list[ModuleSpec] = []
    path: list[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:count]), path)
        if found is None:
            return specs
        specs.append(found)
        if found.submodule_search_locations is None:
            return specs
        path = list(found.submodule_search_locations)
        if count == 1 and found.origin is not None and is_installed_file(found.origin):
            return specs  # its submodules are installed as well
    return specs
