"""The public ``infeed.DataLoader`` class."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, final

from infeed.engine.bad_samples import BadSample
from infeed.engine.epoch_iterator import EpochIterator
from infeed.engine.planning import Planner
from infeed.engine.progress import Lineage
from infeed.engine.session import Session
from infeed.metrics.statistics import Statistics
from infeed.options import OnError, OnStatistics, Options, RandomSampler, WorkerChoice
from infeed.plan.sharding import Shard
from infeed.workers.interpreter import StartMethod
from infeed.workers.preload import start_for_loader
from infeed.workers.recorder import Observe


@final
class DataLoader:
    """Loads a dataset in parallel batches. Order and contents do not depend on the number or kind of workers.

    Each iteration yields one epoch. Workers start with the first epoch and run until ``close``, the end of a ``with`` block, or
    garbage collection of the loader. No ``if __name__ == "__main__"`` is needed.

    Samples can be nested dicts, lists, tuples, named tuples and dataclasses. Arrays, tensors and numbers are stacked; other
    leaves become lists. A batch stays valid for as long as anything references its memory.

    Args: As in torch
        dataset: map-style or iterable dataset. Map-style has ``__getitem__`` and ``__len__`` (and ``__getitems__``, if it can
            load several samples at once), iterable has ``__iter__``. NumPy arrays, and tuples and dicts of arrays of equal
            length, are datasets whose rows are samples.
        batch_size: number of samples per batch; ``None`` yields single samples unchanged.
        shuffle: use a new order in every epoch, derived from ``seed``; ``"block"`` shuffles blocks of samples. With ``True``,
            datasets of ``infeed.open`` do so on object storage, and so do Parquet files with more than 256 MiB in the columns
            that are read; ``sampler=infeed.RandomSampler()`` shuffles single samples.
        sampler: an iterable of indices in the order of loading, or an ``infeed.RandomSampler``.
        batch_sampler: an iterable of lists of indices, one list per batch.
        num_workers: number of workers; 0 loads in the main process, ``"auto"`` adds workers while they help. It starts with
            few, and measures how long the training loop waits, how busy workers are, and the available CPU cores and memory.
            The number does not affect the batches. With ``"auto"``, an iterable dataset gets one worker, because its order
            depends on the number of workers.
        collate_fn: function that converts a list of samples into a batch; runs in the worker. By default arrays are stacked.
        pin_memory: page-lock the memory of batches if torch has an accelerator. The accelerator can then read it directly.
        drop_last: drop the last batch if it is incomplete.
        timeout: seconds to wait for a batch before raising ``LoadTimeoutError``; 0 sets no limit.
        worker_init_fn: function that each worker calls with its number at start-up.
        in_order: ``False`` yields batches in the order in which they become ready.

    Args: Workers
        worker: kind of worker: ``"process"``, ``"thread"``, ``"inline"`` (the main process), ``"auto"`` or ``"ray"``. Threads
            suit datasets that release the GIL. ``"auto"`` starts with processes, and switches to threads in the next epoch if
            measurements show that they are as fast; ``num_workers`` is then the maximum. Use it only for datasets that threads
            can share. ``"ray"`` or an ``infeed.RayWorkers`` starts workers on the nodes of a Ray cluster.
        start_method: how to start worker processes: ``"auto"``, ``"forkserver"`` or ``"spawn"``. ``"forkserver"`` forks them
            from a clean helper process, ``"spawn"`` starts a new interpreter for each, ``"auto"`` uses ``"forkserver"`` where
            it is safe.
        threads_per_worker: threads that NumPy, torch, OpenCV and other libraries may use in each worker process. The
            environment of this process (``OMP_NUM_THREADS``) does not matter. Threads and inline workers use this process's
            thread pools.
        cpu_limit: with ``"auto"``, number of CPU cores that workers may use; by default all available cores. If several ranks
            share the machine, by default the share of this rank. It can be fractional, such as 0.5.
        prefetch: maximum number of batches in flight; by default enough to keep workers busy. ``memory_limit`` applies as well.

    Args: Reproducibility
        seed: seed of the order and of all random numbers in the dataset. ``None`` draws one, which ``repr`` shows.
        grain_size: number of samples that share one seed and are loaded by one worker; by default a quarter of a batch. With 1,
            the random numbers of a sample do not depend on the batch size.

    Args: Several ranks
        shard: ``(rank, world_size)`` if several processes share each epoch, or ``"auto"``. ``"auto"`` reads
            ``torch.distributed`` and the launcher's environment variables. All ranks need the same seed; the default is 0.
            ``batch_size`` is per rank.
        pad: repeat a sample on ranks that would get one less than others, so that all have equal batches. With ``False``, each
            sample is delivered exactly once, and the last batches may differ by one row.

    Args: Memory
        memory_limit: maximum memory for batches in flight and batches that you hold, in bytes or as text such as ``"2GiB"``. By
            default half of the memory that is free when the loader starts. With ``num_workers="auto"``, infeed adds no worker
            if all workers and batches together would exceed the limit.

    Args: Faults
        on_error: ``"raise"``, ``"skip"`` or ``"replace"`` a sample that cannot be loaded; a function, or an
            ``infeed.ErrorPolicy``. This applies to samples that raise, and to samples that kill their worker. ``"skip"`` makes
            the batch smaller; ``"replace"`` loads another sample, drawn from the seed and the position. A function gets the
            exception and the index, runs in this process and returns one of the three. See ``bad_samples``.
        sample_timeout: seconds that one sample may take before its worker is killed and the sample is bad; 0 sets no limit.
        hang_warning: seconds at one sample before infeed logs where its worker is; 0 disables the warning. By default 10 s or
            30 times the usual time per sample, whichever is longer.

    Args: Device
        device: device on which batches are delivered, such as ``"cuda:0"``, or an ``infeed.Device``. infeed copies batches
            ahead of the training loop on a separate device stream. Non-numeric leaves stay on the host.

    Args: Observing
        observe: what to record: ``"timeline"`` (counters and timed spans), ``"counters"`` only, or ``"off"``. Recording adds
            about 1% or less to the time of the smallest batches. See ``statistics``, ``timeline`` and ``report``.
        progress: show a progress bar (tqdm) with the throughput, the wait time of the training loop and the number of workers.
        on_statistics: function that is called with ``Statistics`` every 10 s, or an ``infeed.StatisticsCallback``. It is also
            called at the end of an epoch, and runs in the thread of the training loop. For TensorBoard, Weights & Biases,
            Prometheus and similar.

    Raises:
        ConfigError: an argument or a combination of arguments is invalid.

    Examples:
        >>> import infeed
        >>> with infeed.DataLoader(range(6), batch_size=2, shuffle=True, seed=0, num_workers=2, worker="thread") as loader:
        ...     [batch.tolist() for batch in loader]
        [[0, 1], [3, 5], [4, 2]]
    """

    __module__ = "infeed"

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool | Literal["block"] = False,
        sampler: Iterable[Any] | RandomSampler | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        in_order: bool = True,
        worker: WorkerChoice = "process",
        start_method: StartMethod = "auto",
        threads_per_worker: int = 1,
        cpu_limit: float | None = None,
        prefetch: int | None = None,
        seed: int | None = None,
        grain_size: int | None = None,
        shard: tuple[int, int] | Literal["auto"] | None = None,
        pad: bool = True,
        memory_limit: int | str | None = None,
        on_error: OnError = "raise",
        sample_timeout: float = 0,
        hang_warning: float | None = None,
        device: Any = None,
        observe: Observe = "timeline",
        progress: bool = False,
        on_statistics: OnStatistics | None = None,
    ) -> None:
        options = dict(locals())
        del options["self"]
        config = Options(**options)
        self._open(config, _drawn_seed(config) if seed is None else int(seed))

    def _open(self, config: Options, seed: int) -> None:
        self._session = Session(config, Planner(config, seed))
        # Safety net for `close`: references the engine cache, not the loader, and runs at interpreter exit at the latest.
        self._finalizer = weakref.finalize(self, self._session.engine_cache.close_unasked)
        if config.kind == "process" and self._session.plan.table is None:
            start_for_loader(config.start_method, config.dataset, config.collate_fn, config.worker_init_fn)

    def __reduce__(self) -> tuple[Callable[[Options, int], DataLoader], tuple[Options, int]]:
        """Pickle or copy the options and the seed. The copy has workers of its own, and starts at the first batch."""
        return _rebuilt, (self._session.config, self._session.plan.seed)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Workers start with the first batch, unless they run already."""
        return EpochIterator(self._session, self)

    def __len__(self) -> int:
        """Return the number of batches per epoch.

        Raises:
            TypeError: the dataset, sampler or batch sampler has no length.
        """
        return self._session.plan.batch_count()

    @property
    def dataset(self) -> Any:
        """The dataset, as passed."""
        return self._session.config.dataset

    @property
    def batch_size(self) -> int | None:
        """Number of samples per batch, as passed; ``None`` for single samples."""
        return self._session.config.batch_size

    @property
    def seed(self) -> int:
        """Seed of the order and of the dataset's random numbers, as passed or as drawn."""
        return self._session.plan.seed

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one if no epoch is in progress."""
        return self._session.epoch

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were skipped or replaced because they could not be loaded: the latest 1000 of all epochs."""
        return self._session.bad_samples

    def statistics(self) -> Statistics:
        """Return counters of all epochs and a diagnosis: whether the training loop waits for data, the bottleneck, the fix.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.statistics().sample_count
            6
        """
        return self._session.statistics()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline of the run to a file.

        The extension selects the format: ``.json`` for Perfetto and chrome://tracing; ``.svg``, ``.png`` or ``.html`` for a
        picture. The timeline holds the latest 100,000 worker spans. Spans shorter than 0.1 ms are merged.

        Args:
            path: file to write; an existing file is replaced.

        Raises:
            ConfigError: the file extension is not supported, or ``observe`` records no timeline.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.timeline("run.json")
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(self._session.trace(), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained page about the run so far: diagnosis, charts, slowest samples, timeline, settings, machine.

        Args:
            path: HTML file to write; an existing file is replaced.

        Raises:
            ConfigError: ``observe`` records no timeline.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> batches = list(loader)
            >>> loader.report("report.html")
        """
        from infeed.metrics.run_report import write_report

        write_report(self._session.trace(), path)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; later iterations count up from it.

        This calls ``set_epoch`` of the sampler, if it has one. Every worker calls ``set_epoch`` of the dataset, its transforms
        and ``collate_fn`` at the start of each epoch, even without this call. If you loaded a state of the same epoch,
        iteration resumes from that state.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            ConfigError: ``epoch`` is not an int, or is negative.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3
        """
        self._session.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop, excluding prefetched batches, as plain data that JSON can store.

        You can load it with another number or kind of workers, another batch size or another number of ranks.

        If workers or ``device=`` load ahead of a map-style dataset that has a ``state_dict``, a state in mid-epoch lacks the
        state of the dataset, with a warning.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> first = next(iter(loader))
            >>> state = loader.state_dict()
            >>> resumed = infeed.DataLoader(range(6), batch_size=2)
            >>> resumed.load_state_dict(state)
            >>> [batch.tolist() for batch in resumed]
            [[2, 3], [4, 5]]
        """
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state with the next iteration, without loading delivered batches again. ``{}`` changes nothing.

        Samplers and iterable datasets resume through their own ``load_state_dict``, if they have one. Others are read from the
        beginning and delivered samples are skipped, so they must yield the same values again.

        Args:
            state_dict: the result of ``state_dict``, of this loader or of one with the same dataset, order and seed.

        Raises:
            StateError: the state is damaged, lacks the state of a map-style dataset that has one, or belongs to another
                dataset or other options. The loader stays unchanged.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2)
            >>> first = next(iter(loader))
            >>> loader.load_state_dict(loader.state_dict())
            >>> [batch.tolist() for batch in loader]
            [[2, 3], [4, 5]]
        """
        self._session.load_state_dict(state_dict)

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Return the origin of a batch: indices, seeds, the workers that loaded it, the time and the attempts.

        Args:
            step: number of the batch in its epoch, from 0.
            epoch: by default the latest epoch that was started. For other epochs and for future batches, only the plan is
                known.

        Raises:
            IndexError: the batch does not exist, or it came from a sampler or an iterable dataset and is no longer stored.

        Examples:
            >>> import infeed
            >>> infeed.DataLoader(range(6), batch_size=2).explain(1).indices
            [2, 3]
        """
        return self._session.explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load a batch of an epoch again in the calling thread, so that you can use a debugger.

        An iterable dataset is read from its beginning. It cannot be replayed if it splits itself among several workers.

        Args:
            step: number of the batch in its epoch, from 0.
            epoch: by default the latest epoch that was started.

        Raises:
            IndexError: see ``explain``.

        Examples:
            >>> import infeed
            >>> infeed.DataLoader(range(6), batch_size=2).replay(1).tolist()
            [2, 3]
        """
        return self._session.replay(step, epoch)

    def close(self) -> None:
        """Stop workers and free memory. Batches that you still hold stay valid. Idempotent and safe to call from any thread.

        Examples:
            >>> import infeed
            >>> loader = infeed.DataLoader(range(6), batch_size=2, num_workers=2, worker="thread")
            >>> batches = list(loader)
            >>> loader.close()
        """
        self._finalizer.detach()
        self._session.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._session.config
        shown = {
            "batch_size": str(config.batch_size),
            "num_workers": repr(config.num_workers),
            **config.shown(),
            "seed": str(self.seed),
        }
        return f"DataLoader({shown.pop('dataset')}, {', '.join(f'{name}={value}' for name, value in shown.items())})"


def _drawn_seed(config: Options) -> int:
    # All ranks need the same seed and cannot communicate here, so the default is a constant.
    is_shared = isinstance(config.shard, Shard) and config.shard.world_size > 1
    return 0 if is_shared else int.from_bytes(os.urandom(8)) >> 1


def _rebuilt(config: Options, seed: int) -> DataLoader:
    loader = DataLoader.__new__(DataLoader)
    loader._open(config, seed)
    return loader
