"""Options are declared once, in ``infeed.options``, and everything that repeats them matches."""

import inspect
import re
from dataclasses import MISSING
from typing import Any

import pytest
from torch.utils import data

import infeed
from infeed.options import OPTIONS, TORCH_OPTIONS, Options
from infeed.torch import DataLoader
from infeed.torch.accelerate import rebuilt
from infeed.torch.service import config_of
from tools import options as page

pytestmark = [pytest.mark.torch]

# A value other than the default for each option that infeed.torch adds.
OTHERS: dict[str, Any] = {
    "seed": 7, "worker": "thread", "memory_limit": "1GB", "grain_size": 3, "device": infeed.Device("cpu", prefetch=5),
    "on_error": infeed.ErrorPolicy("skip", budget=9, retries=2), "sample_timeout": 0.0, "hang_warning": 12.0,
    "threads_per_worker": 2, "cpu_limit": 1.0, "observe": "counters", "progress": True,
    "on_statistics": infeed.StatisticsCallback(print, interval=3.0),
}  # fmt: skip


def parameters(loader: Any) -> dict[str, Any]:
    return {name: one.default for name, one in list(inspect.signature(loader.__init__).parameters.items())[1:]}


def documented(loader: Any) -> dict[str, str]:
    """Returns the arguments in the docstring of a class, with their text on one line."""
    lines = (inspect.getdoc(loader) or "").split("\n")
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if entry := re.match(r"    (\w+): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif line.startswith("        ") and name:
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def test_all_repetitions_of_the_options_match_their_declaration() -> None:
    """Signatures, types, docstrings, attributes, Accelerate's copies, repr and the reference."""
    declared = {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in OPTIONS}
    # A checked shard is a Shard, which users never pass.
    types = {name: text.removeprefix("Shard | ") for name, text in Options.__annotations__.items()}

    # infeed.DataLoader
    assert list(parameters(infeed.DataLoader).items()) == list(declared.items())
    arguments = infeed.DataLoader.__init__.__annotations__
    assert {name: arguments[name] for name in declared} == {name: types[name] for name in declared}
    texts = documented(infeed.DataLoader)
    assert [name for name in texts if name in declared] == list(declared)
    assert [one.name for one in OPTIONS if not texts[one.name].startswith(one.metadata["doc"])] == []

    # infeed.torch.DataLoader: torch's arguments in torch's order, then infeed's.
    given = parameters(DataLoader)
    theirs = [name for name in parameters(data.DataLoader) if name != "in_order"]  # Since torch 2.6.
    assert list(given) == [*theirs, "in_order", *TORCH_OPTIONS]
    assert {name: given[name] for name in TORCH_OPTIONS} == TORCH_OPTIONS
    arguments, attributes = DataLoader.__init__.__annotations__, DataLoader.__annotations__
    assert {name: arguments[name] for name in TORCH_OPTIONS} == {name: types[name] for name in TORCH_OPTIONS}
    assert {name: attributes.get(name) for name in TORCH_OPTIONS} == {name: types[name] for name in TORCH_OPTIONS}
    texts = documented(DataLoader)
    docs = {one.name: one.metadata["doc"] for one in OPTIONS}
    assert [name for name in TORCH_OPTIONS if not texts[name].startswith(docs[name])] == []

    # Attributes, and loaders that are created from them.
    assert OTHERS.keys() == TORCH_OPTIONS.keys()
    source = DataLoader(list(range(8)), num_workers="auto", **OTHERS)
    assert {name: getattr(source, name) for name in OTHERS} == OTHERS
    again = rebuilt(source, source.dataset, batch_size=2, num_workers="auto")
    assert {name: getattr(again, name) for name in OTHERS} == OTHERS
    assert {name: getattr(config_of(again), name) for name in OTHERS} == OTHERS
    shown = repr(infeed.DataLoader(range(8), num_workers="auto", **OTHERS))
    assert [name for name in OTHERS if f"{name}=" not in shown] == []

    # The reference.
    written = page.PAGE.read_text(encoding="utf-8")
    assert page.written(written) == written, "run python tools/options.py"


@pytest.mark.parametrize("group", [infeed.RandomSampler, infeed.ErrorPolicy, infeed.Device, infeed.StatisticsCallback])
def test_every_field_of_a_group_is_documented_in_order(group: Any) -> None:
    assert list(documented(group))[: len(parameters(group))] == list(parameters(group))


def test_the_torch_loader_rejects_the_block_shuffle() -> None:
    """torch would take any text for True, and shuffle single samples."""
    with pytest.raises(infeed.ConfigError, match=r"shuffle='block' is not supported by infeed.torch"):
        DataLoader(list(range(8)), shuffle="block")  # type: ignore[arg-type]


def test_the_torch_loader_rejects_a_random_sampler_of_infeed() -> None:
    """It takes torch's samplers."""
    with pytest.raises(infeed.ConfigError, match=r"sampler=infeed.RandomSampler is not supported by infeed.torch"):
        DataLoader(list(range(8)), sampler=infeed.RandomSampler())  # type: ignore[arg-type]
