"""The public ``infeed.DataLoader`` class."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, final

from infeed.engine.bad_samples import BadSample
from infeed.engine.iterator import EpochIterator
from infeed.engine.planning import Planner
from infeed.engine.progress import Lineage
from infeed.engine.session import Session
from infeed.metrics.statistics import Statistics
from infeed.options import LoaderConfig, Observe, OnError, StartMethod, WorkerChoice
from infeed.plan.shards import Shard
from infeed.workers.early_start import start_for_loader


@final
class DataLoader:
    """Loads a dataset in parallel batches. Order and contents do not depend on the number or kind of workers.

    Each iteration yields one epoch. Workers start with the first epoch and run until ``close``, the end of a ``with`` block, or
    garbage collection of the loader. No ``if __name__ == "__main__"`` is needed.

    Samples can be nested dicts, lists, tuples, named tuples and dataclasses. Arrays, tensors and numbers are stacked; other
    leaves become lists. A batch stays valid for as long as anything references its memory.

    Args:
        dataset: a map-style dataset with ``__getitem__`` and ``__len__`` (and ``__getitems__``, if it can load several samples
            at once), or an iterable dataset with ``__iter__``. NumPy arrays, and tuples and dicts of arrays of equal length,
            are datasets whose rows are samples.
        batch_size: number of samples per batch; ``None`` yields single samples unchanged.
        shuffle: use a new order in every epoch, derived from ``seed``.
        sampler: an iterable that yields indices in the order of loading.
        batch_sampler: an iterable that yields one list of indices per batch.
        num_workers: number of workers; 0 loads in the main process, on demand. ``"auto"`` starts with few workers and adds
            workers while they increase throughput. It measures how long the training loop waits, how busy workers are, and the
            available CPU cores and memory. The number does not affect the batches. With ``"auto"``, an iterable dataset gets
            one worker, because its order depends on the number of workers.
        worker: kind of worker. ``"process"``; ``"thread"`` for datasets that release the GIL; ``"inline"`` for the main
            process; ``"auto"`` starts with processes and switches to threads in the next epoch if measurements show that they
            are as fast. ``"auto"`` makes ``num_workers`` the maximum. Use it only for datasets that threads can share.
        collate_fn: function that converts a list of samples into a batch; runs in the worker. By default arrays are stacked.
        drop_last: drop the last batch if it is incomplete.
        seed: seed of the order and of all random numbers in the dataset; ``None`` draws one, which ``repr`` shows.
        in_order: ``False`` yields batches in the order in which they become ready.
        prefetch: maximum number of batches in flight. By default enough to keep workers busy, within ``memory_limit``.
        timeout: seconds to wait for a batch before raising ``LoadTimeoutError``; 0 waits as long as workers are alive.
        worker_init_fn: function that each worker calls with its number at start-up.
        memory_limit: maximum memory for batches in flight and batches that user code holds, in bytes or as text such as
            ``"2GiB"``. By default half of the memory that is free when the loader starts. With ``num_workers="auto"``, infeed
            adds no worker if all workers and batches together would exceed the limit.
        grain_size: number of samples that share one seed and are loaded by one worker; by default a quarter of a batch. With 1,
            the random numbers of a sample do not depend on the batch size.
        start_method: how to start worker processes. ``"forkserver"`` forks them from a clean helper process, ``"spawn"`` starts
            a new interpreter for each, ``"auto"`` uses ``"forkserver"`` where it is safe.
        shard: ``(rank, world_size)`` if several processes share each epoch; ``"auto"`` reads ``torch.distributed`` and the
            launcher's environment variables. All ranks need the same seed; the default is 0. ``batch_size`` is per rank.
        pad: repeat a sample on ranks that would get one row less than others at the end of an epoch, so that all ranks have
            batches of equal size. With ``False``, each sample is delivered exactly once, and the last batches may differ by one
            row.
        replacement: draw each sample from the whole dataset, so that a sample can occur several times in an epoch.
        weights: one number per sample, proportional to its probability of being drawn, with replacement.
        num_samples: number of samples per epoch; by default the length of the dataset.
        pin_memory: page-lock the memory of batches if torch has an accelerator, so that the accelerator can read it directly.
        output: ``"jax"`` yields JAX arrays, on ``device`` or on JAX's default device.
        device: target device of batches, such as ``"cuda:0"``. infeed copies batches ahead of the training loop on a separate
            device stream. Non-numeric leaves stay on the host.
        device_prefetch: number of batches to copy to the device ahead of the one that the training loop uses; 0 copies on
            demand.
        convert: function of a batch on the device, run on the copy stream: for dtype, memory format or scaling.
        on_error: what to do with a sample that raises or kills its worker. ``"raise"`` raises; ``"skip"`` omits it, so its
            batch is smaller; ``"replace"`` loads another sample, drawn from the seed and the position. Or pass a function of
            the exception and the index that returns one of these; it runs in this process. See ``bad_samples``.
        error_budget: number or fraction of bad samples that an epoch may have before the loader raises an error anyway.
        retries: number of retries of a sample that raises, before it counts as bad.
        sample_timeout: seconds that one sample may take. After that, the worker is killed and the sample counts as bad. 0 sets
            no limit.
        hang_warning: seconds on one sample after which infeed logs where the worker is. By default 10 s or 30 times the usual
            time per sample, whichever is longer; 0 disables the warning.
        threads_per_worker: threads that NumPy, torch, OpenCV and other libraries may use in each worker process, regardless of
            the environment of this process (``OMP_NUM_THREADS``). Thread and inline workers use the thread pools of this
            process, unchanged.
        cpu_limit: with ``"auto"``, number of CPU cores that workers may use, such as 2 or 0.5. By default all cores available
            to this process, or its share of them if several ranks share the machine.
        observe: what to record: ``"timeline"`` (counters and timed spans), ``"counters"`` only, or ``"off"``. Recording costs
            at most about 1% of the time of the smallest batches. See ``statistics``, ``timeline`` and ``report``.
        progress: show a progress bar (tqdm, in a terminal or a notebook) with samples per second, wait time of the training
            loop and workers.
        on_statistics: function called with the loader's ``Statistics`` every ``statistics_every`` seconds and at the end of an
            epoch, in the thread of the training loop. For TensorBoard, Weights & Biases, Prometheus and similar.
        statistics_every: seconds between calls of ``on_statistics``; 0 calls it with every batch.

    Raises:
        ConfigError: an argument or a combination of arguments is invalid.
    """

    __module__ = "infeed"

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        worker: WorkerChoice = "process",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        in_order: bool = True,
        prefetch: int | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        memory_limit: int | str | None = None,
        grain_size: int | None = None,
        start_method: StartMethod = "auto",
        shard: tuple[int, int] | Literal["auto"] | None = None,
        pad: bool = True,
        replacement: bool = False,
        weights: Any = None,
        num_samples: int | None = None,
        pin_memory: bool = False,
        output: Literal["jax"] | None = None,
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
        config = LoaderConfig(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            worker=worker,
            collate_fn=collate_fn,
            drop_last=drop_last,
            seed=seed,
            in_order=in_order,
            prefetch=prefetch,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            memory_limit=memory_limit,
            grain_size=grain_size,
            start_method=start_method,
            shard=shard,
            pad=pad,
            replacement=replacement,
            weights=weights,
            num_samples=num_samples,
            pin_memory=pin_memory,
            output=output,
            device=device,
            device_prefetch=device_prefetch,
            convert=convert,
            on_error=on_error,
            error_budget=error_budget,
            retries=retries,
            sample_timeout=sample_timeout,
            hang_warning=hang_warning,
            threads_per_worker=threads_per_worker,
            cpu_limit=cpu_limit,
            observe=observe,
            progress=progress,
            on_statistics=on_statistics,
            statistics_every=statistics_every,
        )
        self._session = Session(config, Planner(config, _drawn_seed(config) if seed is None else int(seed)))
        # Safety net for `close`: references the engine cache, not the loader, and runs at interpreter exit at the latest.
        self._finalizer = weakref.finalize(self, self._session.engine_cache.close_unasked)
        if config.kind == "process" and self._session.plan.table is None:
            start_for_loader(config.start_method, dataset, collate_fn, worker_init_fn)

    def __iter__(self) -> Iterator[Any]:
        return EpochIterator(self._session, self)

    def __len__(self) -> int:
        """Return the number of batches per epoch.

        Raises:
            TypeError: the dataset, sampler or batch sampler has no length.
        """
        return self._session.plan.batch_count()

    @property
    def dataset(self) -> Any:
        return self._session.config.dataset

    @property
    def batch_size(self) -> int | None:
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
        """Return counters of all epochs and a diagnosis: whether the training loop waits for data, the bottleneck, the fix."""
        return self._session.statistics()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline of the run to a file.

        The extension selects the format: ``.json`` for Perfetto and chrome://tracing; ``.svg``, ``.png`` or ``.html`` for a
        picture. The timeline holds the latest 100,000 worker spans. Spans shorter than 0.1 ms are merged.

        Raises:
            ConfigError: the file extension is not supported, or ``observe`` records no timeline.
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(self._session.trace(), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained page about the run so far: diagnosis, charts, slowest samples, timeline, settings, machine.

        Raises:
            ConfigError: ``observe`` records no timeline.
        """
        from infeed.metrics.report import write_report

        write_report(self._session.trace(), path)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; later iterations count up from it.

        This calls ``set_epoch`` of the sampler, if it has one. Every worker calls ``set_epoch`` of the dataset, its transforms
        and ``collate_fn`` at the start of each epoch, even without this call. If you loaded a state of the same epoch,
        iteration resumes from that state.
        """
        self._session.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop, excluding prefetched batches, as plain data that JSON can store.

        You can load it with another number or kind of workers, another batch size or another number of ranks.

        Raises:
            StateError: the dataset is map-style and has its own ``state_dict``, which the loader cannot track in workers.
        """
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state with the next iteration, without loading delivered batches again. ``{}`` changes nothing.

        Samplers and iterable datasets resume through their own ``load_state_dict``, if they have one. Others are read from the
        beginning and delivered samples are skipped, so they must yield the same values again.

        Raises:
            StateError: the state is damaged, or belongs to another dataset or other options. The loader stays unchanged.
        """
        self._session.load_state_dict(state_dict)

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Return the origin of batch ``step`` (from 0): indices, seeds, the workers that loaded it, the time and the attempts.

        Args:
            epoch: by default the latest epoch that was started. For other epochs and for future batches, only the plan is
                known.

        Raises:
            IndexError: the batch does not exist, or it came from a sampler or an iterable dataset and is no longer stored.
        """
        return self._session.explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load the same batch ``step`` of an epoch again in the calling thread, so that you can use a debugger.

        An iterable dataset is read from its beginning. It cannot be replayed if it splits itself among several workers.

        Raises:
            IndexError: see ``explain``.
        """
        return self._session.replay(step, epoch)

    def close(self) -> None:
        """Stop workers and free memory. Batches that you still hold stay valid. Idempotent and safe to call from any thread."""
        self._finalizer.detach()
        self._session.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._session.config
        dataset = type(config.dataset).__qualname__
        rank, world_size = self._session.plan.cut.shard
        shard = "" if world_size == 1 else f", shard=({rank}, {world_size})"
        worker = "auto" if config.is_kind_auto else config.kind
        return (
            f"DataLoader({dataset}, batch_size={config.batch_size}, shuffle={config.shuffle}, "
            f"num_workers={config.num_workers!r}, worker={worker!r}, seed={self.seed}{shard})"
        )


def _drawn_seed(config: LoaderConfig) -> int:
    # All ranks need the same seed and cannot communicate here, so the default is a constant.
    is_shared = isinstance(config.shard, Shard) and config.shard.world_size > 1
    return 0 if is_shared else int.from_bytes(os.urandom(8)) >> 1
