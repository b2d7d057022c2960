"""The local cache: shared, limited, and intact whenever a process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import infeed
from infeed.data.cache import PieceCache
from infeed.data.locks import file_lock, replace_file
from infeed.data.storage import Range, Stat, Storage, stat_of
from tests.helpers import wait_until
from tests.shards.writing import write_shards

PIECE = 1000
DATA = bytes(number * 7 % 251 for number in range(10_500))
STATS = {"a": Stat(len(DATA), "1"), "b": Stat(len(DATA), "1")}


class Counting(Storage):
    """Every shard is DATA; records the downloads."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.barrier: threading.Barrier | None = None

    def read(self, ranges: Sequence[Range], versions: Any) -> list[bytes]:
        if self.barrier is not None:
            self.barrier.wait(10)
        self.ranges += ranges
        return [DATA[one.offset : one.offset + one.size] for one in ranges]

    def stat(self, urls: Sequence[str]) -> list[Stat]:
        raise NotImplementedError

    def list_urls(self, prefix: str) -> list[str]:
        raise NotImplementedError

    def read_whole(self, url: str) -> bytes | None:
        raise NotImplementedError

    def write(self, url: str, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Zeros(Counting):
    """Shards of any size."""

    def read(self, ranges: Sequence[Range], versions: Any) -> list[bytes]:
        self.ranges += ranges
        return [bytes(one.size) for one in ranges]


def pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.piece"))


def cache_in(folder: Path, limit: int = 100 * PIECE) -> PieceCache:
    return PieceCache(folder, limit, PIECE)


def test_ranges_are_read_from_pieces(tmp_path: Path) -> None:
    """Within one, across several, at the end of the shard, and empty ones."""
    storage = Counting()
    ranges = [Range("a", 5, 10), Range("a", 990, 2500), Range("b", 10_400, 100), Range("a", 0, 0), Range("b", 0, 10_500)]
    for _ in range(2):
        found = cache_in(tmp_path).read(ranges, STATS, storage)
        assert found == [DATA[one.offset : one.offset + one.size] for one in ranges]

    assert len(storage.ranges) == len(set(storage.ranges)) == 4 + 11
    assert len(pieces(tmp_path)) == 15


def test_a_cold_cache_keeps_only_the_wanted_bytes_in_memory(tmp_path: Path) -> None:
    """Whatever the number of pieces that a call reads, memory holds those that are being downloaded."""
    length = 1 << 18
    stats = {"a": Stat(64 * length, "1")}

    cache = PieceCache(tmp_path, 100 * length, length)
    tracemalloc.start()
    try:
        found = cache.read([Range("a", number * length, 3) for number in range(64)], stats, Zeros())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == [bytes(3)] * 64
    assert peak < 24 * length  # 8 downloads, and as many again for copies


@pytest.mark.linux("sets a limit of open files")
def test_a_call_may_read_more_pieces_than_files_can_be_open(tmp_path: Path, few_files: None) -> None:
    storage = Zeros()
    stats = {"a": Stat(100 * PIECE, "1")}
    ranges = [Range("a", number * PIECE, 5) for number in range(100)]
    cache = cache_in(tmp_path, 200 * PIECE)
    for _ in range(2):
        assert cache.read(ranges, stats, storage) == [bytes(5)] * 100

    assert len(storage.ranges) == 100


@pytest.mark.linux("sets a limit of open files")
def test_a_piece_that_cannot_be_opened_is_not_downloaded_again(tmp_path: Path, few_files: None) -> None:
    storage = Counting()
    cache = cache_in(tmp_path)
    cache.read([Range("a", 0, 5)], STATS, storage)
    with ExitStack() as stack:
        with suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull, "rb"))
        with pytest.raises(infeed.StorageError, match=r"cache=.* cannot be read: .*Too many open files"):
            cache.read([Range("a", 0, 5)], STATS, storage)

    assert len(storage.ranges) == 1


def test_another_version_is_another_piece(tmp_path: Path) -> None:
    storage = Counting()
    for version in ("1", "2", "1"):
        cache_in(tmp_path).read([Range("a", 0, 5)], {"a": Stat(len(DATA), version)}, storage)

    assert len(storage.ranges) == 2


def test_the_least_recently_used_pieces_are_removed_at_the_limit(tmp_path: Path) -> None:
    storage = Counting()
    cache = cache_in(tmp_path, 6 * PIECE)
    for number in range(10):
        cache.read([Range("a", number * PIECE, 10)], STATS, storage)
        cache.read([Range("a", 0, 10)], STATS, storage)
        assert sum(path.stat().st_size for path in pieces(tmp_path)) <= 6 * PIECE

    assert len(storage.ranges) == 10  # The first piece was always used.


def test_processes_that_need_the_same_piece_download_it_once(tmp_path: Path) -> None:
    storage = Counting()
    caches = [cache_in(tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=cache.read, args=([Range("a", 0, 10)], STATS, storage)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(storage.ranges) == 1


def test_missing_pieces_are_downloaded_concurrently(tmp_path: Path) -> None:
    """Each of four downloads waits for the other three."""
    storage = Counting()
    storage.barrier = threading.Barrier(4)
    found = cache_in(tmp_path).read([Range("a", number * PIECE, 1) for number in range(4)], STATS, storage)

    assert found == [DATA[number * PIECE : number * PIECE + 1] for number in range(4)]


def test_a_piece_of_a_wrong_size_is_downloaded_again(tmp_path: Path) -> None:
    """A power failure may leave such a piece."""
    storage = Counting()
    cache_in(tmp_path).read([Range("a", 0, 10)], STATS, storage)
    pieces(tmp_path)[0].write_bytes(b"")

    assert cache_in(tmp_path).read([Range("a", 0, 10)], STATS, storage) == [DATA[:10]]
    assert len(storage.ranges) == 2


def test_old_temporary_files_are_removed(tmp_path: Path) -> None:
    """They belong to processes that were killed while they wrote."""
    for name, age in (("old.part", 1), ("new.part", None)):
        (tmp_path / name).write_bytes(b"x")
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    cache_in(tmp_path).read([Range("a", 0, 10)], STATS, Counting())

    assert [path.name for path in tmp_path.glob("*.part")] == ["new.part"]


def test_temporary_files_count_towards_the_limit(tmp_path: Path) -> None:
    (tmp_path / "new.part").write_bytes(bytes(3 * PIECE))
    cache = cache_in(tmp_path, 6 * PIECE)
    for number in range(10):
        cache.read([Range("a", number * PIECE, 10)], STATS, Counting())
        assert len(pieces(tmp_path)) <= 3


@pytest.mark.linux("finds the descriptor in /proc")
def test_a_lock_is_released_although_a_forked_process_has_a_copy_of_it(tmp_path: Path) -> None:
    import fcntl

    path = (tmp_path / "a").resolve()
    with file_lock(path):
        (held,) = (int(one.name) for one in Path("/proc/self/fd").iterdir() if os.path.realpath(one) == str(path))
        copy = os.dup(held)
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(copy)


def test_a_cache_that_cannot_be_written_is_disabled_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = cache_in(tmp_path / "file")
    for _ in range(3):
        assert cache.read([Range("a", 3, 10)], STATS, Counting()) == [DATA[3:13]]

    assert caplog.text.count("cannot be written") == 1


_KILLED = """
import sys
import infeed
print("ready", flush=True)
while True:
    dataset = infeed.open(sys.argv[1], cache=sys.argv[2], cache_limit="16MiB", index=sys.argv[3])
    for sample in dataset:
        pass
    for path in __import__("pathlib").Path(sys.argv[2]).glob("*.piece"):
        path.unlink()
    print("round", flush=True)
"""


@pytest.mark.process
@pytest.mark.linux("sends SIGKILL")
def test_the_cache_stays_intact_when_writers_are_killed(tmp_path: Path) -> None:
    """Neither a wrong byte nor a lock remains."""
    (tmp_path / "shards").mkdir()
    pattern = write_shards(tmp_path / "shards", 2, 20, 5000)
    arguments = [pattern, str(tmp_path / "cache"), str(tmp_path / "index")]
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", _KILLED, *arguments], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
    cached = infeed.open(pattern, cache=tmp_path / "cache", cache_limit="16MiB", index=tmp_path / "index")

    assert list(cached) == list(infeed.open(pattern))


@pytest.mark.process
def test_workers_share_the_cache(tmp_path: Path, forkserver: dict[str, Any]) -> None:
    (tmp_path / "shards").mkdir()
    pattern = write_shards(tmp_path / "shards", 3, 20)
    dataset = infeed.open(pattern, columns=["cls"], decode={"cls": int}, cache=tmp_path / "cache", cache_limit="64MiB")
    with infeed.DataLoader(dataset, 5, **forkserver) as loader:
        assert [label for batch in loader for label in batch["cls"].tolist()] == list(range(60))

    assert len(pieces(tmp_path / "cache")) == 3


def test_a_changed_shard_is_noticed_although_it_was_cached(tmp_path: Path) -> None:
    """A new index has the new version; pieces of the old one are not used for it."""
    (tmp_path / "shards").mkdir()
    pattern = write_shards(tmp_path / "shards", 1, 3)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "cache_limit": "64MiB"}
    assert infeed.open(pattern, **options)[0]["cls"] == b"0"
    path = tmp_path / "shards" / "train-000.tar"
    path.write_bytes(path.read_bytes().replace(b"000000.cls", b"000000.cls").replace(b"0 0 0", b"9 9 9"))
    os.utime(path, ns=(7_000, 7_000))  # Windows counts in units of 100 ns.

    assert stat_of(path.stat()).version == "7000"
    assert infeed.open(pattern, **options)[0]["bin"].startswith(b"9 9 9")


def test_a_file_is_replaced_while_another_thread_reads_it(tmp_path: Path) -> None:
    """On Windows, a reader prevents it until it closes the file."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    new.write_text("new")
    file = open(old)  # noqa: SIM115
    threading.Timer(0.2, file.close).start()
    replace_file(new, old)

    assert old.read_text() == "new"
    wait_until(lambda: file.closed, "the reader")
