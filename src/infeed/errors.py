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
    """An option, or a combination of options, is invalid."""


class StateError(InfeedError, ValueError):
    """A state cannot be loaded: it is damaged or incomplete, or belongs to another version, dataset or other options."""


class LoaderClosedError(InfeedError, RuntimeError):
    """The loader, or the iterator of an epoch, was used after it was closed."""


class SampleError(InfeedError):
    """A sample could not be loaded, and the dataset's exception could not be re-created in this process."""


class CollateError(SampleError, ValueError):
    """Samples could not be collated into a batch: shapes or structures differ."""


class WorkerError(InfeedError, RuntimeError):
    """A worker failed."""


class WorkerStartError(WorkerError):
    """A worker did not become ready: the dataset cannot be pickled, an import failed, or ``worker_init_fn`` raised."""

    # Names the object that cannot be pickled, if that is the cause: "dataset.file is a h5py.File, which cannot be pickled".
    unpicklable: str | None = None


class WorkerDiedError(WorkerError):
    """A worker was killed or exited, and its tasks could not be retried."""


class LoadTimeoutError(WorkerError, TimeoutError):
    """No batch arrived within ``timeout`` seconds."""


class MemoryLimitError(InfeedError, MemoryError):
    """Not enough shared memory. The message gives the requested size, the available size and how to reduce the request."""


class StorageError(InfeedError, OSError):
    """A shard could not be read from disk or object storage. The message names the shard, the offset and the cause."""


class ShardError(InfeedError, ValueError):
    """The content of a shard is not as expected: it is compressed, damaged, has changed, or a sample lacks a column."""


class InternalError(InfeedError, RuntimeError):
    """A bug in infeed. The message asks the user to report it."""


# Users import them from there, and see that name in messages and pickles.
for _error in [one for one in vars().values() if isinstance(one, type)]:
    _error.__module__ = "infeed"
del _error
