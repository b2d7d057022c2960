"""A small program for each library, as users write it: with torch's loader, and unchanged under ``infeed run``.

Programs that read a storage format also run with ``infeed.torch.DataLoader``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ScriptResult, start_python
from tools.libraries import LIBRARIES, read_state

pytestmark = [pytest.mark.libraries, pytest.mark.process, pytest.mark.slow, pytest.mark.torch]

PROGRAMS = Path(__file__).parent / "programs"
# Importing these libraries takes seconds in each process, and longer on a busy machine.
DEADLINE_S = 300.0
TORCH_IMPORT = re.compile(r"^from torch\.utils\.data import DataLoader.*$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    library: str
    ranks: int = 1
    """Processes that train; each prints a summary."""
    on_torch: str = ""
    """The loader of the program that runs on torch's own workers, and why."""
    is_storage: bool = False
    """Whether the library reads a storage format."""


CASES = {
    "with_accelerate": Case("accelerate"),
    "with_array_record": Case("array_record", is_storage=True),
    "with_datasets": Case("datasets", is_storage=True),
    "with_h5py": Case("h5py", is_storage=True),
    "with_lightning_ddp": Case("lightning", ranks=2),
    "with_litdata": Case(
        "litdata",
        on_torch="litdata.streaming.dataloader.StreamingDataLoader(StreamingDataset), because it creates "
        "litdata.streaming.dataloader._StreamingMultiProcessingDataLoaderIter directly",
        is_storage=True,
    ),
    "with_lmdb": Case("lmdb", is_storage=True),
    "with_monai": Case("monai"),
    "with_skorch": Case("skorch"),
    "with_streaming": Case("mosaicml-streaming", is_storage=True),
    "with_tensordict": Case("tensordict"),
    "with_timm": Case("timm"),
    "with_torch_geometric": Case("torch_geometric"),
    "with_transformers": Case("transformers"),
    "with_ultralytics": Case("ultralytics"),
    "with_webdataset": Case("webdataset", is_storage=True),
    "with_zarr": Case("zarr", is_storage=True),
}


def skip_without(name: str) -> None:
    try:
        version(name)
    except PackageNotFoundError:
        reason = read_state().get(name, {}).get("failed", "python dev.py test --libraries installs it")
        pytest.skip(f"{name} is not installed: {reason}")


def ran(arguments: list[str], folder: Path) -> ScriptResult:
    folder.mkdir()
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "YOLO_CONFIG_DIR": str(folder)}
    result = start_python(arguments, cwd=folder, env=environ).finish(DEADLINE_S)
    assert result.code == 0, result.err
    return result


def seen(result: ScriptResult) -> list[Any]:
    """Returns what the loops of a program received: the lines of JSON that it printed."""
    return [json.loads(line) for line in result.out.splitlines() if line.startswith('{"')]


@pytest.fixture(scope="session")
def seen_with_torch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Returns the output of a program with torch's loader."""
    folder = tmp_path_factory.mktemp("torch")
    return functools.cache(lambda program: seen(ran([str(PROGRAMS / f"{program}.py")], folder / program)))


@pytest.mark.parametrize("program", CASES)
def test_a_program_sees_the_same_batches_under_infeed_run(
    program: str, seen_with_torch: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """In the same order; each of two ranks in its own. The summary says which workers served its loaders."""
    case = CASES[program]
    skip_without(case.library)

    expected = seen_with_torch(program)
    result = ran(["-m", "infeed", "run", str(PROGRAMS / f"{program}.py")], tmp_path / "infeed")

    got = seen(result)
    if case.ranks > 1:
        got, expected = sorted(got, key=repr), sorted(expected, key=repr)
    assert got == expected
    assert expected
    summaries = re.findall(
        r"^infeed(?: \(pid \d+\))?: ([1-9]\d*) loaders? on infeed's engine, ([1-9]\d*) batch.*$", result.err, re.M
    )
    assert len(summaries) == case.ranks, result.err
    reasons = set(re.findall(r"on torch's own (?:workers|iterator): ([^;\n]*)", result.err))
    assert reasons == ({case.on_torch} if case.on_torch else set())


@pytest.mark.parametrize("program", [program for program, case in CASES.items() if case.is_storage])
def test_a_program_sees_the_same_batches_with_infeeds_loader(
    program: str, seen_with_torch: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """The import is the only change, as in the guide."""
    skip_without(CASES[program].library)
    path = tmp_path / f"{program}.py"
    code = (PROGRAMS / path.name).read_text(encoding="utf-8")
    code, count = TORCH_IMPORT.subn(r"\g<0>\nfrom infeed.torch import DataLoader", code)
    assert count == 1
    path.write_text(code, encoding="utf-8")

    result = ran([str(path)], tmp_path / "infeed")

    assert seen(result) == seen_with_torch(program)
    assert "torch's own workers" not in result.err


def test_each_library_has_a_program_and_vice_versa() -> None:
    """No program or library is missing."""
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(CASES)
    assert {case.library for case in CASES.values()} == {library.name for library in LIBRARIES}
