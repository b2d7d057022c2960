"""Starting the fork server before there is a loader, so that it imports libraries while the program does.

A program that takes seconds to import its libraries would wait for the server to import them again when it asks for its first
batch. Here the server starts when `infeed run` starts the program, or when the program imports `infeed.torch`. Which modules it
then imports is a guess from the source of the program: the libraries below that it imports. The first loader says what it
needs; modules that are missing are imported then, and a server that guessed wrong is replaced.

A process is started only for programs that mention workers, on machines with a core to spare, and it ends with the program, or
after two minutes if no loader needs it. Imports nothing that takes long.
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

# Libraries that datasets use, that take long to import, and that do nothing else when they are imported. Others may open
# devices or connections, which only a program that needs them should do.
_LIBRARIES: Final = frozenset({
    "albumentations", "cv2", "datasets", "h5py", "kornia", "librosa", "lightning", "monai", "nibabel", "numpy", "pandas", "PIL",
    "pyarrow", "pytorch_lightning", "scipy", "skimage", "sklearn", "skorch", "timm", "tokenizers", "torch", "torch_geometric",
    "torchaudio", "torchdata", "torchvision", "transformers", "webdataset",
})  # fmt: skip
# Statements at the beginning of a line. Some that are none, inside of a text, do no harm.
_IMPORT: Final = re.compile(r"^(?:import[ \t]+([^#;\n]+)|from[ \t]+([\w.]+)[ \t]+import[ \t]+([^#;\n]+))", re.MULTILINE)
# Without this word in its source a program hardly makes loaders with workers.
_HINT: Final = "workers"
# Of the program's own source, how much is read.
_MOST_FILES: Final = 64
_MOST_CHARACTERS: Final = 1_000_000


def start_for_program(script: str) -> None:
    """The program begins: its ``sys.argv`` and ``sys.path`` are set. Starts nothing if its libraries cannot be guessed.

    Nothing is raised: what keeps the server from being started is reported by the first loader that needs it.
    """
    with suppress(Exception):
        if _is_to_start() and not is_installed_file(script):
            _start("auto", likely_imports(script))


def start_for_module(name: str) -> None:
    """Likewise for a program that is a module, as with ``python -m``."""
    with suppress(Exception):
        files = [spec.origin for spec in _specs(name) if spec.origin is not None]
        start_for_program(files[-1])


def start_for_main() -> None:
    """The program has imported ``infeed.torch``; likewise."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(script, str):
        start_for_program(script)


def start_for_loader(start_method: StartMethod, *given: Any) -> None:
    """A loader with process workers was made, of objects that workers will need. Until its first batch the server may import.

    Nothing is raised, as above.
    """
    if is_importing() or is_in_worker():
        return  # workers seldom iterate loaders that they make
    with suppress(Exception):
        classes = [cls for one in given for cls in type(one).__mro__]
        named = [one for one in given if isinstance(getattr(one, "__module__", None), str)]
        _start(start_method, preloadable({one.__module__ for one in [*classes, *named]}), is_always=True)


def _start(start_method: StartMethod, modules: list[str], *, is_always: bool = False) -> None:
    if sys.platform == "linux" and (modules or is_always) and uses_fork(start_method):
        fork_server().guess(modules)


def _is_to_start() -> bool:
    """Whether a program begins in this process, which is asked once, and there is a core for the server.

    Children of ``multiprocessing`` import the program again for any purpose, and there may be many.
    """
    is_first = os.getpid() not in _ASKED
    _ASKED.add(os.getpid())
    process: Any = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    return is_first and not is_child and available_cores() >= 2


_ASKED: Final[set[int]] = set()  # numbers of processes: a forked child has its parent's set


def likely_imports(script: str) -> list[str]:
    """The libraries that a program imports, in order: its script, and the modules of its own that this imports.

    Its source is read, and nothing is imported. Empty if the source does not mention workers.
    """
    found: dict[str, None] = {}
    todo: list[tuple[str, str]] = [(script, "")]  # files, each with the package that it belongs to
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
        if name.partition(".")[0] not in _LIBRARIES:  # else members are hardly modules that take long
            yield from (f"{name}.{part.split()[0]}" for part in members.strip(" \t()\\").split(",") if part.split())


def _specs(name: str) -> list[ModuleSpec]:
    """Where a module lies, after the packages that it is in, as far as they are found on ``sys.path``. Imports nothing."""
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
            return specs  # its parts are as well
    return specs
