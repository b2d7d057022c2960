"""Write tar shards in WebDataset's conventions from a folder of files or a map-style dataset."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from infeed.data.locks import replace_file
from infeed.data.storage import LocalStorage, Range, any_version
from infeed.data.tar_scan import LOCAL, scan_tar, split_name
from infeed.errors import ConfigError, ShardError

_PART_SUFFIX: Final = ".part"
_DIGITS: Final = 6
_FORMAT: Final = tarfile.PAX_FORMAT
# An archive ends with two empty blocks, and its size is a multiple of the record size.
_END_BYTES: Final = 2 * tarfile.BLOCKSIZE


class Sample(NamedTuple):
    """A key and the content of its members by extension."""

    key: str
    members: Mapping[str, bytes | Path]

    def archived_bytes(self) -> int:
        """Return how much it adds to an archive: headers, and contents in whole blocks."""
        total = 0
        for extension, data in self.members.items():
            info = tarfile.TarInfo(f"{self.key}.{extension}")
            info.size = len(data) if isinstance(data, bytes) else data.stat().st_size
            total += len(info.tobuf(_FORMAT)) + _rounded(info.size, tarfile.BLOCKSIZE)
        return total


class PackResult(NamedTuple):
    """The numbers of a finished ``pack``."""

    shards: int
    samples: int
    resumed_samples: int  # of them, those that an earlier run had written
    skipped_files: int


def samples_of_folder(folder: Path, out: Path) -> tuple[list[Sample], int]:
    """Return the samples of a folder: files of one folder and basename are one sample, in the order of their paths.

    Args:
        out: Folder for the shards. If it is inside of ``folder``, its files are left out.

    Returns:
        The samples, and how many files are no part of one, because their names have no basename or extension.

    Raises:
        ConfigError: The folder has no samples, or names of its files differ only in upper and lower case of the extension; or
            ``out`` is the same folder.
    """
    real, shards = folder.resolve(), out.resolve()
    if shards == real:
        raise ConfigError(f"{out} is the folder to pack; write the shards to another folder")
    inside = folder / shards.relative_to(real) if shards.is_relative_to(real) else None
    groups: dict[str, dict[str, Path]] = {}
    skipped_count = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or (inside is not None and path.is_relative_to(inside)):
            continue
        parts = split_name(path.relative_to(folder).as_posix())
        if parts is None:
            skipped_count += 1
            continue
        key, column = parts
        other = groups.setdefault(key, {}).setdefault(column, path)
        if other is not path:
            raise ConfigError(
                f"{other} and {path} would be one column, because column names are lower-case; rename one of them"
            )
    if not groups:
        raise ConfigError(f"{folder} has no files with an extension; pass a folder with files such as 0001.jpg and 0001.cls")
    return [Sample(key, groups[key]) for key in sorted(groups)], skipped_count


def samples_of_dataset(dataset: Any, start: int = 0) -> Iterator[Sample]:
    """Yield the samples of a map-style dataset from ``start`` on, as bytes. Columns such as ``__key__`` are left out.

    Raises:
        ConfigError: A value has no file format, or a sample would have other columns when the shards are read.
    """
    for number in range(start, len(dataset)):
        sample = dataset[number]
        if isinstance(sample, tuple | list):
            sample = {f"{place}": value for place, value in enumerate(sample)}
        elif not isinstance(sample, Mapping):
            sample = {"0": sample}
        key = f"{number:09d}"
        found = [_member(key, name, value) for name, value in sample.items() if not _is_metadata(name)]
        if not found:
            raise ConfigError(f"sample {number} has no columns; remove it from the dataset")
        members = {name.lower(): data for name, data in found}
        if len(members) < len(found):
            raise ConfigError(
                f"sample {number} has keys that differ only in case: {list(sample)}; column names are lower-case, so rename one"
            )
        yield Sample(key, members)


def _is_metadata(name: Any) -> bool:
    return isinstance(name, str) and len(name) > 4 and name.startswith("__") and name.endswith("__")


def _member(key: str, name: Any, value: Any) -> tuple[str, bytes]:
    """Return extension and bytes of a value.

    Raises:
        ConfigError: The value has no file format, or the extension would be another when it is read.
    """
    where = f"sample {int(key)}, column {name!r}"
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the name is a {type(name).__qualname__}; use a str")
    try:
        extension, data = _encoded(name, value)
    except Exception as error:  # NumPy, Pillow and json raise several types
        raise ConfigError(
            f"{where}: a value of type {type(value).__qualname__} cannot be written ({error}); return bytes, text, numbers, "
            "arrays, PIL images or JSON values"
        ) from error
    if not name or "\0" in name or split_name(f"{key}.{extension}") != (key, extension.lower()):
        raise ConfigError(f"{where}: the name cannot be an extension of a file; rename it")
    return extension, data


def _encoded(name: str, value: Any) -> tuple[str, bytes]:
    """Return extension and bytes of a value: bytes unchanged, text and numbers as text, arrays as .npy, images as .png."""
    if isinstance(value, bytes | bytearray | memoryview):
        return name, bytes(value)
    if isinstance(value, str):
        return name, value.encode()
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return name, str(value).encode()
    if hasattr(value, "save") and hasattr(value, "tobytes") and hasattr(value, "mode"):  # a PIL image
        stream = io.BytesIO()
        value.save(stream, "PNG")
        return _with_extension(name, "png"), stream.getvalue()
    if hasattr(value, "__array__"):
        stream = io.BytesIO()
        np.save(stream, np.asarray(value), allow_pickle=False)
        return _with_extension(name, "npy"), stream.getvalue()
    return _with_extension(name, "json"), json.dumps(value).encode()


def _with_extension(name: str, extension: str) -> str:
    return name if name == extension or name.endswith(f".{extension}") else f"{name}.{extension}"


def written_shards(out: Path, prefix: str) -> tuple[list[Path], int, str | None]:
    """Return the complete shards of an earlier run, how many samples they have, and the key of the last one."""
    shards: list[Path] = []
    count, last = 0, None
    while (path := shard_path(out, prefix, len(shards))).exists():
        storage = LocalStorage()

        def read(offset: int, size: int, path: Path = path, storage: LocalStorage = storage) -> bytes:
            return storage.read([Range(str(path), offset, size)], any_version)[0]

        found = scan_tar(str(path), read, path.stat().st_size, LOCAL)
        shards.append(path)
        count += len(found.keys)
        last = found.keys[-1] if found.keys else last
    return shards, count, last


def shard_path(out: Path, prefix: str, number: int) -> Path:
    return out / f"{prefix}-{number:0{_DIGITS}d}.tar"


def check_resumed(out: Path, last: str | None, expected: str | None) -> None:
    """Check that the shards of an earlier run have the first samples of this one.

    Raises:
        ShardError: They are of other data.
    """
    if last != expected:
        raise ShardError(f"{out} has shards whose last sample is {last!r} instead of {expected!r}; pack into an empty folder")


def write_shards(samples: Iterable[Sample], out: Path, prefix: str, shard_bytes: int, first: int) -> Iterator[int]:
    """Write samples to shards from number ``first`` on; yield the number of the shard of each sample.

    A shard has a temporary name until it is complete, so that an interrupted run continues with the first missing one.
    """
    out.mkdir(parents=True, exist_ok=True)
    number = first
    part = shard_path(out, prefix, number).with_suffix(_PART_SUFFIX)
    archive: tarfile.TarFile | None = None
    try:
        for sample in samples:
            added = sample.archived_bytes()
            if archive is not None and _rounded(archive.offset + added + _END_BYTES, tarfile.RECORDSIZE) > shard_bytes:
                archive.close()
                archive = None
                replace_file(part, shard_path(out, prefix, number))
                number += 1
                part = shard_path(out, prefix, number).with_suffix(_PART_SUFFIX)
            if archive is None:
                archive = tarfile.open(part, "w", format=_FORMAT)  # noqa: SIM115
            for extension, data in sample.members.items():
                _add(archive, f"{sample.key}.{extension}", data)
            yield number
        if archive is not None:
            archive.close()
            archive = None
            replace_file(part, shard_path(out, prefix, number))
    finally:
        if archive is not None:  # interrupted
            archive.close()
            part.unlink()


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _add(archive: tarfile.TarFile, name: str, data: bytes | Path) -> None:
    info = tarfile.TarInfo(name)
    if isinstance(data, bytes):
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
        return
    with open(data, "rb") as file:
        info.size = os.fstat(file.fileno()).st_size
        archive.addfile(info, file)
