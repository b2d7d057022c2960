"""Validation of options: ``LoaderConfig`` checks them once, and later code relies on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from operator import index
from typing import Any, Final, Literal, TypeAlias, final, get_args

import numpy as np

from infeed.distributed import find_shard
from infeed.errors import ConfigError
from infeed.memory.limits import available_cores, parse_bytes
from infeed.plan.shards import ALONE, Shard
from infeed.plan.state import MOST_SEED_BITS


def check_int(name: str, value: Any, least: int | None, cure: str) -> None:
    if isinstance(value, bool) or not is_int(value):
        raise ConfigError(f"{name}={short(value)} must be a whole number; {cure}")
    if least is not None and value < least:
        raise ConfigError(f"{name}={short(value)} must be at least {least}; {cure}")


def check_seconds(name: str, value: Any, cure: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ConfigError(f"{name}={short(value)} must be a number of seconds, 0 or more; {cure}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name}={value!r} is not one of {listed}; choose one of these")


def checked_shard(shard: Any) -> Shard:
    """Return the validated shard; ``"auto"`` detects it."""
    if shard is None:
        return ALONE
    if isinstance(shard, str) and shard == "auto":
        return find_shard()
    rule = "must be (rank, world_size) with 0 <= rank < world_size; or 'auto' to find it, or None"
    if not isinstance(shard, tuple | list) or len(shard) != 2 or not all(is_int(part) for part in shard):
        raise ConfigError(f"shard={short(shard)} {rule}")
    rank, world_size = (index(part) for part in shard)
    if any(isinstance(part, bool) for part in shard) or not 0 <= rank < world_size:
        raise ConfigError(f"shard={short(shard)} {rule}")
    return Shard(rank, world_size)


def check_cpu_limit(limit: Any) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 < float(limit) < float("inf"):
        raise ConfigError(f"cpu_limit={short(limit)} must be a number of cores above 0; use None for all that there are")


def checked_weights(given: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the validated weights as an array."""
    try:
        weights = np.asarray(given)
    except Exception as error:  # for example a ragged list
        raise ConfigError("weights cannot be made an array; pass one number for each sample") from error
    if weights.ndim != 1 or weights.dtype.kind not in "fiub":
        raise ConfigError(
            f"weights of shape {weights.shape} and dtype {weights.dtype} must be one number for each sample; pass a "
            "sequence of numbers"
        )
    with np.errstate(over="ignore"):
        total = float(weights.sum(dtype=np.float64))
    if not bool((weights >= 0).all()) or not 0 < total < float("inf"):
        raise ConfigError("weights must be 0 or more, finite, and not all 0; a sample with weight 0 never comes")
    return weights


def checked_budget(budget: float | None) -> float | None:
    """Return the validated budget: an ``int`` is a number of samples, a ``float`` is a fraction of them."""
    if budget is None:
        return None
    rule = "must be a number of samples, or a fraction of them from 0.0 to 1.0; None sets no limit"
    if isinstance(budget, bool) or not isinstance(budget, Real) or not budget >= 0:
        raise ConfigError(f"error_budget={short(budget)} {rule}")
    if is_int(budget) and not isinstance(budget, float):
        return index(budget)
    if not budget <= 1:
        raise ConfigError(f"error_budget={short(budget)} {rule}")
    return float(budget)


def is_int(value: Any) -> bool:
    """Whether the value is an integer of any type, such as NumPy's."""
    try:
        return bool(value == value.__index__())
    except (AttributeError, TypeError):
        return False


def short(value: Any) -> str:
    """Return the value as text for a message, or only its type if the text is long."""
    try:
        text = repr(value)
    except Exception:  # an integer with too many digits, or a failing user-defined __repr__
        return f"{type(value).__qualname__} object"
    return text if len(text) <= 80 else f"{type(value).__qualname__} object"


# I/O-bound work gains from more workers than CPU cores, regardless of the number of cores. For CPU-bound work the tuner keeps
# the count within the cores.
MOST_WORKERS: Final = 64


@final
class AutoCount(int):
    """Maximum number of workers for ``num_workers="auto"``. Its ``repr`` is ``'auto'``.

    The type survives copying, pickling and being passed to another loader.
    """

    def __new__(cls, most: int) -> AutoCount:
        return super().__new__(cls, most)

    def __repr__(self) -> str:
        return "'auto'"

    def __str__(self) -> str:
        return "auto"

    def __reduce__(self) -> tuple[type[AutoCount], tuple[int]]:
        return AutoCount, (int(self),)


def core_limit(cpu_limit: float | None) -> float:
    """Return the number of CPU cores that a loader may use: the available cores, or ``cpu_limit`` if that is less."""
    cores = available_cores()
    return cores if cpu_limit is None else min(cores, float(cpu_limit))


WorkerKind = Literal["process", "thread", "inline"]
WorkerChoice = Literal["process", "thread", "inline", "auto"]
StartMethod = Literal["auto", "forkserver", "spawn"]
Output = Literal["jax"]
BadSampleAction: TypeAlias = Literal["raise", "skip", "replace"]
Observe: TypeAlias = Literal["timeline", "counters", "off"]
OnError: TypeAlias = BadSampleAction | Callable[[BaseException, Any], BadSampleAction]

# Larger values are typing errors, and would start that many processes before the user can react.
_MOST_WORKERS: Final = 1024


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """All options of a loader, validated individually, in combination and against the dataset."""

    dataset: Any
    batch_size: int | None
    shuffle: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Iterable[Any]] | None
    num_workers: int | Literal["auto"]
    worker: WorkerChoice
    collate_fn: Callable[[Any], Any] | None
    drop_last: bool
    seed: int | None
    in_order: bool
    prefetch: int | None
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    memory_limit: int | str | None
    grain_size: int | None
    start_method: StartMethod
    shard: Shard | tuple[int, int] | Literal["auto"] | None = None
    pad: bool = True
    replacement: bool = False
    weights: Any = None
    num_samples: int | None = None
    pin_memory: bool = False
    output: Output | None = None
    device: Any = None
    device_prefetch: int = 2
    convert: Callable[[Any], Any] | None = None
    on_error: OnError = "raise"
    error_budget: float | None = None
    retries: int = 0
    sample_timeout: float = 0
    hang_warning: float | None = None
    threads_per_worker: int = 1
    cpu_limit: float | None = None
    prefetch_factor: int | None = None  # torch's option: batches in flight per worker
    observe: Observe = "timeline"
    progress: bool = False
    on_statistics: Callable[[Any], Any] | None = None
    statistics_every: float = 10.0
    is_torch: bool = False  # created by infeed.torch: torch has validated its arguments, and batches follow torch's format

    def __post_init__(self) -> None:
        self._check_cpu_limit()
        if isinstance(self.num_workers, str) and self.num_workers == "auto":
            object.__setattr__(self, "num_workers", AutoCount(MOST_WORKERS))
        self._check_numbers()
        for name in (
            "batch_size",
            "num_workers",
            "seed",
            "prefetch",
            "grain_size",
            "num_samples",
            "retries",
            "threads_per_worker",
        ):
            value = getattr(self, name)
            # Convert NumPy integers to Python integers.
            if value is not None and not isinstance(value, AutoCount):
                object.__setattr__(self, name, index(value))
        self._check_choices()
        if not self.is_torch:
            self._check_callables()
            self._check_dataset()
            self._check_together()
        object.__setattr__(self, "shard", checked_shard(self.shard))
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights))

    def shown(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as text."""
        shown = {"dataset": type(self.dataset).__qualname__}
        for field in fields(self):
            value = getattr(self, field.name)
            usual = (None, False) if field.default is MISSING else (field.default,)
            if field.name not in ("dataset", "is_torch") and not any(value is one for one in usual):
                shown[field.name] = short(value)
        return shown

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable: it has ``__iter__`` and no access by index."""
        return _is_torch_stream(self.dataset) if self.is_torch else is_stream(self.dataset)

    @property
    def kind(self) -> WorkerKind:
        if self.num_workers == 0:
            return "inline"
        return "process" if self.worker == "auto" else self.worker

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers may change at run time. False for iterable datasets, whose order depends on it."""
        is_asked = isinstance(self.num_workers, AutoCount) or self.worker == "auto"
        return is_asked and self.kind != "inline" and not self.is_stream

    @property
    def is_kind_auto(self) -> bool:
        """Whether infeed chooses the kind of worker. It uses processes until it has decided.

        ``sample_timeout`` needs processes, because threads cannot be killed; ``worker_init_fn`` expects a separate process.
        """
        needs_processes = self.sample_timeout > 0 or self.worker_init_fn is not None or self.is_stream
        return self.worker == "auto" and self.kind != "inline" and not needs_processes

    @property
    def most_workers(self) -> int:
        """Maximum number of workers; 0 loads in the main process."""
        if isinstance(self.num_workers, AutoCount) and self.is_stream:
            return 1
        return int(self.num_workers)

    @property
    def core_limit(self) -> float:
        """CPU cores that workers may use if infeed chooses the number of workers."""
        return core_limit(self.cpu_limit)

    @property
    def is_cpu_limited(self) -> bool:
        """Whether ``cpu_limit`` is below the number of available CPU cores."""
        return self.core_limit < core_limit(None)

    @property
    def is_staged(self) -> bool:
        """Whether batches are converted (device, JAX) before delivery, instead of delivered as arrays in shared memory."""
        return self.device is not None or self.output is not None

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def _check_numbers(self) -> None:
        if self.batch_size is not None:
            check_int("batch_size", self.batch_size, 1, "use batch_size=None to yield single samples")
        if isinstance(self.num_workers, str):
            raise ConfigError(
                f"num_workers={self.num_workers!r} must be 'auto' or a whole number; use 0 to load in this process"
            )
        check_int("num_workers", self.num_workers, 0, "use 0 to load in this process")
        if self.num_workers > _MOST_WORKERS:
            raise ConfigError(
                f"num_workers={short(self.num_workers)} must be at most {_MOST_WORKERS}; did you mean batch_size?"
            )
        if self.seed is not None:
            check_int("seed", self.seed, None, "use seed=None to draw one")
            if index(self.seed).bit_length() > MOST_SEED_BITS:
                raise ConfigError(f"seed must have at most {MOST_SEED_BITS} bits; a state could not hold a longer one")
        if self.prefetch is not None:
            check_int("prefetch", self.prefetch, 1, "use num_workers=0 to load without prefetching")
        if self.grain_size is not None:
            check_int("grain_size", self.grain_size, 1, "use grain_size=1 for one seed per sample")
        if self.num_samples is not None:
            check_int("num_samples", self.num_samples, 1, "use None for as many as the dataset has")
        check_int("threads_per_worker", self.threads_per_worker, 1, "use 1 for as many threads as there are workers")
        check_seconds("timeout", self.timeout, "0 waits without limit")
        self._check_failures()
        limit = self.memory_limit_bytes
        if limit is not None and limit < 1:
            raise ConfigError(f"memory_limit={self.memory_limit!r} must be at least 1 byte; use None for the default")

    def _check_cpu_limit(self) -> None:
        limit = self.cpu_limit
        check_cpu_limit(limit)
        if limit is None:
            return
        is_number = not isinstance(self.num_workers, str | AutoCount)
        if is_number and (self.worker != "auto" or self.num_workers == 0):
            raise ConfigError(
                f"cpu_limit={short(limit)} has no meaning with num_workers={short(self.num_workers)}; that number is the "
                "limit, so leave one of them out, or use num_workers='auto'"
            )

    def _check_failures(self) -> None:
        """Check the options for samples that fail, and those for output and device."""
        if not callable(self.on_error):
            check_choice("on_error", self.on_error, get_args(BadSampleAction))
        check_int("device_prefetch", self.device_prefetch, 0, "0 copies a batch when it is asked for")
        if self.output is not None:
            check_choice("output", self.output, get_args(Output))
        if self.convert is not None and (not callable(self.convert) or not self.is_staged):
            raise ConfigError("convert must be a function of a batch on the device; pass device= as well")
        check_int("retries", self.retries, 0, "0 asks for a sample once")
        check_seconds("sample_timeout", self.sample_timeout, "0 lets a sample take as long as it likes")
        if self.on_error == "replace" and self.is_stream:
            raise ConfigError("on_error='replace' cannot go with a stream; nothing else can be asked for, so use 'skip'")
        if self.sample_timeout and self.kind == "thread":
            raise ConfigError("sample_timeout cannot go with worker='thread'; a thread cannot be stopped, so use processes")
        if self.hang_warning is not None:
            check_seconds("hang_warning", self.hang_warning, "None goes by what samples usually take, 0 says nothing")
        object.__setattr__(self, "error_budget", checked_budget(self.error_budget))

    def _check_choices(self) -> None:
        check_choice("worker", self.worker, get_args(WorkerChoice))
        check_choice("observe", self.observe, get_args(Observe))
        if self.on_statistics is not None and not callable(self.on_statistics):
            raise ConfigError(f"on_statistics={short(self.on_statistics)} must be callable; pass a function of Statistics")
        check_seconds("statistics_every", self.statistics_every, "0 calls on_statistics with every batch")
        if self.observe == "off" and (self.progress or self.on_statistics is not None):
            raise ConfigError("observe='off' leaves nothing to show; leave out progress and on_statistics, or observe")
        if self.observe == "off" and (self.is_auto or self.is_kind_auto):
            raise ConfigError("observe='off' leaves nothing to go by with 'auto'; use observe='counters', or give a number")
        check_choice("start_method", self.start_method, get_args(StartMethod))
        for name in ("shuffle", "drop_last", "in_order", "pad", "replacement", "pin_memory", "progress"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False; it is a switch")

    def _check_callables(self) -> None:
        for name in ("collate_fn", "worker_init_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} must be callable; pass a function, or leave it out")
        for name in ("sampler", "batch_sampler"):
            value = getattr(self, name)
            if value is not None and not _is_iterable(value):
                raise ConfigError(f"{name}={value!r} must be iterable; pass an iterable of indices")

    def _check_dataset(self) -> None:
        dataset = self.dataset
        if isinstance(dataset, type):
            raise ConfigError(f"dataset={dataset.__qualname__} is a class; pass an instance, {dataset.__qualname__}(...)")
        if not _has(dataset, "__getitem__") and not _is_iterable(dataset):
            raise ConfigError(
                f"dataset={short(dataset)} has neither __getitem__ nor __iter__; give it one: __getitem__ and __len__ for "
                "samples that are asked for by index, __iter__ for a stream"
            )

    def _check_together(self) -> None:
        if self.sampler is not None and self.shuffle:
            raise ConfigError("shuffle=True cannot go with sampler; the sampler decides the order, so leave shuffle out")
        self._check_sampling()
        if self.batch_sampler is not None:
            for name, value, default in (
                ("batch_size", self.batch_size, 1),
                ("shuffle", self.shuffle, False),
                ("sampler", self.sampler, None),
                ("drop_last", self.drop_last, False),
            ):
                if value is not default and value != default:
                    raise ConfigError(
                        f"{name}={short(value)} cannot go with batch_sampler; the batch sampler decides it, so leave it out"
                    )
        if self.batch_size is None and self.drop_last:
            raise ConfigError("drop_last=True cannot go with batch_size=None; there are no batches to drop")
        if self.is_stream:
            for name, given in (
                ("shuffle", self.shuffle),
                ("sampler", self.sampler is not None),
                ("batch_sampler", self.batch_sampler is not None),
            ):
                if given:
                    raise ConfigError(f"{name} cannot go with a stream; a dataset without __getitem__ decides its own order")
        elif self.sampler is None and self.batch_sampler is None and not _has(self.dataset, "__len__"):
            raise ConfigError(
                f"dataset={short(self.dataset)} has __getitem__ but no __len__; add it, or pass sampler= or batch_sampler="
            )
        if self.batch_sampler is not None and not self.pad:
            raise ConfigError("pad=False cannot go with batch_sampler; whole batches are shared out, so leave pad out")
        if self.worker == "inline" and self.num_workers != 0:
            raise ConfigError(
                f"num_workers={self.num_workers!r} has no meaning with worker='inline'; use num_workers=0, or worker='process'"
            )

    def _check_sampling(self) -> None:
        """Check the options that select the samples of an epoch."""
        chosen = [
            f"{name}={short(value)}" if name != "weights" else "weights"
            for name, value, default in (
                ("replacement", self.replacement, False),
                ("weights", self.weights, None),
                ("num_samples", self.num_samples, None),
            )
            if value is not default
        ]
        if not chosen:
            return
        for name, given in (
            ("sampler", self.sampler is not None),
            ("batch_sampler", self.batch_sampler is not None),
            ("a stream", self.is_stream),
        ):
            if given:
                raise ConfigError(
                    f"{chosen[0]} cannot go with {name}; that decides which samples come, so leave one of them out"
                )


def is_stream(dataset: Any) -> bool:
    """Whether the dataset is iterable: it has ``__iter__`` but no ``__getitem__``.

    torch's ``IterableDataset`` counts as iterable, although it inherits an unusable ``__getitem__``.
    """
    if isinstance(dataset, Mapping) and not isinstance(dataset, dict):
        return False
    if not _has(dataset, "__getitem__"):
        return True
    return _is_torch_stream(dataset)


def _is_torch_stream(dataset: Any) -> bool:
    return any(
        cls.__name__ == "IterableDataset" and cls.__module__.startswith("torch.utils.data") for cls in type(dataset).__mro__
    )


def _is_iterable(value: Any) -> bool:
    return _has(value, "__iter__") or _has(value, "__getitem__")


def _has(value: Any, method: str) -> bool:
    return callable(getattr(type(value), method, None))
