"""The index is built once, found again, and rebuilt where it does not fit."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import infeed
from infeed.data.storage import LocalStorage, Range
from tests.shards.writing import shard, write_shards


class Reads:
    """Counts the shards whose bytes are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._urls: set[str] = set()
        read = LocalStorage.read

        def counted(storage: LocalStorage, ranges: list[Range], versions: Any) -> list[bytes]:
            self._urls |= {one.url for one in ranges}
            return read(storage, ranges, versions)

        monkeypatch.setattr(LocalStorage, "read", counted)

    def names(self) -> list[str]:
        names, self._urls = sorted(os.path.basename(url) for url in self._urls), set()
        return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def labels(dataset: Any) -> list[int]:
    return [int(one["cls"]) for one in dataset]


def index_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npz"))


def test_the_second_call_reads_no_shard(tmp_path: Path, reads: Reads) -> None:
    pattern = write_shards(tmp_path, 2, 3)
    infeed.open(pattern)

    assert reads.names() == ["train-000.tar", "train-001.tar"]
    assert len(infeed.open(pattern)) == 6
    assert reads.names() == []
    assert len(index_files(tmp_path)) == 1


def test_only_changed_shards_are_indexed_again(tmp_path: Path, reads: Reads) -> None:
    pattern = write_shards(tmp_path, 3, 2)
    infeed.open(pattern)
    reads.names()
    (tmp_path / "train-001.tar").write_bytes(shard([7, 8, 9]))
    os.utime(tmp_path / "train-001.tar", ns=(1, 1))
    dataset = infeed.open(pattern)

    assert reads.names() == ["train-001.tar"]
    assert labels(dataset) == [0, 1, 7, 8, 9, 4, 5]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[: len(data) // 2] + b"X" * 64 + data[len(data) // 2 + 64 :],
    ],
    ids=["cut", "empty", "flipped"],
)
def test_a_damaged_index_is_rebuilt_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    pattern = write_shards(tmp_path, 2, 3)
    infeed.open(pattern)
    (index,) = index_files(tmp_path)
    index.write_bytes(damage(index.read_bytes()))
    with caplog.at_level(logging.WARNING, "infeed"):
        dataset = infeed.open(pattern)

    assert labels(dataset) == list(range(6))
    assert "is damaged: " in caplog.text
    caplog.clear()
    infeed.open(pattern)
    assert caplog.text == ""


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, MemoryError, SyntaxError])
def test_an_index_whose_damage_confuses_the_reader_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Wrong bytes make zipfile find an encrypted or unknown member, and NumPy an array of any size."""
    pattern = write_shards(tmp_path, 2, 3)
    infeed.open(pattern)

    def damaged(*_args: object, **_options: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("numpy.load", damaged)
        assert len(infeed.open(pattern)) == 6


def test_a_folder_in_place_of_the_index_is_not_touched(tmp_path: Path, cache_folder: Path, reads: Reads) -> None:
    pattern = write_shards(tmp_path, 1, 3)
    infeed.open(pattern)
    (index,) = index_files(tmp_path)
    index.unlink()
    index.mkdir()
    infeed.open(pattern)
    reads.names()
    infeed.open(pattern)

    assert reads.names() == []
    assert len(index_files(cache_folder)) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_has_its_index_in_the_cache_folder(
    tmp_path: Path, cache_folder: Path, reads: Reads
) -> None:
    pattern = write_shards(tmp_path, 1, 3)
    tmp_path.chmod(0o555)
    try:
        infeed.open(pattern)
        reads.names()
        infeed.open(pattern)
    finally:
        tmp_path.chmod(0o755)

    assert reads.names() == []
    assert index_files(tmp_path) == []
    assert len(index_files(cache_folder)) == 1


def test_the_index_may_have_its_own_folder(tmp_path: Path, reads: Reads) -> None:
    (tmp_path / "shards").mkdir()
    pattern = write_shards(tmp_path / "shards", 1, 3)
    infeed.open(pattern, index=tmp_path / "index")
    reads.names()
    infeed.open(pattern, index=tmp_path / "index")

    assert reads.names() == []
    assert [path.parent.name for path in index_files(tmp_path)] == ["index"]


def test_other_lists_of_shards_have_separate_indices(tmp_path: Path) -> None:
    write_shards(tmp_path, 3, 2)

    assert labels(infeed.open([tmp_path / "train-002.tar", tmp_path / "train-000.tar"])) == [4, 5, 0, 1]
    assert labels(infeed.open(tmp_path / "*.tar")) == list(range(6))
    assert len(index_files(tmp_path)) == 2


def test_concurrent_callers_scan_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start at the same time; one of them builds the index, and the others wait for it."""
    pattern = write_shards(tmp_path, 4, 2)
    scans: list[str] = []
    from infeed.data import tar

    scan_tar = tar.scan_tar
    monkeypatch.setattr(tar, "scan_tar", lambda url, *rest: (scans.append(url), scan_tar(url, *rest))[1])
    lengths: list[int] = []
    threads = [threading.Thread(target=lambda: lengths.append(len(infeed.open(pattern)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert lengths == [8] * 4
    assert len(scans) == 4


def test_a_missing_shard_is_reported(tmp_path: Path) -> None:
    write_shards(tmp_path, 2, 3)
    with pytest.raises(infeed.StorageError, match=r"train-002\.tar: .*check the path"):
        infeed.open(f"{tmp_path}/train-{{000..002}}.tar")
