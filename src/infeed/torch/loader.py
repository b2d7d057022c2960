"""``infeed.torch.DataLoader``: torch's class, torch's arguments, infeed's engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader  # now, because `install` changes it
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
    """torch's ``DataLoader`` on infeed's engine: the same arguments, attributes, batches and errors; a subclass of it.

    No ``if __name__ == "__main__"`` is needed, the process is never forked, and lambdas and classes of a script or notebook
    travel to workers. What differs is in the migration page of the documentation.

    Args:
        seed: makes the order (of a plain ``shuffle=True``) and random numbers in the dataset a function of seed and epoch, also
            with ``num_workers=0``. Without it both come from torch's generators, as with torch.
        num_workers: also ``"auto"``: begins with few and has as many as bring something, by what is measured while the loop
            runs: how long it waits, how busy they are, the cores and the memory that there are. Batches do not depend on it. A
            stream has one worker, because its order depends on them. As an attribute it is the most that there may be.
        worker: ``"process"``, or ``"thread"`` for datasets that leave the GIL; ``"auto"`` begins with processes, and has
            threads from the next epoch on if measuring says that they do as well; ``num_workers`` is the most there may be.
        cpu_limit: with ``"auto"``, how many cores workers may use; by default all that this process has, its part of them where
            several ranks share the machine.
        memory_limit: bytes, or text such as ``"2GiB"``: the most that batches in flight and batches kept may take together,
            with ``num_workers="auto"`` with the workers' own memory.
        grain_size: samples that share one seed and are loaded by one worker; 1 gives each sample its own.
        device: where batches are to arrive, such as ``"cuda:0"``. They are copied on a stream of their own, ahead of the loop;
            leaves that are no numbers stay on the host.
        device_prefetch: how many batches are on their way to the device besides the one that the loop has.
        convert: a function of a batch on the device, run on the stream of the copies: for dtype, memory format, scaling.
        on_error: what to do with a sample that raises, or that kills its worker: ``"raise"``; ``"skip"`` leaves it out, and
            its batch is smaller; ``"replace"`` puts another in its place, drawn from seed and position; or a function of
            the exception and the index that returns one of these, called in this process. See ``bad_samples``.
        error_budget: how many bad samples an epoch may have before it is an error all the same: a number, or a fraction.
        retries: how often a sample that raises is asked for again before it is bad.
        sample_timeout: seconds that one sample may take; then its worker is killed and the sample is bad. 0 sets no limit.
        hang_warning: after how many seconds at one sample a line in the log says where its worker is; by default 10, or 30
            times what samples usually take; 0 says nothing.
        threads_per_worker: threads that torch, NumPy, OpenCV and others may use in each worker process; torch's loader: 1.
        observe: what is kept of the run: ``"timeline"`` (counters, and who did what when), ``"counters"`` alone, or ``"off"``.
            All of it costs about a hundredth of the time of the smallest batches, or less. See ``statistics``, ``timeline`` and
            ``report``.
        progress: show a bar (tqdm, in a terminal or a notebook) with samples per second, how much the loop waits, and workers.
        on_statistics: called with the loader's ``Statistics`` every ``statistics_every`` seconds and at the end of an epoch, in
            the loop's thread: for TensorBoard, Weights & Biases, Prometheus and the like.

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
        newer = {} if in_order else {"in_order": in_order}  # torch has it since 2.6
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
        # Under these names, and as given: frameworks make a loader anew from its attributes.
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
        self._infeed_prefetch_factor = prefetch_factor  # if it was asked for; torch's attribute has its default by now
        config = config_of(self)  # wrong arguments are told now
        if config.kind == "process" and not is_gathered(config) and why_not(self) is None:
            start_for_loader(config.start_method, self.dataset, self.collate_fn, self.worker_init_fn)

    @staticmethod
    def _counted(num_workers: int | str, cpu_limit: float | None) -> int:
        """A number, because torch computes with it, and so do frameworks."""
        if isinstance(num_workers, int):
            return num_workers
        if num_workers != "auto":
            raise ConfigError(f"num_workers={num_workers!r} must be 'auto' or a whole number; use 0 to load in this process")
        check_cpu_limit(cpu_limit)
        return AutoCount(MOST_WORKERS)

    def check_worker_number_rationality(self) -> None:
        """torch warns of more workers than cores. Where infeed decides, the number is only the most that there may be."""
        if not isinstance(self.num_workers, AutoCount):
            super().check_worker_number_rationality()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self)

    @property
    def _infeed_source(self) -> DataLoader[_T]:
        """For ``accelerating``, which finds it also through a wrapper."""
        return self

    # --- what torch's loader does not have

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if there is none."""
        return session_of(self).epoch

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were left out or replaced because they could not be loaded; the latest thousand of all epochs."""
        return session_of(self).bad_samples

    def statistics(self) -> Statistics:
        """What it did so far, in all its epochs, and a verdict: does the loop wait for data, for what, and what would help."""
        return statistics_of(self)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write who did what when: ``.json`` for Perfetto and chrome://tracing, or a picture: ``.svg``, ``.png``, ``.html``.

        The latest hundred thousand spans of workers are kept; what is shorter than a tenth of a millisecond is put together.

        Raises:
            ConfigError: the ending is none of these, ``observe`` keeps no timeline, or this runs on torch's own workers.
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(trace_of(self), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page about the run so far: verdict, charts, slowest samples, timeline, settings, machine.

        Raises:
            ConfigError: ``observe`` keeps no timeline, or this runs on torch's own workers.
        """
        from infeed.metrics.report import write_report

        write_report(trace_of(self), path)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, and call ``set_epoch`` of the sampler.

        From then on workers call ``set_epoch`` of the dataset, its transforms and ``collate_fn`` at the start of each epoch. If
        you never call this, they do not, as with torch.
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
            session.engine_cache.clear()  # persistent workers were started without
            self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: what was given to the loop, not what was loaded ahead. Plain data, fit for JSON.

        Empty, with a warning, if the loader runs on torch's own workers, which have no state.

        Raises:
            StateError: the dataset is map-style and has a ``state_dict``, which cannot be followed with workers.
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
        """Go on where a state says, with the next iteration; as ``torchdata``'s ``StatefulDataLoader``.

        Raises:
            StateError: it is damaged, or of another dataset or other options. The loader is as it was.
        """
        session = session_of(self)
        session.load_state_dict(state_dict)
        if state_dict:
            session.engine_cache.clear()  # workers have the seed of another run
            self._iterator = None  # as torchdata: persistent workers begin again

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Where batch ``step`` (from 0) of an epoch comes from: see ``infeed.DataLoader.explain``."""
        return session_of(self).explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load batch ``step`` of an epoch again, in this thread: see ``infeed.DataLoader.replay``."""
        return session_of(self).replay(step, epoch)

    def close(self) -> None:
        """Stop workers now; iterating again starts others."""
        stop_workers(self)
        self._iterator = None
