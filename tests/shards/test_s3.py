"""Shards on a real S3 server that is slow, fails, and changes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import infeed
from tests.shards.s3 import Proxy, Server
from tests.shards.writing import sample, shard

pytestmark = pytest.mark.process

SIZE = 2000
# Faults show within the time of a test.
BACKOFF = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=50), "base": 2}
QUICK: dict[str, Any] = {
    "retry_config": {"max_retries": 12, "backoff": BACKOFF},
    "client_options": {"timeout": timedelta(seconds=0.5), "pool_max_idle_per_host": "0"},
}
# For tests that count requests: no request is repeated, however busy the machine is.
PATIENT: dict[str, Any] = {
    "retry_config": {"max_retries": 0},
    "client_options": {"timeout": timedelta(seconds=60), "pool_max_idle_per_host": "0"},
}


def upload(s3: Server, name: str, shards: int, samples: int) -> str:
    for number in range(shards):
        s3.put(f"{name}/{number:02d}.tar", shard(range(number * samples, (number + 1) * samples), SIZE))
    return f"s3://data/{name}/{{00..{shards - 1:02d}}}.tar"


def labels(samples: Any) -> list[int]:
    return [int(one["cls"]) for one in samples]


def is_range(head: bytes) -> bool:
    return re.search(rb"(?im)^range:", head) is not None


def no_fault(head: bytes, number: int) -> None:
    return None


def test_samples_are_those_of_local_shards(s3: Server) -> None:
    dataset = infeed.open(upload(s3, "plain", 3, 20), storage_options=s3.options())

    assert len(dataset) == 60
    assert dataset[41] == {"__key__": "train/000041", "__url__": "s3://data/plain/02.tar", **sample(41, SIZE)}
    assert labels(dataset.__getitems__([59, 3, 22, 3])) == [59, 3, 22, 3]


@pytest.mark.parametrize("pattern", ["s3://data/globs/*.tar", "s3://data/globs/", "s3://data/**/globs/0*.tar"])
def test_patterns_list_the_bucket(s3: Server, pattern: str) -> None:
    upload(s3, "globs", 2, 3)

    assert labels(infeed.open(pattern, storage_options=s3.options())) == list(range(6))


def test_many_shards_are_looked_up_by_listing(s3: Server) -> None:
    """One request for all sizes and versions instead of one per shard."""
    pattern = upload(s3, "many", 40, 1)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, no_fault) as proxy:
        assert len(infeed.open(pattern, storage_options=s3.options(proxy.port, **PATIENT))) == 40
        assert proxy.request_count <= 3


def test_the_index_is_in_the_cache_folder_and_not_written_to_the_bucket(s3: Server, cache_folder: Path) -> None:
    infeed.open(upload(s3, "readonly", 2, 3), storage_options=s3.options())

    assert s3.names("readonly/") == ["readonly/00.tar", "readonly/01.tar"]
    assert len(list(cache_folder.rglob("*.npz"))) == 1


def test_neighbors_are_one_request_and_others_run_concurrently(s3: Server) -> None:
    """Requests for a block of samples: one. For samples of several shards: one for each shard, at the same time."""
    pattern = upload(s3, "merged", 6, 20)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, lambda head, number: "slow" if is_range(head) else None) as proxy:
        dataset = infeed.open(pattern, storage_options=s3.options(proxy.port, **PATIENT))
        before = proxy.request_count
        assert labels(dataset.__getitems__(range(5, 12))) == list(range(5, 12))
        assert proxy.request_count == before + 1
        assert labels(dataset.__getitems__([0, 21, 41, 61, 81, 101])) == [0, 21, 41, 61, 81, 101]
        assert proxy.request_count == before + 7
        assert proxy.most_at_once >= 4  # On a busy machine, some may begin late.


FAULTS: dict[str, Callable[[bytes, int], str | None]] = {
    "slow": lambda head, number: "slow" if number % 4 == 1 else None,
    "dropped": lambda head, number: "drop" if number % 3 else None,
    "cut off": lambda head, number: "cut" if is_range(head) and number % 2 else None,
    "503": lambda head, number: "503" if number % 3 else None,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_requests_that_fail_are_retried(s3: Server, fault: Callable[[bytes, int], str | None], request: Any) -> None:
    pattern = upload(s3, re.sub(r"\W", "-", request.node.name), 2, 10)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, fault) as proxy:
        dataset = infeed.open(pattern, storage_options=s3.options(proxy.port, **QUICK))
        for rows in ([0, 15], [7], [12, 3]):
            assert labels(dataset.__getitems__(rows)) == rows


def test_a_server_that_keeps_failing_is_an_error_with_shard_offset_and_cause(s3: Server) -> None:
    pattern = upload(s3, "failing", 1, 10)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, lambda head, number: "503" if is_range(head) else None) as proxy:
        dataset = infeed.open(pattern, storage_options=s3.options(proxy.port, **QUICK))
        with pytest.raises(infeed.StorageError, match=r"s3://data/failing/00\.tar: reading \d+ bytes at offset \d+ .*503"):
            dataset[3]


def test_an_error_in_a_worker_keeps_its_type_and_text(s3: Server, forkserver: dict[str, Any]) -> None:
    pattern = upload(s3, "worker", 1, 10)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, lambda head, number: "503" if is_range(head) else None) as proxy:
        dataset = infeed.open(pattern, storage_options=s3.options(proxy.port, **QUICK))
        with (
            infeed.DataLoader(dataset, 5, **forkserver) as loader,
            pytest.raises(infeed.StorageError, match=r"00\.tar: reading \d+ bytes at offset \d+"),
        ):
            next(iter(loader))


def test_a_shard_that_changes_while_it_is_read_is_detected(s3: Server) -> None:
    pattern = upload(s3, "changing", 1, 10)
    dataset = infeed.open(pattern, storage_options=s3.options())
    assert labels([dataset[3]]) == [3]
    s3.put("changing/00.tar", shard(range(50, 60), SIZE))
    with pytest.raises(infeed.ShardError, match=r"s3://data/changing/00\.tar: the shard has changed since it was indexed"):
        dataset[3]

    assert labels(infeed.open(pattern, storage_options=s3.options())) == list(range(50, 60))


def test_a_missing_shard_and_missing_permissions_are_reported(s3: Server) -> None:
    with pytest.raises(infeed.StorageError, match=r"s3://data/none/0\.tar cannot be opened: .*check URL, credentials"):
        infeed.open("s3://data/none/0.tar", storage_options=s3.options())
    wrong = s3.options() | {"secret_access_key": "wrong"}
    with pytest.raises(infeed.StorageError, match="cannot be opened"):
        infeed.open("s3://data/none/0.tar", storage_options=wrong)
    with pytest.raises(infeed.ConfigError, match="check the URL and storage_options"):
        infeed.open("s3://data/none/0.tar", storage_options={"no_such_option": 1})


def test_shuffle_uses_blocks_unless_a_sampler_requests_single_samples(s3: Server) -> None:
    """Blocks of a megabyte: more than all of these samples."""
    dataset = infeed.open(upload(s3, "blocks", 2, 10), columns=["cls"], decode={"cls": int}, storage_options=s3.options())

    assert dataset.prefers_block_shuffle
    assert dataset.shuffle_blocks > 100
    orders = [
        [label for batch in infeed.DataLoader(dataset, 5, seed=1, **options) for label in batch["cls"].tolist()]
        for options in ({"shuffle": True}, {"shuffle": "block"}, {"sampler": infeed.RandomSampler()})
    ]
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(order) for order in orders] == [list(range(20))] * 3


def kill_one(pids: list[Any]) -> None:
    """Kills the first of these processes that is still running."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return


@pytest.mark.linux("kills workers")
def test_a_run_resumed_after_killed_workers_delivers_every_sample_once(s3: Server) -> None:
    """From a server that fails sometimes: exactly once, in the order of an undisturbed run."""
    pattern = upload(s3, "resumed", 4, 50)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": "block", "seed": 5, "timeout": 60}
    columns: dict[str, Any] = {"columns": ["cls"], "decode": {"cls": int}}
    plain = infeed.open(pattern, storage_options=s3.options(), **columns)
    whole = [batch["cls"].tolist() for batch in infeed.DataLoader(plain, **options)]
    seen = []
    with Proxy(s3.port, lambda head, number: ("503", "drop", None, None, None)[number % 5]) as proxy:
        dataset = infeed.open(pattern, storage_options=s3.options(proxy.port, **QUICK), **columns)
        with infeed.DataLoader(dataset, num_workers=2, **options) as loader:
            batches = iter(loader)
            for step in range(11):
                seen.append(next(batches)["cls"].tolist())
                if step in (2, 6):
                    kill_one([worker.pid for worker in loader.statistics().workers])
            state = loader.state_dict()
        with infeed.DataLoader(dataset, num_workers=2, **options) as loader:
            loader.load_state_dict(state)
            seen += [batch["cls"].tolist() for batch in loader]

    assert seen == whole
    assert sorted(label for batch in whole for label in batch) == list(range(200))


def test_a_resumed_epoch_reads_nothing_again(s3: Server) -> None:
    """Nothing that was delivered is read again."""
    pattern = upload(s3, "begins", 2, 100)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, no_fault) as proxy:
        dataset = infeed.open(pattern, columns=["cls"], storage_options=s3.options(proxy.port, **PATIENT))
        loader = infeed.DataLoader(dataset, 5, seed=1)
        loader.load_state_dict({**loader.state_dict(), "position": 150, "step": 30})
        before = proxy.request_count
        next(iter(loader))
        assert proxy.request_count - before <= 2


def test_the_cache_serves_data_that_was_read_before(s3: Server, tmp_path: Path) -> None:
    pattern = upload(s3, "cached", 2, 10)
    infeed.open(pattern, storage_options=s3.options())
    with Proxy(s3.port, no_fault) as proxy:
        options = s3.options(proxy.port, **PATIENT)
        dataset = infeed.open(pattern, storage_options=options, cache=tmp_path, cache_limit="64MiB")
        assert not dataset.prefers_block_shuffle
        before = proxy.request_count
        assert labels(dataset.__getitems__(range(20))) == list(range(20))
        assert proxy.request_count == before + 2
        assert labels(dataset.__getitems__(range(20))) == list(range(20))
        assert proxy.request_count == before + 2


def test_http_servers_are_read_too(tmp_path: Path, obstore_threads: None) -> None:
    """By ranges; the pattern lists the shards, because HTTP has no listing."""
    import functools
    import http.server
    import threading

    (tmp_path / "0.tar").write_bytes(shard(range(10), SIZE))

    class Ranges(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            path = tmp_path / self.path.strip("/")
            if wanted is None or not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
            self.end_headers()
            self.wfile.write(data[first : last + 1])

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        dataset = infeed.open(f"http://127.0.0.1:{server.server_address[1]}/{{0..0}}.tar")
        assert labels(dataset.__getitems__([7, 2])) == [7, 2]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    began = time.monotonic()
    dataset.close()
    assert time.monotonic() - began < 1
