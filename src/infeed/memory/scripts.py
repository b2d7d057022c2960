"""Modules that workers must not import: the script, and modules that iterate a loader when they are imported."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Final, NoReturn

# Workers get functions and classes of these modules by value. Never shrinks: after its import, importing a module in a worker
# would iterate its loaders again. In a process of `multiprocessing`, the script is also the module "__mp_main__".
SCRIPTS: Final = {"__main__", "__mp_main__"}


def note_scripts() -> None:
    """Add the modules whose code this thread is executing. Call it in the thread that iterates the loader."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = frame.f_globals.get("__name__", "")
            if getattr(sys.modules.get(name), "__dict__", None) is frame.f_globals:
                SCRIPTS.add(name)
        frame = frame.f_back


def stand_ins() -> dict[str, list[str] | None]:
    """Return the imported modules that workers get a stand-in for: the name, and the path if it is a package."""
    found = {name: sys.modules[name] for name in SCRIPTS - {"__main__", "__mp_main__"} if name in sys.modules}
    return {name: list(module.__path__) if hasattr(module, "__path__") else None for name, module in found.items()}


def add_stand_in(name: str, path: list[str] | None) -> None:
    """Put an empty module in the place of a script, so that no import runs its code. Its submodules can be imported."""
    module = ModuleType(name)
    if path is not None:
        module.__path__ = path
    why = f"workers do not run {name}, which iterates a loader when it is imported"
    module.__file__ = f"not imported: {why}"  # `from module import name` shows it in its error
    explain_missing_names(module, why)
    sys.modules.setdefault(name, module)


def explain_missing_names(module: ModuleType, why: str) -> None:
    """Explain to user code that looks up a name of a script in a worker why it is missing."""

    def explain(name: str) -> NoReturn:
        text = f"module {module.__name__!r} has no attribute {name!r}"
        if not name.startswith("__"):
            text += f" in a worker, because {why}; move {name} to another module, or store it in the dataset"
        raise AttributeError(text)

    vars(module)["__getattr__"] = explain
