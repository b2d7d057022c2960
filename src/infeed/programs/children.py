"""Child processes of a program that runs on infeed: their torch loaders run on infeed, too. Ranks of one job must not differ.

* ``multiprocessing`` copies ``_config`` of the current process into each process object that is made, and pickles it for
  children that are not forked. An entry of ours in it installs infeed where it is unpickled: after the main module has been
  imported again, before the target runs. (A forked child has everything already.)
* A command that the program starts (Lightning's ``ddp``, torchrun, ``subprocess``) inherits only the environment. There
  ``infeed run``, and nothing else, puts the folder ``startup`` first in ``PYTHONPATH``; the ``sitecustomize`` in it installs
  infeed in every Python that starts.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final, final

from infeed.import_hooks import when_imported

# Set by `infeed run`, to the number of its process.
RUN_VARIABLE: Final = "INFEED_RUN"
_PATH_VARIABLE: Final = "PYTHONPATH"
_STARTUP: Final = str(Path(__file__).parent / "startup")
_KEY: Final = "infeed"


def install_when_imported() -> None:
    """Put infeed in the place of torch's data loading as soon as the program imports torch."""

    def install() -> None:
        installing: Any = importlib.import_module("infeed.torch.install")
        installing.install()

    when_imported("torch", install)
    # By itself too: it imports torch while it is being imported, and then it is too late to wait for it.
    when_imported("torchdata.stateful_dataloader", install)


def carry_into_processes() -> None:
    """Let processes that ``multiprocessing`` starts from now on call ``install_when_imported``."""
    _inherited()[_KEY] = _CARRIED


def forget_processes() -> None:
    """Take ``carry_into_processes`` back."""
    _inherited().pop(_KEY, None)


def carry_into_commands() -> None:
    """Let every Python that this process starts call ``install_when_imported``. Changes the environment."""
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
    return _CARRIED  # for this process's own children


_CARRIED: Final = _Carried()


def _inherited() -> dict[str, Any]:
    process: Any = importlib.import_module("multiprocessing.process")
    config: dict[str, Any] = process.current_process()._config
    return config
