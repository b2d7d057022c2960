"""In-memory arrays: which datasets are tables, and that gathering equals indexing."""

import mmap
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.collate.arrays import ArrayTable, as_rows, table_of
from infeed.collate.rows import RowReader
from infeed.memory.arena import LeaseBook
from infeed.scheduler.messages import SlotId

OFFSET = 64
STRUCTURED = np.dtype([("a", "i4"), ("b", "f8")])


class Columns(NamedTuple):
    x: Any
    y: Any


class Array(np.ndarray[Any, Any]):
    pass


def gathered(table: ArrayTable, indices: Any) -> Any:
    count = len(indices)
    _, size = table.layout.offsets(count)
    memory = mmap.mmap(-1, OFFSET + max(size, 64))
    table.gather(indices, memory, OFFSET, count)
    lease = LeaseBook().grant(memory, OFFSET, max(size, 64), SlotId(0))
    return RowReader(table.layout, count).read(lease, [])


def table(dataset: Any) -> ArrayTable:
    made = table_of(dataset)
    assert made is not None
    return made


COLUMNS: dict[str, np.ndarray[Any, Any]] = {
    "float": np.arange(60.0).reshape(20, 3),
    "vector": np.arange(20),
    "bytes": np.arange(20, dtype="u1"),
    "bool": np.arange(20) % 2 == 0,
    "complex": np.arange(20) * 1j,
    "big-endian": np.arange(20, dtype=">i4"),
    "datetime": np.arange(20).astype("M8[s]"),
    "timedelta": np.arange(20).astype("m8[D]"),
    "text": np.array([f"t{n}" for n in range(20)]),
    "bytes text": np.array([f"t{n}".encode() for n in range(20)]),
    "structured": np.array([(n, n / 2) for n in range(20)], STRUCTURED),
    "Fortran": np.asfortranarray(np.arange(60.0).reshape(20, 3)),
    "strided": np.arange(120.0).reshape(20, 6)[:, ::2],
    "reversed": np.arange(20)[::-1],
    "rows of no width": np.zeros((20, 0)),
    "cube": np.arange(20 * 2 * 3, dtype="f4").reshape(20, 2, 3),
    "float16": np.arange(20, dtype="f2"),
    "read-only": np.broadcast_to(np.arange(3), (20, 3)),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_gathering_equals_indexing(column: np.ndarray[Any, Any]) -> None:
    """For any array, order, repetition and negative index."""
    indices = [3, 0, 19, 3, -1, -20, 7]

    found = gathered(table(column), np.array(indices))

    assert found.dtype == column.dtype
    assert found.shape == (7, *column.shape[1:])
    assert np.array_equal(found, column[indices])


@given(st.lists(st.integers(-20, 19), min_size=1, max_size=40))
def test_columns_of_a_table_are_gathered_together(indices: list[int]) -> None:
    """By the same indices, and the batch has the table's structure."""
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20)
    for dataset in ((x, y), Columns(x, y), {"x": x, "y": y}):
        batch = gathered(table(dataset), indices)
        assert type(batch) is type(dataset)
        found = list(batch.values()) if isinstance(batch, dict) else list(batch)
        assert np.array_equal(found[0], x[indices])
        assert np.array_equal(found[1], y[indices])


TABLES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.zeros((5, 2)),
    "tuple": lambda: (np.zeros(5), np.zeros((5, 3))),
    "named tuple": lambda: Columns(np.zeros(5), np.zeros(5)),
    "dict": lambda: {"a": np.zeros(5)},
    "no rows": lambda: np.zeros((0, 3)),
}
NO_TABLES: dict[str, Callable[[], Any]] = {
    "list of arrays": lambda: [np.zeros(5), np.zeros(5)],
    "tuple of lists": lambda: ([1, 2], [3, 4]),
    "different lengths": lambda: (np.zeros(5), np.zeros(6)),
    "array and list": lambda: (np.zeros(2), [1, 2]),
    "empty tuple": tuple,
    "empty dict": dict,
    "0-d array": lambda: np.array(5),
    "objects": lambda: np.array([1, "a"], object),
    "structured with objects": lambda: np.zeros(3, [("o", object)]),
    "subclass of array": lambda: np.zeros(5).view(Array),
    "masked array": lambda: np.ma.masked_array([1, 2], [0, 1]),
    "subclass of dict": lambda: OrderedDict(a=np.zeros(5)),
    "list of numbers": lambda: [1, 2, 3],
    "range": lambda: range(5),
    "text": lambda: "abc",
    "None": lambda: None,
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_these_datasets_are_tables(make: Callable[[], Any]) -> None:
    """NumPy arrays, and tuples, named tuples and dicts of arrays of one length."""
    dataset = make()
    first = dataset if isinstance(dataset, np.ndarray) else next(iter(dataset.values() if type(dataset) is dict else dataset))

    assert table(dataset).length == len(first)


@pytest.mark.parametrize("make", NO_TABLES.values(), ids=NO_TABLES)
def test_other_datasets_are_not_tables(make: Callable[[], Any]) -> None:
    """They are indexed like any dataset."""
    assert table_of(make()) is None


def test_a_memory_map_is_not_a_table(tmp_path: Path) -> None:
    """Its rows come from a disk, and several workers can wait for it in parallel."""
    np.save(tmp_path / "a.npy", np.zeros((5, 2)))

    assert table_of(np.load(tmp_path / "a.npy", mmap_mode="r")) is None


@pytest.mark.parametrize("index", [20, -21, 1 << 40], ids=["behind the end", "before the begin", "far away"])
def test_an_index_out_of_range_is_an_error_with_index_and_length(index: int) -> None:
    """The same error as for indexing, before anything is written."""
    with pytest.raises(IndexError, match=rf"^index {index} is out of bounds for a dataset of length 20$"):
        gathered(table(np.arange(20)), [3, index, 5])


def test_an_index_that_is_not_an_integer_is_rejected() -> None:
    """It is not truncated to an integer."""
    with pytest.raises((TypeError, ValueError, IndexError)):
        gathered(table(np.arange(20)), ["a"])
    with pytest.raises((TypeError, ValueError, IndexError)):
        gathered(table(np.arange(20)), [1.5])


@pytest.mark.parametrize("name", ["Fortran", "strided", "big-endian"])
def test_gathering_a_few_rows_does_not_copy_the_table(name: str) -> None:
    """For any memory layout: the cost of a batch must not grow with the dataset."""
    big = {
        "Fortran": np.asfortranarray(np.zeros((20_000, 50))),
        "strided": np.zeros((20_000, 100))[:, ::2],
        "big-endian": np.zeros((20_000, 50), ">f8"),
    }[name]
    made = table(big)
    gathered(made, [0, 1])
    tracemalloc.start()
    try:
        gathered(made, [5, 19_999])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < big.nbytes / 10


def test_columns_that_cannot_be_gathered_are_still_rows() -> None:
    """The meaning of a dataset does not depend on whether it can be gathered."""
    columns = {"x": np.arange(6).reshape(3, 2), "o": np.array([1, "a", None], object)}
    rows = as_rows(columns)

    assert len(rows) == 3
    assert rows[1]["x"].tolist() == [2, 3]
    assert rows[1]["o"] == "a"
    pair = as_rows(Columns(np.arange(3), np.arange(3) * 2))[2]
    assert (type(pair), pair) == (Columns, (2, 4))
    assert as_rows((np.arange(3), np.arange(3)))[1] == (1, 1)


@pytest.mark.parametrize("dataset", [[1, 2], (1, 2), {"a": 1}, (np.zeros(2), np.zeros(3)), "ab", ()], ids=repr)
def test_other_tuples_are_not_columns(dataset: Any) -> None:
    """A tuple of samples is a dataset of samples."""
    assert as_rows(dataset) is dataset


@pytest.mark.torch
def test_a_tensor_dataset_is_a_table(torch: ModuleType) -> None:
    """It is gathered as it would be indexed, for any tensors."""
    from torch.utils.data import Subset, TensorDataset

    tensors = [
        torch.arange(40.0).reshape(20, 2),
        torch.arange(20),
        torch.arange(20).to(torch.bfloat16),
        torch.arange(60).reshape(3, 20).t(),
        torch.arange(20) % 2 == 0,
        torch.zeros(20, 0),
        torch.arange(20.0).requires_grad_(),
    ]
    dataset = TensorDataset(*tensors)
    indices = [3, -1, 0, 19, 3]

    batch = gathered(table(dataset), np.array(indices))

    assert type(batch) is tuple
    for found, tensor in zip(batch, tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.detach()[indices])
    with pytest.raises(IndexError, match="index 20 is out of bounds for a dataset of length 20"):
        gathered(table(dataset), [20])
    assert table_of(Subset(dataset, [0])) is None
    assert table_of(TensorDataset(torch.eye(3).to_sparse())) is None
    assert table_of(torch.zeros(3)) is None
