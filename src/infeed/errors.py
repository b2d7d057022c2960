"""Exception hierarchy. The type shows the cause; the message gives the name, the value, the violated rule and the fix."""

from __future__ import annotations


class InfeedError(Exception):
    """Base class of all errors that infeed itself raises.

    Exceptions from the dataset or other user code keep their own type, plus a note that names where they were raised. So
    ``except ValueError`` works the same with and without workers.

    Examples:
        >>> import infeed
        >>> try:
        ...     infeed.DataLoader(range(6), batch_size=0)
        ... except infeed.InfeedError as error:
        ...     print(error)
        batch_size=0 must be at least 1; use batch_size=None to yield single samples
    """


class ConfigError(InfeedError, ValueError):
    """An option, or a combination of options, is invalid.

    Examples:
        >>> import infeed
        >>> try:
        ...     infeed.DataLoader(range(6), shuffle=True, sampler=[0, 1])
        ... except infeed.ConfigError as error:
        ...     print(error)
        shuffle=True is not supported with sampler, which sets the order; omit one of them
    """


class StateError(InfeedError, ValueError):
    """A state cannot be loaded: it is damaged or incomplete, or belongs to another version, dataset or other options.

    Examples:
        >>> import infeed
        >>> try:
        ...     infeed.DataLoader(range(6)).load_state_dict({"epoch": 0})
        ... except infeed.StateError as error:
        ...     print(error)
        state has no 'version', so it is not a state of infeed; pass the result of state_dict()
    """


class LoaderClosedError(InfeedError, RuntimeError):
    """The loader, or the iterator of an epoch, was used after it was closed.

    Examples:
        >>> import infeed
        >>> loader = infeed.DataLoader(range(6))
        >>> loader.close()
        >>> try:
        ...     next(iter(loader))
        ... except infeed.LoaderClosedError as error:
        ...     print(error)
        this loader is closed; create another, or close it later
    """


class SampleError(InfeedError):
    """A sample failed and its exception could not be re-created in this process, or there were too many bad samples.

    Examples:
        >>> import infeed
        >>> from infeed.testing import FaultyDataset
        >>> loader = infeed.DataLoader(FaultyDataset(6, [2]), 3, on_error=infeed.ErrorPolicy("skip", budget=0))
        >>> try:
        ...     batches = list(loader)
        ... except infeed.SampleError as error:
        ...     print(str(error).partition(":")[0])
        budget=0 exceeded
    """


class CollateError(SampleError, ValueError):
    """Samples could not be collated into a batch: shapes or structures differ.

    Examples:
        >>> import infeed
        >>> import numpy as np
        >>> try:
        ...     list(infeed.DataLoader([np.zeros(2), np.zeros(3)], batch_size=2))
        ... except infeed.CollateError as error:
        ...     print(str(error).partition(";")[0])
        arrays do not stack at sample: shape (2,) at index=0 and shape (3,) at index=1
    """


class WorkerError(InfeedError, RuntimeError):
    """A worker failed.

    Examples:
        >>> import infeed
        >>> import threading
        >>> try:
        ...     next(iter(infeed.DataLoader([threading.Lock()], num_workers=1)))
        ... except infeed.WorkerError as error:
        ...     print(type(error).__name__)
        WorkerStartError
    """


class WorkerStartError(WorkerError):
    """A worker did not become ready: the dataset cannot be pickled, an import failed, or ``worker_init_fn`` raised.

    Examples:
        >>> import infeed
        >>> import threading
        >>> try:
        ...     next(iter(infeed.DataLoader([threading.Lock()], num_workers=1)))
        ... except infeed.WorkerStartError as error:
        ...     print(error.unpicklable)
        dataset[0] is a _thread.lock, which cannot be pickled
    """

    # Names the object that cannot be pickled, if that is the cause: "dataset.file is a h5py.File, which cannot be pickled".
    unpicklable: str | None = None


class WorkerDiedError(WorkerError):
    """A worker was killed or exited, and its tasks could not be retried.

    Examples:
        >>> import infeed
        >>> from infeed.testing import CrashingDataset
        >>> dataset = CrashingDataset(2, crash_at=[1], count_file="deaths.txt", times=None)
        >>> try:
        ...     with infeed.DataLoader(dataset, num_workers=1) as loader:
        ...         batches = list(loader)
        ... except infeed.WorkerDiedError as error:
        ...     print(str(error).partition(";")[0])
        3 workers died while loading this sample
    """


class LoadTimeoutError(WorkerError, TimeoutError):
    """No batch arrived within ``timeout`` seconds.

    Examples:
        >>> import infeed
        >>> from infeed.testing import SlowDataset
        >>> try:
        ...     with infeed.DataLoader(SlowDataset(1, 0.2), num_workers=1, worker="thread", timeout=0.01) as loader:
        ...         batches = list(loader)
        ... except infeed.LoadTimeoutError as error:
        ...     print(str(error).partition(";")[0])
        timeout=0.01 s exceeded without a batch
    """


class MemoryLimitError(InfeedError, MemoryError):
    """Not enough shared memory. The message gives the requested size, the available size and how to reduce the request.

    Examples:
        >>> import infeed
        >>> import numpy as np
        >>> try:
        ...     list(infeed.DataLoader([np.zeros(1000)], num_workers=1, worker="thread", memory_limit=1000))
        ... except infeed.MemoryLimitError as error:
        ...     print(str(error).partition(":")[0])
        memory_limit=1000 B reached
    """


class StorageError(InfeedError, OSError):
    """A shard could not be read from disk or object storage. The message names the shard, the offset and the cause.

    Examples:
        >>> import infeed
        >>> try:
        ...     infeed.open("missing.tar")
        ... except infeed.StorageError as error:
        ...     print(str(error).rpartition("missing.tar: ")[2])
        No such file or directory; check the path
    """


class ShardError(InfeedError, ValueError):
    """The content of a shard is not as expected: it is compressed, damaged, has changed, or a sample lacks a column.

    Examples:
        >>> import infeed
        >>> from pathlib import Path
        >>> _ = Path("text.tar").write_text("not a tar file")
        >>> try:
        ...     infeed.open("text.tar")
        ... except infeed.ShardError as error:
        ...     print(str(error).rpartition(": ")[2])
        the file is truncated inside the header at offset 0; copy or write it again
    """


class InternalError(InfeedError, RuntimeError):
    """A bug in infeed; please report it."""


# Users import them from there, and see that name in messages and pickles.
for _error in [one for one in vars().values() if isinstance(one, type)]:
    _error.__module__ = "infeed"
del _error
