"""Each test has its own cache folder, so that it finds no index of another test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shards.s3 import Server, serving


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("INFEED_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open 40 more files only, enough for 8 downloads."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[40], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def obstore_threads() -> None:
    """Starts obstore's threads, which stay until the process ends, before the leak guard of a test checks."""
    obstore = pytest.importorskip("obstore")
    obstore.put(obstore.store.MemoryStore(), "a", b"")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory, obstore_threads: None) -> Iterator[Server]:
    """One S3 server for all tests of this process. Every test uses its own keys."""
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server
