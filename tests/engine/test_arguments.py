"""Invalid arguments raise an error that names the option, the problem and the fix."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import infeed
from tests.helpers import Squares, Stream


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size=0 must be at least 1; use batch_size=None"),
    ({"batch_size": -3}, "batch_size=-3 must be at least 1"),
    ({"batch_size": 2.5}, "batch_size=2.5 must be an int"),
    ({"batch_size": True}, "batch_size=True must be an int"),
    ({"batch_size": "8"}, "batch_size='8' must be an int"),
    ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
    ({"num_workers": 5000}, "num_workers=5000 must be at most 1024"),
    ({"num_workers": 1.0}, "num_workers=1.0 must be an int"),
    ({"prefetch": 0}, "prefetch=0 must be at least 1"),
    ({"grain_size": 0}, "grain_size=0 must be at least 1"),
    ({"seed": "x"}, "seed='x' must be an int"),
    ({"timeout": -1}, "timeout=-1 must be a number of seconds, at least 0"),
    ({"timeout": float("nan")}, "timeout=nan must be a number of seconds"),
    ({"timeout": None}, "timeout=None must be a number of seconds"),
    ({"memory_limit": 0}, "memory_limit=0 must be at least 1 byte"),
    ({"memory_limit": "much"}, "memory_limit='much' is not a size"),
    ({"worker": "fork"}, "worker='fork' is not supported; use 'process', 'thread', 'inline'"),
    ({"worker": "inline", "num_workers": 2}, "num_workers=2 is not supported with worker='inline'"),
    ({"start_method": "fork"}, "start_method='fork' is not supported; use 'auto', 'forkserver'"),
    ({"shuffle": 1}, "shuffle=1 is not supported; use True, False or .block"),
    ({"drop_last": None}, "drop_last=None must be a bool"),
    ({"collate_fn": 3}, "collate_fn=3 must be callable"),
    ({"worker_init_fn": "f"}, "worker_init_fn='f' must be callable"),
    ({"sampler": 7}, "sampler=7 must be iterable"),
    ({"batch_sampler": 7}, "batch_sampler=7 must be iterable"),
    ({"sampler": [1], "shuffle": True}, "shuffle=True is not supported with sampler"),
    ({"batch_sampler": [[1]], "batch_size": 4}, "batch_size=4 is not supported with batch_sampler"),
    ({"batch_sampler": [[1]], "shuffle": True}, "shuffle=True is not supported with batch_sampler"),
    ({"batch_sampler": [[1]], "sampler": [1]}, r"sampler=\[1\] is not supported with batch_sampler"),
    ({"batch_sampler": [[1]], "drop_last": True}, "drop_last=True is not supported with batch_sampler"),
    ({"batch_size": None, "drop_last": True}, "drop_last=True is not supported with batch_size=None"),
    ({"dataset": 5}, "dataset=5 has neither __getitem__ nor __iter__"),
    ({"dataset": Squares}, r"dataset=Squares is a class; pass an instance: Squares\(...\)"),
    ({"dataset": NoLength()}, "has __getitem__ but no __len__"),
    ({"dataset": Stream(3), "shuffle": True}, "shuffle=True is not supported for iterable datasets"),
]


@pytest.mark.parametrize(
    ("options", "message"), WRONG, ids=[", ".join(map(str, options)) + f" {n}" for n, (options, _) in enumerate(WRONG)]
)
def test_an_invalid_argument_is_reported_with_its_value_and_a_fix(options: dict[str, Any], message: str) -> None:
    """Raises `ConfigError`, a `ValueError`, before anything is started."""
    with pytest.raises(infeed.ConfigError, match=message) as caught:
        infeed.DataLoader(**{"dataset": range(10), **options})
    assert isinstance(caught.value, ValueError)
    assert ";" in str(caught.value)


def test_all_options_but_two_are_keyword_only() -> None:
    """Only dataset and batch_size may be positional."""
    assert len(infeed.DataLoader(range(10), 4)) == 3
    with pytest.raises(TypeError):
        infeed.DataLoader(range(10), 4, True)  # type: ignore[misc]  # on purpose


def test_numpy_numbers_are_accepted() -> None:
    """NumPy scalars are treated like Python numbers."""
    import numpy as np

    loader = infeed.DataLoader(range(10), np.int64(4), seed=np.int32(3), num_workers=np.uint8(0))
    assert [len(batch) for batch in loader] == [4, 4, 2]


@pytest.mark.process
def test_forkserver_is_rejected_where_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """start_method='forkserver' raises a `ConfigError` that lists the other start methods."""
    from tests.conftest import make_portable

    make_portable(monkeypatch)
    with pytest.raises(infeed.ConfigError, match="use 'auto' or 'spawn'"):
        next(iter(infeed.DataLoader(range(4), num_workers=1, start_method="forkserver")))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copied_loader_has_the_options_and_the_seed_of_the_original(copied: Callable[[Any], Any]) -> None:
    """The copy has its own workers and its own progress: it starts at the first batch."""
    loader = infeed.DataLoader(range(20), 4, shuffle=True)
    first = [batch.tolist() for batch in loader]

    again = copied(loader)

    assert [batch.tolist() for batch in again] == first
    assert repr(again) == repr(loader)
