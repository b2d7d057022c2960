"""The exception tree."""

import pickle

import pytest

from infeed import errors

TREE = {
    "InfeedError": (Exception,),
    "ConfigError": (errors.InfeedError, ValueError),
    "StateError": (errors.InfeedError, ValueError),
    "LoaderClosedError": (errors.InfeedError, RuntimeError),
    "SampleError": (errors.InfeedError,),
    "CollateError": (errors.SampleError, ValueError),
    "ShardError": (errors.InfeedError, ValueError),
    "StorageError": (errors.InfeedError, OSError),
    "WorkerError": (errors.InfeedError, RuntimeError),
    "WorkerStartError": (errors.WorkerError,),
    "WorkerDiedError": (errors.WorkerError,),
    "LoadTimeoutError": (errors.WorkerError, TimeoutError),
    "MemoryLimitError": (errors.InfeedError, MemoryError),
    "InternalError": (errors.InfeedError, RuntimeError),
}


def test_the_tree_has_exactly_these_errors() -> None:
    """A new error is added here and in the documentation."""
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)}

    assert found == set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_its_place_in_the_tree(name: str) -> None:
    """Each can be caught as an InfeedError, and as the matching built-in exception."""
    assert vars(errors)[name].__bases__ == TREE[name]


@pytest.mark.parametrize("name", TREE)
def test_an_error_can_be_pickled(name: str) -> None:
    """By its public name, with message and notes."""
    error = vars(errors)[name]("what happened")
    error.add_note("where")

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert type(again).__module__ == "infeed"
    assert str(again) == "what happened"
    assert again.__notes__ == ["where"]
