"""All options of a loader, declared once: name, type, default, check and one-line documentation.

The signatures and docstrings of ``infeed.DataLoader`` and ``infeed.torch.DataLoader``, and the table in the documentation,
repeat parts of these declarations. ``tests/torch/test_declarations.py`` fails if one of them differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from numbers import Real
from operator import index
from typing import Any, Final, Literal, TypeAlias, final, get_args

import numpy as np

from infeed.autotune.capacity import MOST_WORKERS, WorkerKind
from infeed.distributed import find_shard
from infeed.errors import ConfigError
from infeed.memory.limits import available_cores, parse_bytes
from infeed.metrics.statistics import Statistics
from infeed.plan.sharding import ALONE, Shard
from infeed.plan.state import MOST_SEED_BITS
from infeed.workers.interpreter import StartMethod
from infeed.workers.ray_options import RayWorkers
from infeed.workers.recorder import Observe

WorkerName = Literal["process", "thread", "inline", "auto", "ray"]
WorkerChoice: TypeAlias = WorkerName | RayWorkers
Output = Literal["jax"]
BadSampleAction: TypeAlias = Literal["raise", "skip", "replace"]
BadSampleFunction: TypeAlias = Callable[[BaseException, Any], BadSampleAction]
Topic = Literal["torch", "workers", "reproducibility", "ranks", "memory", "faults", "device", "observing"]

# Larger values are typing errors, and would start that many processes before the user can react.
_MOST_WORKERS: Final = 1024


@final
class AutoCount(int):
    """Maximum number of workers for ``num_workers="auto"``. Its ``repr`` is ``'auto'``.

    The type survives copying, pickling and being passed to another loader.
    """

    def __repr__(self) -> str:
        return "'auto'"

    def __str__(self) -> str:
        return "auto"


def core_limit(cpu_limit: float | None) -> float:
    """Return the number of CPU cores that a loader may use: the available cores, or ``cpu_limit`` if that is less."""
    cores = available_cores()
    return cores if cpu_limit is None else min(cores, float(cpu_limit))


# --- checks: functions of name and value that return the value to use, or raise a ConfigError

_Check = Callable[[str, Any], Any]


def is_int(value: Any) -> bool:
    """Whether the value is an integer of any type, such as NumPy's, but not a bool."""
    try:
        return not isinstance(value, bool) and bool(value == value.__index__())
    except (AttributeError, TypeError):
        return False


def short(value: Any) -> str:
    """Return the value as text for a message, or only its type if the text is long."""
    try:
        text = repr(value)
    except Exception:  # an integer with too many digits, or a failing user-defined __repr__
        return f"{type(value).__qualname__} object"
    return text if len(text) <= 80 else f"{type(value).__qualname__} object"


def _integer(least: int | None, fix: str, *, or_none: bool = False) -> _Check:
    def check(name: str, value: Any) -> int | None:
        if value is None and or_none:
            return None
        if not is_int(value):
            raise ConfigError(f"{name}={short(value)} must be an int; {fix}")
        if least is not None and value < least:
            raise ConfigError(f"{name}={short(value)} must be at least {least}; {fix}")
        return index(value)  # NumPy integers become Python's

    return check


def _seconds(fix: str, *, or_none: bool = False) -> _Check:
    def check(name: str, value: Any) -> Any:
        if value is None and or_none:
            return None
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
            raise ConfigError(f"{name}={short(value)} must be a number of seconds, at least 0; {fix}")
        return value

    return check


def _one_of(*choices: str, or_none: bool = False) -> _Check:
    *first, last = map(repr, choices)
    listed = f"{', '.join(first)} or {last}" if first else last

    def check(name: str, value: Any) -> Any:
        if not (value is None and or_none) and not (isinstance(value, str) and value in choices):
            raise ConfigError(f"{name}={short(value)} is not supported; use {listed}")
        return value

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={short(value)} must be a bool; use True or False")
    return value


def _callable(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ConfigError(f"{name}={short(value)} must be callable; pass a function or None")
    return value


def _batches(name: str, value: Any) -> Any:
    if value is not None and not _is_iterable(value):
        raise ConfigError(f"{name}={short(value)} must be iterable; pass an iterable of indices")
    return value


def _shuffle(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "block"):
        raise ConfigError(f"{name}={short(value)} is not supported; use True, False or 'block'")
    return value


def _block_size(name: str, value: Any) -> Any:
    fix = "use 1 to shuffle single samples"
    if isinstance(value, str) and value != "auto":
        raise ConfigError(f"{name}={short(value)} must be an int or 'auto'; {fix}")
    return value if isinstance(value, str) else _integer(1, fix)(name, value)


def _sampler(name: str, value: Any) -> Any:
    return value if isinstance(value, RandomSampler) else _batches(name, value)


def _action(name: str, value: Any) -> Any:
    return value if callable(value) else _one_of(*get_args(BadSampleAction))(name, value)


def _on_error(name: str, value: Any) -> Any:
    return value if isinstance(value, ErrorPolicy) else _action(name, value)


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise ConfigError(f"{name}={short(value)} must be callable; pass a function of Statistics")
    return value


def _on_statistics(name: str, value: Any) -> Any:
    return value if value is None or isinstance(value, StatisticsCallback) else _function(name, value)


def _any(name: str, value: Any) -> Any:
    del name
    return value


def _worker(name: str, value: Any) -> Any:
    return value if isinstance(value, RayWorkers) else _one_of(*get_args(WorkerName))(name, value)


def _worker_count(name: str, value: Any) -> int:
    if isinstance(value, AutoCount):
        return value
    if isinstance(value, str):
        if value == "auto":
            return AutoCount(MOST_WORKERS)
        raise ConfigError(f"{name}={value!r} must be an int or 'auto'; use 0 to load in the main process")
    count: int = _integer(0, "use 0 to load in the main process")(name, value)
    if count > _MOST_WORKERS:
        raise ConfigError(f"{name}={short(value)} must be at most {_MOST_WORKERS}; did you mean batch_size?")
    return count


def _seed(name: str, value: Any) -> int | None:
    seed: int | None = _integer(None, "use seed=None to draw one", or_none=True)(name, value)
    if seed is not None and seed.bit_length() > MOST_SEED_BITS:
        raise ConfigError(f"{name}={short(value)} has more than {MOST_SEED_BITS} bits; use a smaller int")
    return seed


def _size(name: str, value: Any) -> Any:
    limit = None if value is None else parse_bytes(value)
    if limit is not None and limit < 1:
        raise ConfigError(f"{name}={value!r} must be at least 1 byte; use None for the default")
    return value


def check_cpu_limit(name: str, value: Any) -> Any:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < float(value) < float("inf")):
        raise ConfigError(f"{name}={short(value)} must be a number of CPU cores above 0; use None for all available cores")
    return value


def _shard(name: str, value: Any) -> Shard:
    if value is None:
        return ALONE
    if isinstance(value, str) and value == "auto":
        return find_shard()
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_int, value))
    rank, world_size = map(index, value) if is_pair else (0, 0)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{name}={short(value)} must be (rank, world_size) with 0 <= rank < world_size; use 'auto' to detect it, or None"
        )
    return Shard(rank, world_size)


def _error_budget(name: str, value: Any) -> int | float | None:
    if value is None:
        return None
    is_count = is_int(value) and not isinstance(value, float)
    if is_count and value >= 0:
        return index(value)
    if is_count or isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ConfigError(
            f"{name}={short(value)} must be a number of samples, or a fraction from 0.0 to 1.0; use None for no limit"
        )
    return float(value)


def _weights(name: str, given: Any) -> np.ndarray[Any, np.dtype[Any]] | None:
    if given is None:
        return None
    try:
        weights = np.asarray(given)
    except Exception as error:  # for example a ragged list
        raise ConfigError(f"{name} cannot be converted to an array; pass one number per sample") from error
    if weights.ndim != 1 or weights.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name} has shape {weights.shape} and dtype {weights.dtype}, but must be one-dimensional and numeric; pass one "
            "number per sample"
        )
    with np.errstate(over="ignore"):
        total = float(weights.sum(dtype=np.float64))
    if not bool((weights >= 0).all()) or not 0 < total < float("inf"):
        raise ConfigError(f"{name} must be finite, at least 0, and not all 0; a sample with weight 0 is never drawn")
    return weights


# --- declarations


def _option(default: Any, doc: str, check: _Check = _any, topic: Topic = "torch", *, torch: bool = False) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        doc: first sentence of its documentation.
        check: function of name and value that returns the value to store.
        topic: group in the documentation; "torch" for the arguments of torch's class.
        torch: whether ``infeed.torch.DataLoader`` adds the option to torch's arguments.
    """
    return field(default=default, metadata={"doc": doc, "check": check, "topic": topic, "torch": torch})


def _check_fields(value: Any, except_for: tuple[str, ...] = ()) -> None:
    """Check the fields of a frozen dataclass, and store what the checks return."""
    for one in fields(value):
        if one.name not in except_for:
            object.__setattr__(value, one.name, one.metadata["check"](one.name, getattr(value, one.name)))


def _is_default(value: Any, default: Any) -> bool:
    """Whether an option has its default value. Strings of an unpickled loader are equal to the default, but not identical."""
    return value is default or (type(value) is type(default) and isinstance(value, str | float) and value == default)


def _group_repr(group: Any) -> str:
    """Format a group of options as code, without the defaults."""
    first, *rest = ((one, getattr(group, one.name)) for one in fields(group))
    shown = [short(first[1])] + [f"{one.name}={short(value)}" for one, value in rest if not _is_default(value, one.default)]
    return f"{type(group).__qualname__}({', '.join(shown)})"


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RandomSampler:
    """Random order with a choice of samples, for ``sampler=`` of ``infeed.DataLoader``; derived from ``seed`` and the epoch.

    ``RandomSampler()`` draws every sample once, like ``shuffle=True``. Only ``weights`` takes memory per sample.

    Args:
        weights: one number per sample, proportional to its probability of being drawn, with replacement.
        replacement: draw each sample from the whole dataset, so that a sample can occur several times in an epoch.
        num_samples: number of samples per epoch; by default the length of the dataset.
        block_size: shuffle blocks of this many consecutive samples, and the samples within windows of blocks, so that a batch
            is read in few large pieces. ``"auto"``: the block size of the dataset. 1 shuffles single samples.
        window: number of blocks whose samples are shuffled together; by default 4.

    Raises:
        ConfigError: an argument is invalid.

    Examples:
        >>> import infeed
        >>> few = infeed.RandomSampler(num_samples=4)
        >>> len(infeed.DataLoader(range(1000), batch_size=2, sampler=few))
        2
    """

    __repr__ = _group_repr

    weights: Any = _option(None, "one number per sample", _weights)
    _: KW_ONLY
    replacement: bool = _option(False, "draw from the whole dataset", _boolean)
    num_samples: int | None = _option(
        None, "samples per epoch", _integer(1, "use None for the length of the dataset", or_none=True)
    )
    block_size: int | Literal["auto"] = _option(1, "samples per block", _block_size)
    window: int | None = _option(None, "blocks per window", _integer(1, "use 1 to shuffle within single blocks", or_none=True))

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.block_size != 1 and (self.weights is not None or self.replacement):
            raise ConfigError("block_size is not supported with weights or replacement, which draw single samples; omit it")


@final
@dataclass(frozen=True, slots=True, repr=False)
class ErrorPolicy:
    """What to do with samples that cannot be loaded, for ``on_error=``.

    Args:
        action: ``"raise"``, ``"skip"``, ``"replace"``, or a function of the exception and the index that returns one of these;
            the function runs in the main process. ``on_error="skip"`` is short for ``on_error=ErrorPolicy("skip")``.
        budget: number (int) or fraction (float) of bad samples that an epoch may have before the loader raises anyway.
        retries: number of retries of a sample that raises, before it counts as bad.

    Raises:
        ConfigError: an argument is invalid.

    Examples:
        >>> import infeed
        >>> loader = infeed.DataLoader(range(100), 10, on_error=infeed.ErrorPolicy("skip", budget=0.01, retries=2))
    """

    __repr__ = _group_repr

    action: BadSampleAction | BadSampleFunction = _option("raise", "what to do", _action)
    _: KW_ONLY
    budget: int | float | None = _option(None, "bad samples per epoch", _error_budget)
    retries: int = _option(0, "retries per sample", _integer(0, "use 0 for no retries"))

    def __post_init__(self) -> None:
        _check_fields(self)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Device:
    """Where and how batches are delivered, for ``device=``. ``device="cuda:0"`` is short for ``device=Device("cuda:0")``.

    Args:
        target: a device of torch or JAX, such as ``"cuda:0"``. With ``output="jax"``, ``None`` is JAX's default device.
        prefetch: number of batches to copy ahead of the one that the training loop uses; 0 copies on demand.
        convert: function of a batch on the device, run on the copy stream: for dtype, memory format or scaling.
        output: ``"jax"`` yields JAX arrays; ``infeed.DataLoader`` only.

    Raises:
        ConfigError: an argument is invalid.

    Examples:
        >>> import infeed
        >>> loader = infeed.DataLoader(range(100), 10, device=infeed.Device("cpu", prefetch=1))
    """

    __repr__ = _group_repr

    target: Any = _option(None, "a device of torch or JAX")
    _: KW_ONLY
    prefetch: int = _option(2, "batches to copy ahead", _integer(0, "use 0 to copy on demand"))
    convert: Callable[[Any], Any] | None = _option(None, "function of a batch", _callable)
    output: Output | None = _option(None, "type of arrays", _one_of("jax", or_none=True))

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.target is None and self.output is None:
            raise ConfigError("target=None is only supported with output='jax'; pass a device, such as Device('cuda:0')")


@final
@dataclass(frozen=True, slots=True, repr=False)
class StatisticsCallback:
    """A function that the loader calls regularly with its ``Statistics``, for ``on_statistics=``.

    ``on_statistics=function`` is short for ``on_statistics=StatisticsCallback(function)``.

    Args:
        function: called with the loader's ``Statistics`` in the thread of the training loop.
        interval: seconds between two calls; 0 calls it with every batch. The end of an epoch always calls it.

    Raises:
        ConfigError: an argument is invalid.

    Examples:
        >>> import infeed
        >>> seen = []
        >>> callback = infeed.StatisticsCallback(lambda statistics: seen.append(statistics.batch_count), interval=0)
        >>> _ = list(infeed.DataLoader(range(6), 2, on_statistics=callback))
        >>> seen[-1]
        3
    """

    __repr__ = _group_repr

    function: Callable[[Statistics], object] = _option(MISSING, "function of Statistics", _function)
    _: KW_ONLY
    interval: float = _option(10.0, "seconds between calls", _seconds("use 0 to call it with every batch"))

    def __post_init__(self) -> None:
        _check_fields(self)


# Not in the class bodies, where it would hide KW_ONLY from `dataclass`, which looks for it in the module of the class.
for _group in (RandomSampler, ErrorPolicy, Device, StatisticsCallback):
    _group.__module__ = "infeed"

OnError: TypeAlias = BadSampleAction | BadSampleFunction | ErrorPolicy
OnStatistics: TypeAlias = Callable[[Statistics], object] | StatisticsCallback


def _dataset(name: str, value: Any) -> Any:
    if isinstance(value, type):
        raise ConfigError(f"{name}={value.__qualname__} is a class; pass an instance: {value.__qualname__}(...)")
    if not _has(value, "__getitem__") and not _is_iterable(value):
        raise ConfigError(
            f"{name}={short(value)} has neither __getitem__ nor __iter__; implement __getitem__ and __len__ (map-style), or "
            "__iter__ (iterable)"
        )
    return value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a loader, checked one by one, in combination and against the dataset.

    The order is that of the constructors: torch's arguments first, then infeed's by topic.
    """

    dataset: Any = _option(MISSING, "map-style or iterable dataset.", _dataset)
    batch_size: int | None = _option(
        1,
        "number of samples per batch; ``None`` yields single samples unchanged.",
        _integer(1, "use batch_size=None to yield single samples", or_none=True),
    )
    shuffle: bool | Literal["block"] = _option(
        False, 'use a new order in every epoch, derived from ``seed``; ``"block"`` shuffles blocks of samples.', _shuffle
    )
    sampler: Iterable[Any] | RandomSampler | None = _option(
        None, "an iterable of indices in the order of loading, or an ``infeed.RandomSampler``.", _sampler
    )
    batch_sampler: Iterable[Iterable[Any]] | None = _option(
        None, "an iterable of lists of indices, one list per batch.", _batches
    )
    num_workers: int | Literal["auto"] = _option(
        0, 'number of workers; 0 loads in the main process, ``"auto"`` adds workers while they help.', _worker_count
    )
    collate_fn: Callable[[Any], Any] | None = _option(
        None, "function that converts a list of samples into a batch; runs in the worker.", _callable
    )
    pin_memory: bool = _option(False, "page-lock the memory of batches if torch has an accelerator.", _boolean)
    drop_last: bool = _option(False, "drop the last batch if it is incomplete.", _boolean)
    timeout: float = _option(
        0, "seconds to wait for a batch before raising ``LoadTimeoutError``; 0 sets no limit.", _seconds("use 0 for no limit")
    )
    worker_init_fn: Callable[[int], Any] | None = _option(
        None, "function that each worker calls with its number at start-up.", _callable
    )
    in_order: bool = _option(True, "``False`` yields batches in the order in which they become ready.", _boolean)
    worker: WorkerChoice = _option(
        "process",
        'kind of worker: ``"process"``, ``"thread"``, ``"inline"`` (the main process), ``"auto"`` or ``"ray"``.',
        _worker,
        "workers",
        torch=True,
    )
    start_method: StartMethod = _option(
        "auto",
        'how to start worker processes: ``"auto"``, ``"forkserver"`` or ``"spawn"``.',
        _one_of(*get_args(StartMethod)),
        "workers",
    )
    threads_per_worker: int = _option(
        1,
        "threads that NumPy, torch, OpenCV and other libraries may use in each worker process.",
        _integer(1, "use 1 for one thread per worker"),
        "workers",
        torch=True,
    )
    cpu_limit: float | None = _option(
        None,
        'with ``"auto"``, number of CPU cores that workers may use; by default all available cores.',
        check_cpu_limit,
        "workers",
        torch=True,
    )
    prefetch: int | None = _option(
        None,
        "maximum number of batches in flight; by default enough to keep workers busy.",
        _integer(1, "use num_workers=0 to load without prefetching", or_none=True),
        "workers",
    )
    seed: int | None = _option(
        None, "seed of the order and of all random numbers in the dataset.", _seed, "reproducibility", torch=True
    )
    grain_size: int | None = _option(
        None,
        "number of samples that share one seed and are loaded by one worker; by default a quarter of a batch.",
        _integer(1, "use grain_size=1 for one seed per sample", or_none=True),
        "reproducibility",
        torch=True,
    )
    shard: Shard | tuple[int, int] | Literal["auto"] | None = _option(
        None, '``(rank, world_size)`` if several processes share each epoch, or ``"auto"``.', _shard, "ranks"
    )
    pad: bool = _option(
        True, "repeat a sample on ranks that would get one less than others, so that all have equal batches.", _boolean, "ranks"
    )
    memory_limit: int | str | None = _option(
        None,
        'maximum memory for batches in flight and batches that you hold, in bytes or as text such as ``"2GiB"``.',
        _size,
        "memory",
        torch=True,
    )
    on_error: OnError = _option(
        "raise",
        '``"raise"``, ``"skip"`` or ``"replace"`` a sample that cannot be loaded; a function, or an ``infeed.ErrorPolicy``.',
        _on_error,
        "faults",
        torch=True,
    )
    sample_timeout: float = _option(
        0,
        "seconds that one sample may take before its worker is killed and the sample is bad; 0 sets no limit.",
        _seconds("use 0 for no limit"),
        "faults",
        torch=True,
    )
    hang_warning: float | None = _option(
        None,
        "seconds at one sample before infeed logs where its worker is; 0 disables the warning.",
        _seconds("use None for the default, 0 to disable it", or_none=True),
        "faults",
        torch=True,
    )
    device: Any = _option(
        None,
        'device on which batches are delivered, such as ``"cuda:0"``, or an ``infeed.Device``.',
        _any,
        "device",
        torch=True,
    )
    observe: Observe = _option(
        "timeline",
        'what to record: ``"timeline"`` (counters and timed spans), ``"counters"`` only, or ``"off"``.',
        _one_of(*get_args(Observe)),
        "observing",
        torch=True,
    )
    progress: bool = _option(
        False,
        "show a progress bar (tqdm) with the throughput, the wait time of the training loop and the number of workers.",
        _boolean,
        "observing",
        torch=True,
    )
    on_statistics: OnStatistics | None = _option(
        None,
        "function that is called with ``Statistics`` every 10 s, or an ``infeed.StatisticsCallback``.",
        _on_statistics,
        "observing",
        torch=True,
    )
    # Not arguments of ``infeed.DataLoader``.
    prefetch_factor: int | None = _option(None, "torch's batches in flight per worker")
    is_torch: bool = _option(False, "created by infeed.torch, so batches follow torch's format")

    def __post_init__(self) -> None:
        _check_fields(self, except_for=_CHECKED_BY_TORCH if self.is_torch else ())
        self._check_workers()
        self._check_observing()
        if self.is_torch:
            if isinstance(self.device, Device) and self.device.output is not None:
                raise ConfigError(
                    f"output={self.device.output!r} is not supported by infeed.torch; use infeed.DataLoader, or omit output"
                )
        else:
            self._check_sampling()
            self._check_dataset()
        if self.is_stream and self.error_policy.action == "replace":
            raise ConfigError("on_error='replace' is not supported for iterable datasets; use 'skip'")

    def shown(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as text."""
        shown = {"dataset": type(self.dataset).__qualname__}
        for one in OPTIONS[1:]:
            value = getattr(self, one.name)
            if one.name == "shard":
                value = None if value == ALONE else tuple(value)
            if not _is_default(value, one.default):
                shown[one.name] = short(value)
        return shown

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable: it has ``__iter__`` and no access by index."""
        return is_torch_stream(self.dataset) if self.is_torch else is_stream(self.dataset)

    @property
    def index_sampler(self) -> Iterable[Any] | None:
        """The user's iterable of indices, if any."""
        return None if isinstance(self.sampler, RandomSampler) else self.sampler

    @property
    def random_sampler(self) -> RandomSampler | None:
        """The random order that ``sampler`` or ``shuffle`` requests, if any."""
        if isinstance(self.sampler, RandomSampler):
            return self.sampler
        if not self.shuffle:
            return None
        # Datasets on object storage are shuffled by blocks unless a RandomSampler asks for single samples.
        is_by_blocks = self.shuffle == "block" or getattr(self.dataset, "prefers_block_shuffle", False) is True
        return RandomSampler(block_size="auto") if is_by_blocks else RandomSampler()

    @property
    def error_policy(self) -> ErrorPolicy:
        return self.on_error if isinstance(self.on_error, ErrorPolicy) else ErrorPolicy(self.on_error)

    @property
    def delivery(self) -> Device | None:
        """Where and how batches are converted before delivery; ``None`` delivers arrays in shared memory."""
        return self.device if self.device is None or isinstance(self.device, Device) else Device(self.device)

    @property
    def is_staged(self) -> bool:
        """Whether batches are converted (device, JAX) before delivery."""
        return self.device is not None

    @property
    def statistics_callback(self) -> StatisticsCallback | None:
        wanted = self.on_statistics
        return wanted if wanted is None or isinstance(wanted, StatisticsCallback) else StatisticsCallback(wanted)

    @property
    def kind(self) -> WorkerKind:
        if self.num_workers == 0:
            return "inline"
        if isinstance(self.worker, RayWorkers) or self.worker == "ray" or self.worker == "auto":
            return "process"
        return self.worker

    @property
    def ranks(self) -> int:
        """The number of training processes that share a Ray cluster."""
        # Without shard=, a DistributedSampler may divide the epoch among ranks.
        shard = find_shard() if self.shard == ALONE else self.shard
        world_size: int = shard.world_size  # type: ignore[union-attr]
        return world_size

    @property
    def ray(self) -> RayWorkers | None:
        """The options of workers on a Ray cluster; ``None`` if all workers are on this machine."""
        if isinstance(self.worker, RayWorkers):
            return self.worker
        return RayWorkers() if self.worker == "ray" else None

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
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def _check_workers(self) -> None:
        """Check options that depend on the number and kind of workers."""
        count = short(self.num_workers)
        is_fixed = not isinstance(self.num_workers, AutoCount) and (self.worker != "auto" or self.num_workers == 0)
        if self.cpu_limit is not None and is_fixed:
            raise ConfigError(
                f"cpu_limit={short(self.cpu_limit)} is not supported with num_workers={count}, which is already the limit; "
                "omit one of them, or use num_workers='auto'"
            )
        if self.sample_timeout and self.kind == "thread":
            raise ConfigError(
                "sample_timeout is not supported with worker='thread', because threads cannot be killed; use worker='process'"
            )
        if isinstance(self.worker, RayWorkers) and self.worker.local > self.most_workers > 0:
            raise ConfigError(
                f"RayWorkers(local={self.worker.local}) exceeds num_workers={count}, which counts local workers too; raise it"
            )
        if self.worker == "inline" and self.num_workers != 0:
            raise ConfigError(
                f"num_workers={count} is not supported with worker='inline'; use num_workers=0 or worker='process'"
            )

    def _check_observing(self) -> None:
        if self.observe != "off":
            return
        for name, is_given in (("progress", self.progress), ("on_statistics", self.on_statistics is not None)):
            if is_given:
                raise ConfigError(f"observe='off' is not supported with {name}; omit {name}, or use observe='counters'")
        if self.is_auto or self.is_kind_auto:
            raise ConfigError(
                "observe='off' is not supported with 'auto', which needs counters; use observe='counters', or pass a "
                "number and a kind of workers"
            )

    def _check_sampling(self) -> None:
        """Check the options that select the samples of an epoch and their order."""
        if self.sampler is not None and self.shuffle:
            raise ConfigError("shuffle=True is not supported with sampler, which sets the order; omit one of them")
        if self.batch_sampler is not None:
            for name, usual in (("batch_size", 1), ("shuffle", False), ("sampler", None), ("drop_last", False), ("pad", True)):
                value = getattr(self, name)
                if value is not usual and value != usual:
                    raise ConfigError(
                        f"{name}={short(value)} is not supported with batch_sampler, which defines the batches; omit {name}"
                    )
        if self.batch_size is None and self.drop_last:
            raise ConfigError(
                "drop_last=True is not supported with batch_size=None, which yields single samples; omit drop_last"
            )

    def _check_dataset(self) -> None:
        if self.is_stream:
            for name, is_given, fix in (
                ("shuffle=True", self.shuffle, "shuffle inside the dataset"),
                ("sampler", self.sampler is not None, "select samples inside the dataset"),
                ("batch_sampler", self.batch_sampler is not None, "select samples inside the dataset"),
            ):
                if is_given:
                    raise ConfigError(f"{name} is not supported for iterable datasets; {fix}")
        elif self.index_sampler is None and self.batch_sampler is None and not _has(self.dataset, "__len__"):
            raise ConfigError(
                f"dataset={short(self.dataset)} has __getitem__ but no __len__; implement it, or pass sampler= or "
                "batch_sampler="
            )


# Arguments that torch's constructor has checked.
_CHECKED_BY_TORCH: Final = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
# The arguments of ``infeed.DataLoader``, in its order.
OPTIONS: Final = fields(Options)[:-2]
# The options that ``infeed.torch.DataLoader`` adds to torch's arguments, with their defaults.
TORCH_OPTIONS: Final[dict[str, Any]] = {one.name: one.default for one in OPTIONS if one.metadata["torch"]}


def is_stream(dataset: Any) -> bool:
    """Whether the dataset is iterable: it has ``__iter__`` but no ``__getitem__``.

    torch's ``IterableDataset`` counts as iterable, although it inherits an unusable ``__getitem__``.
    """
    if isinstance(dataset, Mapping) and not isinstance(dataset, dict):
        return False
    if not _has(dataset, "__getitem__"):
        return True
    return is_torch_stream(dataset)


def is_torch_stream(dataset: Any) -> bool:
    """Whether the dataset is an instance of torch's ``IterableDataset``. Does not import torch."""
    return any(
        cls.__name__ == "IterableDataset" and cls.__module__.startswith("torch.utils.data") for cls in type(dataset).__mro__
    )


def _is_iterable(value: Any) -> bool:
    return _has(value, "__iter__") or _has(value, "__getitem__")


def _has(value: Any, method: str) -> bool:
    return callable(getattr(type(value), method, None))
