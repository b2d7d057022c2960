"""Files that several processes use: locks that the system releases when their holder dies, and replacing a file in use."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LOCK_BYTES: Final = 1
# The error of msvcrt.locking while the lock is taken; Wine's has no number. Its waiting mode tries only once a second.
_LOCKED: Final = (errno.EACCES, 0)
# Windows cannot replace a file that another process or thread has open. Readers here close it after one read.
_REPLACE_S: Final = 2.0
_RETRY_S: Final = 0.01


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if needed and not removed.

    Raises:
        OSError: The file cannot be created, or its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Every holder opens the file itself: locks of one open file do not exclude threads of the same process.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, _LOCK_BYTES)
                    break
                except OSError as error:
                    if error.errno not in _LOCKED:
                        raise
                time.sleep(_RETRY_S)
            try:
                yield
            finally:
                os.lseek(descriptor, 0, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_UNLCK, _LOCK_BYTES)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing would release it only when processes that were forked meanwhile have closed their copies, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def replace_file(source: str | Path, target: str | Path) -> None:
    """Rename ``source`` to ``target``, which may exist. On Windows, wait for readers of ``target`` for up to 2 s."""
    deadline_s = time.monotonic() + _REPLACE_S
    while True:
        try:
            os.replace(source, target)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def cache_folder() -> Path:
    """Return the folder for infeed's files of this user: ``INFEED_CACHE_DIR``, or the platform's cache folder."""
    given = os.environ.get("INFEED_CACHE_DIR")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "infeed"
