"""The exception tree. Each type says whose fault it is; each message gives name, value, broken rule and cure."""

from __future__ import annotations


class InfeedError(Exception):
    """Base of every error that infeed raises by itself.

    An exception raised by the user's own dataset or functions is not one of these: it arrives with its own type (and a note
    that says where it was raised), so that ``except ValueError`` works as it does without workers.
    """

    __module__ = "infeed"


class ConfigError(InfeedError, ValueError):
    """An option was given that cannot work."""

    __module__ = "infeed"


class StateError(InfeedError, ValueError):
    """A state cannot be loaded: it is damaged, of another version, or of another dataset or other options.

    Or it cannot be taken: worker processes have copies of a map-style dataset that has a state of its own.
    """

    __module__ = "infeed"


class LoaderClosedError(InfeedError, RuntimeError):
    """The loader, or the epoch being iterated, was used after it was closed."""

    __module__ = "infeed"


class SampleError(InfeedError):
    """A sample could not be loaded, and the dataset's own exception could not be rebuilt in this process."""

    __module__ = "infeed"


class CollateError(SampleError, ValueError):
    """Samples could not be made into one batch: shapes or structures differ."""

    __module__ = "infeed"


class WorkerError(InfeedError, RuntimeError):
    """A worker went away."""

    __module__ = "infeed"


class WorkerStartError(WorkerError):
    """A worker never became ready: the dataset cannot be sent, an import failed, or ``worker_init_fn`` raised."""

    __module__ = "infeed"
    # What cannot be pickled, if that is why: "dataset.file is a h5py.File, which cannot be pickled".
    unpicklable: str | None = None


class WorkerDiedError(WorkerError):
    """A worker was killed or ended by itself, and its work could not be done again."""

    __module__ = "infeed"


class LoadTimeoutError(WorkerError, TimeoutError):
    """No batch arrived within ``timeout`` seconds."""

    __module__ = "infeed"


class MemoryLimitError(InfeedError, MemoryError):
    """Shared memory is short: says what was asked, what there is and how to ask for less."""

    __module__ = "infeed"


class InternalError(InfeedError, RuntimeError):
    """A bug in infeed; the message asks for a report."""

    __module__ = "infeed"
