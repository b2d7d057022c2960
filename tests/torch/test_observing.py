"""Messages of ``infeed.torch.DataLoader`` where torch's own workers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infeed

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")

pytestmark = pytest.mark.torch


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")  # Python's own, from 3.12 on.
def test_options_that_torchs_workers_ignore_are_reported() -> None:
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    with pytest.warns(RuntimeWarning, match="progress and on_statistics have no effect"):
        list(ours.DataLoader(range(8), 2, progress=True, on_statistics=print, **options))


@pytest.mark.process
@pytest.mark.linux("needs os.fork")
@pytest.mark.filterwarnings("ignore")  # Of the fork.
def test_missing_measurements_of_torchs_workers_are_reported(tmp_path: Path) -> None:
    loader = ours.DataLoader(range(8), 2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(infeed.ConfigError, match="torch's own workers"):
        loader.report(tmp_path / "run.html")  # Before the first iteration too.
    assert len(list(loader)) == 4
    known = loader.statistics()
    assert known.finding is None
    assert "torch's own workers" in str(known)
    assert "multiprocessing_context='fork'" in str(known)
    for write in (loader.timeline, loader.report):
        with pytest.raises(infeed.ConfigError, match="torch's own workers"):
            write(tmp_path / "run.html")
    assert not list(tmp_path.iterdir())
    loader.multiprocessing_context = "spawn"
    assert len(list(loader)) == 4
    assert loader.statistics().batch_count == 4
    assert loader.statistics().finding is not None
    loader.timeline(tmp_path / "run.json")


@pytest.mark.filterwarnings("ignore")  # torch's, about DataPipes.
def test_an_iterator_of_torch_is_named_as_such() -> None:
    loader = ours.DataLoader(data.datapipes.iter.IterableWrapper(range(4)), 2)
    assert len(list(loader)) == 2
    assert "torch's own iterator, because the dataset is a DataPipe" in loader.statistics().diagnosis


def test_statistics_requested_while_the_loop_starts_are_of_the_same_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may request them: counts are not lost to a second set of counters."""
    loader = ours.DataLoader(range(8), batch_size=2)
    serving: Any = pytest.importorskip("infeed.torch.service")
    make, begun = serving.Session, []

    def make_slowly(*given: Any) -> Any:
        if not begun:
            begun.append(True)
            begun.append(iter(loader))  # Meanwhile.
        return make(*given)

    monkeypatch.setattr(serving, "Session", make_slowly)
    assert loader.statistics().batch_count == 0
    assert len(list(begun[1])) == 4
    assert loader.statistics().batch_count == 4


class Together(list[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_sampler": [[0, 1], [2]]}, {"batch_size": None}], ids=str)
def test_statistics_name_the_method_that_loads(options: dict[str, Any]) -> None:
    loader = ours.DataLoader(Together(range(3)), **options)
    list(loader)
    is_single = options.get("batch_size", 0) is None
    assert loader.statistics().loads_by == ("__getitem__" if is_single else "__getitems__")
