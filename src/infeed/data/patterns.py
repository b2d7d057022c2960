"""Expand patterns that name shards: braces, globs, folders and lists."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

from infeed.errors import ConfigError

_MOST_SHARDS: Final = 1_000_000
_SCHEME: Final = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
_LETTERS: Final = re.compile(r"([a-z])\.\.([a-z])(?:\.\.(\d+))?|([A-Z])\.\.([A-Z])(?:\.\.(\d+))?")
# Extensions of tar files that are compressed as a whole.
COMPRESSED: Final = (".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4", ".tgz", ".txz", ".tbz2")
_WILDCARD: Final = re.compile(r"[*?\[]")
# What infeed itself writes beside shards: indices, and what an interrupted write or `infeed pack` leaves.
_OWN: Final = re.compile(r"infeed-[0-9a-f]{16}\.npz(\.[0-9a-f]{32}\.tmp)?|.*-[0-9]{6}\.part")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case, or ``""`` for a local path.

    >>> scheme_of("s3://bucket/a.tar"), scheme_of("C:\\\\data\\\\a.tar"), scheme_of("data/a.tar")
    ('s3', '', '')
    """
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def local_path(url: str) -> str:
    """Return the path that a ``file://`` URL means; other URLs and paths as they are."""
    if scheme_of(url) != "file":
        return url
    from urllib.request import url2pathname  # takes 20 ms to import

    return url2pathname(url[len("file://") :])


def expand_braces(pattern: str) -> list[str]:
    """Expand ranges and alternatives in braces, as shells and WebDataset do.

    >>> expand_braces("{train,val}-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    begin = pattern.find("{")
    if begin < 0:
        return [pattern]
    depth = 0
    commas = []
    for end in range(begin, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        if depth == 1 and pattern[end] == ",":
            commas.append(end)
        if depth == 0:
            break
    else:
        raise ConfigError(f"pattern={pattern!r} has an opening brace without a closing one; close it")
    cuts = [begin, *commas, end]
    parts = [pattern[left + 1 : right] for left, right in pairwise(cuts)]
    if len(parts) == 1:
        parts = _range(parts[0], pattern)
    inner = [one for part in parts for one in expand_braces(part)]
    return [pattern[:begin] + one + rest for one in inner for rest in expand_braces(pattern[end + 1 :])]


def _range(text: str, pattern: str) -> list[str]:
    if match := _NUMBERS.fullmatch(text):
        first, last, step = match.groups()
        is_padded = any(len(one) > 1 and one[0] == "0" for one in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        return [str(number).zfill(width) for number in _steps(int(first), int(last), step, pattern)]
    if match := _LETTERS.fullmatch(text):
        first, last, step = match.groups()[:3] if match[1] else match.groups()[3:]
        return [chr(number) for number in _steps(ord(first), ord(last), step, pattern)]
    raise ConfigError(f"pattern={pattern!r} has braces that are neither a range {{000..127}} nor a list {{a,b}}")


def _steps(first: int, last: int, step: str | None, pattern: str) -> range:
    stride = int(step or 1)
    if stride == 0 or abs(last - first) // stride >= _MOST_SHARDS:
        raise ConfigError(f"pattern={pattern!r} has a range without end or of more than {_MOST_SHARDS:,} shards; shorten it")
    return range(first, last + 1, stride) if first <= last else range(first, last - 1, -stride)


def expand(
    patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], list_urls: Callable[[str], list[str]]
) -> list[str]:
    """Return the URLs and absolute paths of all shards: in the given order, and sorted where a glob or folder names several.

    Args:
        list_urls: Function that returns the URLs of all objects below a prefix.

    Raises:
        ConfigError: A pattern is invalid or matches nothing.
    """
    if isinstance(patterns, str | os.PathLike):
        patterns = [patterns]
    found: list[str] = []
    for given in patterns:
        if not isinstance(given, str | os.PathLike):
            raise ConfigError(f"pattern={given!r} must be a path, a URL, or a list of them")
        pattern = local_path(os.fspath(given))
        # A literal path may contain braces.
        alternatives = [pattern] if not scheme_of(pattern) and os.path.exists(pattern) else expand_braces(pattern)
        for one in alternatives:
            matched = _remote(one, list_urls) if scheme_of(one) else _local(one)
            if not matched:
                raise ConfigError(f"pattern={one!r} matches no shards; check the path")
            found += matched
    if not found:
        raise ConfigError("pattern=[] lists no shards; pass at least one")
    if len(set(found)) != len(found):
        twice = next(url for number, url in enumerate(found) if url in found[:number])
        raise ConfigError(f"pattern lists {twice!r} twice; list each shard once")
    return found


def _local(pattern: str) -> list[str]:
    path = os.path.abspath(pattern)
    if os.path.isdir(path):
        return sorted(os.path.join(path, name) for name in os.listdir(path) if is_shard(name))
    if _WILDCARD.search(pattern) and not os.path.exists(path):  # the current folder may have brackets, too
        matched = map(os.path.abspath, glob.glob(pattern, recursive=True))
        return sorted(found for found in matched if os.path.isfile(found) and not _is_own(found))
    return [path]


def _remote(url: str, list_urls: Callable[[str], list[str]]) -> list[str]:
    if scheme_of(url) in ("http", "https"):
        plain, query, _ = url.partition("?")
        if query:  # may have a signature, which no message should show
            raise ConfigError(
                f"pattern={plain} has a query, which is not supported; make the shards readable without a signature, or use "
                "s3://, gs:// or az:// with credentials"
            )
        return [url]
    if url.endswith("/"):
        return sorted(found for found in list_urls(url) if is_shard(found) and "/" not in found[len(url) :])
    wildcard = _WILDCARD.search(url)
    if wildcard is None:
        return [url]
    prefix = url[: url.rindex("/", 0, wildcard.start()) + 1]
    matches = re.compile(_translated(url)).fullmatch
    return sorted(found for found in list_urls(prefix) if matches(found) and not _is_own(found))


def _translated(pattern: str) -> str:
    """Translate a glob to a regular expression, in which ``*`` does not match ``/`` and ``**`` does."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]*\])", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known[part] if part in known else part.replace("[!", "[^") if part[:1] == "[" and number % 2 else re.escape(part)
        for number, part in enumerate(parts)
    )


def _is_own(path: str) -> bool:
    return _OWN.fullmatch(os.path.basename(path)) is not None


def is_shard(name: str) -> bool:
    """Whether a file in a folder is a shard, by its extension; also a compressed one, which must not be left out silently."""
    return name.lower().endswith((".tar", ".parquet", ".pq", *COMPRESSED))
