"""Patterns that name shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infeed
from infeed.data.patterns import expand, expand_braces
from infeed.data.storage import common_prefix
from tests.shards.writing import write_shards

OBJECTS = [f"s3://b/{name}" for name in ("x/0.tar", "x/1.tar", "x/y/2.tar", "x/readme", "z/3.tar")]


def list_urls(prefix: str) -> list[str]:
    return [url for url in reversed(OBJECTS) if url.startswith(prefix)]


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("a", ["a"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{08..10}-{a,b}", ["08-a", "08-b", "09-a", "09-b", "10-a", "10-b"]),
        ("x{a,{0..1}c}", ["xa", "x0c", "x1c"]),
        ("{,x}y", ["y", "xy"]),
        ("{0..10..4}", ["0", "4", "8"]),
        ("{a..c}{E..C}", ["aE", "aD", "aC", "bE", "bD", "bC", "cE", "cD", "cC"]),
        ("{a..e..2}", ["a", "c", "e"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{9..010}", ["009", "010"]),
        ("{10..9..1}", ["10", "9"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, expanded: list[str]) -> None:
    assert expand_braces(pattern) == expanded


@pytest.mark.parametrize("pattern", ["{0..", "{abc}", "{a..C}", "{0..3..0}", "{0..99999999}"])
def test_invalid_braces_are_rejected(pattern: str) -> None:
    with pytest.raises(infeed.ConfigError, match="pattern="):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s3://b/x/{0..1}.tar", ["x/0.tar", "x/1.tar"]),
        ("s3://b/x/*.tar", ["x/0.tar", "x/1.tar"]),
        ("s3://b/x/", ["x/0.tar", "x/1.tar"]),
        ("s3://b/{x,z}/*.tar", ["x/0.tar", "x/1.tar", "z/3.tar"]),
        ("s3://b/**/*.tar", ["x/0.tar", "x/1.tar", "x/y/2.tar", "z/3.tar"]),
        ("s3://b/x/[!0].tar", ["x/1.tar"]),
        ("s3://b/?/3.tar", ["z/3.tar"]),
        (["s3://b/z/3.tar", "s3://b/x/*.tar"], ["z/3.tar", "x/0.tar", "x/1.tar"]),
    ],
)
def test_globs_match_objects(pattern: Any, names: list[str]) -> None:
    assert expand(pattern, list_urls) == [f"s3://b/{name}" for name in names]


def test_globs_and_folders_match_local_files(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.txt"):
        (tmp_path / name).touch()
    both = [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]

    assert expand(str(tmp_path / "*.tar"), list_urls) == both
    assert expand(tmp_path, list_urls) == both
    assert expand(f"file://{tmp_path}/a.tar", list_urls) == both[:1]


def test_globs_are_relative_to_a_folder_whose_name_has_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "[v1]").mkdir()
    (tmp_path / "[v1]" / "a.tar").touch()
    monkeypatch.chdir(tmp_path / "[v1]")

    assert expand("*.tar", list_urls) == [str(tmp_path / "[v1]" / "a.tar")]


def test_shards_and_index_may_be_file_urls(tmp_path: Path) -> None:
    """As pathlib writes them, with escapes."""
    folder = tmp_path / "a b"
    (folder / "index").mkdir(parents=True)
    write_shards(folder, 1, 3)

    assert len(infeed.open((folder / "train-000.tar").as_uri(), index=(folder / "index").as_uri())) == 3
    assert len(list((folder / "index").iterdir())) == 1


def test_a_signature_is_not_shown() -> None:
    with pytest.raises(infeed.ConfigError) as caught:
        expand("https://h/0.tar?sig=secret", list_urls)

    assert "secret" not in str(caught.value)


def test_folders_are_not_searched_recursively(tmp_path: Path) -> None:
    """On a disk as in object storage; ``**`` searches subfolders."""
    (tmp_path / "val").mkdir()
    for name in ("a.tar", "val/b.tar"):
        (tmp_path / name).touch()

    assert expand(tmp_path, list_urls) == [str(tmp_path / "a.tar")]
    assert expand(f"{tmp_path}/**/*.tar", list_urls) == [str(tmp_path / name) for name in ("a.tar", "val/b.tar")]


OWN = ["infeed-0123456789abcdef.npz", f"infeed-0123456789abcdef.npz.{'a' * 32}.tmp", "shard-000001.part"]


def test_globs_leave_out_the_files_of_infeed_itself(tmp_path: Path) -> None:
    """The index is beside the shards, and an interrupted write leaves temporary files there."""
    for name in ("a.tar", *OWN):
        (tmp_path / name).touch()
    names = ["d/a.tar", *(f"d/{name}" for name in OWN)]

    assert expand(str(tmp_path / "*"), list_urls) == [str(tmp_path / "a.tar")]
    assert expand("s3://b/d/*", lambda prefix: [f"s3://b/{name}" for name in names]) == ["s3://b/d/a.tar"]


def test_a_glob_of_all_files_matches_the_same_shards_again(tmp_path: Path) -> None:
    write_shards(tmp_path, 2, 3)

    assert [len(infeed.open(tmp_path / "*")) for _ in range(2)] == [6, 6]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.TAR.ZST"])
def test_a_folder_with_compressed_shards_is_rejected_with_the_reason(tmp_path: Path, name: str) -> None:
    """Skipping them would lose data silently."""
    (tmp_path / "b.tar").touch()
    (tmp_path / name).touch()
    (tmp_path / "labels.csv.gz").touch()
    with pytest.raises(infeed.ConfigError, match=f"{name}: the shard is compressed as a whole"):
        infeed.open(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("s3://b/q/*.tar", "matches no shards"),
        ("s3://b/{x,nope}/*.tar", r"'s3://b/nope/\*\.tar' matches no shards"),
        ("https://h/0.tar?sig=secret", r"https://h/0\.tar has a query"),
        ([], "lists no shards"),
        ([3], "must be a path"),
        (["s3://b/z/3.tar", "s3://b/z/*"], "lists 's3://b/z/3.tar' twice"),
    ],
)
def test_a_pattern_without_shards_is_rejected(pattern: Any, message: str) -> None:
    with pytest.raises(infeed.ConfigError, match=message):
        expand(pattern, list_urls)


@pytest.mark.parametrize(
    ("urls", "prefix"),
    [
        (["s3://b/t-00.tar", "s3://b/t-01.tar"], "s3://b/"),
        (["/x/a/1.tar"], "/x/a/"),
        (["/x/a/1.tar", "/x/ab/1.tar"], "/x/"),
        (["s3://b/a/1.tar", "s3://b/a/b/1.tar"], "s3://b/a/"),
    ],
)
def test_the_common_folder_ends_with_a_slash(urls: list[str], prefix: str) -> None:
    assert common_prefix(urls) == prefix
