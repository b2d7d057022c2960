"""The serialized dataset: stored once, shared by workers, and writable by each as a private copy."""

import mmap
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infeed.errors import WorkerStartError
from infeed.memory.segments import SegmentHandle, SegmentReader, SegmentStore, open_reader, open_store
from infeed.memory.serialized_dataset import receive, send


@pytest.fixture
def store() -> Iterator[SegmentStore]:
    made = open_store()
    yield made
    made.close()


def delivered(obj: Any, store: SegmentStore) -> Any:
    return receive(send({"dataset": obj}, obj, store), open_reader(store.descriptor()))


@pytest.mark.parametrize(
    "obj",
    [None, 5, [1, "a", {"k": (1.5, None)}], b"", {"x": b"bytes"}, range(10)],
    ids=["None", "int", "tree", "empty bytes", "bytes", "range"],
)
def test_plain_objects_keep_their_types(obj: Any, store: SegmentStore) -> None:
    """A list stays a list."""
    again = delivered(obj, store)

    assert again == obj
    assert type(again) is type(obj)


def test_arrays_keep_their_contents(store: SegmentStore) -> None:
    """Of all sizes together."""
    arrays = [np.arange(n, dtype=dtype) for n in (0, 1, 63, 64, 65, 5000) for dtype in ("i1", "f8", ">i4")]

    for found, expected in zip(delivered(arrays, store), arrays, strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_writes_of_a_worker_to_its_dataset_affect_no_other(store: SegmentStore) -> None:
    """Pages are shared until one worker writes, as with a copy."""
    original = {"x": np.zeros(10_000)}
    serialized = send({}, original, store)
    reader = open_reader(store.descriptor())
    one, other = receive(serialized, reader), receive(serialized, reader)

    one["x"][:] = 7
    original["x"][0] = 3

    assert one["x"].sum() == 70_000
    assert other["x"].sum() == 0


@pytest.mark.parametrize(("obj", "is_private"), [({"x": np.zeros(10)}, True), ({"x": [0.0] * 10}, False)])
def test_only_arrays_need_a_private_mapping(obj: Any, is_private: bool, store: SegmentStore) -> None:
    """Windows charges a private mapping in full, in each worker."""
    asked: list[bool] = []

    class Reader(SegmentReader):
        def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
            asked.append(private)
            return open_reader(store.descriptor()).attach(handle, private=private)

    receive(send({}, obj, store), Reader())
    assert asked == [is_private]


def test_required_modules_are_listed_for_the_fork_server(store: SegmentStore) -> None:
    """It imports the modules of the dataset ahead."""
    import fractions

    assert "fractions" in send({}, [fractions.Fraction(1, 3)], store).modules


class Cache:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class WithCache:
    def __init__(self) -> None:
        self.cache = Cache()


def test_an_object_that_cannot_be_pickled_is_named_by_its_path_with_a_fix(store: SegmentStore) -> None:
    """The error shows the argument, the attribute, the type, and the fix."""
    dataset = WithCache()
    text = (
        "dataset cannot be sent to workers: dataset.cache.lock is a _thread.lock, which cannot be pickled; open it on "
        "first use or in worker_init_fn, exclude it in __getstate__, or use worker='thread'\n"
        "  pickle error: "
    )

    with pytest.raises(WorkerStartError, match="^" + re.escape(text)) as caught:
        send({"dataset": dataset, "collate_fn": None}, (dataset, None), store)
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_argument_that_cannot_be_pickled_is_named(store: SegmentStore) -> None:
    """It need not be the dataset."""
    lock = threading.Lock()

    def collate(samples: Any) -> Any:
        with lock:
            return samples

    with pytest.raises(
        WorkerStartError, match=r"^collate_fn cannot be sent to workers: collate_fn -> lock \(closed over\) is a"
    ):
        send({"dataset": [1], "collate_fn": collate}, ([1], collate), store)


class Refusing:
    def __reduce__(self) -> Any:
        raise ValueError("not today")


def test_an_object_that_refuses_pickling_is_named(store: SegmentStore) -> None:
    """Whatever its __reduce__ raises."""
    with pytest.raises(WorkerStartError, match=r"dataset\[1\] is a .*Refusing, which cannot be pickled") as caught:
        send({"dataset": [1, Refusing()]}, [1, Refusing()], store)
    assert "not today" in str(caught.value)
