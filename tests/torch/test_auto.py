"""torch's loader class with ``num_workers="auto"``: an int for torch and for frameworks, and the same batches."""

from __future__ import annotations

import copy
import time
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch

from infeed.errors import ConfigError
from infeed.torch import DataLoader
from infeed.torch.service import config_of
from tests.helpers import always_threads, engine_of, wait_until

pytestmark = pytest.mark.process


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


def test_num_workers_behaves_as_an_int() -> None:
    """torch has nothing to warn about: the number is only the maximum."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(Numbers(), num_workers="auto")

    assert isinstance(loader.num_workers, int)
    assert loader.num_workers > 1
    assert repr(loader.num_workers) == "'auto'"
    assert config_of(loader).is_auto


@pytest.mark.parametrize("how", ["from attributes", "copied"])
def test_a_loader_created_from_another_has_auto_too(how: str) -> None:
    """Frameworks re-create loaders with their own sampler."""
    loader = DataLoader(Numbers(), num_workers="auto", cpu_limit=2, worker="auto")
    if how == "copied":
        again = copy.copy(loader)
    else:
        again = DataLoader(loader.dataset, num_workers=loader.num_workers, worker=loader.worker, cpu_limit=loader.cpu_limit)

    made = config_of(again)
    assert (made.is_auto, made.most_workers, made.is_kind_auto) == (True, loader.num_workers, True)
    assert made.cpu_limit == 2


def test_batches_are_those_of_torch() -> None:
    """The number of workers has no influence on them."""
    with closing(DataLoader(Numbers(), batch_size=4, num_workers="auto", timeout=30)) as loader:
        batches = [batch.tolist() for batch in loader]

    assert batches == [batch.tolist() for batch in torch.utils.data.DataLoader(Numbers(), batch_size=4)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": "all"}, "num_workers='all' must be an int or 'auto'"),
        ({"num_workers": "auto", "cpu_limit": -1}, "cpu_limit=-1 must be a number of CPU cores above 0"),
        ({"num_workers": 2, "cpu_limit": 1}, "cpu_limit=1 is not supported with num_workers=2"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, object], text: str) -> None:
    """By the constructor, as for torch's own arguments."""
    with pytest.raises(ConfigError, match=text):
        DataLoader(Numbers(), **options)  # type: ignore[arg-type]


class Naps(Numbers):
    """Releases the GIL."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


@pytest.mark.parametrize("is_persistent", [False, True], ids=["restarted", "persistent"])
def test_the_kind_of_worker_is_remembered_from_epoch_to_epoch(is_persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch draws an order once per epoch, so the change takes effect in the next epoch, and stays."""

    def load(dataset: Any, worker: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(dataset, 8, True, num_workers=2, persistent_workers=is_persistent, generator=generator, worker=worker)

    always_threads(monkeypatch)
    with closing(load(range(400), "process")) as plain, closing(load(Naps(), "auto")) as loader:
        kinds = []
        for _ in range(3):
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
            kinds.append(loader.statistics().kind)
    assert kinds == ["process", "thread", "thread"]


def test_prefetch_factor_applies_to_the_current_workers() -> None:
    """The user's number stays the same per worker."""
    with closing(DataLoader(Naps(), batch_size=4, num_workers="auto", prefetch_factor=3)) as loader:
        batches = iter(loader)
        next(batches)
        for count in (1, 4, 2):
            engine_of(loader).scaling.aim(count)

            def is_reached(count: int = count) -> bool:
                next(batches)
                known = loader.statistics()
                return (known.worker_count, known.batches_in_flight) == (count, 3 * count)

            wait_until(is_reached, f"{count} workers and 3 batches for each")
