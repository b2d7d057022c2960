"""``infeed bench``: which settings it tries, which one it chooses, and its output."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from infeed.cli import bench
from infeed.doctor.report import bench_page, rate_figure
from infeed.doctor.throughput import Bench, Measured, Setting, choose, confirm, search
from infeed.errors import ConfigError
from tests.helpers import ScriptResult, start_python


def rated(rate: float, kind: str = "process", workers: int = 1, memory: int = 0) -> Measured:
    return Measured(setting=Setting(kind, workers), samples_per_s=rate, memory_bytes=memory)  # type: ignore[arg-type]


def tried(rates: dict[int, float], core_count: int) -> list[int]:
    """Returns the numbers of workers that are tried if they reach these rates."""

    def measure(setting: Setting) -> Measured:
        return rated(rates.get(setting.num_workers, 1.0), setting.kind, setting.num_workers)

    return [one.setting.num_workers for one in search(measure, core_count, ["process"])]


def test_more_workers_are_tried_while_they_help() -> None:
    """The search stops after two steps without a gain, or after one step above twice the number of cores."""
    assert tried({1: 10, 2: 20, 4: 20, 8: 20}, core_count=16) == [0, 1, 2, 4, 8]
    assert tried({1: 10, 2: 20, 4: 20, 8: 20}, core_count=2) == [0, 1, 2, 4]
    assert tried({count: count * 10.0 for count in (1, 2, 4, 8, 16)}, core_count=2) == [0, 1, 2, 4, 8, 16, 32]


def test_a_kind_that_fails_is_not_tried_again() -> None:
    """Other kinds of workers are still tried."""

    def measure(setting: Setting) -> Measured:
        return Measured(setting=setting, samples_per_s=1.0, error="no" if setting.kind == "thread" else "")

    kinds = [one.setting.kind for one in search(measure, 2)]

    assert kinds.count("thread") == 1
    assert kinds.count("process") > 1


def test_the_smallest_setting_close_to_the_fastest_is_chosen() -> None:
    """Among settings with the same number of workers, the one with less memory wins."""
    best = choose(
        [rated(50, "inline", 0), rated(98, workers=4, memory=9), rated(99, "thread", 4, memory=1), rated(100, workers=8)]
    )

    assert best is not None
    assert best.setting == Setting("thread", 4)
    assert choose([Measured(setting=Setting("inline", 0), error="no")]) is None


def test_the_fastest_settings_are_measured_twice_and_the_better_rate_counts() -> None:
    """Another program may have slowed down one measurement. Settings that are far slower are not measured again."""
    asked: list[Setting] = []

    def measure(setting: Setting) -> Measured:
        asked.append(setting)
        return rated(120 if setting.num_workers == 4 else 10, setting.kind, setting.num_workers)

    found = confirm(measure, [rated(20, workers=1), rated(100, workers=2), rated(90, workers=4)])

    assert [one.samples_per_s for one in found] == [20, 100, 120]
    assert [setting.num_workers for setting in asked] == [2, 4]


def test_the_chosen_setting_is_a_line_to_paste() -> None:
    """Processes are the default, so `worker=` is left out for them."""
    assert Setting("process", 4).code(8) == "infeed.DataLoader(dataset, batch_size=8, num_workers=4)"
    assert Setting("thread", 2).code(8) == 'infeed.DataLoader(dataset, batch_size=8, num_workers=2, worker="thread")'


def test_the_rate_is_measured_after_a_warm_up() -> None:
    """The clock advances by one second per read."""
    ticks = itertools.count()
    bench = Bench(range(10), batch_size=2, seconds=10, clock=lambda: float(next(ticks)))

    found = bench.measure(Setting("inline", 0))

    assert found.samples_per_s == 2.0  # One batch of two samples per second.
    assert found.first_s > 0


def test_an_empty_dataset_and_one_without_a_batch_are_reported() -> None:
    """An empty dataset is reported before anything is measured, a dataset without a full batch as a result."""
    with pytest.raises(ConfigError, match="the dataset is empty"):
        Bench([], batch_size=2, seconds=1)

    class Short:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter([1])

    found = Bench(Short(), batch_size=2, seconds=1).measure(Setting("inline", 0))
    assert "--batch-size" in found.error


def test_an_exception_of_the_dataset_is_a_result() -> None:
    """Other settings are still tried: some datasets fail with one kind of worker only."""

    class Raises:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            raise OSError("no such disk\nand more")

    found = Bench(Raises(), batch_size=2, seconds=1).measure(Setting("thread", 1))

    assert found.error.startswith("OSError: no such disk, while loading sample index=")


def test_the_page_has_a_line_for_each_kind() -> None:
    """Each kind of worker has a line, which begins at `num_workers=0`."""
    results = [rated(1, "inline", 0), rated(2, "thread", 1), rated(3, "process", 1), rated(6, "process", 2)]

    lines = rate_figure(results, 2)["data"]

    assert [(line["name"], line["x"], line["y"]) for line in lines] == [
        ("threads", [0, 1], [1, 2]),
        ("processes", [0, 1, 2], [1, 3, 6]),
    ]
    pytest.importorskip("plotly")
    assert "num_workers=2" in bench_page("data:train", 32, 2, results, results[-1])


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (24, ["no workers", "1,234,567"]),
        (40, ["no workers", "1,234,567", "4 s"]),
        (60, ["no workers", "1,234,567", "█" * 9, "4 s", "5.0 MiB"]),
        (80, ["no workers", "1,234,567", "█" * 24, "4 s", "5.0 MiB"]),
    ],
)
def test_no_number_is_truncated_on_a_narrow_terminal(
    columns: int, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a narrow terminal bars are shortened, then columns are dropped."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    one = Measured(setting=Setting("inline", 0), samples_per_s=1_234_567, first_s=4.0, memory_bytes=5 << 20)

    bench._print_table([one, rated(99, "thread", 16)], one)

    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "no workers" in line)
    assert re.split(r"  +", row.strip()) == shown
    assert not any("…" in line for line in lines)


BAD = """
import threading
class Needs:
    def __init__(self, root): pass
    def __len__(self): return 8
    def __getitem__(self, index): return index
class Broken(Needs):
    def __init__(self): pass
    def __getitem__(self, index): raise ValueError("no such disk")
class Somewhere(Broken):
    def __getitem__(self, index):
        if threading.current_thread() is not threading.main_thread(): raise ValueError("not here")
        return index
def make(): raise OSError("no such folder")
"""


def run_bench(tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> ScriptResult:
    (tmp_path / "data.py").write_text("def make(): return list(range(1000))\nnumber = 7\n")
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "worse.py").write_text("1 / 0")
    return start_python(["-m", "infeed", "bench", *arguments], cwd=tmp_path, env=env).finish(60)


@pytest.mark.process
@pytest.mark.slow
def test_a_dataset_is_measured_with_every_kind_of_worker(tmp_path: Path) -> None:
    """The file contains the results, the terminal shows the choice."""
    result = run_bench(tmp_path, "data:make", "--seconds", "0.05", "--json", "found.json")

    report = json.loads((tmp_path / "found.json").read_text())
    assert {one["setting"]["kind"] for one in report["results"]} == {"inline", "thread", "process"}
    assert all(one["samples_per_s"] > 0 for one in report["results"])
    assert report["best"]["code"] in result.out
    assert result.code == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["data"], 2, "'data' does not have the form module:dataset"),
        (["data:absent"], 3, "module 'data' has no 'absent'; it defines make, number"),
        (["data:number"], 3, "data:number is a int, not a dataset"),
        (["bad:Needs"], 3, "bad:Needs() cannot be called: missing a required argument: 'root'; pass the name of a function"),
        (["bad:make"], 3, "bad:make could not be loaded: OSError: no such folder"),
        (["worse:train_set"], 3, "worse:train_set could not be loaded: ZeroDivisionError: division by zero"),
        (["bad:Broken", "--seconds", "0.1"], 3, "bad:Broken could not be loaded: ValueError: no such disk"),
        (["data:make", "--batch-size", "0"], 2, "'0' must be an int, at least 1"),
        (["data:make", "--json", "absent/x"], 2, "--json absent/x cannot be written: folder"),
        (["data:make", "--html", "absent/x"], 2, "--html absent/x cannot be written: folder"),
        (["data:make", "--seconds", "0"], 2, "'0' must be a number of seconds above 0"),
    ],
)
def test_invalid_usage_is_reported(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    """Each usage error prints the fix and has its exit code."""
    result = run_bench(tmp_path, *arguments)

    assert text in result.err
    assert result.code == code


@pytest.mark.process
@pytest.mark.slow
def test_a_terminal_with_a_limited_encoding_gets_replacements(tmp_path: Path) -> None:
    """Files are still written in UTF-8."""
    arguments = ("data:make", "--seconds", "0.05", "--worker", "thread", "--json", "found.json")
    result = run_bench(tmp_path, *arguments, env={"PYTHONIOENCODING": "ascii"})

    assert "########################" in result.out
    assert "infeed.DataLoader(dataset, " in result.out
    assert (tmp_path / "found.json").is_file()
    assert result.code == 0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.linux("writes to /dev/full")
def test_results_are_printed_even_if_they_cannot_be_written(tmp_path: Path) -> None:
    """The disk turns out to be full."""
    result = run_bench(tmp_path, "data:make", "--seconds", "0.05", "--worker", "thread", "--json", "/dev/full")

    assert "infeed.DataLoader(dataset, " in result.out
    assert "--json /dev/full cannot be written: No space left on device" in result.err
    assert "Traceback" not in result.err
    assert result.code == 2


@pytest.mark.process
def test_each_trial_is_announced_before_it_runs(tmp_path: Path) -> None:
    """The dataset ends the process, as native code may. It also has fewer samples than a batch."""
    (tmp_path / "deadly.py").write_text("""
import os
class Deadly:
    def __len__(self): return 20
    def __getitem__(self, index): os._exit(7)
""")
    result = run_bench(tmp_path, "deadly:Deadly")

    assert result.err.endswith("batch size reduced to 20, the number of samples\n  no workers: ")
    assert result.code == 7


@pytest.mark.process
@pytest.mark.slow
def test_other_settings_are_tried_after_one_fails(tmp_path: Path) -> None:
    """Failed trials are reported next to the choice."""
    result = run_bench(tmp_path, "bad:Somewhere", "--seconds", "0.05", "--worker", "thread")

    assert "1 thread: ValueError: not here" in result.out
    assert "not measured" in result.out
    assert "num_workers=0" in result.out
    assert result.code == 0
