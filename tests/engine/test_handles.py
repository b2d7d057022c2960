"""Handles that belong to one process are rejected before a worker starts, with their path and the fix (P7)."""

from __future__ import annotations

import importlib
import socket
import sqlite3
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infeed


class Data:
    """Holds a handle where datasets usually hold one."""

    def __init__(self, handle: Any) -> None:
        self.name, self.shards = "train", {"first": [handle]}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def zip_file(folder: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(folder / "data.zip", "w")


def h5py_dataset(folder: Path) -> Any:
    file = importlib.import_module("h5py").File(folder / "data.h5", "w")
    file["x"] = [1, 2, 3]
    return file["x"]


def close_h5py(dataset: Any) -> None:
    dataset.file.close()


# How to open and close the handle, its name in messages, and which attribute of it cannot be pickled.
HANDLES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], object], str, str]] = {
    "text file": (lambda folder: (folder / "a").open("w"), lambda h: h.close(), "_io.TextIOWrapper", ""),
    "binary file": (lambda folder: (folder / "a").open("wb"), lambda h: h.close(), "_io.BufferedWriter", ""),
    "zip file": (zip_file, lambda h: h.close(), "_io.BufferedRandom", ".fp"),
    "sqlite3": (lambda _: sqlite3.connect(":memory:"), lambda h: h.close(), "sqlite3.Connection", ""),
    "socket": (lambda _: socket.socket(), lambda h: h.close(), "socket.socket", ""),
    "lock": (lambda _: threading.Lock(), id, "_thread.lock", ""),
    "condition": (lambda _: threading.Condition(), id, "_thread.RLock", "._lock"),
    "generator": (lambda _: (i for i in range(3)), lambda h: h.close(), "generator", ""),
    "h5py": (h5py_dataset, close_h5py, "h5py._hl.dataset.Dataset", ""),
    "lmdb": (lambda folder: importlib.import_module("lmdb").open(str(folder)), lambda h: h.close(), "Environment", ""),
    "cv2": (lambda _: importlib.import_module("cv2").VideoCapture(), lambda h: h.release(), "cv2.VideoCapture", ""),
}


@pytest.mark.process
@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_that_cannot_be_pickled_is_named_with_its_path_and_the_fix(tmp_path: Path, name: str) -> None:
    """Whatever library it belongs to; threads share it, so the same dataset loads there."""
    if name in ("h5py", "lmdb", "cv2"):
        pytest.importorskip(name)
    make, close, kind, inside = HANDLES[name]
    dataset = Data(make(tmp_path))
    try:
        with pytest.raises(infeed.WorkerStartError) as caught:
            list(infeed.DataLoader(dataset, num_workers=1, timeout=30))
        with infeed.DataLoader(dataset, batch_size=2, num_workers=1, worker="thread", timeout=30) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1]]
    finally:
        close(dataset.shards["first"][0])

    text = str(caught.value)
    assert f"dataset.shards['first'][0]{inside} is a {kind}, which cannot be pickled" in text
    assert "on first use or in worker_init_fn" in text
    assert "worker='thread'" in text
