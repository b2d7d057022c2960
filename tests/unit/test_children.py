"""How an installation reaches child processes, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fresh import SOURCE, run_fresh

STARTUP = str(SOURCE / "programs" / "startup")
HOOKED = "any(type(finder).__module__ == 'infeed.import_hooks' for finder in sys.meta_path)"


def start(code: str, *paths: str, run: str | None) -> str:
    """Returns the output of Python started with these paths, with or without ``infeed run``."""
    env = {name: value for name, value in os.environ.items() if name != "INFEED_RUN"}
    env["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths, str(SOURCE.parent)])
    if run is not None:
        env["INFEED_RUN"] = run
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("run", ["1", None])
def test_python_under_infeed_run_hooks_torch_and_imports_nothing_else(run: str | None) -> None:
    """Other processes, such as infeed's workers, install no hook."""
    code = f"import sys; print({HOOKED}, 'torch' in sys.modules, 'numpy' in sys.modules, {STARTUP!r} in sys.path)"

    assert start(code, run=run) == f"{run is not None} False False False"


def test_a_sitecustomize_of_the_user_runs_as_well(tmp_path: Path) -> None:
    theirs = tmp_path / "sitecustomize.py"
    theirs.write_text("import builtins; builtins.theirs = 5\n")

    assert start("import sitecustomize; print(theirs, sitecustomize.__file__)", str(tmp_path), run="1") == f"5 {theirs}"


def test_the_installation_reaches_a_process_without_torch_and_its_children() -> None:
    code = f"""
    import multiprocessing, pickle, sys
    from infeed.programs.children import carry_into_processes, forget_processes
    carry_into_processes()
    config = multiprocessing.Process()._config
    assert "infeed" in config
    assert not {HOOKED}
    arrived = pickle.loads(pickle.dumps(config["infeed"]))
    assert {HOOKED}
    assert pickle.dumps(arrived) == pickle.dumps(config["infeed"])
    forget_processes()
    assert "infeed" not in multiprocessing.Process()._config
    print("torch" in sys.modules, "numpy" in sys.modules)
    """
    assert run_fresh(code) == "False False"


def test_the_environment_keeps_its_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    from infeed.programs.children import carry_into_commands, is_child_of_run

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", "b"]))
    monkeypatch.setenv("INFEED_RUN", "")  # To be restored.
    monkeypatch.delenv("INFEED_RUN")
    assert not is_child_of_run()
    for _ in range(2):
        carry_into_commands()
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [STARTUP, "a", "b"]
    assert not is_child_of_run()
    monkeypatch.setenv("INFEED_RUN", "1")
    assert is_child_of_run()
