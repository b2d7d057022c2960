"""The demo: its output, its temporary files and its error messages."""

import importlib.util
import json
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

SMALL = ["demo", "--images", "6", "--workers", "1", "--batch-size", "2", "--seconds", "0.05"]
ROWS = ["infeed, no workers", "infeed, threads", "infeed, processes"]


@pytest.fixture
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirects temporary files and the report to this folder, so that a test can check what the demo leaves behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_no_images_left(temp_root: Path) -> None:
    assert list(temp_root.glob("infeed-demo-*")) == []
    assert list(temp_root.rglob("*.jpg")) == []


# From Python 3.12 on, forking a process with several threads warns; torch forks, and NumPy's BLAS has threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.process
@pytest.mark.slow
def test_every_loader_has_a_row_and_the_images_are_removed(temp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run prints a row for each loader, the path of the report and the next steps, and removes its temporary files."""
    pytest.importorskip("PIL")
    assert main([*SMALL, "--report", "timeline.json"]) == 0

    out = capsys.readouterr().out
    for row in [*ROWS, *(["torch DataLoader"] if importlib.util.find_spec("torch") else [])]:
        assert row in out
    assert "1 worker, batch size 2, 6 images" in out
    assert str(temp_root / "timeline.json") in out
    assert json.loads((temp_root / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "infeed run train.py" in out
    assert_no_images_left(temp_root)


def test_ctrl_c_prints_one_line_and_removes_the_images(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl+C while loading exits with code 130, without a traceback, and removes the temporary files."""
    pytest.importorskip("PIL")
    images_seen: list[Path] = []

    def interrupt(*args: object, **kwargs: object) -> None:
        images_seen.extend(temp_root.rglob("*.jpg"))
        raise KeyboardInterrupt

    monkeypatch.setattr(infeed, "DataLoader", interrupt)

    assert main(SMALL) == 130

    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "infeed demo: interrupted"
    assert "Traceback" not in err
    assert len(images_seen) == 6
    assert_no_images_left(temp_root)


@pytest.mark.parametrize("module", ["PIL", "tqdm", "rich"])
def test_a_missing_package_is_reported_with_the_fix(
    module: str, temp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a package that the demo needs is missing, one sentence says how to install it."""
    monkeypatch.setitem(sys.modules, module, None)

    assert main(SMALL) == 2

    err = capsys.readouterr().err
    assert {"PIL": "Pillow"}.get(module, module) in err
    assert err.endswith('pip install "infeed[demo]"\n')
    assert_no_images_left(temp_root)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--images", "0"], "--images: '0' must be an int, at least 1"),
        (["--workers", "many"], "--workers: 'many' must be an int, at least 1"),
        (["--batch-size", "-1"], "--batch-size: '-1' must be an int, at least 1"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_invalid_argument_is_reported(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid argument exits with code 2 and prints the name of the argument."""
    with pytest.raises(SystemExit) as exited:
        main(["demo", *arguments])

    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, the help is printed as an error."""
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`infeed --version` prints the package's version."""
    with pytest.raises(SystemExit) as exited:
        main(["--version"])

    assert exited.value.code == 0
    assert capsys.readouterr().out == f"infeed {infeed.__version__}\n"


def test_the_rate_is_measured_from_the_first_batch() -> None:
    """Creating the loader and loading the first batch count as start-up; time between batches and epochs counts as waiting."""
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

    timing = measure("slow", open_loader, seconds=40, on_batch=lambda count: pass_time(10 * count), clock=lambda: now)

    # 20 s of work; wait 3 s, 10 s of work; wait 1 + 3 s, 20 s of work: then 40 s have passed.
    assert timing == Timing("slow", image_count=5, seconds=57, first_batch_s=8, waited_s=7)
    assert timing.images_per_s == pytest.approx(5 / 57)
    assert timing.waited_share == pytest.approx(7 / 57)


def test_an_unwritable_report_path_is_rejected_first(temp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of the report is checked before any image is generated."""
    pytest.importorskip("PIL")
    assert main([*SMALL, "--report", str(temp_root / "absent" / "demo.html")]) == 2

    assert "--report" in capsys.readouterr().err
    assert_no_images_left(temp_root)


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    out = capsys.readouterr().out
    assert all(f"  infeed {command} " in out for command in ("run", "doctor", "bench", "demo"))


def test_no_number_is_truncated_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A narrow terminal wraps words and numbers instead of truncating them."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")

    _print_table([Timing("infeed, processes", 1_234_567_890, 1.0, 0.123, 0.5)], [])

    assert "…" not in capsys.readouterr().out
