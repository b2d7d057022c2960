"""Parquet files as a map-style dataset: rows addressed by row group, read with pyarrow."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, Final, final

import numpy as np

from infeed.data.dataset import Decode, Integers, ShardDataset, ShardReader
from infeed.data.index import Index, Part, Scan, texts
from infeed.data.storage import Range, Stat, Storage, any_version
from infeed.errors import ConfigError, InfeedError, ShardError

_SEPARATOR: Final = "\0"
# Decoded row groups that one process keeps. Samples of a row group are read together or soon after each other.
MEMORY_BYTES: Final = 1 << 28
# Footers of files that one process keeps.
_FOOTERS: Final = 1000
_MOST_WINDOW: Final = 16


def parquet_scan(storage: Storage) -> Scan:
    """Return how to index Parquet files."""

    def scan(url: str, stat: Stat) -> Part:
        footer = _footer(url, stat.size, lambda ranges: storage.read(ranges, any_version))
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        schema = footer.schema.to_arrow_schema()
        names, _ = texts([_SEPARATOR.join(schema.names)])
        types, _ = texts([_SEPARATOR.join(map(_type_text, schema.types))])
        column_bytes = dict.fromkeys(schema.names, 0)
        for leaf in range(footer.num_columns):
            column = _column_of(footer.schema.column(leaf).path, column_bytes)
            if column is not None:
                column_bytes[column] += sum(group.column(leaf).total_uncompressed_size for group in groups)
        return {
            "rows": np.array([group.num_rows for group in groups], dtype=np.int64),
            "bytes": np.array([group.total_byte_size for group in groups], dtype=np.int64),
            "column_bytes": np.array([column_bytes[name] for name in schema.names], dtype=np.int64),
            "names": names,
            "types": types,
        }

    return Scan("parquet", ("rows", "bytes", "column_bytes", "names", "types"), scan)


@final
class ParquetDataset(ShardDataset):
    """A sample is a dict of the columns of a row. Numbers keep their type, as NumPy scalars; lists of numbers are arrays."""

    def __init__(self, index: Index, reader: ShardReader, columns: Sequence[str] | None, decode: Decode | None) -> None:
        rows, counts = index.arrays["rows"], index.counts["rows"]
        known = _common_names(index)
        self._group_stops = np.cumsum(rows, dtype=np.int64)
        self._group_starts = self._group_stops - rows
        self._first_groups = np.cumsum(counts) - counts  # of each shard
        shard_stops = np.concatenate([[0], self._group_stops])[np.cumsum(counts)]
        super().__init__(index, reader, shard_stops, columns, decode, known)
        self._sizes = {url: stat.size for url, stat in zip(index.urls, index.stats, strict=True)}
        # By shard, of all columns and of those that are read. Row groups of a shard have about the same proportions.
        sizes = index.arrays["column_bytes"].reshape(len(index.urls), len(known))
        wanted = sizes[:, [known.index(name) for name in self.columns]].sum(axis=1)
        shares = np.repeat(wanted / np.maximum(1, sizes.sum(axis=1)), counts)
        self._decoded_bytes = int(wanted.sum())
        self._group_bytes = int((index.arrays["bytes"] * shares).max(initial=1))
        self._reset()

    def _reset(self) -> None:
        self._footers: dict[str, Any] = {}
        self._tables: dict[int, Any] = {}  # by row group, least recently used first
        self._lock = threading.Lock()  # guards changes of both

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_footers", "_tables", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def prefers_block_shuffle(self) -> bool:
        """Whether ``shuffle=True`` shuffles row groups: if reading single rows would decode them again and again.

        A process keeps 256 MiB of decoded columns. With more, each row of an exact order would decode a row group.
        """
        return super().prefers_block_shuffle or self._decoded_bytes > MEMORY_BYTES

    @property
    def shuffle_blocks(self) -> int | Integers:
        """The end of each row group."""
        return self._group_stops

    @property
    def shuffle_window(self) -> int:
        """Row groups that a process can keep decoded."""
        return int(max(1, min(_MOST_WINDOW, MEMORY_BYTES // max(1, self._group_bytes))))

    def _load(self, rows: Integers) -> list[dict[str, Any]]:
        groups = np.searchsorted(self._group_stops, rows, side="right")
        samples: list[dict[str, Any]] = [{} for _ in rows]
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            table = self._table(group)
            inside = rows[places] - self._group_starts[group]
            for name in self.columns:
                values = _taken(table.column(name), inside)
                decode = self._decoders.get(name)
                for place, value in zip(places.tolist(), values, strict=True):
                    if decode is not None:
                        value = self._decoded(decode, value, int(rows[place]), name)
                    samples[place][name] = value
        return samples

    def _described(self, row: int) -> str:
        return f"row {row} of the dataset"

    def _table(self, group: int) -> Any:
        with self._lock:
            table = self._tables.pop(group, None)
            if table is not None:
                self._tables[group] = table  # now the most recently used
                return table
        table = self._read_group(group)
        with self._lock:
            self._tables[group] = table
            total = sum(one.nbytes for one in self._tables.values())
            for old in list(self._tables)[:-1]:
                if total <= MEMORY_BYTES:
                    break
                total -= self._tables.pop(old).nbytes
        return table

    def _read_group(self, group: int) -> Any:
        shard = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        url, number = self._urls[shard], group - int(self._first_groups[shard])
        footer = self._footers.get(url)
        if footer is None:
            footer = _footer(url, self._sizes[url], self._reader.read)
            with self._lock:
                if len(self._footers) >= _FOOTERS:
                    self._footers.clear()
                self._footers[url] = footer
        file = _RangeFile(url, self._sizes[url], self._reader.read)
        file.fetch(_chunks(footer.row_group(number), set(self.columns)))
        parquet = _parquet(url)
        try:
            found = parquet.ParquetFile(file, metadata=footer).read_row_group(
                number, columns=list(self.columns), use_threads=False
            )
        except InfeedError:
            raise
        except (OSError, ValueError) as error:
            raise ShardError(
                f"{url}: row group {number} cannot be read: {error}; the shard is damaged, copy or write it again"
            ) from error
        return found.combine_chunks()


@final
class _RangeFile(io.RawIOBase):
    """A shard as a file of Python. Ranges that are fetched ahead are read concurrently, others when they are asked for."""

    def __init__(self, url: str, size: int, read: Callable[[Sequence[Range]], list[bytes]]) -> None:
        super().__init__()
        self._url, self._size, self._read = url, size, read
        self._position = 0
        self._held: list[tuple[int, bytes]] = []

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        found = self._read([Range(self._url, offset, size) for offset, size in ranges])
        self._held += [(offset, data) for (offset, _), data in zip(ranges, found, strict=True)]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        begin = self._position
        stop = self._size if size < 0 else min(self._size, begin + size)
        self._position = max(begin, stop)
        for offset, data in self._held:
            if offset <= begin and stop <= offset + len(data):
                return data[begin - offset : stop - offset]
        return self._read([Range(self._url, begin, stop - begin)])[0] if stop > begin else b""


def _parquet(url: str) -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f'{url} needs pyarrow; install it with: pip install "infeed[parquet]"') from error


def _footer(url: str, size: int, read: Callable[[Sequence[Range]], list[bytes]]) -> Any:
    """Return the metadata at the end of a file."""
    parquet = _parquet(url)
    file = _RangeFile(url, size, read)
    tail = min(size, 1 << 16)  # holds most footers, so that one request is enough
    file.fetch([(size - tail, tail)])
    try:
        return parquet.read_metadata(file)
    except InfeedError:  # such as a request that failed
        raise
    except (OSError, ValueError) as error:
        raise ShardError(f"{url} is not a Parquet file: {error}") from error


def _chunks(group: Any, columns: set[str]) -> list[tuple[int, int]]:
    """Return offset and size of the column chunks of a row group."""
    found = []
    for number in range(group.num_columns):
        chunk = group.column(number)
        if _column_of(chunk.path_in_schema, columns) is not None:
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                begin = min(begin, chunk.dictionary_page_offset)
            found.append((begin, chunk.total_compressed_size))
    return found


def _column_of(path: str, columns: Collection[str]) -> str | None:
    """Return which of these columns contains a leaf of the schema. Names of columns may have dots, too."""
    while path not in columns:
        if "." not in path:
            return None
        path = path.rpartition(".")[0]
    return path


def _taken(column: Any, rows: Integers) -> list[Any]:
    try:
        return _values(column.take(rows))
    except NotImplementedError:  # pyarrow has no `take` for string_view and binary_view
        return [column[row].as_py() for row in rows.tolist()]


def _values(column: Any) -> list[Any]:
    """Return the values of a column: NumPy scalars and arrays where its type is numeric, else Python objects.

    Each value is a function of its own row, whatever the others are, so that it does not depend on how rows are grouped.
    """
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    return [value for chunk in chunks for value in _chunk_values(chunk)]


def _chunk_values(array: Any) -> list[Any]:
    types = import_module("pyarrow").types
    kind = array.type

    def is_plain(one: Any) -> bool:
        return bool(types.is_integer(one) or types.is_floating(one) or types.is_boolean(one))

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_plain(kind) and not (is_list and is_plain(kind.value_type)):
        return list(array.to_pylist())
    if array.null_count:
        found = iter(_chunk_values(array.drop_null()))
        return [next(found) if is_valid else None for is_valid in array.is_valid().to_pylist()]
    if not is_list:
        return list(array.to_numpy(zero_copy_only=False))
    flat = array.flatten()
    if flat.null_count:  # a list with missing elements has no dtype
        lists = [one.values for one in array]
        return [one.to_pylist() if one.null_count else _writable(one) for one in lists]
    numbers = _writable(flat)
    if types.is_fixed_size_list(kind):
        return list(numbers.reshape(len(array), kind.list_size))
    offsets = array.offsets.to_numpy()
    return [numbers[begin:end] for begin, end in zip(offsets - offsets[0], offsets[1:] - offsets[0], strict=False)]


def _writable(array: Any) -> Any:
    numbers = array.to_numpy(zero_copy_only=False)
    return numbers if numbers.flags.writeable else numbers.copy()


def _type_text(kind: Any) -> str:
    """Return a type as text, without what does not change its values: names of elements, and whether they may be missing."""
    return re.sub(r"(?<=list<)\w+: ", "", str(kind)).replace(" not null", "")


def _common_names(index: Index) -> list[str]:
    """Return the columns, whose names and types are the same in all files.

    Raises:
        ShardError: They are not.
    """
    first: tuple[list[str], list[str]] | None = None
    for url, part in zip(index.urls, index.parts(), strict=True):
        names, types = (part[name].tobytes().decode().split(_SEPARATOR) for name in ("names", "types"))
        twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise ShardError(f"{url} has two columns named {twice!r}; rename one of them")
        first = first or (names, types)
        if names != first[0]:
            raise ShardError(f"{url} has columns {names}, but {index.urls[0]} has {first[0]}; open them separately")
        for name, kind, usual in zip(names, types, first[1], strict=True):
            if kind != usual:
                raise ShardError(
                    f"{url} has column {name!r} of type {kind}, but {index.urls[0]} has {usual}; write them with one schema, "
                    "or open them separately"
                )
    return first[0] if first else []
