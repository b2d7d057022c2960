"""Installs infeed in child processes of a program that runs on infeed, because all ranks of one job must behave alike.

* ``multiprocessing`` copies ``_config`` of the current process into each new process object, and pickles it for children that
  are not forked. infeed adds an entry whose unpickling installs infeed: after the child re-imports the main module, and before
  the target runs. A forked child inherits the installation.
* A command that the program starts (Lightning's ``ddp``, torchrun, ``subprocess``) inherits only the environment. Only
  ``infeed run`` puts the folder ``startup`` first in ``PYTHONPATH``; its ``sitecustomize`` installs infeed in every Python
  that starts.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final, final

from infeed.import_hooks import when_imported

# Set by `infeed run` to its PID.
RUN_VARIABLE: Final = "INFEED_RUN"
_PATH_VARIABLE: Final = "PYTHONPATH"
_STARTUP: Final = str(Path(__file__).parent / "startup")
_KEY: Final = "infeed"


def install_when_imported() -> None:
    """Replace torch's data loading with infeed as soon as the program imports torch."""

    def install() -> None:
        installing: Any = importlib.import_module("infeed.torch.patching")
        installing.install()

    when_imported("torch", install)
    # Register torchdata too: it imports torch during its own import, when it is too late to register a hook for torchdata.
    when_imported("torchdata.stateful_dataloader", install)


def carry_into_processes() -> None:
    """Make processes that ``multiprocessing`` starts from now on call ``install_when_imported``."""
    _inherited()[_KEY] = _CARRIED


def forget_processes() -> None:
    """Undo ``carry_into_processes``."""
    _inherited().pop(_KEY, None)


def carry_into_commands() -> None:
    """Make every Python that this process starts call ``install_when_imported``. Modifies ``os.environ``."""
    os.environ[RUN_VARIABLE] = str(os.getpid())
    paths = os.environ.get(_PATH_VARIABLE, "").split(os.pathsep)
    os.environ[_PATH_VARIABLE] = os.pathsep.join([_STARTUP, *(path for path in paths if path not in ("", _STARTUP))])


def is_child_of_run() -> bool:
    """Whether ``infeed run`` started the program that started this process."""
    return os.environ.get(RUN_VARIABLE, str(os.getpid())) != str(os.getpid())


@final
class _Carried:
    def __reduce__(self) -> Any:
        return _arrive, ()


def _arrive() -> _Carried:
    install_when_imported()
    return _CARRIED  # for the children of this process


_CARRIED: Final = _Carried()


def _inherited() -> dict[str, Any]:
    process: Any = importlib.import_module("multiprocessing.process")
    config: dict[str, Any] = process.current_process()._config
    return config
