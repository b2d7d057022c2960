"""Import hooks: run a callback after a module is imported, without importing it here."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` after the module is imported, or immediately if it is already imported."""
    if name in sys.modules:
        call()
    else:
        when_any_imported({name: call})


def when_any_imported(calls: dict[str, Callable[[], None]]) -> None:
    """Call the function of each module after that module is imported, and remove it from ``calls``, which may change."""
    if calls and not any(isinstance(finder, _Finder) and finder.calls is calls for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(calls))


@contextmanager
def trace_imports(executed: Callable[[str, list[str]], None]) -> Iterator[None]:
    """Call ``executed`` after each module executed in this context, with its name and the modules that are importing it."""
    tracer = _Tracer(executed)
    sys.meta_path.insert(0, tracer)
    try:
        yield
    finally:
        sys.meta_path.remove(tracer)


def _find_behind(finder: Any, name: str, path: Any, target: Any) -> importlib.machinery.ModuleSpec | None:
    """Return the first spec from the finders after ``finder`` in ``sys.meta_path``."""
    finders = list(sys.meta_path)
    for other in finders[finders.index(finder) + 1 :] if finder in finders else []:
        find = getattr(other, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


@final
class _Finder:
    """Finder that wraps the loaders of some modules and calls a function after such a module has been executed.

    It stays installed until then, because ``importlib.util.find_spec`` queries finders without importing, and a failed import
    may be retried.
    """

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self.calls = calls

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = _find_behind(self, fullname, path, target) if fullname in self.calls else None
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader, partial(self._execute, fullname)))
        return spec

    def _execute(self, name: str, execute: Callable[[], None]) -> None:
        execute()
        call = self.calls.pop(name, None)
        if not self.calls and self in sys.meta_path:
            sys.meta_path.remove(self)
        if call is not None:  # otherwise the module is being executed a second time
            call()


@final
class _Tracer:
    """Finder that wraps the loader of every module and calls a function after each execution."""

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
class _Loader:  # no importlib.abc base class: importing it takes longer than this module
    """Wraps the loader of a spec and passes ``exec_module`` to ``around``, which must call it."""

    def __init__(self, loader: Any, around: Callable[[Callable[[], None]], None]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # restore the original loader
        self._around(partial(self._loader.exec_module, module))

    def __getattr__(self, name: str) -> Any:
        """Forward ``get_source``, ``get_filename`` and similar, for code that gets this loader from ``find_spec``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)
