"""Every test has a cache folder of its own, so that no index of another test is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shards.s3 import Server, serving


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("INFEED_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One S3 server for all tests of this process. Every test uses keys of its own."""
    pytest.importorskip("obstore")
    with serving(tmp_path_factory.mktemp("s3")) as server:
        server.names("")  # starts obstore's threads, which stay
        yield server
