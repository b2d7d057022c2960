"""Small real programs, unchanged, under ``infeed run``; and infeed's loader in the frameworks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, ScriptResult, start_python

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "plain_torch": ["torch"],
    "with_lightning": ["lightning"],
    "with_accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
    "own_lightning": ["lightning"],
    "own_accelerate": ["accelerate", "torchdata"],
}
# torch sometimes aborts a rank while Python ends ("terminate called without an active exception"; seen without infeed), so
# ranks exit when the program has ended.
LEAVING = """
import os, runpy, sys
sys.argv = sys.argv[1:]
code = 0
if sys.argv[0] == "infeed":
    from infeed.cli import main
    code = main(sys.argv[1:])
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
# Importing these frameworks takes seconds, and there may be two ranks and another test beside them.
DEADLINE_S = 150.0


def ran(arguments: list[str], tmp_path: Path) -> ScriptResult:
    # One thread for arithmetic: on such small models more of them only wait for each other, at full speed.
    result = start_python(arguments, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}).finish(DEADLINE_S)
    assert result.code == 0, result.err
    return result


def ran_ranks(arguments: list[str], tmp_path: Path) -> ScriptResult:
    """Runs two ranks of a program, or of ``infeed`` with arguments."""
    leaving = tmp_path / "leaving.py"
    leaving.write_text(LEAVING)
    return ran(["-m", "torch.distributed.run", "--nproc-per-node", "2", str(leaving), *arguments], tmp_path)


def said(result: ScriptResult) -> list[Any]:
    """Returns the JSON lines that a program printed, in a fixed order."""
    return sorted((json.loads(line) for line in result.out.splitlines() if line.startswith('{"')), key=repr)


def skip_without(program: str) -> None:
    for name in NEEDS[program]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; the extra `frameworks` has it")


# The ways to run a program: number of workers, and how infeed is used.
RUN = ["-m", "infeed", "run"]
INSTALLED = (
    "import infeed.torch, runpy, sys; from infeed.torch.summary import TALLY; infeed.torch.install(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); print(TALLY, file=sys.stderr)"
)


@pytest.mark.parametrize(
    "program",
    # The default run has the Trainer, which prepares its loaders with Accelerate, and the example `lightning_trainer.py`.
    [pytest.param(name, marks=pytest.mark.long) for name in ("with_lightning", "with_accelerate")],
)
def test_a_program_has_the_same_losses_under_infeed_run(program: str, tmp_path: Path) -> None:
    """infeed's workers serve its loaders, with the same numbers."""
    skip_without(program)
    path = str(PROGRAMS / f"{program}.py")

    result = ran([*RUN, path, "2"], tmp_path)

    assert said(result) == said(ran([path, "0"], tmp_path))
    assert_all_on_infeed(result)


def test_a_plain_loop_has_the_same_losses_with_and_without_workers(tmp_path: Path) -> None:
    path = str(PROGRAMS / "plain_torch.py")
    expected = said(ran([path, "0"], tmp_path))

    served = ran([*RUN, path, "2"], tmp_path)

    assert said(served) == expected
    assert_all_on_infeed(served)


def test_the_trainer_has_the_same_losses_after_install(tmp_path: Path) -> None:
    """The Trainer creates its loaders and prepares them with Accelerate; `infeed run` calls install() too."""
    skip_without("trainer")
    path = str(PROGRAMS / "trainer.py")
    expected = said(ran([path, "0"], tmp_path))

    installed = ran(["-c", INSTALLED, path, "2"], tmp_path)

    assert said(installed) == expected
    assert "2 loaders on infeed's engine" in installed.err


def assert_all_on_infeed(result: ScriptResult) -> None:
    """Fails unless ``infeed run`` reports that infeed served all loaders."""
    assert "on infeed's engine" in result.err.splitlines()[-1]
    assert "torch's own" not in result.err


@pytest.mark.long
def test_ranks_under_torchrun_have_the_same_losses(tmp_path: Path) -> None:
    """infeed runs each rank."""
    path = str(PROGRAMS / "torchrun.py")
    expected = said(ran_ranks([path, "0"], tmp_path))

    result = ran_ranks(["infeed", "run", path, "2"], tmp_path)

    assert said(result) == expected
    assert expected[0]["complete"]
    assert result.err.count("on infeed's engine") == 2


@pytest.mark.parametrize(
    "program",
    # Two ranks below run the second too; the example `lightning_trainer.py` resumes infeed's loader in Lightning.
    [pytest.param("own_lightning", marks=pytest.mark.long), pytest.param("own_accelerate", marks=pytest.mark.long)],
)
def test_a_framework_keeps_infeeds_loader(program: str, tmp_path: Path) -> None:
    """Re-created, wrapped, sharded once, saved and resumed: the program asserts it."""
    skip_without(program)

    assert said(ran([str(PROGRAMS / f"{program}.py")], tmp_path))


def test_accelerate_shards_infeeds_loader_once(tmp_path: Path) -> None:
    """Two ranks deliver every sample once, and the remainder is right."""
    skip_without("own_accelerate")

    ranks = said(ran_ranks([str(PROGRAMS / "own_accelerate.py")], tmp_path))

    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {rank["steps"] for rank in ranks} == {6}


def test_torchdatas_loader_uses_infeed_under_infeed_run(tmp_path: Path) -> None:
    """Its arguments and its states keep working."""
    skip_without("own_accelerate")
    path = tmp_path / "program.py"
    path.write_text(
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "loader = StatefulDataLoader(list(range(20)), batch_size=4, num_workers=2, snapshot_every_n_steps=3)\n"
        "it = iter(loader); [next(it) for _ in range(2)]\n"
        "state = loader.state_dict()\n"
        "other = StatefulDataLoader(list(range(20)), batch_size=4)\n"
        "other.load_state_dict(state)\n"
        "print([batch.tolist() for batch in other])\n"
    )

    result = ran(["-m", "infeed", "run", str(path)], tmp_path)

    assert result.out.strip() == str([list(range(i, i + 4)) for i in range(8, 20, 4)])
    assert "2 loaders on infeed's engine" in result.err


def test_all_programs_are_found() -> None:
    """A moved folder must not look like success."""
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*NEEDS, "torchrun"}
    assert sys.executable
    assert ROOT.is_dir()
