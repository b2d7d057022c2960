"""Random programs run with torch's loader and with infeed's, and observe the same.

`DIFFERENCES` lists the intended differences. With INFEED_FUZZ=1 every run draws new programs.
"""

from __future__ import annotations

import copy
import faulthandler
import os
from collections import Counter
from typing import Any, Final

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.utils.data import DataLoader

from tests.helpers import ROOT
from tests.torch.fuzz.comparing import DIFFERENCES, assert_same_record
from tests.torch.fuzz.objects import DatasetSpec
from tests.torch.fuzz.programs import Operation, OptionsSpec, Program
from tests.torch.fuzz.strategies import programs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.linux("torch's workers are forked, so that nothing needs to be pickled for them"),
    # torch's iterator fails in __del__ if its constructor has failed.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function _MultiProcessingDataLoaderIter:pytest.PytestUnraisableExceptionWarning"
    ),
]

_PARTS: Final = 5
_LONG_CASES: Final = int(os.environ.get("INFEED_FUZZ_CASES", "20000"))
# Few, because Hypothesis varies the programs that it has drawn: more seeds find more.
_PER_PART: Final = 50
# A part that takes longer hangs.
_HANG_S: Final = 900.0


def run_programs(part: int) -> Counter[str]:
    """Runs the programs of a seed; returns how many of them showed each intended difference."""
    shown: Counter[str] = Counter()

    @seed(int.from_bytes(os.urandom(8)) if os.environ.get("INFEED_FUZZ") else part)
    @settings(
        max_examples=_PER_PART,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(programs())
    def check(program: Program) -> None:
        shown.update(assert_same_record(program))

    check()
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_program_observes_the_same_as_with_torch(part: int) -> None:
    """Bit-identical batches, errors and their positions, calls of samplers and datasets, warnings, and generators."""
    run_programs(part)


@pytest.mark.long
def test_thousands_of_programs_observe_the_same_as_with_torch() -> None:
    """The same for INFEED_FUZZ_CASES programs (20,000) and the examples. Every intended difference must occur."""
    shown = Counter(name for one in DIFFERENCES.values() for name in assert_same_record(one.example))
    for done in range(0, _LONG_CASES, _PER_PART):
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        shown += run_programs(_PARTS + done // _PER_PART)
        print(f"{done + _PER_PART} programs; differences on purpose: {dict(shown)}", flush=True)
    assert sorted(shown) == sorted(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_intended_difference_is_detected_and_documented(name: str) -> None:
    """Its example shows this difference and no other."""
    difference = DIFFERENCES[name]
    shown = assert_same_record(difference.example)
    assert shown == [name] or (difference.is_timed and not shown)
    text = " ".join((ROOT / "docs/migration.md").read_text(encoding="utf-8").split())
    _, _, section = text.partition(f"## {difference.section} ")
    assert difference.documented in section.partition(" ## ")[0]


class Draws(DataLoader[Any]):
    """Draws one number too many."""

    def __iter__(self) -> Any:
        torch.rand(1)
        return super().__iter__()


class Shortens(DataLoader[Any]):
    """Yields one batch too few."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[:-1])


class Copies(DataLoader[Any]):
    """Yields a copy of the result of collate_fn."""

    def __iter__(self) -> Any:
        return map(copy.copy, super().__iter__())


@pytest.mark.parametrize("loader_class", [Draws, Shortens, Copies])
def test_a_wrong_loader_is_detected(loader_class: Any) -> None:
    """By everything that the program observes, not only by batches."""
    program = Program(DatasetSpec(), OptionsSpec(collate_fn="dict"), (Operation("epoch"),))
    with pytest.raises(AssertionError, match="differs in"):
        assert_same_record(program, loader_class)
