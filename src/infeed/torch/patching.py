"""``install`` and ``uninstall``: make torch's own ``DataLoader`` run on infeed's engine, wherever it was imported from."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import Any, Final

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.import_hooks import when_imported
from infeed.plan.stateful import is_stateful
from infeed.programs.children import carry_into_processes, forget_processes
from infeed.torch.loader import DataLoader
from infeed.torch.service import iterator_of, notice, refuse

# The method that creates iterators. Patching it on torch's class, instead of replacing the class in modules, reaches every
# program, framework and subclass, and leaves `isinstance` unchanged.
_METHOD: Final = "_get_iterator"
_ORIGINAL: Final = TorchDataLoader._get_iterator
# Some libraries create torch's iterators directly. All iterators, including subclasses, call this constructor.
_ITERATOR_INIT: Final[Any] = _BaseDataLoaderIter.__init__
# torchdata's loader has its own iterators and state format, so its class is replaced in the module.
_TORCHDATA: Final = "torchdata.stateful_dataloader"
_STATEFUL: Final = "StatefulDataLoader"
_NO_STATE: Final = "remove its state_dict(), and keep the state in the sampler or compute samples from the index alone"


def install() -> None:
    """Run all loaders of torch's class and its subclasses on infeed, from their next iteration on.

    Unsupported loaders run as before, with a warning that states the reason: DataPipes, ``multiprocessing_context="fork"``,
    datasets that cannot be pickled, and loaders that create torch's private iterators themselves. torchdata's
    ``StatefulDataLoader`` becomes infeed's, if it is imported from now on. All this also applies to processes that
    ``multiprocessing`` starts from now on, with any start method. Idempotent; ``uninstall`` reverts it.

    Examples:
        >>> import infeed.torch, torch
        >>> infeed.torch.install()
        >>> [batch.tolist() for batch in torch.utils.data.DataLoader(range(4), batch_size=2)]
        [[0, 1], [2, 3]]
        >>> infeed.torch.uninstall()
    """
    setattr(TorchDataLoader, _METHOD, _get_iterator)
    _BaseDataLoaderIter.__init__ = _begin_iterator  # type: ignore[method-assign]
    when_imported(_TORCHDATA, _replace_stateful)
    carry_into_processes()


def uninstall() -> None:
    """Undo ``install``: loaders run on torch's own workers again, and torchdata's class is restored.

    Examples:
        >>> import infeed.torch
        >>> infeed.torch.install()
        >>> infeed.torch.uninstall()
    """
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
    if is_installed and not _REPLACED and hasattr(torchdata, _STATEFUL):  # missing during torchdata's import
        _REPLACED.append(getattr(torchdata, _STATEFUL))
        setattr(torchdata, _STATEFUL, StatefulDataLoader)


class StatefulDataLoader(DataLoader[Any]):
    """infeed's loader with the arguments and the state contract of torchdata's ``StatefulDataLoader``.

    If workers load a map-style dataset that has a state, the methods of torchdata's class run instead: infeed's workers load
    ahead, so that the state of the dataset at a batch is unknown.
    """

    def __init__(self, *arguments: Any, snapshot_every_n_steps: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.snapshot_every_n_steps = snapshot_every_n_steps  # infeed needs none: a state at every step costs microseconds
        # Attributes of torchdata's class.
        self.next_iter_state: dict[str, Any] | None = None
        self._initial_iter_for_state_dict = False

    def _torchdata(self) -> Any:
        """Return torchdata's class if its methods are to run, else ``None``."""
        if not self.num_workers or isinstance(self.dataset, IterableDataset) or not is_stateful(self.dataset):
            return None
        return import_module(f"{_TORCHDATA}.stateful_dataloader").StatefulDataLoader  # the package has this class

    def _get_iterator(self) -> _BaseDataLoaderIter:
        torchdata = self._torchdata()
        if torchdata is None:
            return super()._get_iterator()
        return refuse(self, "its map-style dataset has a state_dict()", _NO_STATE, torchdata._get_iterator)

    def __iter__(self) -> Any:
        torchdata = self._torchdata()
        return super().__iter__() if torchdata is None else torchdata.__iter__(self)

    def state_dict(self) -> dict[str, Any]:
        torchdata = self._torchdata()
        return super().state_dict() if torchdata is None else torchdata.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torchdata = self._torchdata()
        if torchdata is None:
            super().load_state_dict(state_dict)
        else:
            torchdata.load_state_dict(self, state_dict)
