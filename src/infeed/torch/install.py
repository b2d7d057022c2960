"""``install``: torch's own ``DataLoader``, wherever it was imported from, runs on infeed's engine."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.import_hooks import when_imported
from infeed.programs.children import carry_into_processes, forget_processes
from infeed.torch.loader import DataLoader
from infeed.torch.service import iterator_of, notice

# The one method that torch's class has for it. Changing it there, and not the name of the class in some modules, reaches every
# program, framework and subclass alike, and `isinstance` stays what it was.
_METHOD: Final = "_get_iterator"
_ORIGINAL: Final = TorchDataLoader._get_iterator
# Some libraries make torch's iterators by themselves. All of them, also those of subclasses, begin here.
_ITERATOR_INIT: Final[Any] = _BaseDataLoaderIter.__init__
# torchdata's loader has iterators of its own, whose states are theirs: it is replaced as a whole, where it is looked for.
_TORCHDATA: Final = "torchdata.stateful_dataloader"
_STATEFUL: Final = "StatefulDataLoader"


def install() -> None:
    """Let all loaders of torch's class, and of its subclasses, load with infeed from their next iteration on.

    Loaders that infeed cannot serve (DataPipes; ``multiprocessing_context="fork"``; datasets that cannot be pickled; loaders
    that make torch's private iterators by themselves) run as before, with a warning that gives the reason. torchdata's
    ``StatefulDataLoader`` becomes infeed's, if it is imported from now on. The same goes for processes that
    ``multiprocessing`` starts from now on, by any start method. Idempotent; ``uninstall`` takes it back.
    """
    setattr(TorchDataLoader, _METHOD, _get_iterator)
    _BaseDataLoaderIter.__init__ = _begin_iterator  # type: ignore[method-assign]
    when_imported(_TORCHDATA, _replace_stateful)
    carry_into_processes()


def uninstall() -> None:
    """Give torch's class its own workers back, and torchdata its class."""
    setattr(TorchDataLoader, _METHOD, _ORIGINAL)
    _BaseDataLoaderIter.__init__ = _ITERATOR_INIT  # type: ignore[method-assign]
    forget_processes()
    torchdata: Any = sys.modules.get(_TORCHDATA)
    if torchdata is not None and _REPLACED:
        setattr(torchdata, _STATEFUL, _REPLACED.pop())


_REPLACED: Final[list[Any]] = []


def _get_iterator(self: TorchDataLoader[Any]) -> _BaseDataLoaderIter:
    return iterator_of(self)


@functools.wraps(_ITERATOR_INIT)
def _begin_iterator(self: _BaseDataLoaderIter, loader: Any, *arguments: Any, **options: Any) -> None:
    _ITERATOR_INIT(self, loader, *arguments, **options)
    notice(loader, self)


def _replace_stateful() -> None:
    torchdata: Any = sys.modules[_TORCHDATA]
    is_installed = getattr(TorchDataLoader, _METHOD) is _get_iterator
    if is_installed and not _REPLACED and hasattr(torchdata, _STATEFUL):  # not while it is still being imported
        _REPLACED.append(getattr(torchdata, _STATEFUL))
        setattr(torchdata, _STATEFUL, StatefulDataLoader)


class StatefulDataLoader(DataLoader[Any]):
    """infeed's loader under the arguments of torchdata's, whose contract for states it keeps."""

    def __init__(self, *arguments: Any, snapshot_every_n_steps: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.snapshot_every_n_steps = snapshot_every_n_steps  # every step costs microseconds here
