"""Carries state of the program's modules to workers: settings of libraries, and variables of the user's modules.

torch forks workers, so they have the state that the program has set in modules since their import. infeed's workers import the
modules themselves, so they get that state with the dataset:

* The names of modules that must not run in workers (see ``memory/scripts.py``). Workers get empty modules in their place.
* ``_SETTINGS``: settings of well-known libraries, applied to libraries that the worker has imported, or when it imports them.
* Variables of the user's modules that are plain data: globals, and attributes of the module's classes and of their instances
  there. They are applied once the dataset is unpickled: modules may fill each other's variables at import, for instance with
  names that may be registered only once.

The state of a loader is read once, with its dataset, so a worker that replaces another gets the same. Nothing is imported for
this, in either process. What cannot be read, compared or written is skipped.
"""

from __future__ import annotations

import dis
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import Any, Final, NamedTuple, final

from infeed.import_hooks import when_any_imported
from infeed.memory.scripts import SCRIPTS, add_stand_in, note_scripts, stand_ins
from infeed.workers.preload import is_installed_file

_PROTOCOL: Final = 5

# --- settings of libraries


class _Setting(NamedTuple):
    read: Callable[[Any], Any]  # gets the module
    write: Callable[[Any, Any], object]  # gets the module and the value


def _attribute(name: str) -> _Setting:
    return _Setting(lambda module: getattr(module, name), lambda module, value: setattr(module, name, value))


def _functions(read: str, write: str) -> _Setting:
    return _Setting(lambda module: getattr(module, read)(), lambda module, value: getattr(module, write)(value))


def _read_umask(_: ModuleType) -> int:
    """Return the umask. Linux only: elsewhere reading it would change it for a moment, and workers inherit it anyway."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _read_filters(_: ModuleType) -> list[tuple[Any, ...]]:
    filters: list[Any] = list(warnings.filters)
    return [(*one[:2], one[2].__module__, one[2].__qualname__, *one[3:]) for one in filters]


def _write_filters(_: ModuleType, filters: list[tuple[Any, ...]]) -> None:
    """Replace the filters, without those whose category belongs to a module that is not imported."""
    warnings.resetwarnings()
    for action, message, module, name, *rest in filters:
        category = getattr(sys.modules.get(module), name, None)
        if category is not None:
            warnings.filters.append((action, message, category, *rest))  # type: ignore[attr-defined]


def _read_deterministic(torch: Any) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_SETTINGS: Final[dict[str, tuple[_Setting, ...]]] = {
    "sys": (
        _functions("getrecursionlimit", "setrecursionlimit"),
        _functions("get_int_max_str_digits", "set_int_max_str_digits"),
    ),
    "os": (_Setting(_read_umask, lambda os, value: os.umask(value)),),
    "_locale": (_Setting(lambda module: module.setlocale(module.LC_ALL), lambda m, value: m.setlocale(m.LC_ALL, value)),),
    "csv": (_functions("field_size_limit", "field_size_limit"),),
    "decimal": (_functions("getcontext", "setcontext"),),
    "socket": (_functions("getdefaulttimeout", "setdefaulttimeout"),),
    "warnings": (_Setting(_read_filters, _write_filters),),
    "numpy": (_Setting(lambda numpy: numpy.geterr(), lambda numpy, value: numpy.seterr(**value)),),
    "PIL.Image": (_attribute("MAX_IMAGE_PIXELS"),),
    "PIL.ImageFile": (_attribute("LOAD_TRUNCATED_IMAGES"), _attribute("MAXBLOCK")),
    "PIL.PngImagePlugin": (_attribute("MAX_TEXT_CHUNK"), _attribute("MAX_TEXT_MEMORY")),
    "cv2": (_functions("useOptimized", "setUseOptimized"),),  # infeed limits threads and disables OpenCL: native_threads
    "torch": (
        _Setting(
            lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
            lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
        ),
        _Setting(_read_deterministic, lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
        _functions("is_grad_enabled", "set_grad_enabled"),
        _functions("get_float32_matmul_precision", "set_float32_matmul_precision"),
    ),
    "torchvision": (_functions("get_image_backend", "set_image_backend"),),
}  # fmt: skip
# Not applied before the dataset is unpickled: a filter may turn warnings of imports into errors, and the program has imported
# these modules already.
_AFTER_IMPORTS: Final = {"warnings"}


def _read_settings(name: str) -> list[bytes | None]:
    """Return the pickled values of a module's settings; ``None`` for a setting that this version of the module lacks."""
    found: list[bytes | None] = []
    for setting in _SETTINGS[name]:
        found.append(None)
        with suppress(Exception):
            found[-1] = pickle.dumps(setting.read(sys.modules[name]), _PROTOCOL)
    return found


def _write_settings(name: str, values: Iterable[bytes | None]) -> None:
    module = sys.modules[name]
    for setting, data in zip(_SETTINGS[name], values, strict=True):
        with suppress(Exception):
            value = None if data is None else pickle.loads(data)
            if data is not None and value != setting.read(module):
                setting.write(module, value)


# --- variables of the user's modules

# Larger values are tables rather than settings. An estimate, at 8 bytes per object.
_MOST_BYTES: Final = 64 << 10
_ATOMS: Final = frozenset({NoneType, bool, int, float})
_DEFINITIONS: Final = frozenset({FunctionType, ModuleType, type})
_COLLECTIONS: Final = frozenset({tuple, list, set, frozenset})
# What `parse_args` returns, and a usual kind of configuration.
_NAMESPACES: Final = {("argparse", "Namespace"), ("types", "SimpleNamespace")}


def _is_small_data(value: Any) -> bool:
    """Whether this is plain data that is not large."""
    room = _MOST_BYTES
    todo = [value]
    while todo:
        one = todo.pop()
        kind = type(one)
        room -= 8
        if kind in _ATOMS:
            continue
        if kind is str or kind is bytes:
            room -= len(one)
        elif kind in _COLLECTIONS:
            room -= 8 * len(one)
            todo += one if room >= 0 else ()
        elif kind is dict:
            room -= 16 * len(one)
            todo += (*one, *one.values()) if room >= 0 else ()
        elif (kind.__module__, kind.__name__) in _NAMESPACES:
            todo.append(vars(one))
        else:
            return False
        if room < 0:
            return False
    return True


_Key = tuple[str, str]  # the name in the module, and that of the class


class _Variables(NamedTuple):
    """The variables of a module, class or object, without functions, classes and modules."""

    plain: dict[str, Any]
    others: list[str]


def _owners(module: ModuleType) -> Iterator[tuple[_Key, Any]]:
    """Yield what has variables: the module, the classes that it defines, and its objects of these classes."""
    yield ("", ""), module
    for name, value in list(vars(module).items()):
        cls = value if isinstance(value, type) else type(value)
        if cls.__module__ == module.__name__ and hasattr(value, "__dict__"):
            yield (name, cls.__qualname__), value


def _read_variables(owner: Any) -> _Variables:
    found = _Variables({}, [])
    for name, value in list(vars(owner).items()):
        if type(value) in _DEFINITIONS:
            continue
        if _is_small_data(value):
            if not (name.startswith("__") and name.endswith("__")):
                found.plain[name] = value
        elif not isinstance(value, ModuleType | type):
            found.others.append(name)
    return found


def _write_variables(module: ModuleType, owner: Any, found: _Variables) -> None:
    present = vars(owner)
    changed = {name for name, value in found.plain.items() if name not in present or not _is_same(present[name], value)}
    if changed:
        built = {name for name in found.others if name not in present or _is_small_data(present[name])}
        if built and owner is not module:
            return  # the other variables of a class or object may be about what was built
        for name in changed - _self_initialized(module, owner, changed, built):
            if isinstance(owner, type):
                setattr(owner, name, found.plain[name])
            else:
                present[name] = found.plain[name]  # not setattr: it may call user code


def _is_same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # a list of arrays
        return False


def _is_own(name: str, module: Any) -> bool:
    """Whether this is a module of the user that workers can import by this name."""
    file = vars(module).get("__file__")
    if not isinstance(file, str) or is_installed_file(file) or name.partition(".")[0] == "infeed" or name in SCRIPTS:
        return False
    spec = vars(module).get("__spec__")
    return spec is not None and spec.name == name and bool(spec.has_location)


def _self_initialized(module: ModuleType, owner: Any, names: set[str], built: set[str]) -> set[str]:
    """Return those of the ``names`` that say what the module has initialized in this process.

    These are the names that a function of the module sets together with an object ``built`` in the program only, and flags
    that a function both reads and sets (``if not ready: connect(); ready = True``). A worker initializes such things itself.
    """
    load, store = ("LOAD_GLOBAL", "STORE_GLOBAL") if owner is module else ("LOAD_ATTR", "STORE_ATTR")
    found: set[str] = set()
    for code in _codes(module):
        if names.isdisjoint(code.co_names):
            continue
        used = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname in (load, store)]
        stored = {name for opname, name in used if opname == store}
        loaded = {name for opname, name in used if opname == load}
        if stored & built:
            found |= stored
        found |= {name for name in loaded & stored if type(vars(owner).get(name)) in (NoneType, bool)}
    return found & names


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of the module's functions and methods."""
    values = list(vars(module).values())
    for cls in [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]:
        values += vars(cls).values()
    for value in values:
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield function.__code__


# --- from the program to its workers

# Names of modules that are not the user's. There may be thousands, and their namespaces are rarely in the CPU cache.
_FOREIGN: Final[set[str]] = set()
# The functions to call when this worker imports a module.
_WAITING: Final[dict[str, Callable[[], None]]] = {}


@final
class ProgramState:
    """State of the program's modules, for a worker."""

    def __init__(self, settings: dict[str, list[bytes | None]], variables: dict[str, dict[_Key, _Variables]]) -> None:
        self._settings, self._variables = settings, variables
        self._stand_ins = stand_ins()

    def adopt(self) -> None:
        """Apply the settings of libraries, now or when they are imported. Call it before the dataset is unpickled."""
        for name, path in self._stand_ins.items():
            add_stand_in(name, path)
        _WAITING.clear()  # functions of the previous loader
        for name, values in self._settings.items():
            if name in sys.builtin_module_names:
                import_module(name)
            if name not in sys.modules:
                _WAITING[name] = partial(_write_settings, name, values)
            elif name not in _AFTER_IMPORTS:
                _write_settings(name, values)
        when_any_imported(_WAITING)

    def settle(self) -> None:
        """Apply everything, now or when the module is imported. Call it when the dataset is unpickled."""
        for name, values in self._settings.items():
            if name in sys.modules:
                _write_settings(name, values)
        for name in self._variables:
            if name in sys.modules:
                self._restore(name)
            else:
                _WAITING[name] = partial(self._restore, name)
        when_any_imported(_WAITING)

    def _restore(self, name: str) -> None:
        module, variables = sys.modules[name], self._variables[name]
        with suppress(Exception):  # user-defined objects may raise anything
            for key, owner in _owners(module):
                if key in variables:
                    _write_variables(module, owner, variables[key])


@final
class PickledProgramState:
    """The state of this process when this object was created, in the thread that iterates the loader.

    Its pickle is loaded as a ``ProgramState`` that has been adopted: pickle it before the dataset.
    """

    def __init__(self) -> None:
        note_scripts()
        settings = {name: _read_settings(name) for name in _SETTINGS if sys.modules.get(name) is not None}
        variables = {}
        for name in [name for name in list(sys.modules) if name not in _FOREIGN]:
            with suppress(Exception):  # not a module, or another thread is changing it
                if _is_own(name, sys.modules[name]):
                    variables[name] = {key: _read_variables(owner) for key, owner in _owners(sys.modules[name])}
                else:
                    _FOREIGN.add(name)
        try:
            # In one pickle, because modules may share a container: `from config import OPTIONS`.
            self._data = pickle.dumps(ProgramState(settings, variables), _PROTOCOL)
        except Exception:  # another thread is changing a container
            self._data = pickle.dumps(ProgramState(settings, {}), _PROTOCOL)

    def __reduce__(self) -> Any:
        return _adopted, (self._data,)


def _adopted(data: bytes) -> ProgramState:
    state: ProgramState = pickle.loads(data)
    state.adopt()
    return state
