"""The demo: what it prints, what it leaves behind, how it says no."""

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import infeed
from infeed.cli import main
from infeed.cli.demo import Timing, _print_table, measure

SMALL = ["demo", "--pictures", "6", "--workers", "1", "--batch-size", "2", "--epochs", "1"]
ROWS = ["infeed, inline", "infeed, threads", "infeed, processes"]


@pytest.fixture
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for temporary files in which whatever the demo leaves behind is seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def assert_no_pictures_left(temp_root: Path) -> None:
    assert list(temp_root.glob("infeed-demo-*")) == []
    assert list(temp_root.rglob("*.jpg")) == []


# From Python 3.12 on, forking with more than one thread warns; torch forks, and NumPy's BLAS has threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.process
@pytest.mark.slow
def test_every_loader_has_a_row_and_the_pictures_are_removed(temp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run ends with a row for each loader, a line that says what ran, and an empty temporary directory."""
    pytest.importorskip("PIL")
    assert main(SMALL) == 0

    out = capsys.readouterr().out
    for row in [*ROWS, *(["torch DataLoader"] if importlib.util.find_spec("torch") else [])]:
        assert row in out
    assert "1 worker, batch size 2, 6 pictures, 1 epoch" in out
    assert_no_pictures_left(temp_root)


def test_ctrl_c_leaves_one_line_and_no_pictures(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl+C while loading gives exit code 130, no traceback, and an empty temporary directory."""
    pytest.importorskip("PIL")
    pictures_seen: list[Path] = []

    def interrupt(*args: object, **kwargs: object) -> None:
        pictures_seen.extend(temp_root.rglob("*.jpg"))
        raise KeyboardInterrupt

    monkeypatch.setattr(infeed, "DataLoader", interrupt)

    assert main(SMALL) == 130

    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "infeed demo: interrupted"
    assert "Traceback" not in err
    assert len(pictures_seen) == 6
    assert_no_pictures_left(temp_root)


@pytest.mark.parametrize("module", ["PIL", "tqdm", "rich"])
def test_a_missing_package_is_named_with_the_cure(
    module: str, temp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one of the demo's packages there is one sentence that says what to install."""
    monkeypatch.setitem(sys.modules, module, None)

    assert main(SMALL) == 2

    err = capsys.readouterr().err
    assert {"PIL": "Pillow"}.get(module, module) in err
    assert err.endswith("pip install infeed[demo]\n")
    assert_no_pictures_left(temp_root)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pictures", "0"], "--pictures: '0' is no number; give 1 or more"),
        (["--workers", "many"], "--workers: 'many' is no number; give 1 or more"),
        (["--batch-size", "-1"], "--batch-size: '-1' is no number; give 1 or more"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument ends the command with code 2 and the argument's name."""
    with pytest.raises(SystemExit) as exited:
        main(["demo", *arguments])

    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help is shown as an error."""
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`infeed --version` prints the package's version."""
    with pytest.raises(SystemExit) as exited:
        main(["--version"])

    assert exited.value.code == 0
    assert capsys.readouterr().out == f"infeed {infeed.__version__}\n"


def test_time_outside_the_loops_own_work_counts_as_waiting() -> None:
    """Making the loader, each batch, and the end of an epoch are waits; the loop's own work and closing are not."""
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    class SlowLoader:
        def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
            for size in (2, 1):
                pass_time(3)
                yield np.zeros((size, 3, 4, 4), dtype=np.float32), 0
            pass_time(1)

    def open_loader() -> nullcontext[SlowLoader]:
        pass_time(5)
        return nullcontext(SlowLoader())

    timing = measure("slow", open_loader, epochs=2, on_batch=lambda count: pass_time(10 * count), clock=lambda: now)

    assert timing == Timing("slow", image_count=6, total_s=5 + 2 * (3 + 20 + 3 + 10 + 1), first_batch_s=8, waited_s=19)
    assert timing.images_per_s == pytest.approx(6 / 79)
    assert timing.waited_share == pytest.approx(19 / 79)


def test_no_number_is_cut_off_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Words and numbers are broken into lines instead."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")

    _print_table([Timing("infeed, processes", 1_234_567_890, 1.0, 0.123, 0.5)], [])

    assert "…" not in capsys.readouterr().out
