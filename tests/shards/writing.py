"""Shards for tests: written by tarfile, so that infeed reads not only what it wrote itself."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def tar_bytes(members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def sample(number: int, size: int = 40) -> Mapping[str, bytes]:
    """Sample ``number`` of the shards below; its bytes depend on the number."""
    return {"bin": (b"%d " % number * size)[:size], "cls": b"%d" % number}


def shard(numbers: Iterable[int], size: int = 40) -> bytes:
    return tar_bytes(
        (f"train/{number:06d}.{column}", data) for number in numbers for column, data in sample(number, size).items()
    )


def write_shards(folder: Path, shards: int, samples: int, size: int = 40) -> str:
    """Writes shards of consecutive samples, and returns their pattern."""
    for number in range(shards):
        data = shard(range(number * samples, (number + 1) * samples), size)
        (folder / f"train-{number:03d}.tar").write_bytes(data)
    return f"{folder}/train-{{000..{shards - 1:03d}}}.tar"
