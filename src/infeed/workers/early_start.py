"""Starts the fork server before the first loader exists, so that it imports libraries while the program does.

Otherwise the first batch would wait for the server to import the same libraries again, which can take seconds. The server
starts when `infeed run` starts the program, or when the program imports `infeed.torch`.

The server guesses its imports from the program's source: those of the libraries below that the program imports. The first
loader sends the modules that it needs. The server then imports missing ones, and a server that guessed wrong is replaced.

The server starts only for programs that mention workers, on machines with at least two CPU cores. It exits with the program, or
after two minutes if no loader needs it. This module must not import anything slow.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final

from infeed.memory.limits import available_cores
from infeed.workers.info import is_in_worker
from infeed.workers.interpreter import StartMethod, uses_fork
from infeed.workers.preload import is_installed_file, preloadable
from infeed.workers.process_tools import is_importing

if sys.platform == "linux":
    from infeed.workers.forkserver import fork_server

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
    if sys.platform == "linux" and (modules or is_always) and uses_fork(start_method):
        fork_server().guess(modules)


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
