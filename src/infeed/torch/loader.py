"""``infeed.torch.DataLoader``: torch's class, torch's arguments, infeed's engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Final, Generic, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader  # before `install` patches it
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.engine.bad_samples import BadSample
from infeed.engine.progress import Lineage
from infeed.errors import ConfigError
from infeed.metrics.statistics import Statistics
from infeed.options import MOST_WORKERS, AutoCount, Observe, OnError, WorkerChoice, check_cpu_limit
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
from infeed.workers.early_start import start_for_loader

_T = TypeVar("_T", covariant=True)


class DataLoader(TorchDataLoader[_T], Generic[_T]):
    """torch's ``DataLoader`` on infeed's engine: a subclass with the same arguments, attributes, batches and errors.

    You need no ``if __name__ == "__main__"``. infeed never forks your process, and it sends lambdas and classes of a script or
    notebook to workers. The migration page of the documentation lists the differences.

    Args:
        seed: makes the order (of a plain ``shuffle=True``) and random numbers in the dataset depend only on seed and epoch,
            also with ``num_workers=0``. Without it both come from torch's generators, as with torch.
        num_workers: also ``"auto"``: starts with few workers and adds workers while they help. It measures how long the
            training loop waits, how busy workers are, and the available cores and memory. Batches do not depend on the number.
            An iterable dataset gets one worker, because its order depends on the number. The attribute holds the maximum.
        worker: ``"process"``, or ``"thread"`` for datasets that release the GIL. ``"auto"`` starts with processes and switches
            to threads from the next epoch if they measure as fast; ``num_workers`` is then the maximum.
        cpu_limit: CPU cores that workers may use with ``"auto"``; by default all cores of this process, or its share if several
            ranks share the machine.
        memory_limit: bytes, or text such as ``"2GiB"``: the limit for batches in flight and batches that you hold together;
            with ``num_workers="auto"`` it includes the workers' own memory.
        grain_size: number of samples that share one seed and are loaded by one worker; 1 gives each sample its own seed.
        device: where batches are delivered, such as ``"cuda:0"``. infeed copies them on a separate stream, ahead of the
            training loop; non-numeric leaves stay on the host.
        device_prefetch: number of batches in transfer to the device, besides the one that the training loop holds.
        convert: a function of a batch on the device, run on the copy stream: for dtype, memory format, scaling.
        on_error: action for a sample that raises or kills its worker. ``"raise"`` raises the error, ``"skip"`` omits the sample
            so its batch is smaller, and ``"replace"`` uses another sample, drawn from seed and position. Or a function of the
            exception and the index that returns one of these, called in this process. See ``bad_samples``.
        error_budget: number or fraction of bad samples that an epoch may have; more raise an error despite ``on_error``.
        retries: how often a sample that raises is retried before it counts as bad.
        sample_timeout: seconds that one sample may take; then its worker is killed and the sample is bad. 0 sets no limit.
        hang_warning: seconds at one sample after which a log line reports where its worker is; by default 10, or 30 times the
            usual sample time. 0 disables the warning.
        threads_per_worker: threads that torch, NumPy, OpenCV and others may use in each worker process; torch's loader: 1.
        observe: what to record: ``"timeline"`` (counters and spans of each worker), ``"counters"`` only, or ``"off"``. The
            timeline costs about 1% of the time of the smallest batches, or less. See ``statistics``, ``timeline``, ``report``.
        progress: show a progress bar (tqdm, in a terminal or a notebook) with samples per second, wait share and workers.
        on_statistics: called with the loader's ``Statistics`` every ``statistics_every`` seconds and at the end of an epoch, in
            the thread of the training loop; for example for TensorBoard, Weights & Biases or Prometheus.

    The other arguments are torch's.
    """

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
        seed: int | None = None,
        worker: WorkerChoice = "process",
        memory_limit: int | str | None = None,
        grain_size: int | None = None,
        device: Any = None,
        device_prefetch: int = 2,
        convert: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        error_budget: float | None = None,
        retries: int = 0,
        sample_timeout: float = 0,
        hang_warning: float | None = None,
        threads_per_worker: int = 1,
        cpu_limit: float | None = None,
        observe: Observe = "timeline",
        progress: bool = False,
        on_statistics: Callable[[Statistics], object] | None = None,
        statistics_every: float = 10.0,
    ) -> None:
        count = self._counted(num_workers, cpu_limit)
        newer = {} if in_order else {"in_order": in_order}  # since torch 2.6
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            count,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **newer,
        )
        self.in_order = in_order
        # Store the arguments unchanged under their names: frameworks re-create a loader from its attributes.
        self.seed = seed
        self.worker = worker
        self.memory_limit = memory_limit
        self.grain_size = grain_size
        self.device = device
        self.device_prefetch = device_prefetch
        self.convert = convert
        self.on_error = on_error
        self.error_budget = error_budget
        self.retries = retries
        self.sample_timeout = sample_timeout
        self.hang_warning = hang_warning
        self.threads_per_worker = threads_per_worker
        self.cpu_limit = cpu_limit
        self.observe = observe
        self.progress = progress
        self.on_statistics = on_statistics
        self.statistics_every = statistics_every
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
            raise ConfigError(f"num_workers={num_workers!r} must be 'auto' or a whole number; use 0 to load in this process")
        check_cpu_limit(cpu_limit)
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
        """Return statistics of all epochs so far, with a diagnosis: whether training is data-bound, the bottleneck, the fix."""
        return statistics_of(self)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline: ``.json`` for Perfetto and chrome://tracing, or a chart as ``.svg``, ``.png`` or ``.html``.

        It holds the latest 100,000 worker spans; spans shorter than 0.1 ms are merged.

        Raises:
            ConfigError: the extension is unknown, ``observe`` records no timeline, or the loader runs on torch's own workers.
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(trace_of(self), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page about the run: diagnosis, charts, slowest samples, timeline, settings, machine.

        Raises:
            ConfigError: ``observe`` records no timeline, or the loader runs on torch's own workers.
        """
        from infeed.metrics.report import write_report

        write_report(trace_of(self), path)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and call ``set_epoch`` of the sampler.

        From then on, workers call ``set_epoch`` of the dataset, its transforms and ``collate_fn`` at the start of each epoch.
        If you never call this method, they do not, as with torch.
        """
        session = session_of(self)
        for one in (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)):
            hear = getattr(one, "set_epoch", None)
            if callable(hear):
                hear(epoch)
        session.set_epoch(epoch)
        plan = plan_of(session)
        if not plan.tells_epochs:
            plan.tells_epochs = True
            session.engine_cache.clear()  # persistent workers were started without this option
            self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as JSON-compatible data. It counts delivered batches, not prefetched ones.

        Empty, with a warning, if the loader runs on torch's own workers, which have no state.

        Raises:
            StateError: the dataset is map-style and has a ``state_dict``, which infeed cannot track with workers.
        """
        reason = refused_reason(self)
        if reason is not None:
            warnings.warn(
                f"state_dict() is empty, because this loader runs on torch's own workers: {reason}; a resumed epoch starts at "
                "its first batch",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}
        return (known_session(self) or session_of(self)).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state with the next iteration, as ``torchdata``'s ``StatefulDataLoader`` does.

        Raises:
            StateError: the state is damaged, or belongs to another dataset or other options. The loader is unchanged.
        """
        session = session_of(self)
        session.load_state_dict(state_dict)
        if state_dict:
            session.engine_cache.clear()  # idle workers have the seed of another run
            self._iterator = None  # as in torchdata, persistent workers restart

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Return the origin of batch ``step`` (from 0) of an epoch; see ``infeed.DataLoader.explain``."""
        return session_of(self).explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load batch ``step`` of an epoch again, in this thread; see ``infeed.DataLoader.replay``."""
        return session_of(self).replay(step, epoch)

    def close(self) -> None:
        """Stop the workers now; the next iteration starts new ones."""
        stop_workers(self)
        self._iterator = None


# Options that torch's class does not have, with their defaults.
OWN_OPTIONS: Final[dict[str, Any]] = {
    name: parameter.default
    for name, parameter in signature(DataLoader).parameters.items()
    if name not in signature(TorchDataLoader).parameters and name != "in_order"  # torch's since 2.6
}
