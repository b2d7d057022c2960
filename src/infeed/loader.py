"""``infeed.DataLoader``: arguments, and what they mean."""

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
    """Loads a dataset in batches, in parallel, in the same order and with the same contents whatever the workers.

    Iterating gives one epoch; the next iteration gives the next. Workers start with the first epoch and stay until ``close``,
    the end of a ``with`` block, or the end of the loader. No ``if __name__ == "__main__"`` is needed.

    Samples are trees of dicts, lists, tuples, named tuples and dataclasses. Arrays, tensors and numbers in them are stacked,
    all else becomes lists. A batch belongs to the caller for as long as anything looks into it.

    Args:
        dataset: has ``__getitem__`` and ``__len__`` (and ``__getitems__``, if it can load several at once), or ``__iter__`` for
            a stream. NumPy arrays, and tuples and dicts of arrays of one length, are datasets whose rows are samples.
        batch_size: samples in a batch; ``None`` yields single samples as they are.
        shuffle: a new order every epoch, from ``seed``.
        sampler: yields indices, in the order in which they are to come.
        batch_sampler: yields lists of indices, a batch each.
        num_workers: how many load at the same time; 0 loads in this process, when asked. ``"auto"`` begins with few and has as
            many as bring something, by what is measured while the loop runs: how long it waits, how busy they are, the cores
            and the memory that there are. Batches do not depend on it. A stream has one, because its order depends on them.
        worker: what a worker is: ``"process"``; ``"thread"`` for datasets that leave the GIL; ``"inline"`` for none; ``"auto"``
            begins with processes, and has threads from the next epoch on if measuring says that they do as well; it makes
            ``num_workers`` the most that there may be. Only for datasets that threads may share.
        collate_fn: makes a batch of a list of samples, in the worker. By default arrays are stacked.
        drop_last: leave out a last batch that is not full.
        seed: of the order and of all random numbers in the dataset; ``None`` draws one, shown in ``repr``.
        in_order: ``False`` gives batches as they are ready.
        prefetch: how many batches may be in flight. By default enough to keep workers busy, within ``memory_limit``.
        timeout: seconds to wait for a batch before ``LoadTimeoutError``; 0 waits for as long as workers live.
        worker_init_fn: called with the worker's number in each worker when it starts.
        memory_limit: bytes, or text such as ``"2GiB"``: the most that batches in flight and batches kept may take together.
            By default half of what is free when the loader starts. With ``num_workers="auto"`` no worker is added that would
            take more, together with the others and with batches.
        grain_size: samples that share one seed and are loaded by one worker; by default a fourth of a batch. With 1, what is
            random about a sample does not depend on the batch size.
        start_method: how processes are made: ``"forkserver"`` from a clean process of our own, ``"spawn"`` each afresh,
            ``"auto"`` the first where it is safe.
        shard: ``(rank, world_size)`` if several processes share each epoch; ``"auto"`` asks ``torch.distributed`` and the
            launcher's environment. All ranks need the same seed: without one it is 0. ``batch_size`` is that of each rank.
        pad: whether ranks that would have a row less than others at the end of an epoch repeat a sample, so that all have
            equal batches. With ``False`` every sample comes exactly once, and the last batches may differ by a row.
        replacement: draw every sample anew from the whole dataset, so that one may come several times in an epoch.
        weights: one number for each sample: how likely it is to be drawn, with replacement.
        num_samples: samples in an epoch; by default as many as the dataset has.
        pin_memory: page-lock the memory that batches lie in, if torch has an accelerator, so that it can read them by itself.
        output: ``"jax"`` gives arrays of JAX, on ``device`` or where JAX puts them.
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
        threads_per_worker: threads that NumPy, torch, OpenCV and other libraries may use in each worker process, whatever the
            environment of this process says for itself (``OMP_NUM_THREADS``). Threads and inline use this process's own pools,
            which are left as they are.
        cpu_limit: with ``"auto"``, how many cores workers may use, such as 2 or 0.5; by default all that this process has, its
            part of them where several ranks share the machine.
        observe: what is kept of the run: ``"timeline"`` (counters, and who did what when), ``"counters"`` alone, or ``"off"``.
            All of it costs about a hundredth of the time of the smallest batches, or less. See ``statistics``, ``timeline`` and
            ``report``.
        progress: show a bar (tqdm, in a terminal or a notebook) with samples per second, how much the loop waits, and workers.
        on_statistics: called with the loader's ``Statistics`` every ``statistics_every`` seconds and at the end of an epoch, in
            the loop's thread: for TensorBoard, Weights & Biases, Prometheus and the like.

    Raises:
        ConfigError: arguments that cannot work.
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
        # The net under `close`: takes the engines, not the loader, and runs at the latest when Python ends.
        self._finalizer = weakref.finalize(self, self._session.engine_cache.close_unasked)
        if config.kind == "process" and self._session.plan.table is None:
            start_for_loader(config.start_method, dataset, collate_fn, worker_init_fn)

    def __iter__(self) -> Iterator[Any]:
        return EpochIterator(self._session, self)

    def __len__(self) -> int:
        """Batches in an epoch.

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
        """What the order and the dataset's random numbers are made from: as given, or as drawn."""
        return self._session.plan.seed

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if there is none."""
        return self._session.epoch

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were left out or replaced because they could not be loaded; the latest thousand of all epochs."""
        return self._session.bad_samples

    def statistics(self) -> Statistics:
        """What it did so far, in all its epochs, and a verdict: does the loop wait for data, for what, and what would help."""
        return self._session.statistics()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write who did what when: ``.json`` for Perfetto and chrome://tracing, or a picture: ``.svg``, ``.png``, ``.html``.

        The latest hundred thousand spans of workers are kept; what is shorter than a tenth of a millisecond is put together.

        Raises:
            ConfigError: the ending is none of these, or ``observe`` keeps no timeline.
        """
        from infeed.metrics.timeline import write_timeline

        write_timeline(self._session.trace(), path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page about the run so far: verdict, charts, slowest samples, timeline, settings, machine.

        Raises:
            ConfigError: ``observe`` keeps no timeline.
        """
        from infeed.metrics.report import write_report

        write_report(self._session.trace(), path)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; later ones follow by themselves.

        A sampler that has ``set_epoch`` is told. The dataset, its transforms and ``collate_fn`` are told in every worker when
        an epoch begins, also without this call. If a state of this very epoch was loaded, the epoch goes on where that says.
        """
        self._session.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: what was given to the loop, not what was loaded ahead. Plain data, fit for JSON.

        It can be loaded with another number or kind of workers, another batch size, another number of ranks.

        Raises:
            StateError: the dataset is map-style and has a ``state_dict``, which cannot be followed with workers.
        """
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state says, with the next iteration. Nothing is loaded again; ``{}`` changes nothing.

        Samplers and iterable datasets continue by their own ``load_state_dict`` if they have one. Others are read from the
        beginning, and what was delivered is skipped, so they must yield the same again.

        Raises:
            StateError: it is damaged, or of another dataset or other options. The loader is as it was.
        """
        self._session.load_state_dict(state_dict)

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Where batch ``step`` (from 0) of an epoch comes from: its indices and seeds, and who loaded it, how long, how often.

        Args:
            epoch: by default the one that was begun last. Of others, and of batches that are still to come, what is planned
                is known and nothing else.

        Raises:
            IndexError: there is no such batch, or it came from a sampler or a stream and is no longer remembered.
        """
        return self._session.explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load batch ``step`` of an epoch again, the very same, here and now: in this thread, so that a debugger can follow.

        A stream is read from its beginning for it; not one that shares itself out among workers.

        Raises:
            IndexError: as ``explain``.
        """
        return self._session.replay(step, epoch)

    def close(self) -> None:
        """Stop workers and give memory back. Batches that are kept stay as they are. Idempotent, safe from any thread."""
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
    # All ranks must have the same, and they do not talk to each other: so it is no secret.
    is_shared = isinstance(config.shard, Shard) and config.shard.world_size > 1
    return 0 if is_shared else int.from_bytes(os.urandom(8)) >> 1
