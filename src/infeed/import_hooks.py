"""Doing something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function when a module has been imported: now, if it is there already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


@contextmanager
def trace_imports(executed: Callable[[str, list[str]], None]) -> Iterator[None]:
    """While this is open, call a function after each module that is executed, with the modules that are importing it."""
    tracer = _Tracer(executed)
    sys.meta_path.insert(0, tracer)
    try:
        yield
    finally:
        sys.meta_path.remove(tracer)


def _find_behind(finder: Any, name: str, path: Any, target: Any) -> importlib.machinery.ModuleSpec | None:
    """What the finders behind this one find."""
    finders = list(sys.meta_path)
    for other in finders[finders.index(finder) + 1 :] if finder in finders else []:
        find = getattr(other, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


@final
class _Finder:
    """Ignores every module but one. Lets the finders behind it find that one, and calls a function when it has been executed.

    It stays in place until then: ``importlib.util.find_spec`` asks finders without importing anything, and an import may fail
    and be tried again.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = _find_behind(self, fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader, self._execute))
        return spec

    def _execute(self, execute: Callable[[], None]) -> None:
        execute()
        if self in sys.meta_path:  # else the module is executed a second time
            sys.meta_path.remove(self)
            self._call()


@final
class _Tracer:
    """Lets the finders behind it find modules, and calls a function after each that was executed."""

    def __init__(self, executed: Callable[[str, list[str]], None]) -> None:
        self._executed = executed
        self._importers: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = _find_behind(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader, partial(self._execute, fullname)))
        return spec

    def _execute(self, name: str, execute: Callable[[], None]) -> None:
        self._importers.append(name)
        try:
            execute()
        finally:
            self._importers.pop()
        self._executed(name, self._importers)


@final
class _Loader:  # not of importlib.abc, whose imports take longer than ours
    """The loader that a finder found; ``exec_module`` is done by a call of ``around`` with it."""

    def __init__(self, loader: Any, around: Callable[[Callable[[], None]], None]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # as if we had not been here
        self._around(partial(self._loader.exec_module, module))

    def __getattr__(self, name: str) -> Any:
        """``get_source``, ``get_filename`` and the like, for code that asks ``find_spec`` for them."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)
