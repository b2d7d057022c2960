"""Worker info: one per thread."""

import pickle
import threading
from typing import Any

import pytest

from infeed.workers.info import WorkerInfo, get_worker_info, set_worker_info, take_was_asked

INFO = WorkerInfo(1, 4, 99, ["dataset"])


@pytest.fixture(autouse=True)
def _no_worker() -> Any:
    """This thread is no worker, before and after."""
    take_was_asked()
    yield
    set_worker_info(None)
    take_was_asked()


def in_thread(function: Any) -> Any:
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join()
    return box[0]


def test_outside_of_a_worker_it_is_none() -> None:
    """As in torch."""
    assert get_worker_info() is None


def test_worker_info_is_set_per_thread() -> None:
    """Thread workers share a process and each has its own worker info."""
    set_worker_info(INFO)

    assert get_worker_info() is INFO
    assert in_thread(get_worker_info) is None


def test_the_first_call_is_recorded() -> None:
    """An iterable dataset that calls get_worker_info shards itself."""
    assert not take_was_asked()
    get_worker_info()
    get_worker_info()

    assert take_was_asked()
    assert not take_was_asked()


def test_a_call_in_another_thread_does_not_count_here() -> None:
    """An iterable dataset of another loader in another thread decides for itself."""
    in_thread(get_worker_info)

    assert not take_was_asked()


def test_an_info_is_frozen_and_picklable() -> None:
    """User code may keep it, and cannot change it."""
    with pytest.raises(AttributeError):
        INFO.id = 5  # type: ignore[misc]

    again = pickle.loads(pickle.dumps(INFO))
    assert (again.id, again.num_workers, again.seed, again.dataset) == (1, 4, 99, ["dataset"])
