"""``infeed pack`` and ``infeed index``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.cli import main
from infeed.data.pack import Sample, samples_of_dataset, write_shards
from tests.shards.s3 import Server
from tests.shards.writing import shard
from tests.shards.writing import write_shards as write_tar


def images(folder: Path, count: int = 10) -> Path:
    for number in range(count):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"class{number % 2}" / f"{number:03d}.jpg").write_bytes(b"%d" % number * 600)
        (folder / f"class{number % 2}" / f"{number:03d}.meta.json").write_text(json.dumps({"number": number}))
    (folder / "README").write_text("no sample")
    return folder


def test_a_folder_is_packed_and_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files with one basename are one sample, and shards have the requested size."""
    images(tmp_path / "in")
    code = main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--shard-size", "10240", "--prefix", "train"])

    assert code == 0
    assert "wrote 10 samples to 4 shards" in capsys.readouterr().out
    dataset = infeed.open(tmp_path / "out", decode={"meta.json": json.loads})
    numbers = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert [sample["__key__"] for sample in dataset] == [f"class{number % 2}/{number:03d}" for number in numbers]
    assert [sample["meta.json"]["number"] for sample in dataset] == numbers
    assert [sample["jpg"] for sample in dataset] == [b"%d" % number * 600 for number in numbers]


def test_the_size_of_a_shard_includes_headers_and_padding(tmp_path: Path) -> None:
    """A label of three bytes takes 1 KiB; a long name takes additional headers."""
    (tmp_path / "in").mkdir()
    for number in range(60):
        name = f"{number:03d}" if number % 2 else f"{number:03d}{'é' * 60}"
        (tmp_path / "in" / f"{name}.cls").write_text(str(number))

    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--shard-size", "40960"]) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert max(sizes) <= 40_960
    assert len(sizes) == 3
    assert [int(one["cls"]) for one in infeed.open(tmp_path / "out")] == list(range(60))


def test_a_sample_larger_than_a_shard_has_its_own_shard(tmp_path: Path) -> None:
    samples = [Sample(str(number), {"x": bytes(size)}) for number, size in enumerate((10, 30_000, 10))]

    assert list(write_shards(samples, tmp_path, "shard", 20_000, 0)) == [0, 1, 2]


def test_files_that_are_not_samples_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without extension, hidden, or in a folder about the archive, which infeed.open would skip."""
    for name in ("README", ".hidden", "b.", "__meta__/a.jpg", "a.jpg", "sub/__x__/c.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("x")

    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "skipped 4 files" in capsys.readouterr().out
    assert [one["__key__"] for one in infeed.open(tmp_path / "out")] == ["a", "sub/__x__/c"]


@pytest.mark.linux("file systems elsewhere may ignore case")
def test_files_with_colliding_columns_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.JPG", "a.jpg"):
        (tmp_path / "in" / name).write_text(name)

    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "in" / "a.JPG") in said
    assert str(tmp_path / "in" / "a.jpg") in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("x", "X"), ("x", "x.npy")])
def test_colliding_columns_are_rejected(names: tuple[str, str]) -> None:
    with pytest.raises(infeed.ConfigError, match="keys that differ only in case"):
        list(samples_of_dataset([{name: np.arange(2) for name in names}]))


@pytest.mark.parametrize("name", ["a/b", "a/b.c", "a/", "", "x\0y", 7, None])
def test_a_column_whose_name_would_change_is_rejected(name: Any) -> None:
    """The sample would lack it when the shards are read."""
    with pytest.raises(infeed.ConfigError, match=f"sample 1, column {name!r}: .* (rename it|use a str)".replace("\\", r"\\")):
        list(samples_of_dataset([{"x": b""}, {name: np.arange(2)}]))


def test_columns_keep_their_names(tmp_path: Path) -> None:
    """Also unusual ones; WebDataset's columns about a sample are omitted."""
    names = ["a b", ".", "x.", "__x", "é", "seg.png", "__y__.z", "mynpy"]
    samples = samples_of_dataset([dict.fromkeys([*names, "__key__", "__url__"], b"1")])
    list(write_shards(samples, tmp_path, "s", 1 << 20, 0))

    assert list(infeed.open(tmp_path).columns) == names


@pytest.mark.parametrize("sample", [{}, (), {"__key__": "a"}])
def test_a_sample_without_columns_is_rejected(sample: Any) -> None:
    """It would be missing in the shards, and later samples would have other indices."""
    with pytest.raises(infeed.ConfigError, match="sample 1 has no columns"):
        list(samples_of_dataset([{"x": b""}, sample]))


@pytest.mark.parametrize("value", [np.array([None, "a"]), {1j: 0}, "\ud800"], ids=["objects", "keys", "surrogate"])
def test_a_value_that_cannot_be_written_is_reported(value: Any) -> None:
    with pytest.raises(infeed.ConfigError, match=r"sample 0, column 'x': .* cannot be written"):
        list(samples_of_dataset([{"x": value}]))


def test_an_interrupted_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complete shards are kept; the result is that of an uninterrupted run."""
    images(tmp_path / "in")
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--shard-size", "10240"]
    main(["pack", *arguments])
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for number in (2, 3):
        (tmp_path / "out" / f"shard-{number:06d}.tar").unlink()
    (tmp_path / "out" / "shard-000002.part").write_bytes(b"left by kill -9")
    capsys.readouterr()

    assert main(["pack", *arguments]) == 0
    assert "wrote 10 samples to 4 shards" in (said := capsys.readouterr().out)
    assert "6 of them in an earlier run" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole


def test_shards_in_the_packed_folder_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the first run, nor in one that continues it."""
    arguments = [str(images(tmp_path)), str(tmp_path / "shards"), "--shard-size", "10240"]
    for _ in range(2):
        assert main(["pack", *arguments]) == 0
        assert "wrote 10 samples to 4 shards" in capsys.readouterr().out
        assert len(infeed.open(tmp_path / "shards")) == 10  # This leaves an index there, too.


def test_a_folder_is_not_packed_into_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(images(tmp_path / "in")), str(tmp_path / "in" / ".." / "in")]) == 1
    assert "write the shards to another folder" in capsys.readouterr().err


def test_shards_of_other_data_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-000000.tar").write_bytes(shard(range(3)))

    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert "last sample is 'train/000002' instead of 'class0/004'" in capsys.readouterr().err


def test_an_invalid_size_names_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path), str(tmp_path / "out"), "--shard-size", "big"]) == 1
    assert "--shard-size='big' is not a size" in capsys.readouterr().err


def test_an_exception_leaves_no_incomplete_shard(tmp_path: Path) -> None:
    def failing() -> Iterator[Sample]:
        yield Sample("1", {"x": b"1"})
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(write_shards(failing(), tmp_path, "shard", 1000, 0))

    assert list(tmp_path.iterdir()) == []


def test_a_dataset_is_packed_with_a_format_for_each_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "things.py").write_text(
        "import numpy as np\n"
        "data = [{'jpg': b'%d' % i, 'txt': f't{i}', 'cls': i, 'box': np.arange(i), 'info': {'i': i}} for i in range(4)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert main(["pack", "things:data", "out"]) == 0
    sample = infeed.open("out")[3]
    assert {name: value for name, value in sample.items() if name in ("jpg", "txt", "cls", "info.json", "__key__")} == {
        "__key__": "000000003",
        "jpg": b"3",
        "txt": b"t3",
        "cls": b"3",
        "info.json": b'{"i": 3}',
    }
    assert sample["box.npy"].startswith(b"\x93NUMPY")


def test_samples_may_be_tuples_or_single_values() -> None:
    assert list(samples_of_dataset([(np.float32(1.5), "a")])) == [Sample("000000000", {"0": b"1.5", "1": b"a"})]
    assert list(samples_of_dataset([7])) == [Sample("000000000", {"0": b"7"})]
    with pytest.raises(infeed.ConfigError, match="sample 0, column 'x': a value of type object cannot be written"):
        list(samples_of_dataset([{"x": object()}]))


def test_index_says_what_the_shards_contain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = write_tar(tmp_path, 2, 3)

    assert main(["index", pattern]) == 0
    first = capsys.readouterr().out
    assert "6 samples in 2 shards; columns: bin, cls" in first
    assert str(tmp_path) in first.splitlines()[1]
    assert main(["index", pattern]) == 0
    assert "index: up to date" in capsys.readouterr().out


def test_index_writes_to_object_storage(s3: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """So that every machine finds it."""
    s3.put("indexed/0.tar", shard(range(3)))
    options = [f"--option={name}={value}" for name, value in s3.options().items()]

    assert main(["index", "s3://data/indexed/*.tar", *options]) == 0
    assert "index: s3://data/indexed/infeed-" in capsys.readouterr().out
    assert len([name for name in s3.names("indexed/") if name.endswith(".npz")]) == 1
    assert main(["index", "s3://data/indexed/*.tar", *options]) == 0
    assert "index: up to date" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "code"), [(b"\x1f\x8b" + bytes(600), 1), (None, 2)], ids=["compressed", "missing"])
def test_index_fails_with_the_reason(
    tmp_path: Path, content: bytes | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "a.tar").write_bytes(content)

    assert main(["index", str(tmp_path / "*.tar")]) == code
    assert capsys.readouterr().err.startswith("infeed index: ")
