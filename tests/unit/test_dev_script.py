"""The pure parts of dev.py: the steps of a command, and when it reinstalls. No environment is created."""

import copy
import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    spec = importlib.util.spec_from_file_location("infeed_dev_script", ROOT / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_command_needs_an_extra_that_exists(dev: ModuleType, pyproject: dict[str, Any]) -> None:
    """Each command uses an extra that pyproject.toml defines."""
    assert set(dev.EXTRAS.values()) <= set(pyproject["project"]["optional-dependencies"])


def test_the_demo_extra_is_part_of_the_dev_extra(pyproject: dict[str, Any]) -> None:
    """An environment for the tests can run the demo too, with the same versions."""
    extras = pyproject["project"]["optional-dependencies"]
    assert set(extras["demo"]) <= set(extras["dev"])


def test_check_runs_lint_format_layers_and_types_for_three_platforms(dev: ModuleType) -> None:
    """ruff twice, import-linter, and mypy for this platform, Windows and macOS, each with its own cache, all in parallel."""
    assert dev.steps("check", []) == [
        [
            ["-m", "ruff", "check", "."],
            ["-m", "ruff", "format", "--check", "."],
            ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"],
            ["-m", "mypy"],
            ["-m", "mypy", "--platform", "win32", "--cache-dir", ".mypy_cache/win32"],
            ["-m", "mypy", "--platform", "darwin", "--cache-dir", ".mypy_cache/darwin"],
        ]
    ]


def test_quick_runs_tests_that_start_no_process(dev: ModuleType) -> None:
    [[tests]] = dev.steps("test", ["--quick"])
    assert tests[-3:] == ["tests/unit", "tests/engine", "tests/metrics"]
    assert "process" in tests[tests.index("-m", 1) + 1]
    [[tests]] = dev.steps("test", ["--quick", "tests/unit/test_order.py", "-x"])
    assert tests[-3:] == [dev.QUICK_MARKERS, "tests/unit/test_order.py", "-x"]
    [[tests]] = dev.steps("test", ["--quick", "-x"])
    assert tests[-4:] == [*dev.QUICK, "-x"]


def test_test_runs_the_checks_and_then_pytest_with_the_arguments(dev: ModuleType) -> None:
    """Arguments are passed only to pytest, which runs last."""
    *checks, [tests] = dev.steps("test", ["-k", "demo"])
    assert checks == dev.steps("check", [])
    assert (tests[:3], tests[-2:]) == (["-m", "pytest", "-n"], ["-k", "demo"])


def test_docs_are_built_strict_or_served(dev: ModuleType) -> None:
    """A broken link fails the build."""
    assert dev.steps("docs", []) == [[["-m", "mkdocs", "build", "--strict"]]]
    assert dev.steps("docs", ["serve"]) == [[["-m", "mkdocs", "serve"]]]


def test_build_checks_its_result(dev: ModuleType) -> None:
    """twine checks the files of the previous step."""
    build, check = dev.steps("build", [])
    assert build[0][:2] == ["-m", "build"]
    assert check[0][:3] == ["-m", "twine", "check"]


def test_this_python_is_found_by_version_and_by_path(dev: ModuleType) -> None:
    """`--python` accepts both."""
    assert dev.version_of([sys.executable]) == "{}.{}".format(*sys.version_info)
    assert dev.find_python(sys.executable) == sys.executable


@pytest.mark.parametrize(
    ("command", "step"),
    [("demo", ["-m", "infeed", "demo", "--epochs", "1"]), ("bench", ["benchmarks/run.py", "--epochs", "1"])],
    ids=["demo", "bench"],
)
def test_demo_and_bench_are_one_step_with_the_arguments(dev: ModuleType, command: str, step: list[str]) -> None:
    """Arguments after the command are passed unchanged."""
    assert dev.steps(command, ["--epochs", "1"]) == [[step]]


def test_commands_run_in_parallel_and_print_in_sequence(
    dev: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first ends only when the last has run; all outputs are printed, and the first failure sets the exit code."""
    met = tmp_path / "met"
    waiting = "from pathlib import Path; import sys; from tests.helpers import wait_until\n"
    waiting += "wait_until(Path(sys.argv[1]).exists, 'the last'); print('first')"
    codes = [waiting, "print('second'); exit(3)", "exit(4)", "import sys; open(sys.argv[1], 'w'); print('last')"]

    assert dev.call_together([[sys.executable, "-c", code, str(met)] for code in codes]) == 3
    assert [line for line in capfd.readouterr().out.splitlines() if line in ("first", "second", "last")] == [
        "first", "second", "last",
    ]  # fmt: skip


def test_bytecode_is_cached(dev: ModuleType) -> None:
    """A variable that disables the cache is not passed on: every interpreter of a test would compile infeed again."""
    assert dev.environment({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "h"})["HOME"] == "h"
    assert "PYTHONDONTWRITEBYTECODE" not in dev.environment({"PYTHONDONTWRITEBYTECODE": "1"})


def test_both_extras_stay_installed(dev: ModuleType, pyproject: dict[str, Any]) -> None:
    """Installing one extra does not make the script forget the other."""
    stamp = {extra: dev.requirement_hash(pyproject, extra) for extra in ("demo", "dev")}

    assert dev.is_installed(stamp, pyproject, "demo")
    assert dev.is_installed(stamp, pyproject, "dev")


def test_only_a_changed_extra_is_reinstalled(dev: ModuleType, pyproject: dict[str, Any]) -> None:
    """Only extras affected by a change of pyproject.toml are installed again."""
    stamp = {extra: dev.requirement_hash(pyproject, extra) for extra in ("demo", "dev")}
    changed = copy.deepcopy(pyproject)
    changed["project"]["optional-dependencies"]["demo"].append("another")

    assert not dev.is_installed(stamp, changed, "demo")
    assert dev.is_installed(stamp, changed, "dev")


def test_a_changed_dependency_of_the_package_affects_every_extra(dev: ModuleType, pyproject: dict[str, Any]) -> None:
    """Every extra includes the package's own dependencies."""
    stamp = {extra: dev.requirement_hash(pyproject, extra) for extra in ("demo", "dev")}
    pyproject["project"]["dependencies"].append("another")

    assert not dev.is_installed(stamp, pyproject, "demo")
    assert not dev.is_installed(stamp, pyproject, "dev")


def test_a_change_elsewhere_in_pyproject_installs_nothing(dev: ModuleType, pyproject: dict[str, Any]) -> None:
    """Settings of tools do not affect the installation."""
    stamp = {"dev": dev.requirement_hash(pyproject, "dev")}
    pyproject["tool"]["ruff"]["line-length"] = 80

    assert dev.is_installed(stamp, pyproject, "dev")


@pytest.mark.parametrize("text", [None, "", '{"dev": "ab', "[]"], ids=["absent", "empty", "cut short", "other"])
def test_an_unreadable_stamp_means_nothing_is_installed(dev: ModuleType, tmp_path: Path, text: str | None) -> None:
    """An interrupted installation runs again."""
    path = tmp_path / "stamp.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")

    assert dev.read_stamp(path) == {}


def test_a_stamp_is_read_as_it_was_written(dev: ModuleType, tmp_path: Path) -> None:
    """A saved stamp is known at the next call."""
    path = tmp_path / "stamp.json"
    path.write_text(json.dumps({"dev": "abc"}), encoding="utf-8")

    assert dev.read_stamp(path) == {"dev": "abc"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fly"], "command='fly' is unknown; use one of demo, test, check, docs, build, bench"),
        (["check", "-x"], "arguments=['-x'] are not supported by check; to pass arguments to pytest, use test"),
        (["docs", "-x"], "arguments=['-x'] are not supported; use `docs` or `docs serve`"),
        (["test", "--python"], "--python needs a version such as 3.13, or a path"),
        (["test", "--python", "3.99"], "--python='3.99' was not found"),
        ([], "python dev.py test"),
    ],
    ids=["unknown command", "arguments to check", "arguments to docs", "no version", "unknown version", "no command"],
)
def test_invalid_usage_is_reported_before_anything_is_installed(
    dev: ModuleType, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage errors exit with code 2 and print the fix."""
    assert dev.main(argv) == 2
    assert said in capsys.readouterr().out


def test_an_old_python_gets_a_clear_message(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Python that is too old prints the required version instead of an ImportError."""
    monkeypatch.setattr(dev.sys, "version_info", (3, 9, 2, "final", 0))

    assert dev.main(["test"]) == 2
    assert "this is Python 3.9.2, infeed needs 3.11 or newer" in capsys.readouterr().out
