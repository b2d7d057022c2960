"""Tar shards in WebDataset's conventions as a map-style dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from infeed.data.dataset import Decode, Integers, ShardDataset, ShardReader
from infeed.data.index import Index, Part, Scan, texts
from infeed.data.patterns import scheme_of
from infeed.data.storage import Range, Stat, Storage, any_version
from infeed.data.tar_scan import LOCAL, MOST_COLUMNS, REMOTE, scan_tar, too_many_columns
from infeed.errors import ShardError

_SEPARATOR: Final = "\0"
# Columns that every sample has, as in WebDataset.
KEY: Final = "__key__"
URL: Final = "__url__"


def tar_scan(storage: Storage) -> Scan:
    """Return how to index tar shards."""

    def scan(url: str, stat: Stat) -> Part:
        def read(offset: int, size: int) -> bytes:
            return storage.read([Range(url, offset, size)], any_version)[0]

        found = scan_tar(url, read, stat.size, REMOTE if scheme_of(url) else LOCAL)
        names, _ = texts([_SEPARATOR.join(found.names)])
        keys, key_lengths = texts(found.keys)
        return {
            "members": found.counts,
            "codes": found.codes,
            "offsets": found.offsets,
            "sizes": found.sizes,
            "names": names,
            "keys": keys,
            "key_lengths": key_lengths,
        }

    return Scan("tar", ("members", "codes", "offsets", "sizes", "names", "keys", "key_lengths"), scan)


@final
class TarDataset(ShardDataset):
    """A sample is a dict of ``__key__``, ``__url__`` and its members by extension, or only ``columns``."""

    _extra_columns = (KEY, URL)

    def __init__(self, index: Index, reader: ShardReader, columns: Sequence[str] | None, decode: Decode | None) -> None:
        arrays, counts = index.arrays, index.counts
        self._codes, names = _common_codes(index)
        self._names = names
        self._offsets, self._sizes = arrays["offsets"], arrays["sizes"]
        self._member_stops = np.cumsum(arrays["members"], dtype=np.int64)
        self._keys = arrays["keys"]
        self._key_stops = np.cumsum(arrays["key_lengths"], dtype=np.int64)
        super().__init__(index, reader, np.cumsum(counts["members"], dtype=np.int64), columns, decode, names)
        wanted = self._columns
        self._is_wanted = None if wanted is None else [name in wanted for name in names]
        self._has_key, self._has_url = wanted is None or KEY in wanted, wanted is None or URL in wanted
        # Columns whose order or presence must be checked, because a sample may lack one.
        self._required = None if wanted is None else tuple(wanted)

    def _load(self, rows: Integers) -> list[dict[str, Any]]:
        urls, names, is_wanted, decoders = self._urls, self._names, self._is_wanted, self._decoders
        shards = np.searchsorted(self._stops, rows, side="right").tolist()
        stops = self._member_stops[rows].tolist()
        starts = np.where(rows > 0, self._member_stops[rows - 1], 0).tolist()
        ranges: list[Range] = []
        owners: list[list[int]] = []
        for shard, start, stop in zip(shards, starts, stops, strict=True):
            url = urls[shard]
            codes = self._codes[start:stop].tolist()
            offsets, sizes = self._offsets[start:stop].tolist(), self._sizes[start:stop].tolist()
            if is_wanted is not None:
                chosen = [number for number, code in enumerate(codes) if is_wanted[code]]
                codes = [codes[number] for number in chosen]
                offsets, sizes = [offsets[number] for number in chosen], [sizes[number] for number in chosen]
            ranges += [Range(url, offset, size) for offset, size in zip(offsets, sizes, strict=True)]
            owners.append(codes)
        contents = iter(self._reader.read(ranges))
        samples = []
        for row, shard, codes in zip(rows.tolist(), shards, owners, strict=True):
            sample: dict[str, Any] = {}
            if self._has_key:
                sample[KEY] = self.key(row)
            if self._has_url:
                sample[URL] = urls[shard]
            for code in codes:
                name, value = names[code], next(contents)
                if name in decoders:
                    value = self._decoded(decoders[name], value, row, name)
                sample[name] = value
            if self._required is not None:
                sample = self._arranged(sample, self._required, row, urls[shard])
            samples.append(sample)
        return samples

    def _arranged(self, sample: dict[str, Any], required: tuple[str, ...], row: int, url: str) -> dict[str, Any]:
        """Return the columns in the order in which the user named them."""
        try:
            return {name: sample[name] for name in required}
        except KeyError as error:
            start = int(self._member_stops[row - 1]) if row else 0
            found = [self._names[code] for code in self._codes[start : int(self._member_stops[row])].tolist()]
            raise ShardError(
                f"{url}: sample {self.key(row)!r} has no column {error.args[0]!r} (found: {', '.join(found)}); remove it from "
                "columns"
            ) from None

    def _described(self, row: int) -> str:
        return f"{self.key(row)!r} of {self._urls[int(np.searchsorted(self._stops, row, side='right'))]}"

    def key(self, row: int) -> str:
        """Return the key of a sample: its path in the shard without extension."""
        start = int(self._key_stops[row - 1]) if row else 0
        return self._keys[start : int(self._key_stops[row])].tobytes().decode("utf-8", "surrogateescape")


def _common_codes(index: Index) -> tuple[Any, list[str]]:
    """Return the column number of every member, with one numbering for all shards, and the names by number."""
    lists = []
    stops = np.cumsum(index.counts["names"])
    for count, stop in zip(index.counts["names"].tolist(), stops.tolist(), strict=True):
        text = index.arrays["names"][stop - count : stop].tobytes().decode("utf-8", "surrogateescape")
        lists.append(text.split(_SEPARATOR) if text else [])
    numbers: dict[str, int] = {}
    for url, names in zip(index.urls, lists, strict=True):
        for name in names:
            if numbers.setdefault(name, len(numbers)) == MOST_COLUMNS:
                raise too_many_columns(url, name)
    known = list(numbers)
    codes = index.arrays["codes"]
    if all(names == known[: len(names)] for names in lists):
        return codes, known
    codes = codes.copy()
    stop = 0
    for names, count in zip(lists, index.counts["codes"].tolist(), strict=True):
        start, stop = stop, stop + count
        codes[start:stop] = np.array([numbers[name] for name in names], dtype=np.uint16)[codes[start:stop]]
    return codes, known
