"""The index of a list of shards: built once, in parallel, and stored beside the shards or in the user's cache folder.

The file is a NumPy archive, whose checksums reveal damage. It holds arrays per shard, and the size and version of each shard
when it was scanned. A shard whose size or version differs now is scanned again; the others are not.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import eq
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infeed.data.locks import cache_folder, file_lock
from infeed.data.patterns import scheme_of
from infeed.data.storage import Stat, Storage, common_prefix, in_parallel, storage_for
from infeed.errors import ConfigError, StorageError

_LOG: Final = logging.getLogger("infeed")
_VERSION: Final = 3
# Threads that scan shards: of local files, whose headers are mostly parsed under the GIL, and of remote ones, which wait.
_LOCAL_SCANS: Final = 4
_REMOTE_SCANS: Final = 16

Array = npt.NDArray[Any]
Part = dict[str, Array]  # the arrays of one shard, by name


@final
@dataclass(frozen=True, slots=True)
class Index:
    """The arrays of all shards, concatenated, and how many elements of each array belong to each shard."""

    urls: list[str]
    stats: list[Stat]
    arrays: Part
    counts: Part

    def parts(self) -> Iterator[Part]:
        """Yield the arrays of each shard."""
        stops = {name: np.cumsum(counts) for name, counts in self.counts.items()}
        for shard in range(len(self.urls)):
            yield {
                name: array[stops[name][shard] - self.counts[name][shard] : stops[name][shard]]
                for name, array in self.arrays.items()
            }


@final
class IndexPlace(NamedTuple):
    """Where an index may be stored."""

    storage: Storage
    url: str


class Scan(NamedTuple):
    """How to index one kind of shard."""

    kind: str  # part of the file's name, so that kinds are never confused
    names: tuple[str, ...]  # of the arrays
    shard: Callable[[str, Stat], Part]


@final
class IndexStore:
    """Loads, builds and saves the index of one list of shards."""

    def __init__(
        self, urls: Sequence[str], storage: Storage, scan: Scan, given: str | None, options: dict[str, Any] | None
    ) -> None:
        """Create the store.

        Args:
            given: Folder or URL prefix of the index; ``None`` for beside the shards, or else the cache folder. Shards in
                several buckets, or on several hosts or drives, have no common folder: their index is only in the cache folder.
            options: Storage options, for an index on object storage.
        """
        self._urls, self._storage, self._scan = list(urls), storage, scan
        self._folder = common_prefix(self._urls)
        self._names = [url[len(self._folder) :] for url in self._urls]
        identity = json.dumps([_VERSION, scan.kind, self._names])
        self._name = f"infeed-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"
        self._is_remote = scheme_of(self._folder) != ""
        # The cache folder may have indices of several folders with equal names of shards.
        folder_hash = hashlib.sha256(self._folder.encode()).hexdigest()[:16]
        cached = IndexPlace(storage_for(""), str(cache_folder() / "index" / f"{folder_hash}-{self._name}"))
        if given is not None:
            folder = given if given.endswith(("/", os.sep)) else f"{given}/"
            self._places = [IndexPlace(storage_for(folder, options if scheme_of(folder) else None), folder + self._name)]
        elif not self._folder or self._folder.endswith("://"):
            self._places = [cached]
        else:
            self._places = [IndexPlace(storage, self._folder + self._name), cached]
        self._lock = cache_folder() / "locks" / f"{folder_hash}-{self._name}.lock"

    def open(self, *, progress: bool | None = None, publish: bool = False) -> Index:
        """Return the index of the shards as they are now; scan those that the stored index lacks or that have changed.

        Args:
            progress: Whether to show a progress bar; ``None``: in a terminal.
            publish: Store the index beside the shards even on object storage.

        Raises:
            StorageError: A shard cannot be read.
            ShardError: A shard is compressed or damaged.
        """
        stats = self._storage.stat(self._urls)
        place, index = self._load(stats, publish=publish)
        if index is not None and index.stats == stats and not (publish and place != self._places[0]):
            return index
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._lock))  # other ranks wait instead of scanning the same shards
            except OSError as error:
                _LOG.debug("cannot lock %s: %s", self._lock, error)
            place, index = self._load(stats, publish=publish)
            if index is None or index.stats != stats:
                index = self._build(stats, index, progress)
            elif not (publish and place != self._places[0]):
                return index
            self._save(index, publish=publish)
        return index

    def _load(self, stats: Sequence[Stat], *, publish: bool) -> tuple[IndexPlace | None, Index | None]:
        """Return the stored index with the most unchanged shards, and where it is."""
        best: tuple[IndexPlace | None, Index | None] = None, None
        most = -1
        # A local copy that fits saves downloading the published one.
        for place in self._places if publish or not self._is_remote else self._places[::-1]:
            try:
                data = place.storage.read_whole(place.url)
            except OSError as error:
                _LOG.warning("cannot read the index: %s; infeed uses another copy or rebuilds it", str(error))
                continue
            if data is None:
                continue
            try:
                index = self._parsed(data)
            except Exception as error:  # damage makes zipfile and NumPy raise almost anything
                _LOG.warning(
                    "index %s is damaged: %s; infeed uses another copy or rebuilds it",
                    place.url,
                    str(error) or type(error).__name__,
                )
                continue
            unchanged = sum(map(eq, index.stats, stats))
            if unchanged > most:
                best, most = (place, index), unchanged
            if most == len(stats):
                break
        return best

    def _parsed(self, data: bytes) -> Index:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            shards = json.loads(archive["shards"].tobytes())
            if [name for name, _, _ in shards] != self._names:
                raise ValueError("it lists other shards")
            arrays = {name: archive[name] for name in self._scan.names}
            counts = {name: archive[f"{name}_counts"] for name in self._scan.names}
        for name in self._scan.names:
            if len(counts[name]) != len(shards) or counts[name].sum() != len(arrays[name]):
                raise ValueError(f"its array {name!r} has the wrong length")
        return Index(self._urls, [Stat(size, version) for _, size, version in shards], arrays, counts)

    def _build(self, stats: list[Stat], before: Index | None, progress: bool | None) -> Index:
        parts: list[Part | None] = [None] * len(self._urls)
        if before is not None:
            for number, part in enumerate(before.parts()):
                if before.stats[number] == stats[number]:
                    parts[number] = part
        missing = [number for number, part in enumerate(parts) if part is None]

        def scan(number: int) -> Part:
            return self._scan.shard(self._urls[number], stats[number])

        done = in_parallel(scan, missing, _REMOTE_SCANS if self._is_remote else _LOCAL_SCANS)
        for number, part in zip(missing, _shown(done, len(missing), progress), strict=True):
            parts[number] = part
        whole = [part for part in parts if part is not None]
        return Index(
            self._urls,
            stats,
            {name: np.concatenate([part[name] for part in whole]) for name in self._scan.names},
            {name: np.array([len(part[name]) for part in whole], dtype=np.int64) for name in self._scan.names},
        )

    def _save(self, index: Index, *, publish: bool) -> None:
        shards = [[name, *stat] for name, stat in zip(self._names, index.stats, strict=True)]
        members: dict[str, Any] = dict(index.arrays)
        members |= {f"{name}_counts": counts for name, counts in index.counts.items()}
        members["shards"] = np.frombuffer(json.dumps(shards).encode(), dtype=np.uint8)
        stream = io.BytesIO()
        np.savez(stream, **members)
        # Opening a dataset does not write to object storage; `infeed index` does.
        for place in self._places[1:] if self._is_remote and not publish and len(self._places) > 1 else self._places:
            try:
                if not scheme_of(place.url):
                    os.makedirs(os.path.dirname(place.url), exist_ok=True)
                place.storage.write(place.url, stream.getvalue())
            except (OSError, StorageError) as error:
                if publish:
                    raise
                _LOG.debug("the index %s cannot be stored: %s", place.url, error)
            else:
                self.saved_at = place.url
                return
        _LOG.warning("the index of %s cannot be stored; pass index= with a writable folder", self._folder)

    saved_at: str | None = None


def _shown(done: Iterator[Part], count: int, progress: bool | None) -> Iterator[Part]:
    """Show a progress bar over shards, if tqdm is installed."""
    is_shown = sys.stderr.isatty() if progress is None else progress
    if is_shown and count:
        try:
            from tqdm import tqdm
        except ImportError as error:
            if progress:
                raise ConfigError('progress=True needs tqdm; install it with: pip install "infeed[progress]"') from error
        else:
            yield from tqdm(done, total=count, desc="indexing", unit="shard")
            return
    yield from done


def texts(values: Sequence[str]) -> tuple[Array, Array]:
    """Return texts as one array of bytes, and their lengths in bytes."""
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    lengths = np.array([len(value) for value in encoded], dtype=np.uint32)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths
