"""tools/windows.py: exit codes, time limits, repeated tests. Wine is a shell script here."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.linux("Wine runs there")

ROOT = Path(__file__).resolve().parents[2]
FAILED = "FAILED tests/test_a.py::test_one[5 MiB] - assert 1 == 2"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module, with a complete prefix in a temporary folder, and a ``wine`` written by ``set_wine``."""
    spec = importlib.util.spec_from_file_location("infeed_windows_script", ROOT / "tools" / "windows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(module, "DOWNLOAD_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "TESTED", ())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    prefix = module.Prefix("3.11")
    (prefix.drive / "infeed").mkdir(parents=True)
    return module


def set_wine(tool: ModuleType, *bodies: str) -> None:
    """Makes each call of ``wine`` run the next of these commands, and ``wineserver`` nothing."""
    home = tool.HOME
    cases = "".join(f"{number}) {body};;\n" for number, body in enumerate(bodies, 1))
    for name, text in (("wineserver", ""), ("wine", f"echo >> {home}/count\ncase $(wc -l < {home}/count) in\n{cases}esac\n")):
        (home / name).write_text(f"#!/bin/sh\n{text}")
        (home / name).chmod(0o755)


def test_tests_that_pass_when_repeated_are_counted(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed: a successful run does not hide them."""
    other = FAILED.replace("test_one", "test_two")
    set_wine(tool, f'echo "{FAILED}"; echo "{other}"; exit 1', f'echo "{other}"; echo "1 failed in 2.0s"; exit 1')
    assert tool.run_tests(tool.Prefix("3.11"), []) == 1
    assert "passed when repeated: 1\n  tests/test_a.py::test_one[5 MiB]\n" in capsys.readouterr().out


def test_a_repetition_without_a_summary_is_no_success(tool: ModuleType) -> None:
    """A test that ends the process of pytest does so with any exit code, even 0."""
    set_wine(tool, f'echo "{FAILED}"; exit 1', "echo .; exit 0")
    assert tool.run_tests(tool.Prefix("3.11"), []) == tool.ENDED_EARLY


def test_tests_that_are_left_out_exist(tool: ModuleType) -> None:
    """pytest ignores the names of others, so a test with another name would run again."""
    for name in tool.LEFT_OUT:
        path, _, test = name.partition("::")
        function = test.partition("[")[0]
        assert f"def {function}(" in (ROOT / path).read_text() if function else (ROOT / path).exists(), name


def test_a_run_that_does_not_end_is_killed(tool: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    set_wine(tool, "echo started; exec sleep 60")
    assert tool.Prefix("3.11").run([], limit_s=0.2) == tool.TOOK_TOO_LONG
    assert "started\n" in capfd.readouterr().out


def test_the_repetition_gets_the_time_that_is_left(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that hangs each time is noticed after one limit. Tests that somebody chose may take any time."""
    limits: list[float | None] = []

    def run(prefix: object, arguments: list[str], limit_s: float | None, lines: list[str]) -> int:
        limits.append(limit_s)
        lines.append("1 failed in 2.0s")
        time.sleep(0.2)
        return int(tool.SOME_FAILED)

    monkeypatch.setattr(tool, "run", run)
    assert tool.run_tests(tool.Prefix("3.11"), []) == tool.SOME_FAILED
    assert tool.run_tests(tool.Prefix("3.11"), ["tests/unit"]) == tool.SOME_FAILED

    first, second, *others = limits
    assert first == pytest.approx(tool.TESTS_LIMIT_S)
    assert second is not None
    assert second < tool.TESTS_LIMIT_S - 0.1
    assert others == [None, None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo no such option >&2; exit 3", "no-cc -O2 shim.c failed with exit code 3: no such option"),
        ("exec sleep 60", "no-cc -O2 shim.c had not ended after 0 s"),
        (None, "no-cc -O2 shim.c cannot be started: .*No such file"),
    ],
    ids=["fails", "hangs", "is missing"],
)
def test_a_compiler_that_fails_is_a_failed_set_up(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, body: str | None, reason: str
) -> None:
    """And no traceback: runs of CI go on without the Windows tests."""
    monkeypatch.setattr(tool, "COMMAND_LIMIT_S", 0.3)
    (prefix := tool.Prefix("3.11")).folder.joinpath("build").mkdir()
    if body is not None:
        (tool.HOME / "no-cc").write_text(f"#!/bin/sh\n{body}\n")
        (tool.HOME / "no-cc").chmod(0o755)
    with pytest.raises(tool.SetupError, match=reason):
        prefix._compile("no-cc", "-O2", "shim.c")


def test_a_machine_without_wine_differs_from_a_failed_set_up(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing Wine is no failure in CI."""
    monkeypatch.setattr(tool, "_find_library", lambda full: Path(full))
    monkeypatch.setattr(tool, "ROOT", tool.HOME)
    monkeypatch.setenv("PATH", str(tool.HOME))
    assert tool.main([]) == tool.CANNOT_RUN == 77
    assert "Wine is not complete: wine, wineboot" in capsys.readouterr().out

    monkeypatch.setattr(tool, "_install_wine", lambda: None)
    set_wine(tool, "")
    (tool.HOME / "wineboot").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    (tool.HOME / "wineboot").chmod(0o755)
    assert tool.main([]) == tool.SETUP_FAILED
    assert "wineboot -i failed: broken" in capsys.readouterr().out


def test_a_download_is_retried(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times; the error has pip's reason."""
    pip = tool.HOME / "pip"
    pip.write_text(f"#!/bin/sh\necho >> {tool.HOME}/tries\necho no network >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(tool.SetupError, match=r"(?s)could not be downloaded in 3 attempts.*no network"):
        tool.Prefix("3.11")._download("numpy")
    assert len((tool.HOME / "tries").read_text()) == 3
