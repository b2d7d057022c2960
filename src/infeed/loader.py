"""``DataLoader``: from arguments to an engine, and from an engine to the user's loop."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, final

from infeed.assembly import build_engine
from infeed.config import LoaderConfig, StartMethod, WorkerKind
from infeed.engine import Engine, EpochEnd
from infeed.errors import ConfigError, LoaderClosedError
from infeed.garage import MSG_CLOSED, Garage
from infeed.lineage import Lineage, lineage_of
from infeed.plan.batches import BatchPlan
from infeed.plan.cursor import Cursor, read_state, write_state
from infeed.plan.shards import Shard
from infeed.planning import Planner, seed_grain
from infeed.trail import Past, Trail


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
        num_workers: how many load at the same time; 0 loads in this process, when asked.
        worker: what a worker is: ``"process"``; ``"thread"`` for datasets that leave the GIL; ``"inline"`` for none.
        collate_fn: makes a batch of a list of samples, in the worker. By default arrays are stacked.
        drop_last: leave out a last batch that is not full.
        seed: of the order and of all random numbers in the dataset; ``None`` draws one, shown in ``repr``.
        in_order: ``False`` gives batches as they are ready.
        prefetch: how many batches may be in flight. By default enough to keep workers busy, within ``memory_limit``.
        timeout: seconds to wait for a batch before ``LoadTimeoutError``; 0 waits for as long as workers live.
        worker_init_fn: called with the worker's number in each worker when it starts.
        memory_limit: bytes, or text such as ``"2GiB"``: the most that batches in flight and batches kept may take together.
            By default half of what is free when the loader starts.
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
        num_workers: int = 0,
        worker: WorkerKind = "process",
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
    ) -> None:
        self._config = LoaderConfig(
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
        )
        self._planner = Planner(self._config, _drawn_seed(self._config) if seed is None else int(seed))
        # Where the next epoch begins. Taken when its first batch is asked for: `iter` alone, as frameworks call it to look,
        # begins nothing.
        self._next = Cursor()
        self._trail: Trail | None = None  # of the epoch that was begun last
        self._lock = threading.Lock()  # guards both while an epoch begins
        self._garage = Garage()
        # The net under `close`: takes the engines, not the loader, and runs at the latest when Python ends.
        self._finalizer = weakref.finalize(self, self._garage.close)

    def __iter__(self) -> Iterator[Any]:
        if self._garage.is_closed:
            raise LoaderClosedError(MSG_CLOSED)
        return _Epoch(self)

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: the dataset, sampler or batch sampler has no length.
        """
        return self._planner.batch_count()

    @property
    def dataset(self) -> Any:
        return self._config.dataset

    @property
    def batch_size(self) -> int | None:
        return self._config.batch_size

    @property
    def seed(self) -> int:
        """What the order and the dataset's random numbers are made from: as given, or as drawn."""
        return self._planner.seed

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if there is none."""
        return self._cursor().epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; later ones follow by themselves.

        A sampler that has ``set_epoch`` is told. The dataset, its transforms and ``collate_fn`` are told in every worker when
        an epoch begins, also without this call. If a state of this very epoch was loaded, the epoch goes on where that says.
        """
        try:
            epoch = operator.index(epoch)
        except TypeError:
            raise ConfigError(f"epoch={epoch!r} must be a whole number; pass the number of the epoch, from 0") from None
        if not 0 <= epoch < 1 << 62:
            raise ConfigError(f"epoch={epoch!r} must be 0 or more; pass the number of the epoch, from 0")
        sampler = self._config.batch_sampler if self._config.sampler is None else self._config.sampler
        for one in (sampler, getattr(sampler, "sampler", None)):
            hear = getattr(one, "set_epoch", None)
            if callable(hear):
                hear(epoch)
        if not (self._next.epoch == epoch and self._trail is None):
            self._next = Cursor(epoch)
            self._trail = None

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: what was given to the loop, not what was loaded ahead. Plain data, fit for JSON.

        It can be loaded with another number or kind of workers, another batch size, another number of ranks.
        """
        return write_state(self._cursor(), self._planner.identity(is_fresh=False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state says, with the next iteration. Nothing is loaded again; ``{}`` changes nothing.

        Samplers are asked anew and what they yielded before is passed over, so they must yield the same again. Streams go on by
        their own ``load_state_dict`` if they have one, else they are read from the beginning and what was had is forgotten.

        Raises:
            StateError: it is damaged, or of another dataset or other options. The loader is as it was.
        """
        if isinstance(state_dict, dict) and not state_dict:
            return
        cursor, seed = read_state(state_dict, self._planner.identity())
        if seed != self._planner.seed:
            self._planner.seed = seed
            self._garage.clear()  # its workers were born with the other seed
        self._next = cursor
        self._trail = None

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Where batch ``step`` (from 0) of an epoch comes from: its indices and seeds, and who loaded it, how long, how often.

        Args:
            epoch: by default the one that was begun last. Of others, and of batches that are still to come, what is planned
                is known and nothing else.

        Raises:
            IndexError: there is no such batch, or it came from a sampler or a stream and is no longer remembered.
        """
        epoch, plan, past = self._look_up(epoch, step)
        return lineage_of(
            epoch,
            step,
            plan,
            past,
            seed=self._planner.seed,
            grain_size=seed_grain(self._config),
            rank=self._planner.shard.rank,
        )

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load batch ``step`` of an epoch again, the very same, here and now: in this thread, so that a debugger can follow.

        Raises:
            IndexError: as ``explain``.
        """
        if self._config.is_stream:
            raise ConfigError("replay needs a dataset with __getitem__; a stream can only be read from its beginning")
        epoch, plan, past = self._look_up(epoch, step)
        if past is not None:
            assert past.plan.indices is not None
            plan = BatchPlan(past.plan.indices, past.plan.first_position, past.plan.stop)
        engine = build_engine(replace(self._config, num_workers=0, worker="process"), self._planner, only=plan)
        try:
            engine.begin_epoch(Trail(Cursor(epoch, step)))
            return engine.next_batch()
        finally:
            engine.close()

    def _look_up(self, epoch: int | None, step: int) -> tuple[int, BatchPlan | None, Past | None]:
        """The epoch that is meant, and of its batch ``step`` either what is planned or what is remembered."""
        trail = self._trail
        if epoch is None:
            epoch = self.epoch if trail is None else trail.epoch
        if trail is not None and trail.epoch != epoch:
            trail = None
        past = trail.find(step) if trail is not None else None
        if past is not None:
            return epoch, None, past
        if self._planner.is_given:
            raise IndexError(
                f"batch {step} of epoch {epoch} is not remembered; of samplers and streams only the latest batches are, of the "
                "epoch that was begun last"
            )
        start = trail.start if trail is not None and step >= trail.start.step else Cursor(epoch)
        plan = self._planner.batch(start, step)
        if plan is None:
            raise IndexError(f"epoch {epoch} has no batch {step}; it has {len(self)} batches, counted from 0")
        return epoch, plan, None

    def _cursor(self) -> Cursor:
        return self._next if self._trail is None else self._trail.cursor()

    def _begin(self, offered: Cursor) -> Trail:
        """Begin an epoch for an iteration that was made when ``offered`` was the next."""
        with self._lock:
            if self._next is not offered and self._trail is None:
                # A state was loaded, or an epoch set, after `iter`: that is for the next one.
                return Trail(offered)
            start = self._next
            self._trail = Trail(start)
            self._next = Cursor(start.epoch + 1)
            return self._trail

    def close(self) -> None:
        """Stop workers and give memory back. Batches that are kept stay as they are. Idempotent, safe from any thread."""
        self._finalizer()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._config
        dataset = type(config.dataset).__qualname__
        rank, world_size = self._planner.shard
        shard = "" if world_size == 1 else f", shard=({rank}, {world_size})"
        return (
            f"DataLoader({dataset}, batch_size={config.batch_size}, shuffle={config.shuffle}, "
            f"num_workers={config.num_workers}, worker={config.kind!r}, seed={self.seed}{shard})"
        )


def _drawn_seed(config: LoaderConfig) -> int:
    # All ranks must have the same, and they do not talk to each other: so it is no secret.
    is_shared = isinstance(config.shard, Shard) and config.shard.world_size > 1
    return 0 if is_shared else int.from_bytes(os.urandom(8)) >> 1


@final
class _Epoch(Iterator[Any]):
    """One iteration of a loader. Starts nothing before the first batch is asked for."""

    def __init__(self, loader: DataLoader) -> None:
        # Holds the loader: `for batch in DataLoader(...)` has no other reference to it.
        self._loader = loader
        self._offered = loader._next
        self._trail: Trail | None = None
        self._lock = threading.Lock()  # one thread at a time drives the engine
        self._engine: Engine | None = None
        self._is_over = False
        self._finalizer: weakref.finalize[[Garage, Engine], _Epoch] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._is_over:
                raise StopIteration
            engine = self._engine or self._begin()
            try:
                return engine.next_batch()
            except EpochEnd:
                if self._trail is not None:
                    self._trail.end()
                self._end()
                raise StopIteration from None
            except BaseException:
                if not engine.is_usable:
                    self._end()
                raise

    def _begin(self) -> Engine:
        loader = self._loader
        garage = loader._garage
        engine = self._engine = garage.take(lambda: build_engine(loader._config, loader._planner))
        self._trail = loader._begin(self._offered)
        engine.begin_epoch(self._trail)
        # A loop that is left by `break`, an exception or `return` drops this object: then the engine is free for the next.
        self._finalizer = weakref.finalize(self, _leave, garage, engine)
        self._finalizer.atexit = False
        return engine

    def _end(self) -> None:
        self._is_over = True
        if self._finalizer is not None:
            self._finalizer()
        self._engine = None


def _leave(garage: Garage, engine: Engine) -> None:
    if engine.is_usable:
        engine.leave_epoch()
    garage.give_back(engine)
