"""``install``: torch's own ``DataLoader``, wherever it was imported from, runs on infeed's engine."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.torch.serving import iterator_of

# The one method that torch's class has for it. Changing it there, and not the name of the class in some modules, reaches every
# program, framework and subclass alike, and `isinstance` stays what it was.
_METHOD: Final = "_get_iterator"
_ORIGINAL: Final = TorchDataLoader._get_iterator


def install() -> None:
    """Let all loaders of torch's class, and of its subclasses, load with infeed from their next iteration on.

    Loaders that infeed cannot serve (DataPipes; ``multiprocessing_context="fork"``; datasets with multiprocessing objects that
    only a forked process can use) run as before, with a warning that says why. Idempotent; ``uninstall`` takes it back.
    """
    setattr(TorchDataLoader, _METHOD, _get_iterator)


def uninstall() -> None:
    """Give torch's class its own workers back."""
    setattr(TorchDataLoader, _METHOD, _ORIGINAL)


def _get_iterator(self: TorchDataLoader[Any]) -> _BaseDataLoaderIter:
    return iterator_of(self)
