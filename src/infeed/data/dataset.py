"""The common part of tar and Parquet datasets: columns, decoding, access by index, blocks for the shuffle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import log2
from operator import index as as_index
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from infeed.data.cache import PieceCache
from infeed.data.index import Index
from infeed.data.patterns import scheme_of
from infeed.data.storage import Range, Storage
from infeed.errors import ConfigError

Decode: TypeAlias = Mapping[str, Callable[[Any], Any]] | Callable[[dict[str, Any]], Any]
Integers = npt.NDArray[np.int64]

# Smaller blocks cost more requests. Larger ones make fewer of a batch, so that batches are less mixed, and are not faster.
_BLOCK_BYTES: Final = 1 << 19


@final
class ShardReader:
    """Reads ranges of the shards of one dataset, through the local cache if there is one."""

    def __init__(self, index: Index, storage: Storage, cache: PieceCache | None) -> None:
        self._storage, self._cache = storage, cache
        self._stats = dict(zip(index.urls, index.stats, strict=True))

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        if self._cache is not None:
            return self._cache.read(ranges, self._stats, self._storage)
        return self._storage.read(ranges, self._stats.__getitem__)

    def can_cache(self, byte_count: int) -> bool:
        """Whether there is a local cache that can hold this much."""
        return self._cache is not None and self._cache.limit >= byte_count

    def close(self) -> None:
        self._storage.close()


class ShardDataset(ABC):
    """A map-style dataset over shards. Samples are dicts, or what ``decode`` returns.

    Reading is safe from several threads. A pickled copy has no open files and no connections.
    """

    # Columns that samples have although they are not stored in the shards.
    _extra_columns: tuple[str, ...] = ()

    def __init__(
        self,
        index: Index,
        reader: ShardReader,
        stops: Integers,
        columns: Sequence[str] | None,
        decode: Decode | None,
        known: Sequence[str],
    ) -> None:
        """Create the dataset.

        Args:
            stops: Number of samples up to the end of each shard.
            known: Columns that occur in the shards.
        """
        self._urls, self._reader, self._stops = index.urls, reader, stops
        self._length = int(stops[-1])
        self._columns = _checked_columns(columns, known, self._extra_columns)
        self._decode_sample = decode if callable(decode) else None
        self._decoders = _checked_decoders(decode, self._columns, known)
        self._byte_count = sum(stat.size for stat in index.stats)
        self.columns: tuple[str, ...] = tuple(known) if self._columns is None else self._columns

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, read together: ranges that lie close together are merged, requests run concurrently."""
        rows = np.array([as_index(index) for index in indices], dtype=np.int64)
        rows[rows < 0] += self._length
        wrong = (rows < 0) | (rows >= self._length)
        if wrong.any():
            index = indices[int(np.flatnonzero(wrong)[0])]
            raise IndexError(f"index {index} is out of bounds for a dataset of length {self._length}")
        samples = self._load(rows)
        decode = self._decode_sample
        if decode is None:
            return samples
        return [self._decoded(decode, sample, row) for sample, row in zip(samples, rows.tolist(), strict=True)]

    @abstractmethod
    def _load(self, rows: Integers) -> list[dict[str, Any]]:
        """Return the samples with their columns decoded."""

    @abstractmethod
    def _described(self, row: int) -> str:
        """Return what a message calls a sample."""

    def _decoded(self, function: Callable[[Any], Any], value: Any, row: int, column: str | None = None) -> Any:
        """Return ``function(value)``; an exception gets a note that names the sample."""
        try:
            return function(value)
        except Exception as error:
            where = "decode" if column is None else f"decode[{column!r}]"
            error.add_note(f"infeed: raised by {where} for {self._described(row)}")
            raise

    @property
    def prefers_block_shuffle(self) -> bool:
        """Whether ``shuffle=True`` shuffles blocks: on object storage, unless the local cache can hold all shards."""
        return scheme_of(self._urls[0]) != "" and not self._reader.can_cache(self._byte_count)

    @property
    def shuffle_blocks(self) -> int | Integers:
        """Samples per block of a block shuffle, about 512 KiB; or the end of each block, for blocks of several sizes.

        A power of two, as most batch sizes are: a block that two batches share is read for each of them.
        """
        return 1 << round(log2(max(1.0, _BLOCK_BYTES * self._length / max(1, self._byte_count))))

    @property
    def shuffle_window(self) -> int:
        """Blocks per window of a block shuffle: one, because every window on the border of two batches is read twice."""
        return 1

    @property
    def urls(self) -> list[str]:
        """The shards, in the order of the indices."""
        return list(self._urls)

    def close(self) -> None:
        """Close open files. Later reads open them again."""
        self._reader.close()

    def __repr__(self) -> str:
        shards = f"{len(self._urls)} shard{'s' if len(self._urls) > 1 else ''}"
        return f"<{type(self).__name__}: {self._length:,} samples in {shards}, columns {', '.join(self.columns)}>"


def _checked_columns(columns: Sequence[str] | None, known: Sequence[str], extra: Sequence[str]) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns) or not columns:
        raise ConfigError(f"columns={columns!r} must be a list of names; the shards have {', '.join(known)}")
    for name in columns:
        if name not in known and name not in extra:
            raise ConfigError(f"columns has {name!r}, which is in no shard; the shards have {', '.join(known)}")
    return tuple(columns)


def _checked_decoders(
    decode: Decode | None, columns: tuple[str, ...] | None, known: Sequence[str]
) -> dict[str, Callable[[Any], Any]]:
    if decode is None or callable(decode):
        return {}
    if not isinstance(decode, Mapping):
        raise ConfigError(f"decode={decode!r} must be a dict or a function; pass a function per column, or one for samples")
    for name, function in decode.items():
        if not callable(function):
            raise ConfigError(f"decode[{name!r}]={function!r} must be callable; pass a function of the column's value")
        if name not in known:
            raise ConfigError(f"decode has {name!r}, which is in no shard; the shards have {', '.join(known)}")
        if columns is not None and name not in columns:
            raise ConfigError(f"decode has {name!r}, which is not among columns={list(columns)}; add it there")
    return dict(decode)
