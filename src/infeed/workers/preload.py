"""Which modules the fork server should import before it forks.

Only installed ones: the standard library and what lies in ``site-packages``. The user's own modules may do anything when they
are imported, and the server must stay a process in which no user code has run; they are imported in each worker, which is
quick once what *they* import is there already.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType


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


def _imported_by(module: ModuleType) -> set[str]:
    names = set()
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            names.add(value.__name__)
        elif isinstance(origin := getattr(value, "__module__", None), str):
            names.add(origin)
    return names


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return False  # built in, or made at run time: nothing to gain, or nothing to import
    path = Path(file)
    return any(path.is_relative_to(root) for root in _installed_roots())


@lru_cache(maxsize=1)
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages())
    roots.add(site.getusersitepackages())
    return tuple(Path(root) for root in roots)
