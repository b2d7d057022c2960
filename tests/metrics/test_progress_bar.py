"""The progress bar, and the statistics callback."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest

import infeed
from infeed.metrics.progress_bar import ProgressDisplay
from tests.helpers import ROOT, Squares

tqdm_auto = pytest.importorskip("tqdm.auto")


class Bar:
    """Stands in for tqdm and records its calls."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.count = given["initial"]
        self.texts: list[str] = []
        self.is_closed = False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        assert not self.is_closed
        self.count += count

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    Bar.made = []
    return Bar.made


def test_a_bar_counts_completed_steps(bars: list[Bar]) -> None:
    with infeed.DataLoader(Squares(40), 4, num_workers=2, progress=True) as loader:
        for number, _ in enumerate(loader):
            assert bars[0].count == number
    (bar,) = bars
    assert (bar.count, bar.is_closed) == (10, True)
    assert bar.given["total"] == 10
    assert bar.given["desc"] == "epoch 0"
    assert re.search(r", [12] workers?$", bar.texts[-1])  # On a busy machine the second may come too late.
    assert "samples/s, waiting " in bar.texts[-1]


def test_a_bar_starts_where_the_epoch_does(bars: list[Bar]) -> None:
    with infeed.DataLoader(Squares(40), 4, progress=True, seed=1) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    with infeed.DataLoader(Squares(40), 4, progress=True, seed=1) as loader:
        loader.load_state_dict(state)
        list(loader)
    assert bars[-1].given["initial"] == 3
    assert bars[-1].count == 10


def test_the_text_shows_the_statistics(bars: list[Bar]) -> None:
    """Without worker start-up: tqdm shows the current rate beside it."""
    with infeed.DataLoader(Squares(4), 4) as loader:
        nothing = loader.statistics()
    readings = [nothing, replace(nothing, sample_count=100, waited_s=1.0, away_s=3.0, started_s=20.0)]
    show = ProgressDisplay(
        lambda: readings.pop(0), epoch=0, first_step=0, batch_count=4, is_shown=True, on_statistics=None, every_s=1.0
    )
    show.step()
    assert bars[0].texts == ["25 samples/s, waiting 25%"]


def test_closing_a_loader_closes_its_bar(bars: list[Bar]) -> None:
    """So that a traceback is not printed into it."""
    with infeed.DataLoader(Squares(40), 4, num_workers=1, progress=True) as loader:
        batches = iter(loader)
        next(batches)
    assert bars[0].is_closed
    del batches


def test_leaving_a_loop_closes_its_bar(bars: list[Bar]) -> None:
    with infeed.DataLoader(Squares(40), 4, num_workers=1, progress=True) as loader:
        batches = iter(loader)
        next(batches)
        batches.leave()  # type: ignore[attr-defined]
        assert bars[0].is_closed


def test_an_iterable_dataset_has_a_bar_without_a_total(bars: list[Bar]) -> None:
    with infeed.DataLoader((number for number in range(8)), 4, progress=True) as loader:
        list(loader)
    assert bars[0].given["total"] is None
    assert bars[0].count == 2


def test_statistics_are_reported_at_the_interval_and_at_the_end() -> None:
    counts: list[int] = []
    loader = infeed.DataLoader(
        Squares(40), 4, on_statistics=infeed.StatisticsCallback(lambda known: counts.append(known.batch_count), interval=0)
    )
    with loader:
        list(loader)
        assert counts == [*range(1, 11), 10]
    counts.clear()
    with infeed.DataLoader(Squares(40), 4, on_statistics=lambda known: counts.append(known.batch_count)) as loader:
        list(loader)
    assert counts == [10]


def test_an_exception_of_a_callback_is_raised_in_the_loop_and_no_batch_is_lost() -> None:
    def refuse(known: infeed.Statistics) -> None:
        if known.batch_count == 2:
            raise RuntimeError("the disk of the log is full")

    with infeed.DataLoader(Squares(12), 4, on_statistics=infeed.StatisticsCallback(refuse, interval=0), seed=1) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        with pytest.raises(RuntimeError, match="disk of the log"):
            next(batches)
        assert loader.state_dict()["step"] == 2


def test_the_torch_loader_has_a_bar_too(bars: list[Bar]) -> None:
    torch_loaders = pytest.importorskip("infeed.torch")
    loader = torch_loaders.DataLoader(Squares(40), 4, num_workers=1, progress=True)
    list(loader)
    assert bars[0].count == 10
    assert loader.statistics().batch_count == 10
    list(loader)
    assert loader.statistics().batch_count == 20


def test_without_tqdm_the_error_has_the_fix() -> None:
    code = """
import sys
sys.modules["tqdm"] = sys.modules["tqdm.auto"] = None
import infeed
try:
    list(infeed.DataLoader([1, 2, 3], progress=True))
except infeed.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert 'pip install "infeed[progress]"' in done.stdout


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"observe": "everything"}, "observe='everything' is not supported"),
        ({"progress": 1}, "progress=1 must be a bool"),
        ({"on_statistics": 3}, "on_statistics=3 must be callable"),
        ({"observe": "off", "progress": True}, "observe='off' is not supported with progress"),
    ],
)
def test_invalid_options_raise_in_the_constructor(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(infeed.ConfigError, match=said):
        infeed.DataLoader(Squares(4), **wrong)


def test_the_interval_of_a_callback_is_checked() -> None:
    with pytest.raises(infeed.ConfigError, match="interval=-1 must be a number of seconds"):
        infeed.StatisticsCallback(print, interval=-1)
