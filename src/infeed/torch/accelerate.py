"""Hugging Face Accelerate keeps infeed's loaders.

``accelerator.prepare`` throws a loader away and makes one of torch's from its attributes: those named in a table of keyword
arguments. One more name in that table, under which only infeed's loaders have something, tells whose loader it was; where
Accelerate then makes the new one, it is made of infeed's class, with the options that the table does not know. Everything else
(ranks, devices, the end of an epoch) stays Accelerate's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from infeed.import_hooks import when_imported
from infeed.torch.loader import DataLoader

_MODULE: Final = "accelerate.data_loader"
_KEY: Final = "_infeed_source"
# What infeed's class takes beyond torch's.
_OWN_OPTIONS: Final = (
    "seed", "worker", "memory_limit", "grain_size", "threads_per_worker",
    "device", "device_prefetch", "convert", "on_error", "error_budget", "retries", "sample_timeout", "hang_warning",
)  # fmt: skip


def keep_loaders() -> None:
    """Let Accelerate keep infeed's loaders, from when it is imported on."""
    when_imported(_MODULE, _teach)


def _teach() -> None:
    accelerate: Any = sys.modules[_MODULE]
    table = getattr(accelerate, "_PYTORCH_DATALOADER_KWARGS", None)
    if table is None or _KEY in table:
        return  # another Accelerate than is known, or taught already
    plain = accelerate.DataLoader
    init = accelerate.DataLoaderAdapter.__init__

    def make(dataset: Any, *arguments: Any, **options: Any) -> Any:
        source = options.pop(_KEY, None)
        return plain(dataset, *arguments, **options) if source is None else _like(source, dataset, *arguments, **options)

    @functools.wraps(init)
    def adapt(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **options: Any
    ) -> None:
        source = options.pop(_KEY, None)
        if source is None:
            init(self, dataset, use_stateful_dataloader, batch_sampler, **options)
            return
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = _like(source, dataset, batch_sampler=batch_sampler, **options)
        self.dl_state_dict = self.base_dataloader.state_dict()

    table[_KEY] = None
    accelerate.DataLoader = make
    accelerate.DataLoaderAdapter.__init__ = adapt


def _like(source: DataLoader[Any], dataset: Any, *arguments: Any, **options: Any) -> DataLoader[Any]:
    """A loader with the own options of another."""
    options.update((name, getattr(source, name)) for name in _OWN_OPTIONS)
    made: DataLoader[Any] = DataLoader(dataset, *arguments, **options)
    made._infeed_prefetch_factor = source._infeed_prefetch_factor  # Accelerate passes torch's default on as if it was asked for
    return made
