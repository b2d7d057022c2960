"""Makes Hugging Face Accelerate keep infeed's loaders.

``accelerator.prepare`` replaces a loader by a torch loader, created from the attributes that a table of keyword arguments
names. This module adds an attribute to that table that only infeed's loaders have. When Accelerate then creates the new
loader, it uses infeed's class, with the options that the table does not know. Accelerate still handles everything else: ranks,
devices, the end of an epoch.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from infeed.import_hooks import when_imported
from infeed.torch.loader import DataLoader
from infeed.torch.service import own_options

_MODULE: Final = "accelerate.data_loader"
_KEY: Final = "_infeed_source"


def keep_loaders() -> None:
    """Patch Accelerate to keep infeed's loaders as soon as it is imported."""
    when_imported(_MODULE, _teach)


def _teach() -> None:
    accelerate: Any = sys.modules[_MODULE]
    table = getattr(accelerate, "_PYTORCH_DATALOADER_KWARGS", None)
    if table is None or _KEY in table:
        return  # an unknown version of Accelerate, or already patched
    plain = accelerate.DataLoader
    init = accelerate.DataLoaderAdapter.__init__

    def make(dataset: Any, *arguments: Any, **options: Any) -> Any:
        source = options.pop(_KEY, None)
        return plain(dataset, *arguments, **options) if source is None else rebuilt(source, dataset, *arguments, **options)

    @functools.wraps(init)
    def adapt(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **options: Any
    ) -> None:
        source = options.pop(_KEY, None)
        if source is None:
            init(self, dataset, use_stateful_dataloader, batch_sampler, **options)
            return
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = rebuilt(source, dataset, batch_sampler=batch_sampler, **options)
        self.dl_state_dict = self.base_dataloader.state_dict()

    table[_KEY] = None
    accelerate.DataLoader = make
    accelerate.DataLoaderAdapter.__init__ = adapt


def rebuilt(source: DataLoader[Any], dataset: Any, *arguments: Any, **options: Any) -> DataLoader[Any]:
    """Create a loader with the infeed-only options of ``source``."""
    options.update(own_options(source))
    made: DataLoader[Any] = DataLoader(dataset, *arguments, **options)
    # Accelerate passes torch's default prefetch_factor as if the user had set it.
    made._infeed_prefetch_factor = source._infeed_prefetch_factor
    return made
