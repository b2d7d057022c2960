"""Tar shards as a map-style dataset: the contents of a sample, and which archives are rejected."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.data.storage import LocalStorage, Stat, any_version
from infeed.data.tar_scan import LOCAL, REMOTE, ReadAhead, scan_tar
from tests.shards.writing import sample, shard, tar_bytes, write_shards

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def scanned(data: bytes, ahead: ReadAhead = LOCAL) -> list[tuple[str, str, bytes]]:
    """Returns key, column and content of every member."""
    found = scan_tar("a.tar", lambda offset, size: data[offset : offset + size], len(data), ahead)
    keys = np.repeat(np.array(found.keys, dtype=object), found.counts).tolist()
    return [
        (key, found.names[code], data[offset : offset + size])
        for key, code, offset, size in zip(keys, found.codes, found.offsets, found.sizes, strict=True)
    ]


def test_samples_are_dicts_of_key_url_and_members(tmp_path: Path) -> None:
    """Indices have the order of shards and of samples in them."""
    dataset = infeed.open(write_shards(tmp_path, 3, 4))

    assert len(dataset) == 12
    for number in range(12):
        expected = {"__key__": f"train/{number:06d}", "__url__": str(tmp_path / f"train-{number // 4:03d}.tar")}
        assert dataset[number] == {**expected, **sample(number)}


def test_several_samples_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    """Also negative and repeated indices."""
    dataset = infeed.open(write_shards(tmp_path, 2, 3), columns=["cls"], decode={"cls": int})

    assert [one["cls"] for one in dataset.__getitems__([5, 0, -1, 0])] == [5, 0, 5, 0]
    assert [one["cls"] for one in dataset] == list(range(6))


@pytest.mark.parametrize("index", [6, -7])
def test_an_index_out_of_range_raises(tmp_path: Path, index: int) -> None:
    dataset = infeed.open(write_shards(tmp_path, 2, 3))
    with pytest.raises(IndexError, match=f"index {index} is out of bounds for a dataset of length 6"):
        dataset[index]


def test_columns_select_members_in_the_given_order(tmp_path: Path) -> None:
    dataset = infeed.open(write_shards(tmp_path, 1, 2), columns=["cls", "__key__"])

    assert list(dataset[1].items()) == [("cls", b"1"), ("__key__", "train/000001")]


@pytest.mark.parametrize(("size", "block"), [(40_000, 16), (30_000, 16), (600_000, 1)])
def test_a_block_has_as_many_samples_as_a_power_of_two(tmp_path: Path, size: int, block: int) -> None:
    """So that blocks fit into batches, and few are read for two of them."""
    assert infeed.open(write_shards(tmp_path, 1, 20, size)).shuffle_blocks == block


def test_decode_may_be_a_function_of_the_sample(tmp_path: Path) -> None:
    dataset = infeed.open(write_shards(tmp_path, 1, 2), decode=lambda sample: int(sample["cls"]))

    assert list(dataset) == [0, 1]


@pytest.mark.parametrize(("decode", "where"), [({"bin": int}, r"decode['bin']"), (lambda one: int(one["bin"]), "decode")])
def test_an_exception_of_decode_keeps_its_type_and_names_the_sample(tmp_path: Path, decode: Any, where: str) -> None:
    dataset = infeed.open(write_shards(tmp_path, 2, 2), decode=decode)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        dataset[3]

    assert caught.value.__notes__ == [f"infeed: raised by {where} for 'train/000003' of {tmp_path / 'train-001.tar'}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["jpg"]}, "columns has 'jpg', which is in no shard; the shards have bin, cls"),
        ({"columns": "cls"}, "columns='cls' must be a list of names"),
        ({"decode": {"jpg": int}}, "decode has 'jpg', which is in no shard"),
        ({"decode": {"cls": 3}}, r"decode\['cls'\]=3 must be callable"),
        ({"decode": {"cls": int}, "columns": ["bin"]}, "decode has 'cls', which is not among columns"),
        ({"decode": 3}, "decode=3 must be a dict"),
        ({"storage_options": {"region": "x"}}, "storage_options is not supported"),
        ({"cache": "c", "cache_limit": "1MiB"}, "cache_limit=1048576 is too small"),
        ({"cache": "c", "cache_limit": "much"}, "cache_limit='much' is not a size"),
        ({"format": "zip"}, "format='zip' is not supported"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    pattern = write_shards(tmp_path, 1, 2)
    with pytest.raises(infeed.ConfigError, match=message):
        infeed.open(pattern, **options)


def test_a_sample_without_a_requested_column_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("0.cls", b"0"), ("1.cls", b"1"), ("1.txt", b"t")]))
    dataset = infeed.open(tmp_path / "a.tar", columns=["txt"])

    assert dataset[1] == {"txt": b"t"}
    with pytest.raises(infeed.ShardError, match=r"a\.tar: sample '0' has no column 'txt' \(found: cls\); remove it"):
        dataset[0]


def test_shards_may_have_different_columns(tmp_path: Path) -> None:
    """All shards share the numbering of columns."""
    (tmp_path / "a.tar").write_bytes(tar_bytes([("0.x", b"0"), ("0.y", b"1")]))
    (tmp_path / "b.tar").write_bytes(tar_bytes([("1.z", b"2"), ("1.y", b"3"), ("1.x", b"4")]))
    dataset = infeed.open(tmp_path)

    assert [{k: v for k, v in one.items() if k[0] != "_"} for one in dataset] == [
        {"x": b"0", "y": b"1"},
        {"z": b"2", "y": b"3", "x": b"4"},
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ahead", [LOCAL, REMOTE, ReadAhead(600, 512, 0)], ids=["local", "remote", "short"])
def test_every_tar_format_is_read_as_by_tarfile(name: str, ahead: ReadAhead) -> None:
    """Long names take several headers, which differ by format; empty and odd sizes are padded."""
    members = [
        ("a/1.jpg", b"x" * 511),
        ("a/1.cls", b""),
        ("./b/2.seg.png", b"y" * 513),
        ("d" * 60 + "/" + "é" * 30 + "/3.JPG", b"z" * 512),
    ]
    if name != "ustar":
        members.append(("e/" * 120 + "4.txt", b"w"))
    found = scanned(tar_bytes(members, FORMATS[name]), ahead)

    assert found == [
        (path[: path.index(".", path.rindex("/"))], path[path.index(".", path.rindex("/")) + 1 :].lower(), data)
        for path, data in members
    ]


def test_members_that_are_not_columns_are_skipped() -> None:
    """As in WebDataset: folders, names without extension, hidden files, and members about the archive."""
    data = tar_bytes([("README", b"a"), (".hidden", b"b"), ("__meta__/x.json", b"c"), ("1.txt", b"d")])

    assert scanned(data) == [("1", "txt", b"d")]


def test_members_with_an_empty_extension_are_skipped() -> None:
    assert scanned(tar_bytes([("1.", b"a"), ("d/2.", b"b"), ("3.txt", b"c")])) == [("3", "txt", b"c")]


@pytest.mark.parametrize("name", FORMATS)
def test_a_hard_link_has_the_content_of_its_target(name: str) -> None:
    """Tar writes a file with several names once. Names of more than 100 characters take an additional header."""
    folder = "d" * (40 if name == "ustar" else 120)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[name]) as archive:
        for path, data, target in [
            (f"{folder}/a.JPG", b"image", None),
            (f"{folder}/a.cls", b"0", None),
            (f"{folder}/b.jpg", b"", f"{folder}/a.JPG"),
            (f"{folder}/b.cls", b"1", None),
            (f"{folder}/c.jpg", b"", f"{folder}/b.jpg"),
        ]:
            info = tarfile.TarInfo(path)
            info.size = len(data)
            if target is not None:
                info.type, info.linkname = tarfile.LNKTYPE, target
            archive.addfile(info, io.BytesIO(data))

    assert [(key[-1], column, data) for key, column, data in scanned(stream.getvalue())] == [
        ("a", "jpg", b"image"),
        ("a", "cls", b"0"),
        ("b", "jpg", b"image"),
        ("b", "cls", b"1"),
        ("c", "jpg", b"image"),
    ]


def test_an_empty_file_is_refused() -> None:
    """As by tarfile. An archive without members has an end marker."""
    assert scanned(tar_bytes([])) == []
    with pytest.raises(infeed.ShardError, match=r"a\.tar: the file is empty"):
        scanned(b"")


def test_a_hard_link_without_a_target_is_rejected() -> None:
    info = tarfile.TarInfo("b.jpg")
    info.type, info.linkname = tarfile.LNKTYPE, "a.jpg"
    with pytest.raises(infeed.ShardError, match=r"a\.tar: 'b\.jpg' is a hard link to 'a\.jpg'"):
        scanned(info.tobuf())


# What GNU tar writes for sparse files, with --format=gnu and =posix.
SPARSE = {
    "gnu": lambda: _sparse_header(tarfile.GNU_FORMAT, {}, b"S"),
    "pax 0": lambda: _sparse_header(tarfile.PAX_FORMAT, {"GNU.sparse.size": "9", "GNU.sparse.map": "0,1"}, b"0"),
    "pax 1": lambda: _sparse_header(tarfile.PAX_FORMAT, {"GNU.sparse.major": "1", "GNU.sparse.name": "a.jpg"}, b"0"),
}


def _sparse_header(format: int, fields: dict[str, str], kind: bytes) -> bytes:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.pax_headers = kind, fields
    return info.tobuf(format)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_members_are_rejected(name: str) -> None:
    """Their bytes in the shard are not the content: the holes are missing."""
    with pytest.raises(infeed.ShardError, match=r"'a\.jpg' is a sparse file; .*without --sparse"):
        scanned(SPARSE[name]())


def test_too_many_columns_are_rejected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with dots make every sample a separate column."""
    monkeypatch.setattr("infeed.data.tar_scan.MOST_COLUMNS", 3)

    assert len(scanned(tar_bytes((f"v.{number}.jpg", b"") for number in range(3)))) == 3
    with pytest.raises(infeed.ShardError, match=r"a\.tar: more than 3 columns, such as '3\.jpg'; .*first dot"):
        scanned(tar_bytes((f"v.{number}.jpg", b"") for number in range(4)))


def test_too_many_columns_in_all_shards_together_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infeed.data.tar.MOST_COLUMNS", 3)
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes((f"v.{number}{letter}.jpg", b"") for letter in "ab"))
    with pytest.raises(infeed.ShardError, match=r"columns, such as '1b\.jpg'"):
        infeed.open(tmp_path)


def test_a_checksum_of_signed_bytes_is_accepted() -> None:
    """Some old programs write it; it differs for names that are not ASCII."""
    data = tar_bytes([("é.txt", b"d")])
    unsigned, signed = tarfile.calc_chksums(data[:512])  # type: ignore[attr-defined]
    assert unsigned != signed

    assert scanned(data[:148] + b"%06o\0 " % signed + data[156:]) == [("é", "txt", b"d")]


def test_a_shard_without_end_marker_is_complete() -> None:
    data = shard(range(2))
    end = data.rindex(b"1") // 512 * 512 + 512

    assert len(scanned(data[:end])) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (shard(range(2))[:1200], "truncated inside the header at offset 1024"),
        (shard(range(2))[: 3 * 512], "truncated inside the member at offset 1536"),
        (b"x" * 5120, "no tar header at offset 0"),
        (shard(range(1))[:1024] + b"y" * 5120, "no tar header at offset 1024"),
        (shard(range(1)).replace(b"000644", b"000645", 1), "no tar header at offset 0"),
        (gzip.compress(shard(range(2))), r"compressed as a whole \(gzip\)"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"compressed as a whole \(zstd\)"),
        (tar_bytes([("1.a", b""), ("1.a", b"")]), "two members 'a', the second at offset 1024"),
    ],
    ids=["header", "member", "text", "damaged", "checksum", "gzip", "zstd", "twice"],
)
def test_an_unusable_file_is_rejected_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(infeed.ShardError, match=f"a.tar: .*{message}"):
        infeed.open(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_a_compressed_extension_is_rejected_without_reading(name: str) -> None:
    with pytest.raises(infeed.ConfigError, match="compressed as a whole"):
        infeed.open(f"/nowhere/{name}")


def test_a_pickled_copy_opens_its_files_itself(tmp_path: Path) -> None:
    dataset = infeed.open(write_shards(tmp_path, 2, 3))
    first = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    dataset.close()

    assert copy[0] == first
    assert dataset[0] == first


def test_more_files_than_may_be_open_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infeed.data.storage.OPEN_FILES", 2)
    dataset = infeed.open(write_shards(tmp_path, 5, 1), columns=["cls"], decode={"cls": int})

    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2]):
        assert [one["cls"] for one in dataset.__getitems__(order)] == order


@pytest.mark.linux("sets a limit of open files")
def test_a_call_may_read_more_shards_than_files_can_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_files: None
) -> None:
    monkeypatch.setattr("infeed.data.storage.OPEN_FILES", 20)
    dataset = infeed.open(write_shards(tmp_path, 60, 1), columns=["cls"], decode={"cls": int})
    order = [number * 7 % 60 for number in range(60)]

    assert [one["cls"] for one in dataset.__getitems__(order)] == order


def test_a_truncated_file_is_reported_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(infeed.StorageError, match=r"a: reading 9 bytes at offset 3 failed: the file ends at 5"):
        LocalStorage().read([(str(tmp_path / "a"), 3, 9)], any_version)  # type: ignore[list-item]


def test_a_shard_that_changes_while_it_is_read_is_detected(tmp_path: Path) -> None:
    """The index has the offsets of samples; bytes of another version would be garbage."""
    dataset = infeed.open(write_shards(tmp_path, 1, 3))
    dataset[0]
    path = tmp_path / "train-000.tar"
    path.write_bytes(shard(range(5, 8)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(infeed.ShardError, match=r"train-000\.tar: the shard has changed since it was indexed"):
        dataset[1]


def test_a_shard_whose_size_changes_is_noticed_although_its_time_does_not(tmp_path: Path) -> None:
    """As cp -p and rsync -t leave it."""
    dataset = infeed.open(write_shards(tmp_path, 1, 3))
    path = tmp_path / "train-000.tar"
    before = path.stat()
    path.write_bytes(shard(range(3, 100)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(infeed.ShardError, match=r"train-000\.tar: the shard has changed since it was indexed"):
        dataset[0]


@pytest.mark.process
def test_workers_load_the_same_batches_as_the_main_process(tmp_path: Path, every_engine: dict[str, Any]) -> None:
    dataset = infeed.open(write_shards(tmp_path, 3, 10), columns=["cls", "bin"], decode={"cls": int, "bin": lambda b: b[:3]})
    with infeed.DataLoader(dataset, 7, shuffle=True, seed=3, **every_engine) as loader:
        batches = [batch["cls"].tolist() for batch in loader]
    order = [index for batch in infeed.DataLoader(range(30), 7, shuffle=True, seed=3) for index in batch.tolist()]

    assert [label for batch in batches for label in batch] == order


def test_stat_matches_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")

    assert LocalStorage().stat([str(tmp_path / "a")]) == [Stat(3, str((tmp_path / "a").stat().st_mtime_ns))]
    with pytest.raises(infeed.StorageError, match=r"nowhere: .*check the path"):
        LocalStorage().stat(["/nowhere"])
