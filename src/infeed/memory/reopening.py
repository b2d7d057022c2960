"""Open handles of datasets again in workers, read-only, if their library reveals path and mode.

A copy in a worker has its own file position and locks. Files of h5py, LMDB and zipfile that are open for writing are not opened
again, because readers must not meet a writer there. Neither are files whose relative path names another one since `os.chdir`.
Nor are handles that would give other results, as far as their library reveals it: connections with converters, functions or
collations of the user, and images after ``draft()``.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import import_module
from typing import Any, Final
from urllib.parse import quote

# Named databases that LMDB allows per environment. The original's number cannot be read; a higher one costs nothing.
_MOST_DATABASES: Final = 1024
# The compiled types of LMDB have no module.
_LMDB_TYPES: Final = ("Environment", "Transaction", "Cursor", "_Database")


def reduce_handle(obj: Any) -> Any:
    """Reduce a read-only handle to a function that opens it again, or return ``NotImplemented``."""
    if isinstance(obj, sqlite3.Connection):
        return _reduce_sqlite(obj)
    if type(obj) is zipfile.ZipFile:
        return _reduce_zip(obj)
    for module, reduce in _BY_LIBRARY.items():
        if module in sys.modules:
            reduced = reduce(sys.modules[module], obj)
            if reduced is not NotImplemented:
                return reduced
    return NotImplemented


def advice(obj: Any) -> str:
    """Return how to open this handle so that workers can open it again; empty if they never can."""
    module = type(obj).__module__.partition(".")[0]
    if module == "h5py":
        return "open the file by its absolute path with mode 'r', and workers will open it again"
    if module == "lmdb" or (module == "builtins" and type(obj).__qualname__ in _LMDB_TYPES):
        if type(obj).__qualname__ != "Environment":
            return "keep only its environment, and call begin() or open_db() in __getitem__"
        return "open it by its absolute path with readonly=True and lock=False, and workers will open it again"
    if isinstance(obj, sqlite3.Connection):
        return (
            "open one database file and commit changes, without detect_types, functions or collations of your own, and workers "
            "will open it again; else open it in __getitem__ on first use"
        )
    if module in ("zipfile", "PIL"):
        return "open the file by its absolute path, and workers will open it again"
    if module == "pyarrow":
        return "keep the path and open the file in __getitem__ on first use, or use infeed.open for Parquet files"
    return ""


def _absolute(path: str, descriptor: Callable[[], int]) -> str | None:
    """Return the absolute path of an open file, or ``None`` if its relative path names another file now.

    Args:
        descriptor: Function that returns the descriptor of the open file.
    """
    found = os.path.abspath(path)
    if os.path.isabs(path):
        return found
    try:
        return found if os.path.samestat(os.stat(found), os.fstat(descriptor())) else None
    except (OSError, ValueError, AttributeError):  # it is gone, or has no descriptor
        return None


def _is_open(path: str) -> bool:
    """Whether this process has the file open; ``True`` where the system does not list open files."""
    try:
        wanted, descriptors = os.stat(path), os.listdir("/dev/fd")
    except OSError:
        return not os.path.isdir("/dev/fd")
    for number in descriptors:
        with suppress(OSError):  # that of the listing itself is closed
            if os.path.samestat(wanted, os.fstat(int(number))):
                return True
    return False


def _reduce_h5py(h5py: Any, obj: Any) -> Any:
    if not isinstance(obj, h5py.File | h5py.Group | h5py.Dataset) or not obj.id.valid:
        return NotImplemented
    file = obj.file
    if file.mode != "r" or file.driver not in ("sec2", "stdio"):
        return NotImplemented
    path = _absolute(file.filename, file.id.get_vfd_handle)
    if path is None:
        return NotImplemented
    opened = _open_h5py, (path, file.driver, file.swmr_mode)
    if isinstance(obj, h5py.File):
        return opened
    return _member_of_h5py, (*opened[1], obj.name) if obj.name is not None else NotImplemented


def _open_h5py(path: str, driver: str, swmr: bool) -> Any:
    return import_module("h5py").File(path, "r", driver=driver, swmr=swmr)


def _member_of_h5py(path: str, driver: str, swmr: bool, name: str) -> Any:
    return _open_h5py(path, driver, swmr)[name]  # keeps the file open


def _reduce_lmdb(lmdb: Any, obj: Any) -> Any:
    if not isinstance(obj, lmdb.Environment):
        return NotImplemented
    try:
        flags = obj.flags()
        path, info = obj.path(), obj.info()
    except lmdb.Error:  # it is closed
        return NotImplemented
    data = os.path.join(path, "data.mdb") if flags["subdir"] else path
    # LMDB does not reveal its descriptor.
    if not flags["readonly"] or not (os.path.isabs(path) or _is_open(data)):
        return NotImplemented
    kept = {name: flags[name] for name in ("readonly", "subdir", "lock", "readahead", "meminit") if name in flags}
    return _open_lmdb, (os.path.abspath(path), {**kept, "map_size": info["map_size"], "max_readers": info["max_readers"]})


def _open_lmdb(path: str, options: dict[str, Any]) -> Any:
    return import_module("lmdb").open(path, create=False, max_dbs=_MOST_DATABASES, **options)


def _reduce_sqlite(connection: sqlite3.Connection) -> Any:
    """Reduce a connection to a file. The copy can only read, whatever the original may do."""
    if type(connection) is not sqlite3.Connection:
        return NotImplemented
    try:
        cursor = connection.cursor()
        cursor.row_factory = None
        files = [path for _, name, path in cursor.execute("PRAGMA database_list").fetchall() if name != "temp"]
        has_temporary = cursor.execute("SELECT count(*) FROM sqlite_temp_master").fetchone()[0] > 0
        if len(files) != 1 or not files[0] or has_temporary or connection.in_transaction:
            return NotImplemented  # the copy would lack data
        with closing(_open_sqlite(files[0], None, None, str)) as plain:
            if _sqlite_additions(cursor) != _sqlite_additions(plain.cursor()) or _converts(cursor, plain.cursor()):
                return NotImplemented
    except sqlite3.Error:  # it is closed, or belongs to another thread
        return NotImplemented
    return _open_sqlite, (files[0], connection.isolation_level, connection.row_factory, connection.text_factory)


def _sqlite_additions(cursor: sqlite3.Cursor) -> set[Any]:
    """Return the functions and collations of a connection. Names are blobs, which ``text_factory`` does not change."""
    functions = cursor.execute("SELECT CAST(name AS BLOB), narg, builtin FROM pragma_function_list").fetchall()
    return {*functions, *cursor.execute("SELECT CAST(name AS BLOB) FROM pragma_collation_list").fetchall()}


def _converts(cursor: sqlite3.Cursor, plain: sqlite3.Cursor) -> bool:
    """Whether ``detect_types`` changes names of columns, or a number that is read as if it were in a column of the database.

    Args:
        plain: Cursor of a connection to the same database, without any settings.
    """
    if cursor.execute('SELECT 1 AS "a [b]"').description[0][0] == "a":
        return True
    columns = plain.execute(
        "SELECT c.type, c.name, m.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table' AND m.rootpage > 0"
    )
    for column, table in {kind: names for kind, *names in columns.fetchall()}.values():
        try:
            (value,) = cursor.execute(f"SELECT {_quoted(column)} FROM {_quoted(table)} WHERE 0 UNION ALL SELECT 7").fetchone()
        except sqlite3.Error:
            raise
        except Exception:  # of a converter
            return True
        if value != 7 or type(value) is not int:
            return True
    return False


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _open_sqlite(path: str, isolation_level: Any, row_factory: Any, text_factory: Any) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode=ro", uri=True, isolation_level=isolation_level, check_same_thread=False
    )
    connection.row_factory, connection.text_factory = row_factory, text_factory
    return connection


def _reduce_zip(archive: zipfile.ZipFile) -> Any:
    name = archive.filename
    # An archive over an open file of the user has no path of its own.
    if archive.mode != "r" or archive.fp is None or not isinstance(name, str) or not os.path.isfile(name):
        return NotImplemented
    path = _absolute(name, archive.fp.fileno)
    return NotImplemented if path is None else (_open_zip, (path, archive.pwd))


def _open_zip(path: str, password: bytes | None) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(path)
    archive.setpassword(password or b"")
    return archive


def _reduce_pillow(pillow: Any, obj: Any) -> Any:
    """Reduce an image that is not loaded yet. A loaded one is pickled with its pixels, which the user may have changed."""
    if not isinstance(obj, pillow.ImageFile) or getattr(obj, "fp", None) is None or getattr(obj, "is_animated", False):
        return NotImplemented
    name = getattr(obj, "filename", "")
    path = _absolute(os.fsdecode(name), lambda: obj.fp.fileno()) if name and os.path.isfile(name) else None
    if path is None:
        return NotImplemented
    try:
        with _open_image(path) as copy:
            is_same = type(copy) is type(obj) and _decoding(copy) == _decoding(obj)
    except Exception:  # Pillow raises several types
        return NotImplemented
    return (_open_image, (path,)) if is_same else NotImplemented


def _decoding(image: Any) -> tuple[Any, ...]:
    """Return what ``draft()`` changes."""
    return image.mode, image.size, image.tile, getattr(image, "decoderconfig", None)


def _open_image(path: str) -> Any:
    return import_module("PIL.Image").open(path)


_BY_LIBRARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "h5py": _reduce_h5py,
    "lmdb": _reduce_lmdb,
    "PIL.ImageFile": _reduce_pillow,
}
