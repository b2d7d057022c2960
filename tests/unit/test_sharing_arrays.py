"""Shared arrays and tensors."""

import copy
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.collate.arrays import table_of
from infeed.memory.pickling import dump_by_value
from infeed.memory.segments import open_reader, open_store
from infeed.memory.serialized_dataset import receive, send
from infeed.memory.shared_arrays import BINS, pointer_of

ARRAYS = {
    "floats": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": np.arange(24)[::2],
    "backwards": np.arange(5)[::-1],
    "empty": np.zeros((0, 3)),
    "scalar": np.array(5),
    "bool": np.array([True, False]),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "text": np.array(["a", "bcd"]),
    "structured": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    "big endian": np.arange(3, dtype=">i4"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_shared_array_equals_the_original(name: str) -> None:
    """For any dtype and memory order, here and after pickling; contiguous."""
    array = ARRAYS[name]
    shared = infeed.share(array)

    for one in (shared, pickle.loads(pickle.dumps(shared))):
        assert isinstance(one, np.ndarray)
        assert one.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(one), array)
        assert one.flags.f_contiguous or one.flags.c_contiguous
    assert shared.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc


def test_a_shared_array_is_read_only() -> None:
    """So are views of it, also after pickling; and it cannot be made writable."""
    shared = infeed.share(np.zeros(3))

    for array in (shared, shared[1:], pickle.loads(pickle.dumps(shared)), shared.reshape(3, 1)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_results_of_a_shared_array_are_plain_arrays() -> None:
    """Rows, slices, selections, results: samples and batches have their usual types."""
    shared = infeed.share(np.arange(12.0).reshape(3, 4))

    for made in (
        shared[0],
        shared[1:],
        shared[[0, 2]],
        shared[shared > 3],
        shared + 1,
        np.sqrt(shared),
        shared.reshape(4, 3)[0],
    ):
        assert type(made) is np.ndarray
    assert type(shared[0, 0]) is np.float64
    assert type(shared.sum()) is np.float64


def test_a_pickle_of_an_array_is_a_reference() -> None:
    """The whole array, or reshaped."""
    shared = infeed.share(np.arange(10_000))

    for array in (shared, shared.reshape(100, 100), shared.T):
        assert len(pickle.dumps(array)) < 400
        assert np.array_equal(pickle.loads(pickle.dumps(array)), array)


def test_results_in_other_memory_are_pickled_by_value() -> None:
    """NumPy keeps the class of some results; they are pickled like any array."""
    made = infeed.share(np.arange(3)).astype(np.float32)

    assert BINS.locate(pointer_of(made)) is None
    assert pickle.loads(pickle.dumps(made)).tolist() == [0.0, 1.0, 2.0]
    made[0] = 9
    assert copy.deepcopy(made).tolist() == [9.0, 1.0, 2.0]


def test_copies_of_an_array_are_the_same_object() -> None:
    """It is immutable."""
    shared = infeed.share(np.arange(3))

    assert copy.copy(shared) is copy.deepcopy(shared) is infeed.share(shared) is shared


def test_arrays_in_lists_and_dicts_are_stored_beside_their_elements() -> None:
    """They are returned as read-only views, not as copies."""
    original = {
        "x": np.arange(6).reshape(2, 3, order="F"),
        "parts": [np.ones(2), {"deep": np.zeros(3, ">f4")}],
        "none": np.zeros(0),
    }
    shared = infeed.share(original)
    listed = infeed.share([np.arange(n) for n in range(50)])

    assert shared["x"].tolist() == original["x"].tolist()
    assert shared["x"].flags.f_contiguous
    assert shared["parts"][1]["deep"].dtype == ">f4"
    assert not shared["x"].flags.writeable
    assert np.shares_memory(shared["x"], shared["x"])
    assert [array.tolist() for array in listed] == [list(range(n)) for n in range(50)]


def test_a_shared_array_in_a_dataset_is_not_serialized() -> None:
    """Nor is a slice of it, or the contents of a shared list: all are pickled as references."""
    shared = infeed.share(np.arange(100_000))
    held = infeed.share([np.arange(50_000)])
    dataset = {"whole": shared, "part": shared[5:], "odd": shared[::-3], "element": held[0]}
    store = open_store()
    serialized = send({}, dataset, store)
    again = receive(serialized, open_reader(store.descriptor()))
    store.close()

    assert sum(serialized.sizes) < 5000
    for name, array in dataset.items():
        assert type(again[name]) is type(array)
        assert np.array_equal(again[name], array)


def test_a_shared_array_is_gathered_like_any_other() -> None:
    """As a dataset, or as a column of one."""
    rows, labels = infeed.share(np.arange(20.0).reshape(10, 2)), infeed.share(np.arange(10))

    assert table_of(rows) is not None
    assert table_of((rows, labels)) is not None
    batches = list(infeed.DataLoader((rows, labels), batch_size=4))
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert type(batches[0][0]) is np.ndarray


@pytest.fixture
def tensor(torch: ModuleType) -> Any:
    return torch.arange(12, dtype=torch.bfloat16).view(3, 4)


@pytest.mark.torch
def test_a_shared_tensor_equals_the_original(torch: ModuleType, tensor: Any) -> None:
    """Here and after pickling; results computed from it are plain tensors."""
    shared = infeed.share(tensor)

    for one in (shared, pickle.loads(pickle.dumps(shared))):
        assert isinstance(one, torch.Tensor)
        assert one.dtype == tensor.dtype
        assert torch.equal(one, tensor)
    assert type(shared[0]) is type(shared + 1) is type(shared.T) is torch.Tensor
    assert infeed.share(shared) is shared
    assert infeed.share(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.torch
def test_a_pickle_of_a_tensor_is_a_reference(torch: ModuleType) -> None:
    """Also of its slices, inside a dataset."""
    shared = infeed.share(torch.arange(10_000))
    data, buffers = dump_by_value({"whole": shared, "part": shared[7:], "odd": shared.view(100, 100).T}, set())
    again = pickle.loads(data)

    assert len(pickle.dumps(shared)) < 400
    assert not buffers
    assert torch.equal(again["whole"], shared)
    assert torch.equal(again["part"], shared[7:])
    assert torch.equal(again["odd"], shared.view(100, 100).T)


@pytest.mark.torch
def test_a_tensor_that_was_written_to_is_pickled_by_value(torch: ModuleType) -> None:
    """Writes are private to a process, so a reference would have other contents."""
    shared = infeed.share(torch.zeros(1000))
    reference = pickle.dumps(shared)
    shared[3] = 7

    assert pickle.loads(pickle.dumps(shared))[3] == 7
    assert len(pickle.dumps(shared)) > len(reference)


@pytest.mark.torch
def test_a_deep_copy_of_a_tensor_is_independent(torch: ModuleType) -> None:
    """Tensors are writable, so a copy must be separate."""
    shared = infeed.share(torch.zeros(3))
    copied = copy.deepcopy(shared)
    copied[0] = 1

    assert shared.tolist() == [0, 0, 0]
    assert copy.copy(shared) is shared


@pytest.mark.torch
def test_tensors_in_lists_and_datasets_are_shared(torch: ModuleType, tensor: Any) -> None:
    """Beside their elements; and gathered, as a column."""
    shared = infeed.share([tensor, torch.zeros(0), {"deep": tensor}])

    assert torch.equal(shared[0], tensor)
    assert shared[1].shape == (0,)
    assert torch.equal(shared[2]["deep"], tensor)
    assert table_of(torch.utils.data.TensorDataset(infeed.share(tensor))) is not None


@pytest.mark.torch
def test_unsupported_tensors_are_rejected(torch: ModuleType) -> None:
    """With a gradient, sparse, or a parameter."""
    for tensor in (torch.zeros(2, requires_grad=True), torch.zeros(2, 2).to_sparse(), torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(TypeError, match=r"^share\(\) accepts a list, tuple, dict, NumPy array or CPU tensor, not"):
            infeed.share(tensor)
