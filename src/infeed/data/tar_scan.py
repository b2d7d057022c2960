"""Find the samples of a tar shard by reading its headers only.

This module finds 5 times as many members per second as ``tarfile``, because it creates no object per member
(``benchmarks/shards.py``).
Samples follow the conventions of WebDataset: consecutive members of one basename are a sample, and what follows the first dot
of the basename is the name of the column.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final
from zlib import adler32

import numpy as np
import numpy.typing as npt

from infeed.errors import ShardError

_BLOCK: Final = 512
_END: Final = bytes(_BLOCK)
_REGULAR: Final = frozenset(b"0\x007")
_LINK: Final = ord("1")
_SPARSE: Final = ord("S")
# Links, devices and folders have no content, whatever their size field says.
_WITHOUT_CONTENT: Final = frozenset(b"123456")
# Members that describe the archive, which WebDataset skips too.
_META: Final = re.compile(r"__[^/]*__($|/)")
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
}
# Numbers of columns are stored as uint16.
MOST_COLUMNS: Final = 1 << 16
_ADLER: Final = 65_521
# Extended headers are a few hundred bytes; a larger one is damage.
_MOST_HEADER: Final = 1 << 20

Integers = npt.NDArray[Any]


class ReadAhead(NamedTuple):
    """How many bytes to read at a header: ``near`` bytes where members are small, ``far`` where they exceed ``large``."""

    near: int
    far: int
    large: int


# On a local disk a read costs as much as copying 10 KiB; on object storage, as much as transferring a megabyte.
LOCAL: Final = ReadAhead(1 << 16, _BLOCK, 1 << 14)
REMOTE: Final = ReadAhead(1 << 22, 1 << 16, 1 << 20)


@final
@dataclass(frozen=True, slots=True)
class ShardMembers:
    """The samples of one shard. Members are in the order of the file, those of a sample one after the other."""

    keys: list[str]  # by sample
    counts: Integers  # members by sample
    names: list[str]  # columns that occur in the shard
    codes: Integers  # number of the column, by member
    offsets: Integers  # by member
    sizes: Integers  # by member


@final
class _Headers:
    """Returns bytes at increasing offsets, reading ahead."""

    def __init__(self, read: Callable[[int, int], bytes], file_size: int, ahead: ReadAhead) -> None:
        self._read, self._file_size, self._ahead = read, file_size, ahead
        self._data, self._start, self._stop = b"", 0, 0
        self._before = 0

    def at(self, offset: int, size: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or offset + size > self._stop:
            ahead = self._ahead.far if offset - self._before > self._ahead.large else self._ahead.near
            wanted = min(max(size, ahead), self._file_size - offset)
            self._data = self._read(offset, wanted) if wanted > 0 else b""
            self._start, self._stop = offset, offset + len(self._data)
            begin = 0
        self._before = offset
        return self._data[begin : begin + size]


def scan_tar(url: str, read: Callable[[int, int], bytes], file_size: int, ahead: ReadAhead) -> ShardMembers:
    """Read the headers of a tar file.

    Args:
        read: Function of offset and size that returns bytes of the file.

    Raises:
        ShardError: The file is compressed, cut off, or no tar file, or has members that cannot be read at random.
    """
    if not file_size:
        raise ShardError(f"{url}: the file is empty; copy or write it again")
    headers = _Headers(read, file_size, ahead)
    keys: list[str] = []
    counts: list[int] = []
    codes: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    numbers: dict[str, int] = {}
    present: set[int] = set()  # columns of the current sample
    links: list[tuple[int, str]] = []  # members that are hard links, and the names that they link to
    key: str | None = None
    extended: dict[str, str] = {}
    position = 0
    while position < file_size:
        header = headers.at(position, _BLOCK)
        if header == _END:
            break
        if not position:
            _check_start(url, header)
        if len(header) < _BLOCK:
            raise ShardError(f"{url}: the file is truncated inside the header at offset {position}; copy or write it again")
        kind = header[156]
        try:
            _check_sum(header)
            size = int(extended["size"]) if "size" in extended else _number(header)
        except ValueError as error:
            raise ShardError(
                f"{url}: no tar header at offset {position}; the shard is damaged, copy or write it again"
            ) from error
        if kind in _WITHOUT_CONTENT:
            size = 0
        begin = position + _BLOCK
        position = begin + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if begin + size > file_size:
            raise ShardError(f"{url}: the file is truncated inside the member at offset {begin}; copy or write it again")
        if kind in b"xgLK":
            if size > _MOST_HEADER:
                raise ShardError(
                    f"{url}: extended header of {size} bytes at offset {begin}; the shard is damaged, copy or write it again"
                )
            extended |= _extended(kind, headers.at(begin, size))
            continue
        fields, extended = extended, {}
        name = fields.get("path") or _name(header)
        if kind == _SPARSE or (fields and any(field.startswith("GNU.sparse.") for field in fields)):
            raise ShardError(
                f"{url}: {fields.get('GNU.sparse.name', name)!r} is a sparse file; write the shard without --sparse (-S) of tar"
            )
        if kind not in _REGULAR and kind != _LINK:
            continue
        parts = split_name(name)
        if parts is None:
            continue
        base, column = parts
        code = numbers.setdefault(column, len(numbers))
        if code == MOST_COLUMNS:
            raise too_many_columns(url, column)
        if kind == _LINK:
            links.append((len(offsets), fields.get("linkpath") or _text(header[157:257])))
        if base != key:
            key = base
            keys.append(base)
            counts.append(0)
            present.clear()
        elif code in present:
            raise ShardError(
                f"{url}: sample {base!r} has two members {column!r}, the second at offset {begin}; keep one of them"
            )
        present.add(code)
        counts[-1] += 1
        codes.append(code)
        offsets.append(begin)
        sizes.append(size)
    found = ShardMembers(
        keys,
        np.array(counts, dtype=np.uint32),
        list(numbers),
        np.array(codes, dtype=np.uint16),
        np.array(offsets, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
    )
    if links:
        _resolve(url, links, found)
    return found


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and column of a member, or ``None`` if it has no basename or extension, or describes the archive."""
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash or dot + 1 == len(name) or ("__" in name and _META.match(name)):
        return None
    return name[:dot], name[dot + 1 :].lower()


def too_many_columns(url: str, column: str) -> ShardError:
    return ShardError(
        f"{url}: more than {MOST_COLUMNS:,} columns, such as {column!r}; a column begins at the first dot of the basename, so "
        "write keys without dots"
    )


def _resolve(url: str, links: list[tuple[int, str]], found: ShardMembers) -> None:
    """Let hard links point to the content of their targets."""
    keys = np.repeat(np.array(found.keys, dtype=object), found.counts).tolist()
    members = list(zip(keys, [found.names[code] for code in found.codes.tolist()], strict=True))
    places = {member: place for place, member in enumerate(members)}
    for place, target in links:
        parts = split_name(target)
        source = place if parts is None else places.get(parts, place)
        if source >= place:
            raise ShardError(
                f"{url}: {'.'.join(members[place])!r} is a hard link to {target!r}, which is not among the members before "
                "it; write the shard with --hard-dereference of tar"
            )
        found.offsets[place], found.sizes[place] = found.offsets[source], found.sizes[source]


def _check_start(url: str, header: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            raise ShardError(
                f"{url}: the shard is compressed as a whole ({name}), so samples cannot be read at random; "
                "decompress it, or compress the files in it instead"
            )


def _check_sum(header: bytes) -> None:
    """Check that this is a header, by its checksum.

    Adler-32 contains the sum of the bytes plus one, modulo 65,521, and takes a tenth of the time of ``sum``.

    Raises:
        ValueError: The checksum is wrong.
    """
    field = header[148:156]
    found = int(field.rstrip(b"\0 ") or b"-", 8) - 8 * 32 + sum(field)
    if (found + 1 - (adler32(header) & 0xFFFF)) % _ADLER:
        signed = 256 * sum(byte >= 128 for byte in header)  # some old programs added the bytes as signed numbers
        if (found + 1 + signed - (adler32(header) & 0xFFFF)) % _ADLER:
            raise ValueError("wrong checksum")


def _number(header: bytes) -> int:
    """Return the size field."""
    if header[124] & 0x80:  # base 256, for files beyond 8 GiB
        return int.from_bytes(header[125:136], "big")
    return int(header[124:136].rstrip(b"\0 ") or b"0", 8)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    return f"{_text(header[345:500])}/{name}" if header[257:263] == b"ustar\0" and header[345] else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _extended(kind: int, data: bytes) -> dict[str, str]:
    """Return the fields that an extended header sets for the next member."""
    if kind in b"LK":
        return {"path" if kind == ord("L") else "linkpath": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found: dict[str, str] = {}
    if kind == ord("x"):
        while data:
            length, _, rest = data.partition(b" ")
            if not length.isdigit() or int(length) > len(data) or not int(length):
                break
            name, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
            if name in (b"path", b"size", b"linkpath") or name.startswith(b"GNU.sparse."):
                found[name.decode()] = value.decode("utf-8", "surrogateescape")
            data = data[int(length) :]
    return found
