"""Parquet files as a map-style dataset."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.data.storage import LocalStorage
from tests.shards.fakes import fake
from tests.shards.s3 import Proxy, Server

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def table(first: int, count: int) -> Any:
    numbers = range(first, first + count)
    return pa.table(
        {
            "label": pa.array(list(numbers), pa.int32()),
            "weight": pa.array([number / 2 for number in numbers], pa.float32()),
            "image": pa.array([b"%d" % number * 50 for number in numbers], pa.binary()),
            "name": pa.array([None if number % 7 == 3 else f"n{number}" for number in numbers]),
            "box": pa.array([[number] * 4 for number in numbers], pa.list_(pa.int16(), 4)),
            "points": pa.array([list(range(number % 3)) for number in numbers], pa.list_(pa.int64())),
            "nested": pa.array([{"bytes": b"%d" % number, "path": None} for number in numbers]),
        }
    )


def write(folder: Path, files: int = 3, rows: int = 25, group: int = 10) -> Path:
    for number in range(files):
        parquet.write_table(table(number * rows, rows), folder / f"{number}.parquet", row_group_size=group)
    return folder


def test_samples_are_dicts_of_columns(tmp_path: Path) -> None:
    dataset = infeed.open(write(tmp_path))

    assert len(dataset) == 75
    for number in (0, 9, 10, 24, 25, 74):
        sample = dataset[number]
        assert sample["label"] == number
        assert sample["weight"] == number / 2
        assert sample["image"] == b"%d" % number * 50
        assert sample["name"] == (None if number % 7 == 3 else f"n{number}")
        assert sample["box"].tolist() == [number] * 4
        assert sample["points"].tolist() == list(range(number % 3))
        assert sample["nested"] == {"bytes": b"%d" % number, "path": None}


def test_numbers_keep_their_type(tmp_path: Path) -> None:
    """A Python number would become float64 in a batch."""
    loader = infeed.DataLoader(infeed.open(write(tmp_path), columns=["label", "weight", "box"]), 4)
    batch = next(iter(loader))

    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
        "label": (np.int32, (4,)),
        "weight": (np.float32, (4,)),
        "box": (np.int16, (4, 4)),
    }


NULLABLE = {
    "integer": ([1, 2, None, 4], "int32"),
    "half": ([1.0, None, 3.0, 4.0], "float16"),
    "bool": ([True, None, False, True], "bool_"),
    "list": ([[1, 2], None, [3, None], []], "list_int64"),
    "fixed list": ([[1, 2], None, [3, None], [4, 5]], "fixed_int16"),
    "text": (["a", None, "c", "d"], "string"),
}
TYPES = {"list_int64": lambda: pa.list_(pa.int64()), "fixed_int16": lambda: pa.list_(pa.int16(), 2)}


@pytest.mark.parametrize("name", NULLABLE)
def test_a_value_does_not_depend_on_the_rows_read_with_it(tmp_path: Path, name: str) -> None:
    """Numbers keep their type beside missing values, which are None."""
    values, kind = NULLABLE[name]
    made = TYPES[kind]() if kind in TYPES else getattr(pa, kind)()
    array = pa.array([None if v is None else np.float16(v) for v in values] if kind == "float16" else values, made)
    parquet.write_table(pa.table({"a": array}), tmp_path / "a.parquet", row_group_size=3)
    dataset = infeed.open(tmp_path / "a.parquet")

    def described(sample: Any) -> Any:
        value = sample["a"]
        return type(value), getattr(value, "dtype", None), np.array(value, dtype=object).tolist()

    singly = [described(dataset[row]) for row in range(4)]
    assert [described(one) for one in dataset.__getitems__([0, 1, 2, 3])] == singly
    assert [described(one) for one in dataset.__getitems__([3, 0, 3])] == [singly[3], singly[0], singly[3]]
    assert [value for _, _, value in singly] == values
    if name == "integer":
        assert [type(dataset[row]["a"]) for row in range(4)] == [np.int32, np.int32, type(None), np.int32]


@pytest.mark.parametrize("kind", ["string_view", "binary_view"])
def test_string_view_columns_are_read(tmp_path: Path, kind: str) -> None:
    """pyarrow cannot take rows of them."""
    make = getattr(pa, kind, None) or pytest.skip("pyarrow has no such type")
    values = [None, "b" * 30, "c"] if kind == "string_view" else [None, b"b" * 30, b"c"]
    parquet.write_table(pa.table({"x": pa.array(values, make())}), tmp_path / "a.parquet")

    assert [one["x"] for one in infeed.open(tmp_path).__getitems__([2, 0, 1])] == [values[2], values[0], values[1]]


def test_lists_are_writable_arrays(tmp_path: Path) -> None:
    """As torch expects; a transform may work in place."""
    lists = {"a": [[1], [2, 3]], "b": pa.array([[1], [2]], pa.list_(pa.int16(), 1)), "c": [[None], [2]], "d": [None, [1]]}
    parquet.write_table(pa.table(lists), tmp_path / "a.parquet")
    dataset = infeed.open(tmp_path)
    for array in dataset[1].values():
        array += 1

    assert [array.tolist() for array in dataset[1].values()] == [[2, 3], [2], [2], [1]]


def test_two_columns_with_one_name_are_rejected(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 2, names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(infeed.ShardError, match=r"a\.parquet has two columns named 'x'"):
        infeed.open(tmp_path)


def test_columns_that_exist_only_in_tar_shards_are_rejected(tmp_path: Path) -> None:
    for column in ("__url__", "__key__"):
        with pytest.raises(infeed.ConfigError, match=f"columns has '{column}', which is in no shard"):
            infeed.open(write(tmp_path), columns=[column, "label"])


def test_files_with_other_types_are_rejected(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1], "y": ["a"]}), tmp_path / "0.parquet")
    parquet.write_table(pa.table({"x": [1], "y": [2.0]}), tmp_path / "1.parquet")
    with pytest.raises(infeed.ShardError, match=r"1\.parquet has column 'y' of type double, but .*0\.parquet has string"):
        infeed.open(tmp_path)


def test_lists_of_one_type_may_name_their_elements_differently(tmp_path: Path) -> None:
    """Libraries do this."""
    for number, name in enumerate(("item", "element")):
        field = pa.field(name, pa.int64(), nullable=number == 0)
        parquet.write_table(pa.table({"x": pa.array([[number]], pa.list_(field))}), tmp_path / f"{number}.parquet")

    assert [one["x"].tolist() for one in infeed.open(tmp_path)] == [[0], [1]]


def test_rows_have_the_requested_order_and_columns(tmp_path: Path) -> None:
    dataset = infeed.open(f"{write(tmp_path)}/*.parquet", columns=["name", "label"], decode={"label": lambda n: n * 2})

    assert [list(one.items()) for one in dataset.__getitems__([70, 2, -1])] == [
        [("name", "n70"), ("label", 140)],
        [("name", "n2"), ("label", 4)],
        [("name", "n74"), ("label", 148)],
    ]


@pytest.mark.process
def test_workers_load_the_same_batches_as_the_main_process(tmp_path: Path, light_engine: dict[str, Any]) -> None:
    dataset = infeed.open(write(tmp_path), columns=["label"])
    with infeed.DataLoader(dataset, 7, shuffle=True, seed=3, **light_engine) as loader:
        found = [label for batch in loader for label in batch["label"].tolist()]

    assert found == [index for batch in infeed.DataLoader(range(75), 7, shuffle=True, seed=3) for index in batch.tolist()]


def test_a_block_shuffle_uses_row_groups_as_blocks(tmp_path: Path) -> None:
    dataset = infeed.open(write(tmp_path), columns=["label"])
    sampler = infeed.RandomSampler(block_size="auto", window=1)
    labels = [label for batch in infeed.DataLoader(dataset, 5, sampler=sampler) for label in batch["label"].tolist()]
    groups = np.searchsorted([10, 20, 25, 35, 45, 50, 60, 70, 75], labels, side="right")

    assert sorted(labels) == list(range(75))
    assert np.count_nonzero(np.diff(groups)) == 8


def test_only_the_requested_row_groups_and_columns_are_read(s3: Server, tmp_path: Path) -> None:
    """One request for the footer and one for the chunks; none while the row group is kept."""
    s3.put("parquet/0.parquet", (write(tmp_path, 1, 30_000, 10_000) / "0.parquet").read_bytes())
    infeed.open("s3://data/parquet/", storage_options=s3.options())
    sizes: list[int] = []

    def note(head: bytes, number: int) -> None:
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"range: bytes="):
                first, last = line.partition(b"=")[2].split(b"-")
                sizes.append(int(last) - int(first) + 1)

    with Proxy(s3.port, note) as proxy:
        dataset = infeed.open("s3://data/parquet/", columns=["label"], storage_options=s3.options(proxy.port))
        assert dataset.prefers_block_shuffle
        assert dataset[15_000] == {"label": 15_000}
        assert len(sizes) == 2
        assert sum(sizes) < 130_000
        assert [one["label"] for one in dataset.__getitems__([10_001, 19_999])] == [10_001, 19_999]
        assert len(sizes) == 2


def test_the_chunks_of_a_column_with_a_dot_are_one_request(obstore_threads: None, tmp_path: Path) -> None:
    """Beside a column that has the part before the dot as its name, and those of a struct."""
    columns = {"a.b": [1, 2], "a": [3, 4], "c": [{"b": 5}, {"b": 6}]}
    parquet.write_table(pa.table(columns), tmp_path / "0.parquet")
    with fake() as server:
        server.objects = {"d/0.parquet": (tmp_path / "0.parquet").read_bytes()}
        for name, values in columns.items():
            dataset = infeed.open("s3://b/d/0.parquet", columns=[name], storage_options=server.s3())
            server.read.clear()
            assert [one[name] for one in dataset] == values
            assert len(server.read) == 2  # with the footer


def test_a_storage_error_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer of more than 64 KiB is read in two parts."""
    parquet.write_table(pa.table({f"{number:0500}": [number] for number in range(150)}), tmp_path / "0.parquet")
    dataset = infeed.open(tmp_path)
    read, reads = LocalStorage.read, []

    def failing(storage: LocalStorage, ranges: Any, versions: Any) -> list[bytes]:
        reads.append(ranges)
        if len(reads) == 2:
            raise infeed.StorageError("503 Slow Down")
        return read(storage, ranges, versions)

    monkeypatch.setattr(LocalStorage, "read", failing)
    with pytest.raises(infeed.StorageError, match="503 Slow Down"):
        dataset[0]


def test_files_with_other_columns_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, 1)
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(infeed.ShardError, match=r"other\.parquet has columns \['x'\], but .*0\.parquet has \['label'"):
        infeed.open(tmp_path)


def test_a_file_that_is_not_parquet_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(infeed.ShardError, match=r"a\.parquet is not a Parquet file"):
        infeed.open(tmp_path)


def test_a_pickled_copy_reads_the_files_itself(tmp_path: Path) -> None:
    dataset = infeed.open(write(tmp_path), columns=["label"])
    dataset[3]

    assert pickle.loads(pickle.dumps(dataset))[30] == {"label": 30}


def test_only_the_columns_that_are_read_decide_about_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels fit into the memory for decoded row groups, and images do not."""
    monkeypatch.setattr("infeed.data.parquet.MEMORY_BYTES", 20_000)
    images = [random.Random(number).randbytes(1000) for number in range(60)]
    columns = {"label": list(range(60)), "image": images, "a.b": [[number] for number in range(60)]}
    for number in range(2):
        parquet.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=20)

    def described(*names: str) -> tuple[bool, int]:
        dataset = infeed.open(tmp_path, columns=names)
        return dataset.prefers_block_shuffle, dataset.shuffle_window

    assert described("label", "a.b") == (False, 16)
    assert described("image") == described("image", "label") == (True, 1)


def test_row_groups_that_exceed_the_memory_are_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infeed.data.parquet.MEMORY_BYTES", 100)
    dataset = infeed.open(write(tmp_path), columns=["label"])

    assert dataset.prefers_block_shuffle
    assert dataset.shuffle_window == 1
    assert [one["label"] for one in dataset.__getitems__(range(74, -1, -1))] == list(range(74, -1, -1))
