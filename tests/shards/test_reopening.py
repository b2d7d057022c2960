"""Read-only handles of datasets are opened again in workers; others raise an error with the fix."""

from __future__ import annotations

import contextlib
import io
import sqlite3
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import infeed
from infeed.memory.reopening import advice, reduce_handle
from tests.helpers import DEADLINE_S


def _h5py(folder: Path, mode: str = "r") -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file["group/x"] = [10, 11, 12, 13]
    return h5py.File(folder / "a.h5", mode)


def _lmdb(folder: Path, **options: Any) -> Any:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder / "lmdb")) as environment, environment.begin(write=True) as transaction:
        for number in range(4):
            transaction.put(b"%d" % number, b"%d" % (10 + number))
    return lmdb.open(str(folder / "lmdb"), **options)


def _sqlite(folder: Path, mode: str = "ro") -> sqlite3.Connection:
    path = folder / "a b?.db" if sys.platform != "win32" else folder / "a b.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table t (x)")
        connection.executemany("insert into t values (?)", [(10 + number,) for number in range(4)])
    uri = path.as_uri()
    return sqlite3.connect(f"{uri}?mode={mode}", uri=True)


def _zip(folder: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for number in range(4):
            archive.writestr(str(number), str(10 + number))
    return zipfile.ZipFile(folder / "a.zip")


def _image(folder: Path) -> Any:
    image = pytest.importorskip("PIL.Image")
    picture = image.new("L", (4, 1))
    picture.putdata([10, 11, 12, 13])
    picture.save(folder / "a.png")
    return image.open(folder / "a.png")


class Data:
    def __init__(self, handle: Any, read: Callable[[Any, int], Any]) -> None:
        self.handle, self.read = handle, read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.read(self.handle, index))


def _read_lmdb(environment: Any, index: int) -> bytes:
    with environment.begin() as transaction:
        found: bytes = transaction.get(b"%d" % index)
        return found


# How to open the handle, and how to read sample ``index`` from it: 10 + index.
HANDLES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, int], Any]]] = {
    "h5py file": (_h5py, lambda file, index: file["group/x"][index]),
    "h5py group": (lambda folder: _h5py(folder)["group"], lambda group, index: group["x"][index]),
    "h5py dataset": (lambda folder: _h5py(folder)["group/x"], lambda dataset, index: dataset[index]),
    "lmdb": (lambda folder: _lmdb(folder, readonly=True, lock=False), _read_lmdb),
    "sqlite3": (_sqlite, lambda c, index: c.execute("select x from t where rowid = ?", (index + 1,)).fetchone()[0]),
    "sqlite3 that may write": (
        lambda folder: _sqlite(folder, "rw"),
        lambda c, index: c.execute("select x from t where rowid = ?", (index + 1,)).fetchone()[0],
    ),
    "zip": (_zip, lambda archive, index: archive.read(str(index))),
    "image": (_image, lambda image, index: image.getpixel((index, 0))),
}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Handles to close."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        (handle.file if hasattr(handle, "file") else handle).close()


@pytest.mark.process
@pytest.mark.parametrize("name", HANDLES)
def test_a_read_only_handle_is_opened_again_in_workers(tmp_path: Path, name: str, opened: list[Any]) -> None:
    make, read = HANDLES[name]
    handle = make(tmp_path)
    opened.append(handle)
    with infeed.DataLoader(Data(handle, read), 2, num_workers=2, timeout=DEADLINE_S) as loader:
        assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13]]

    assert Data(handle, read)[1] == 11  # The original is still open.


def _database(folder: Path, **options: Any) -> sqlite3.Connection:
    with closing(sqlite3.connect(folder / "a.db")) as connection, connection:
        connection.execute("pragma encoding = 'UTF-16le'")
        connection.execute('create table "t ""1" (x real, y date, "z " integer, w)')
        connection.execute('create view v as select x from "t ""1"')
    return sqlite3.connect(folder / "a.db", **options)


def _with_function(folder: Path) -> sqlite3.Connection:
    connection = _database(folder)
    connection.create_function("lower", 1, lambda text: text)
    return connection


def _with_collation(folder: Path) -> sqlite3.Connection:
    connection = _database(folder)
    connection.create_collation("mine", lambda a, b: 0)
    return connection


def _drafted(folder: Path) -> Any:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64)).save(folder / "a.jpg")
    found = image.open(folder / "a.jpg")
    found.draft("L", (16, 16))
    return found


CHANGED: dict[str, Callable[[Path], Any]] = {
    "converters by type": lambda folder: _database(folder, detect_types=sqlite3.PARSE_DECLTYPES),
    "converters by name": lambda folder: _database(folder, detect_types=sqlite3.PARSE_COLNAMES),
    "function": _with_function,
    "collation": _with_collation,
    "draft": _drafted,
}


@pytest.mark.filterwarnings("ignore:The default date converter")
@pytest.mark.parametrize("name", CHANGED)
def test_a_handle_whose_copy_would_give_other_results_is_not_opened_again(tmp_path: Path, name: str, opened: list[Any]) -> None:
    opened.append(CHANGED[name](tmp_path))

    assert reduce_handle(opened[0]) is NotImplemented


@pytest.mark.parametrize("text", [str, bytes])
def test_a_database_is_opened_again_for_any_types_and_texts(tmp_path: Path, text: Any, opened: list[Any]) -> None:
    opened.append(_database(tmp_path))
    opened[0].text_factory = text
    function, arguments = reduce_handle(opened[0])
    opened.append(function(*arguments))

    assert opened[1].execute("select 'a'").fetchone() == (text(b"a") if text is bytes else "a",)


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.linux("torch forks its workers there")
def test_the_torch_loader_keeps_such_datasets_on_infeeds_workers(
    tmp_path: Path, opened: list[Any], recwarn: pytest.WarningsRecorder
) -> None:
    """It does not use torch's workers, so these loaders resume and survive crashes too."""
    ours = pytest.importorskip("infeed.torch")
    handle = _h5py(tmp_path)
    opened.append(handle)
    loader = ours.DataLoader(Data(handle, HANDLES["h5py file"][1]), 2, num_workers=1, timeout=DEADLINE_S)

    assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13]]
    assert loader.statistics().batch_count == 2
    assert [str(one.message) for one in recwarn if "torch's own workers" in str(one.message)] == []


RELATIVE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "h5py file": (_h5py, "a.h5"),
    "h5py group": (lambda folder: _h5py(folder)["group"], "a.h5"),
    "lmdb": (lambda folder: _lmdb(folder, readonly=True, lock=False), "lmdb"),
    "zip": (_zip, "a.zip"),
    "image": (_image, "a.png"),
}


@pytest.mark.linux("the open files of a process are not listed everywhere")
@pytest.mark.parametrize("name", RELATIVE)
def test_a_relative_path_to_another_file_is_not_opened(tmp_path: Path, name: str, opened: list[Any]) -> None:
    """After os.chdir, the copy would read other data without an error."""
    make, file = RELATIVE[name]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with contextlib.chdir(tmp_path / "two"):
        other = make(Path())
        (other.file if hasattr(other, "file") else other).close()
    with contextlib.chdir(tmp_path / "one"):
        opened.append(make(Path()))
        assert reduce_handle(opened[0])[1][0] == str(tmp_path / "one" / file)
    with contextlib.chdir(tmp_path / "two"):
        assert reduce_handle(opened[0]) is NotImplemented
        assert "absolute path" in advice(opened[0])


WRITABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "h5py": (lambda folder: _h5py(folder, "r+"), "with mode 'r'"),
    "lmdb": (_lmdb, "with readonly=True and lock=False"),
    "sqlite3": (
        lambda _: sqlite3.connect(":memory:"),
        "open one database file and commit changes, without detect_types, functions or collations of your own",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("name", WRITABLE)
def test_a_writable_handle_is_an_error_with_the_fix(tmp_path: Path, name: str, opened: list[Any]) -> None:
    make, text = WRITABLE[name]
    handle = make(tmp_path)
    opened.append(handle)
    with (
        infeed.DataLoader(Data(handle, int), 2, num_workers=1, timeout=DEADLINE_S) as loader,
        pytest.raises(infeed.WorkerStartError) as caught,
    ):
        next(iter(loader))

    assert f"{text}, and workers will open it again" in str(caught.value)


@pytest.mark.process
def test_a_parquet_file_is_an_error_with_the_fix(tmp_path: Path, opened: list[Any]) -> None:
    """pyarrow does not keep the path."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "a.parquet")
    opened.append(parquet.ParquetFile(tmp_path / "a.parquet"))
    with (
        infeed.DataLoader(Data(opened[0], int), 2, num_workers=1, timeout=DEADLINE_S) as loader,
        pytest.raises(infeed.WorkerStartError, match=r"use infeed\.open for Parquet files"),
    ):
        next(iter(loader))


@pytest.mark.process
@pytest.mark.parametrize("name", ["transaction", "database"])
def test_a_part_of_an_lmdb_environment_is_an_error_with_the_fix(tmp_path: Path, name: str, opened: list[Any]) -> None:
    """LMDB does not expose the environment of such a part."""
    environment = _lmdb(tmp_path, readonly=True, lock=False)
    opened.append(environment)
    part = environment.begin() if name == "transaction" else environment.open_db()
    with (
        infeed.DataLoader(Data(part, int), 2, num_workers=1, timeout=DEADLINE_S) as loader,
        pytest.raises(infeed.WorkerStartError, match=r"keep only its environment, and call begin\(\) or open_db\(\)"),
    ):
        next(iter(loader))


@pytest.mark.process
def test_an_archive_without_a_path_is_an_error(opened: list[Any]) -> None:
    stream = io.BytesIO()
    opened.append(zipfile.ZipFile(stream, "w"))
    with (
        infeed.DataLoader(Data(opened[0], int), 2, num_workers=1, timeout=DEADLINE_S) as loader,
        pytest.raises(infeed.WorkerStartError, match=r"dataset\.handle"),
    ):
        next(iter(loader))
