"""Responses of servers and file systems, beyond those of the real S3 server."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

import infeed
from infeed.data.opening import build_index
from infeed.data.storage import LocalStorage, ObjectStorage, Range, any_version, version_from
from tests.shards.fakes import Fake, fake
from tests.shards.writing import shard, tar_bytes


@pytest.fixture
def server(obstore_threads: None) -> Iterator[Fake]:
    with fake() as found:
        yield found


@pytest.mark.parametrize("tag", ["0x8D", '"0x8D"', 'W/"0x8D"'])
def test_an_etag_is_the_same_version_with_and_without_quotes(tag: str) -> None:
    assert version_from({"e_tag": tag, "last_modified": None}) == "0x8D"


ENDPOINTS = ["endpoint", "aws_endpoint", "config", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_without_tls_may_be_named_in_any_way(server: Fake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects = {"0.tar": shard([1])}
    options = server.s3()
    endpoint = options.pop("endpoint")
    if name.isupper():
        monkeypatch.setenv(name, endpoint)
    else:
        options[name] = {"endpoint": endpoint} if name == "config" else endpoint

    assert len(infeed.open("s3://b/0.tar", storage_options=options)) == 1


@pytest.mark.parametrize("name", ["AWS_PROXY_URL", "HTTP_PROXY"])
def test_a_proxy_may_be_named_by_a_variable(server: Fake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """infeed passes timeouts, which would make obstore ignore its own variables."""
    server.objects = {"0.tar": shard([1])}
    monkeypatch.setenv(name, f"http://127.0.0.1:{server.port}")

    assert len(infeed.open("s3://b/0.tar", storage_options=server.s3() | {"endpoint": "http://nowhere.invalid"})) == 1


@pytest.mark.parametrize("host", ["bucket.s3.us-east-1.amazonaws.com", "account.blob.core.windows.net"])
def test_https_urls_of_clouds_are_read_without_credentials(server: Fake, host: str) -> None:
    options = {"client_options": {"proxy_url": f"http://127.0.0.1:{server.port}"}, "retry_config": {"max_retries": 0}}
    with pytest.raises(infeed.StorageError, match="cannot be opened: Generic HTTP error"):
        infeed.open(f"https://{host}/container/0.tar", storage_options=options)

    assert server.tunnels == [f"{host}:443"]


@pytest.mark.parametrize("name", ["my%20data.tar", "my data.tar"])
def test_paths_of_http_urls_may_be_escaped(server: Fake, name: str) -> None:
    server.objects = {"my data.tar": shard([1])}

    assert len(infeed.open(f"http://127.0.0.1:{server.port}/d/{name}")) == 1


def test_shards_listed_by_azure_are_unchanged_when_they_are_read(server: Fake) -> None:
    """More than 32 are listed; the ETags of a listing have no quotes."""
    server.objects = {f"d/{number:02d}.tar": shard([number]) for number in range(40)}
    dataset = infeed.open("az://c/d/{00..39}.tar", storage_options=server.azure())

    assert [int(dataset[number]["cls"]) for number in (0, 39)] == [0, 39]


def test_shards_on_gcs_are_listed_and_read_and_their_index_is_published(server: Fake) -> None:
    server.objects = {f"d/{number:02d}.tar": shard([number]) for number in range(40)}
    dataset, where = build_index("gs://b/d/*.tar", None, None, server.gcs())

    assert [int(one["cls"]) for one in dataset] == list(range(40))
    assert where is not None
    assert where.removeprefix("gs://b/") in server.objects
    server.objects["d/07.tar"] = shard([70])
    with pytest.raises(infeed.ShardError, match=r"gs://b/d/07\.tar: the shard has changed"):
        dataset[7]
    assert int(infeed.open("gs://b/d/{00..39}.tar", storage_options=server.gcs())[7]["cls"]) == 70
    with pytest.raises(infeed.StorageError, match=r"gs://b/d/40\.tar cannot be opened"):
        infeed.open("gs://b/d/40.tar", storage_options=server.gcs())


def test_the_stored_index_with_more_unchanged_shards_is_used(server: Fake) -> None:
    """A published index becomes stale; only the first call afterwards scans what has changed."""
    server.objects = {f"d/{number}.tar": shard([number]) for number in range(3)}
    build_index("s3://b/d/*.tar", None, None, server.s3())
    server.objects["d/1.tar"] = shard([7, 8])
    scanned = []
    for _ in range(2):
        server.read.clear()
        assert len(infeed.open("s3://b/d/*.tar", storage_options=server.s3())) == 4
        scanned.append([name for name in server.read if name.endswith(".tar")])

    assert scanned == [["d/1.tar"], []]
    assert server.read == []  # The local copy fits, so the published one is not downloaded.


@pytest.mark.parametrize("code", [401, 403])
def test_an_index_without_read_permission_counts_as_missing(server: Fake, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without permission to list a bucket, S3 responds with 403 for a missing object."""
    server.objects, server.missing = {"d/0.tar": shard([1])}, code
    with caplog.at_level(logging.INFO, "infeed"):
        for _ in range(2):
            server.read.clear()
            assert len(infeed.open("s3://b/d/0.tar", storage_options=server.s3())) == 1

    assert caplog.records == []
    assert server.read == []


def test_an_unreadable_index_is_a_warning_and_the_shards_are_scanned(server: Fake, caplog: pytest.LogCaptureFixture) -> None:
    server.objects, server.missing = {"d/0.tar": shard([1])}, 500
    with caplog.at_level(logging.WARNING, "infeed"):
        assert len(infeed.open("s3://b/d/0.tar", storage_options=server.s3())) == 1

    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "cannot be read" in caplog.text
    assert "damaged" not in caplog.text


def test_writing_never_touches_the_temporary_file_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process ids repeat: on other machines that share the folder, and in containers."""
    (tmp_path / f"a.{os.getpid()}.tmp").write_bytes(b"of another")
    LocalStorage().write(str(tmp_path / "a"), b"mine")

    assert (tmp_path / "a").read_bytes() == b"mine"
    assert (tmp_path / f"a.{os.getpid()}.tmp").read_bytes() == b"of another"


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match=r"directory|denied"):
        LocalStorage().write(str(tmp_path / "a"), b"mine")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_index_of_shards_in_several_buckets_is_in_the_cache_folder(server: Fake, cache_folder: Path) -> None:
    """There is no folder beside them: a URL such as s3://infeed-0.npz would be another bucket."""
    server.objects = {"0.tar": shard([1])}
    urls = [f"s3://{bucket}/0.tar" for bucket in ("b", "c")]
    for _ in range(2):
        server.read.clear()
        assert len(infeed.open(urls, storage_options=server.s3())) == 2
    dataset, where = build_index(urls, None, None, server.s3())

    assert (len(dataset), where) == (2, None)
    assert server.read == server.not_found == []
    assert len(list(cache_folder.rglob("*.npz"))) == 1


def test_an_object_whose_size_changes_is_noticed_without_an_etag(server: Fake) -> None:
    """The time of modification counts in seconds."""
    server.has_etags = False
    server.objects = {"0.tar": shard([1])}
    dataset = infeed.open(f"http://127.0.0.1:{server.port}/d/0.tar")
    server.objects = {"0.tar": shard(range(2, 30))}
    with pytest.raises(infeed.ShardError, match="the shard has changed since it was indexed"):
        dataset[0]


@pytest.mark.parametrize(("limit", "is_by_blocks"), [(16 << 20, True), (48 << 20, False)])
def test_shuffle_uses_blocks_unless_the_cache_holds_all_shards(
    server: Fake, tmp_path: Path, limit: int, is_by_blocks: bool
) -> None:
    """Otherwise most samples would download a piece of 8 MiB."""
    server.objects = {"0.tar": tar_bytes([("0.a", bytes(20 << 20))])}
    dataset = infeed.open("s3://b/0.tar", storage_options=server.s3(), cache=tmp_path, cache_limit=limit)

    assert dataset.prefers_block_shuffle is is_by_blocks


def test_an_empty_member_is_read(server: Fake) -> None:
    """Alone, between others, and at the end of the shard."""
    members = [("0.a", b""), ("0.b", b"x"), ("1.a", b""), ("2.b", b"y"), ("3.a", b"")]
    server.objects = {"d/0.tar": tar_bytes(members)[: 7 * 512]}  # Without the end marker.
    dataset = infeed.open("s3://b/d/0.tar", storage_options=server.s3())

    assert [[one.get("a"), one.get("b")] for one in dataset] == [[b"", b"x"], [b"", None], [None, b"y"], [b"", None]]


def test_samples_without_stored_columns_need_no_request(server: Fake) -> None:
    server.objects = {"d/0.tar": shard(range(3))}
    dataset = infeed.open("s3://b/d/0.tar", columns=["__key__"], storage_options=server.s3())
    server.read.clear()

    assert dataset.__getitems__([]) == []
    assert [one["__key__"] for one in dataset] == [f"train/{number:06d}" for number in range(3)]
    assert server.read == []


@pytest.mark.parametrize("sizes", [[20], [10, 10], [1] * 20, [3, 17]], ids=str)
def test_large_ranges_are_several_requests(server: Fake, sizes: list[int]) -> None:
    """Of 8 MiB each, also where small ranges are merged. One request for all would take minutes on a slow link."""
    content = random.Random(1).randbytes(20 << 20)
    server.objects = {"a": content}
    stops = list(accumulate(size << 20 for size in sizes))
    ranges = [Range("s3://b/a", begin, stop - begin) for begin, stop in pairwise([0, *stops])]
    storage = ObjectStorage(server.s3())

    assert storage.read(ranges[::-1], any_version)[::-1] == [content[one.offset :][: one.size] for one in ranges]
    assert max(server.sizes) <= 8 << 20
    assert len(server.read) <= 5
    storage.close()


def test_a_failed_request_is_retried_only_by_the_client(server: Fake) -> None:
    """As often as max_retries says."""
    server.objects = {"d/0.tar": shard([1])}
    retry = {"max_retries": 2, "backoff": {"init_backoff": timedelta(milliseconds=1)}}
    dataset = infeed.open("s3://b/d/0.tar", storage_options=server.s3() | {"retry_config": retry})
    server.objects, server.missing = {}, 503
    server.not_found.clear()
    with pytest.raises(infeed.StorageError, match="503"):
        dataset[0]

    assert server.not_found == ["d/0.tar"] * 3


def test_a_forked_process_raises_instead_of_waiting_forever(server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore's threads do not exist in a forked child of a process that has used it, such as a worker of torch's loader."""
    server.objects = {"d/0.tar": shard([1])}
    dataset = infeed.open("s3://b/d/0.tar", storage_options=server.s3())
    assert len(dataset) == 1
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(infeed.StorageError, match="forked process"):
        dataset[0]
