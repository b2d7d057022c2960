"""A local cache of shards, shared by all workers and ranks of a machine.

Shards are cached in pieces, each a file of its own, so that random access to a large shard does not download all of it. A piece
is written under a temporary name and renamed, so that readers see it whole or not at all, whatever process is killed when. A
lock, which the operating system releases when its holder dies, keeps processes from downloading the same piece twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, final
from zlib import crc32

from infeed.data.locks import file_lock, replace_file
from infeed.data.storage import OpenFile, Range, Stat, Storage
from infeed.errors import ConfigError, StorageError

_LOG: Final = logging.getLogger("infeed")

PIECE_BYTES: Final = 1 << 23
# Concurrent downloads per call.
_DOWNLOADS: Final = 8
# Locks of pieces: two pieces may share one, which costs time only.
_LOCKS: Final = 256
# A process measures the cache whenever it has added this fraction of the limit: listing 10,000 files takes 20 ms.
_MEASURED_PART: Final = 1024
# Eviction frees this fraction of the limit beyond what is necessary, as room for what other processes add meanwhile.
_ROOM_PART: Final = 16
# Temporary files of killed processes are removed at this age; writing one takes a fraction of a second.
_OLD_S: Final = 600.0
_SUFFIX: Final = ".piece"
_PART_SUFFIX: Final = ".part"

_Cut: TypeAlias = tuple[int, int]  # offset in a piece, and size


@final
class PieceCache:
    """Pieces of shards in a folder; the least recently used are removed first.

    Processes may exceed the limit by one piece each, for a moment.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int, piece_bytes: int = PIECE_BYTES) -> None:
        if limit < 2 * piece_bytes:
            raise ConfigError(f"cache_limit={limit} is too small; use at least {2 * piece_bytes} bytes")
        self._folder = Path(folder).absolute()
        self.limit, self._piece_bytes = limit, piece_bytes
        self._added = limit  # measure with the first piece: an earlier run may have had a higher limit
        self._names: dict[str, str] = {}
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self._folder, "limit": self.limit, "piece_bytes": self._piece_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def read(self, ranges: Sequence[Range], stats: Mapping[str, Stat], storage: Storage) -> list[bytes]:
        """Return the bytes of each range. Download the pieces that are missing, concurrently.

        Raises:
            StorageError: A piece could not be downloaded, or the cache cannot be read.
        """
        cuts: dict[tuple[str, int], list[_Cut]] = {}
        for one in ranges:
            for number, cut in self._cuts(one):
                cuts.setdefault((one.url, number), []).append(cut)
        # Only what the caller wants is kept of each piece, and only downloads keep files open.
        held = {piece: self._cached(self._path(piece, stats), self._size(piece, stats), cuts[piece]) for piece in cuts}
        missing = [piece for piece, parts in held.items() if parts is None]

        def fetch(piece: tuple[str, int]) -> list[bytes]:
            return self._fetch(piece, cuts[piece], stats, storage)

        if len(missing) == 1:
            held[missing[0]] = fetch(missing[0])
        elif missing:
            with ThreadPoolExecutor(min(_DOWNLOADS, len(missing)), "infeed-cache") as pool:
                held.update(zip(missing, pool.map(fetch, missing), strict=True))
        parts = {piece: iter(found or ()) for piece, found in held.items()}
        return [b"".join(next(parts[one.url, number]) for number, _ in self._cuts(one)) for one in ranges]

    def _cuts(self, wanted: Range) -> Iterator[tuple[int, _Cut]]:
        """Yield the numbers of the pieces that contain a range, and where it lies in each."""
        _, offset, rest = wanted
        while rest:
            number, begin = divmod(offset, self._piece_bytes)
            size = min(rest, self._piece_bytes - begin)
            yield number, (begin, size)
            offset, rest = offset + size, rest - size

    def _size(self, piece: tuple[str, int], stats: Mapping[str, Stat]) -> int:
        url, number = piece
        return min(self._piece_bytes, stats[url].size - number * self._piece_bytes)

    def _path(self, piece: tuple[str, int], stats: Mapping[str, Stat]) -> str:
        url, number = piece
        name = self._names.get(url)
        if name is None:
            identity = f"{url}\0{stats[url].version}\0{stats[url].size}\0{self._piece_bytes}"
            name = self._names[url] = str(self._folder / hashlib.sha256(identity.encode()).hexdigest()[:32])
        return f"{name}-{number}{_SUFFIX}"

    def _cached(self, path: str, size: int, cuts: Sequence[_Cut]) -> list[bytes] | None:
        """Return parts of a piece, or ``None`` if it is missing. The file is closed: open, it would keep its disk space."""
        try:
            file = OpenFile(path)
            if os.fstat(file.fd).st_size != size:  # after a power failure
                return None
            found = [file.read(length, begin) for begin, length in cuts]
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # the latter: it belongs to another user
            return None
        except OSError as error:
            raise StorageError(f"cache={self._folder} cannot be read: {error}") from error
        with suppress(OSError):
            os.utime(path)  # marks the piece as used
        return found

    def _fetch(self, piece: tuple[str, int], cuts: Sequence[_Cut], stats: Mapping[str, Stat], storage: Storage) -> list[bytes]:
        url, number = piece
        path, size = self._path(piece, stats), self._size(piece, stats)
        with self._locked(f"{crc32(path.encode()) % _LOCKS}.lock"):
            found = self._cached(path, size, cuts)
            if found is not None:  # another process has downloaded it meanwhile
                return found
            (data,) = storage.read([Range(url, number * self._piece_bytes, size)], stats.__getitem__)
            self._store(path, data)
        return [data[begin : begin + length] for begin, length in cuts]

    def _store(self, path: str, data: bytes) -> None:
        part = f"{path}.{os.getpid()}-{threading.get_ident()}{_PART_SUFFIX}"
        try:
            self._added += len(data)
            if self._added > self.limit // _MEASURED_PART:
                with self._locked("evict.lock"):
                    self._evict(len(data))
                self._added = len(data)
            with open(part, "wb") as file:
                file.write(data)
            replace_file(part, path)
        except OSError as error:  # such as a full disk: the sample is there all the same
            with suppress(OSError):
                os.unlink(part)
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("cache=%s cannot be written: %s; reading without the cache", self._folder, error)

    def _evict(self, wanted: int) -> None:
        """Remove the least recently used pieces until ``wanted`` more bytes fit."""
        entries = []
        total = wanted
        for entry in os.scandir(self._folder):
            with suppress(OSError):  # another process removed it
                stat = entry.stat()
                if entry.name.endswith(_PART_SUFFIX) and time.time() - stat.st_mtime > _OLD_S:
                    os.unlink(entry.path)
                elif entry.name.endswith((_SUFFIX, _PART_SUFFIX)):
                    total += stat.st_size
                    if entry.name.endswith(_SUFFIX):
                        entries.append((stat.st_mtime_ns, stat.st_size, entry.path))
        if total <= self.limit:
            return
        entries.sort()
        for _, size, path in entries:
            with suppress(OSError):  # Windows does not remove open files
                os.unlink(path)
                total -= size
            if total <= self.limit - self.limit // _ROOM_PART:
                break

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        try:
            lock = file_lock(self._folder / "locks" / name)
            lock.__enter__()
        except OSError as error:  # a file system without locks: pieces may be downloaded twice
            _LOG.debug("cache=%s cannot be locked: %s", self._folder, error)
            yield
            return
        try:
            yield
        finally:
            lock.__exit__(None, None, None)
