"""``infeed.torch.DataLoader``: torch's class, torch's arguments, infeed's engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Final, Generic, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader  # before `install` patches it
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.autotune.capacity import MOST_WORKERS
from infeed.engine.bad_samples import BadSample
from infeed.engine.progress import Lineage
from infeed.errors import ConfigError
from infeed.metrics.statistics import Statistics
from infeed.options import (
    TORCH_OPTIONS,
    AutoCount,
    OnError,
    OnStatistics,
    RandomSampler,
    WorkerChoice,
    check_cpu_limit,
)
from infeed.torch.plan import is_gathered
from infeed.torch.service import (
    config_of,
    iterator_of,
    known_session,
    plan_of,
    refused_reason,
    session_of,
    statistics_of,
    stop_workers,
    trace_of,
    why_not,
)
from infeed.workers.preload import start_for_loader
from infeed.workers.recorder import Observe

_T = TypeVar("_T", covariant=True)
_TORCH_ARGUMENTS: Final = tuple(signature(TorchDataLoader).parameters)


class DataLoader(TorchDataLoader[_T], Generic[_T]):
    """torch's ``DataLoader`` on infeed's engine: a subclass with the same arguments, attributes, batches and errors.

    You need no ``if __name__ == "__main__"``. infeed never forks your process, and it sends lambdas and classes of a script or
    notebook to workers. The migration page of the documentation lists the differences.

    Args: Workers
        num_workers: number of workers; 0 loads in the main process, ``"auto"`` adds workers while they help. It starts with
            few, and measures how long the training loop waits, how busy workers are, and the available CPU cores and memory.
            The attribute of the loader holds the maximum.
        worker: kind of worker: ``"process"``, ``"thread"``, ``"inline"`` (the main process), ``"auto"`` or ``"ray"``. Threads
            suit datasets that release the GIL. ``"auto"`` measures whether threads are as fast; ``num_workers`` is then the
            maximum. ``"ray"`` or an ``infeed.RayWorkers`` starts workers on the nodes of a Ray cluster.
        threads_per_worker: threads that NumPy, torch, OpenCV and other libraries may use in each worker process.
        cpu_limit: with ``"auto"``, number of CPU cores that workers may use; by default all available cores.

    Args: Reproducibility
        seed: seed of the order and of all random numbers in the dataset. With it, the order (of a plain ``shuffle=True``) and
            the random numbers depend only on seed and epoch, also with ``num_workers=0``. Without it, both come from torch's
            generators, as with torch.
        grain_size: number of samples that share one seed and are loaded by one worker; by default a quarter of a batch.

    Args: Memory
        memory_limit: maximum memory for batches in flight and batches that you hold, in bytes or as text such as ``"2GiB"``.
            With ``num_workers="auto"``, this includes the workers' own memory.

    Args: Faults
        on_error: ``"raise"``, ``"skip"`` or ``"replace"`` a sample that cannot be loaded; a function, or an
            ``infeed.ErrorPolicy``. See ``bad_samples``.
        sample_timeout: seconds that one sample may take before its worker is killed and the sample is bad; 0 sets no limit.
        hang_warning: seconds at one sample before infeed logs where its worker is; 0 disables the warning.

    Args: Device
        device: device on which batches are delivered, such as ``"cuda:0"``, or an ``infeed.Device``. infeed copies batches
            ahead of the training loop on a separate stream. Non-numeric leaves stay on the host.

    Args: Observing
        observe: what to record: ``"timeline"`` (counters and timed spans), ``"counters"`` only, or ``"off"``.
        progress: show a progress bar (tqdm) with the throughput, the wait time of the training loop and the number of workers.
        on_statistics: function that is called with ``Statistics`` every 10 s, or an ``infeed.StatisticsCallback``.

    The other arguments are torch's. ``infeed.DataLoader`` documents infeed's own in more detail.

    Examples:
        >>> import torch
        >>> from infeed.torch import DataLoader
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(4))
        >>> [batch for (batch,) in DataLoader(dataset, batch_size=2)]
        [tensor([0, 1]), tensor([2, 3])]
    """

    # Attributes with the arguments as given: frameworks re-create a loader from its attributes.
    worker: WorkerChoice
    threads_per_worker: int
    cpu_limit: float | None
    seed: int | None
    grain_size: int | None
    memory_limit: int | str | None
    on_error: OnError
    sample_timeout: float
    hang_warning: float | None
    device: Any
    observe: Observe
    progress: bool
    on_statistics: OnStatistics | None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        worker: WorkerChoice = "process",
        threads_per_worker: int = 1,
        cpu_limit: float | None = None,
        seed: int | None = None,
        grain_size: int | None = None,
        memory_limit: int | str | None = None,
        on_error: OnError = "raise",
        sample_timeout: float = 0,
        hang_warning: float | None = None,
        device: Any = None,
        observe: Observe = "timeline",
        progress: bool = False,
        on_statistics: OnStatistics | None = None,
    ) -> None:
        given = dict(locals())
        if isinstance(sampler, RandomSampler):
            raise ConfigError(
                "sampler=infeed.RandomSampler is not supported by infeed.torch; use a sampler of torch.utils.data"
            )
        if isinstance(shuffle, str):
            raise ConfigError(
                f"shuffle={shuffle!r} is not supported by infeed.torch; use True or False, or infeed.DataLoader for 'block'"
            )
        given["num_workers"] = self._counted(num_workers, cpu_limit)
        super().__init__(**{name: given[name] for name in _TORCH_ARGUMENTS})
        self.in_order = in_order  # before torch 2.6, torch's class does not have it
        for name in TORCH_OPTIONS:
            setattr(self, name, given[name])
        self._infeed_prefetch_factor = prefetch_factor  # None if not set; torch's attribute already has torch's default
        config = config_of(self)  # raises for invalid arguments
        if config.kind == "process" and not is_gathered(config) and why_not(self) is None:
            start_for_loader(config.start_method, self.dataset, self.collate_fn, self.worker_init_fn)

    @staticmethod
    def _counted(num_workers: int | str, cpu_limit: float | None) -> int:
        """Return ``num_workers`` as an ``int``, because torch and frameworks do arithmetic with it."""
        if isinstance(num_workers, int):
            return num_workers
        if num_workers != "auto":
            raise ConfigError(f"num_workers={num_workers!r} must be an int or 'auto'; use 0 to load in the main process")
        check_cpu_limit("cpu_limit", cpu_limit)
        return AutoCount(MOST_WORKERS)

    def check_worker_number_rationality(self) -> None:
        """Skip torch's warning about more workers than cores for ``"auto"``, where the number is only the maximum."""
        if not isinstance(self.num_workers, AutoCount):
            super().check_worker_number_rationality()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self)

    @property
    def _infeed_source(self) -> DataLoader[_T]:
        """The loader itself; ``infeed.torch.accelerate`` finds it through wrappers too."""
        return self

    # --- methods that torch's loader does not have

    @property
    def epoch(self) -> int:
        """The current epoch during an iteration, else the next one."""
        return session_of(self).epoch

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were skipped or replaced because loading failed; the latest 1,000 of all epochs."""
        return session_of(self).bad_samples

    def statistics(self) -> Statistics:
        """Return statistics of all epochs so far, with a diagnosis: whether training is data-bound, the bottleneck, the fix.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.statistics().sample_count
            6
        """
        return statistics_of(self)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline: ``.json`` for Perfetto and chrome://tracing, or a chart as ``.svg``, ``.png`` or ``.html``.

        It holds the latest 100,000 worker spans; spans shorter than 0.1 ms are merged.

        Args:
            path: file to write; an existing file is replaced.

        Raises:
            ConfigError: the extension is unknown, ``observe`` records no timeline, or the loader runs on torch's own workers.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.timeline("run.json")
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(trace_of(self), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page about the run: diagnosis, charts, slowest samples, timeline, settings, machine.

        Args:
            path: HTML file to write; an existing file is replaced.

        Raises:
            ConfigError: ``observe`` records no timeline, or the loader runs on torch's own workers.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.report("report.html")
        """
        from infeed.metrics.run_report import write_report

        write_report(trace_of(self), path)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and call ``set_epoch`` of the sampler.

        From then on, workers call ``set_epoch`` of the dataset, its transforms and ``collate_fn`` at the start of each epoch.
        If you never call this method, they do not, as with torch.

        Args:
            epoch: number of the epoch, from 0.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3
        """
        session = session_of(self)
        for one in (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)):
            set_epoch = getattr(one, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        session.set_epoch(epoch)
        if plan_of(session).start_setting_epochs():
            session.engine_cache.clear()  # persistent workers were started without this option
            self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as JSON-compatible data. It counts delivered batches, not prefetched ones.

        Empty, with a warning, if the loader runs on torch's own workers, which have no state.

        If workers or ``device=`` load ahead of a map-style dataset that has a ``state_dict``, a state in mid-epoch lacks the
        state of the dataset, with a warning.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> first = next(iter(loader))
            >>> state = loader.state_dict()
            >>> resumed = DataLoader(range(6), batch_size=2)
            >>> resumed.load_state_dict(state)
            >>> list(resumed)
            [tensor([2, 3]), tensor([4, 5])]
        """
        reason = refused_reason(self)
        if reason is not None:
            warnings.warn(
                f"state_dict() is empty, because this loader runs on torch's own workers ({reason}); a resumed epoch starts at "
                "its first batch",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}
        return (known_session(self) or session_of(self)).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state with the next iteration, as ``torchdata``'s ``StatefulDataLoader`` does.

        Args:
            state_dict: the result of ``state_dict``.

        Raises:
            StateError: the state is damaged, lacks the state of a map-style dataset that has one, or belongs to another
                dataset or other options. The loader is unchanged.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> first = next(iter(loader))
            >>> loader.load_state_dict(loader.state_dict())
            >>> list(loader)
            [tensor([2, 3]), tensor([4, 5])]
        """
        session = session_of(self)
        session.load_state_dict(state_dict)
        if state_dict:
            session.engine_cache.clear()  # idle workers have the seed of another run
            self._iterator = None  # as in torchdata, persistent workers restart

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Return the origin of a batch: indices, seeds, workers, time and attempts; see ``infeed.DataLoader.explain``.

        Args:
            step: number of the batch in its epoch, from 0.
            epoch: by default the latest epoch that was started.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> DataLoader(range(6), batch_size=2).explain(1).indices
            [2, 3]
        """
        return session_of(self).explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load a batch again, in this thread; see ``infeed.DataLoader.replay``.

        Args:
            step: number of the batch in its epoch, from 0.
            epoch: by default the latest epoch that was started.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> DataLoader(range(6), batch_size=2).replay(1)
            tensor([2, 3])
        """
        return session_of(self).replay(step, epoch)

    def close(self) -> None:
        """Stop the workers now; the next iteration starts new ones.

        Examples:
            >>> from infeed.torch import DataLoader
            >>> loader = DataLoader(range(6), batch_size=2, num_workers=2, worker="thread")
            >>> batches = list(loader)
            >>> loader.close()
        """
        stop_workers(self)
        self._iterator = None
