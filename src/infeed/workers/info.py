"""Where user code can ask which worker it runs in."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from infeed.import_hooks import when_imported

if TYPE_CHECKING:
    from infeed.workers.spec import WorkerSpec  # needs NumPy


@final
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What ``get_worker_info`` gives: this worker's number, how many there are, its seed, and its copy of the dataset."""

    __module__ = "infeed"

    id: int
    num_workers: int
    seed: int
    dataset: Any


_TORCH_WORKER: Final = "torch.utils.data._utils.worker"


class _Local(threading.local):
    info: WorkerInfo | None = None
    # Whether user code has asked: a stream that does shards itself.
    was_asked: bool = False


_LOCAL: Final = _Local()


def get_worker_info() -> WorkerInfo | None:
    """The worker that the calling code runs in, or ``None`` outside of one (also with ``num_workers=0``, as in torch).

    A stream that is to be read by several workers uses it to choose its share::

        def __iter__(self):
            info = infeed.get_worker_info()
            return iter(self.files[info.id :: info.num_workers] if info else self.files)

    A stream that never asks is read by one worker, so that each element comes once either way.
    """
    _LOCAL.was_asked = True
    return _LOCAL.info


get_worker_info.__module__ = "infeed"


def set_worker_info(info: WorkerInfo | None) -> None:
    """Say which worker this thread is from now on."""
    _LOCAL.info = info


def is_in_worker() -> bool:
    """Whether the calling thread is a worker's."""
    return _LOCAL.info is not None


def tell_torch(info: WorkerInfo) -> None:
    """Let ``torch.utils.data.get_worker_info`` in this process say the same, as soon as it is imported."""

    def tell() -> None:
        worker: Any = sys.modules[_TORCH_WORKER]
        if _LOCAL.info is info:
            told = worker.WorkerInfo(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset)
            worker._worker_info = told

    when_imported(_TORCH_WORKER, tell)


def introduce(spec: WorkerSpec, dataset: Any, worker_count: int) -> None:
    """Let user code in this thread know which worker it runs in, and how many there are."""
    if spec.kind == "inline":
        return  # user code is in the main process and is told so
    info = WorkerInfo(spec.worker, worker_count, spec.worker_seed, dataset)
    set_worker_info(info)
    if spec.is_as_torch:
        tell_torch(info)


def take_was_asked() -> bool:
    """Whether ``get_worker_info`` was called in this thread since the last time this was asked."""
    was_asked, _LOCAL.was_asked = _LOCAL.was_asked, False
    return was_asked
