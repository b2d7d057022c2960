"""``infeed.open``: shards on disk or object storage as a map-style dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from infeed.data.cache import PieceCache
from infeed.data.dataset import Decode, ShardDataset, ShardReader
from infeed.data.index import Index, IndexStore
from infeed.data.parquet import ParquetDataset, parquet_scan
from infeed.data.patterns import COMPRESSED, expand, local_path, scheme_of
from infeed.data.storage import Storage, storage_for
from infeed.data.tar import TarDataset, tar_scan
from infeed.errors import ConfigError
from infeed.memory.limits import parse_bytes

Patterns: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Format: TypeAlias = Literal["tar", "parquet"]


def open(
    pattern: Patterns,
    *,
    columns: Sequence[str] | None = None,
    decode: Decode | None = None,
    format: Format | None = None,
    index: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str = "100GiB",
    storage_options: dict[str, Any] | None = None,
    progress: bool | None = None,
) -> ShardDataset:
    """Open tar shards or Parquet files as a map-style dataset with ``len``, ``dataset[i]`` and ``dataset.__getitems__``.

    The first call indexes the shards, in parallel: of tar files it reads the headers, of Parquet files the footers. Later calls
    use the stored index, and index only shards that have changed.

    A tar sample is a dict of ``__key__``, ``__url__`` and the bytes of its members by extension, as in WebDataset. A Parquet
    sample is a dict of its columns.

    Args:
        pattern: A path, a folder, a URL (``s3://``, ``gs://``, ``az://``, ``https://``), or a list of them. Paths and URLs may
            contain braces (``{000..127}``, ``{train,val}``) and globs (``*``, ``**``). A folder stands for the shards in it,
            without those of its subfolders. The order of shards is the order of indices.
        columns: Names of the columns to read; samples then contain these and no others. By default all.
        decode: A dict of column to function of its value, such as ``{"jpg": decode_image, "cls": int}``, or a function of the
            whole sample. Runs in workers.
        format: ``"tar"`` or ``"parquet"``; by default from the extension.
        index: Folder or URL prefix for the index. By default it is stored beside the shards if that is a local folder and
            writable, else in the cache folder (``INFEED_CACHE_DIR``, or ``~/.cache/infeed``).
        cache: Local folder in which to keep what was read from the shards, shared by all processes of the machine.
        cache_limit: Size limit of the cache, in bytes or as text such as ``"500GiB"``.
        storage_options: Keyword arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``. By
            default credentials come from the usual environment variables.
        progress: Show a progress bar while indexing; by default in a terminal.

    Raises:
        ConfigError: An argument is invalid, or the pattern matches nothing.
        StorageError: A shard cannot be read.
        ShardError: A shard is compressed as a whole, or damaged.

    Examples:
        >>> import io, tarfile, tempfile, infeed
        >>> folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        >>> with tarfile.open(f"{folder.name}/0.tar", "w") as tar:
        ...     member = tarfile.TarInfo("cat.txt")
        ...     member.size = 4
        ...     tar.addfile(member, io.BytesIO(b"meow"))
        >>> dataset = infeed.open(f"{folder.name}/*.tar", columns=["txt"], decode={"txt": bytes.decode}, progress=False)
        >>> len(dataset), dataset[0]
        (1, {'txt': 'meow'})
        >>> folder.cleanup()
    """
    found = find_shards(pattern, format, storage_options)
    store = index_store(found, None if index is None else os.fspath(index), storage_options)
    pieces = None if cache is None else PieceCache(cache, parse_bytes(cache_limit, "cache_limit"))
    return _dataset(found, store.open(progress=progress), pieces, columns, decode)


open.__module__ = "infeed"  # the public path, which pickles refer to


def build_index(
    pattern: Patterns, format: str | None, index: str | None, options: dict[str, Any] | None
) -> tuple[ShardDataset, str | None]:
    """Index shards and store the index beside them, also on object storage.

    Returns:
        The dataset, and where the index was written; ``None`` if it was up to date.
    """
    found = find_shards(pattern, format, options)
    store = index_store(found, index, options)
    opened = store.open(publish=True)
    return _dataset(found, opened, None, None, None), store.saved_at


class Shards(NamedTuple):
    """Shards of one format on one storage."""

    urls: list[str]
    format: Format
    storage: Storage


def find_shards(pattern: Patterns, format: str | None, options: dict[str, Any] | None) -> Shards:
    """Expand a pattern and check that all shards have one format."""
    storages: dict[str, Storage] = {}

    def list_urls(prefix: str) -> list[str]:
        return storages.setdefault(scheme_of(prefix), storage_for(prefix, options)).list_urls(prefix)

    urls = expand(pattern, list_urls)
    schemes = sorted({scheme_of(url) for url in urls})
    if len(schemes) > 1:
        raise ConfigError(
            f"pattern matches shards in {len(schemes)} kinds of storage ({', '.join(schemes)}); open them separately"
        )
    if format is not None and format not in ("tar", "parquet"):
        raise ConfigError(f"format={format!r} is not supported; use 'tar' or 'parquet'")
    formats = {format or _format_of(url) for url in urls}
    if len(formats) > 1:
        raise ConfigError("pattern matches tar and Parquet files; open them separately")
    storage = storages.get(schemes[0]) or storage_for(urls[0], options)
    return Shards(urls, "tar" if formats == {"tar"} else "parquet", storage)


def _format_of(url: str) -> Format:
    path = url.lower()
    if path.endswith(".tar"):
        return "tar"
    if path.endswith((".parquet", ".pq")):
        return "parquet"
    if path.endswith(COMPRESSED):
        raise ConfigError(
            f"{url}: the shard is compressed as a whole, so samples cannot be read at random; decompress it, or compress the "
            "files in it instead"
        )
    raise ConfigError(f"{url}: the extension is neither .tar nor .parquet; pass format=")


def index_store(found: Shards, given: str | None, options: dict[str, Any] | None) -> IndexStore:
    scan = tar_scan if found.format == "tar" else parquet_scan
    return IndexStore(found.urls, found.storage, scan(found.storage), given and local_path(given), options)


def _dataset(
    found: Shards, index: Index, cache: PieceCache | None, columns: Sequence[str] | None, decode: Decode | None
) -> ShardDataset:
    dataset = TarDataset if found.format == "tar" else ParquetDataset
    return dataset(index, ShardReader(index, found.storage, cache), columns, decode)
