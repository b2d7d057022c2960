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
from typing import Any, Final, final
from zlib import crc32

from infeed.data.locks import file_lock
from infeed.data.storage import OpenFile, Range, Stat, Storage
from infeed.errors import ConfigError

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
            StorageError: A piece could not be downloaded.
        """
        length = self._piece_bytes
        held: dict[tuple[str, int], OpenFile | bytes | None] = {}
        for url, offset, size in ranges:
            for number in range(offset // length, (offset + max(size, 1) - 1) // length + 1):
                if (url, number) not in held:
                    held[url, number] = self._open(self._path(url, stats[url], number), self._size(stats[url], number))
        missing = [piece for piece, file in held.items() if file is None]

        def fetch(piece: tuple[str, int]) -> OpenFile | bytes:
            url, number = piece
            return self._fetch(url, stats[url], number, storage)

        if len(missing) == 1:
            held[missing[0]] = fetch(missing[0])
        elif missing:
            with ThreadPoolExecutor(min(_DOWNLOADS, len(missing)), "infeed-cache") as pool:
                held.update(zip(missing, pool.map(fetch, missing), strict=True))
        return [b"".join(self._parts(one, held)) for one in ranges]

    def _parts(self, wanted: Range, held: Mapping[tuple[str, int], OpenFile | bytes | None]) -> Iterator[bytes]:
        url, offset, rest = wanted
        while rest:
            number, begin = divmod(offset, self._piece_bytes)
            size = min(rest, self._piece_bytes - begin)
            piece = held[url, number]
            assert piece is not None
            yield piece[begin : begin + size] if isinstance(piece, bytes) else piece.read(size, begin)
            offset, rest = offset + size, rest - size

    def _size(self, stat: Stat, number: int) -> int:
        return min(self._piece_bytes, stat.size - number * self._piece_bytes)

    def _path(self, url: str, stat: Stat, number: int) -> str:
        name = self._names.get(url)
        if name is None:
            identity = f"{url}\0{stat.version}\0{stat.size}\0{self._piece_bytes}"
            name = self._names[url] = str(self._folder / hashlib.sha256(identity.encode()).hexdigest()[:32])
        return f"{name}-{number}{_SUFFIX}"

    def _open(self, path: str, size: int) -> OpenFile | None:
        """Open a piece for this call only: an open file would keep its disk space after eviction."""
        try:
            file = OpenFile(path)
            if os.fstat(file.fd).st_size != size:  # after a power failure
                return None
        except OSError:  # it does not exist, or belongs to another user
            return None
        with suppress(OSError):
            os.utime(path)  # marks the piece as used
        return file

    def _fetch(self, url: str, stat: Stat, number: int, storage: Storage) -> OpenFile | bytes:
        path, size = self._path(url, stat, number), self._size(stat, number)
        with self._locked(f"{crc32(path.encode()) % _LOCKS}.lock"):
            file = self._open(path, size)
            if file is not None:  # another process has downloaded it meanwhile
                return file
            (data,) = storage.read([Range(url, number * self._piece_bytes, size)], lambda _: stat.version)
            self._store(path, data)
        return data

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
            os.replace(part, path)
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
                if entry.name.endswith(_SUFFIX):
                    entries.append((stat.st_mtime_ns, stat.st_size, entry.path))
                    total += stat.st_size
                elif entry.name.endswith(_PART_SUFFIX) and time.time() - stat.st_mtime > _OLD_S:
                    os.unlink(entry.path)
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
