"""How the fuzzer draws programs. Most have no workers, because processes take 100 times as long as the rest."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from tests.torch.fuzz.objects import BATCH_SAMPLERS, COLLATE_FNS, DATASETS, INIT_FNS, SAMPLERS, DatasetSpec, SamplerSpec
from tests.torch.fuzz.programs import OPERATIONS, Operation, OptionsSpec, Program
from tests.torch.samples import SAMPLES

_EXCEPTIONS: Final = ("ValueError", "KeyError", "IndexError", "Several", "StopIteration")
# Three programs in 20 have workers.
_WORKERS: Final = (*[0] * 17, 1, 2, 3)
# Common operations are drawn more often than others.
_OPERATIONS: Final = (*["epoch"] * 4, *["break"] * 3, *["take"] * 5, *["drain"] * 3, *OPERATIONS)

leaves: Final = st.sampled_from(["int", *SAMPLES])


def _containers(parts: Any) -> Any:
    return st.tuples(st.sampled_from(["tuple", "list", "dict", "named tuple"]), parts) | st.tuples(
        st.sampled_from(["tuple", "list", "dict", "named tuple"]), parts, parts
    )


samples: Final = st.one_of(st.just("int"), leaves, st.recursive(leaves, _containers, max_leaves=3))


@st.composite
def dataset_specs(draw: Any) -> DatasetSpec:
    kind = draw(st.sampled_from(list(DATASETS)))
    length = draw(st.integers(0, 9))
    bad = draw(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(_EXCEPTIONS)), max_size=2)) if draw(_one_in(4)) else []
    return DatasetSpec(kind, length, draw(samples), tuple(bad))


def _one_in(count: int) -> Any:
    return st.integers(0, count - 1).map(lambda number: number == count - 1)


@st.composite
def sampler_specs(draw: Any, kinds: tuple[str, ...], length: int) -> SamplerSpec:
    kind = draw(st.sampled_from(kinds))
    highest = max(0, length - 1)
    index = st.integers(0, highest)
    if draw(_one_in(6)):
        index = st.integers(-2, length + 1)
    indices = draw(st.lists(index, min_size=1, max_size=8))
    generator = draw(st.sampled_from(["", "seeded", "loader", "default"]))
    return SamplerSpec(kind, tuple(indices), draw(st.integers(1, 3)), generator)


@st.composite
def options_specs(draw: Any, dataset: DatasetSpec) -> OptionsSpec:
    chosen: dict[str, Any] = {"batch_size": draw(st.sampled_from([1, 2, 3, 4, None]))}
    way = draw(st.sampled_from(["plain", "shuffle", "sampler", "batch_sampler"]))
    if dataset.is_iterable and not draw(_one_in(20)):
        way = "plain"  # Anything else is rejected.
    if way == "shuffle":
        chosen["shuffle"] = True
    elif way == "sampler":
        kinds = SAMPLERS
        if chosen["batch_size"] is None and draw(_one_in(3)):
            kinds = BATCH_SAMPLERS
        chosen["sampler"] = draw(sampler_specs(kinds, dataset.length))
    elif way == "batch_sampler":
        chosen["batch_size"] = 1
        chosen["batch_sampler"] = draw(sampler_specs(BATCH_SAMPLERS, dataset.length))
    if way != "batch_sampler" and (chosen["batch_size"] is not None or draw(_one_in(20))):
        chosen["drop_last"] = draw(st.booleans())
    chosen["generator"] = draw(st.sampled_from(["", "", "seeded", "default"]))
    if draw(_one_in(3)):
        chosen["collate_fn"] = draw(st.sampled_from(list(COLLATE_FNS)))
    chosen["pin_memory"] = draw(_one_in(20))
    workers = draw(st.sampled_from(_WORKERS))
    if workers:
        chosen["num_workers"] = workers
        chosen["prefetch_factor"] = draw(st.sampled_from([None, None, 1, 3]))
        chosen["persistent_workers"] = draw(st.booleans())
        chosen["in_order"] = not draw(_one_in(6))
        chosen["timeout"] = draw(st.sampled_from([0, 60]))
        if draw(_one_in(3)):
            chosen["worker_init_fn"] = draw(st.sampled_from(list(INIT_FNS)))
    return OptionsSpec(**chosen)


operations: Final = st.builds(Operation, st.sampled_from(_OPERATIONS), st.integers(0, 1), st.integers(0, 3))


@st.composite
def programs(draw: Any) -> Program:
    dataset = draw(dataset_specs())
    options = draw(options_specs(dataset))
    # Every iteration with workers starts processes, in torch's loader and in infeed's.
    done = draw(st.lists(operations, min_size=1, max_size=3 if options.num_workers else 6))
    return Program(dataset, options, tuple(done))
