"""Checks for wrong samples: repeated random numbers, and iterable datasets read in full by every worker."""

from __future__ import annotations

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.finding import Finding, describe


def same_random_numbers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that workers copy one generator and draw the same numbers; restarted workers draw them again."""
    del run
    # A worker_init_fn may seed the generators.
    if loader.kind != "process" or loader.has_init or not loader.probe.generators:
        return None
    is_repeated = not loader.is_persistent
    is_several = loader.num_workers > 1 or loader.is_auto  # "auto" may add workers at any time
    if not is_several and not is_repeated:
        return None
    again = ["in every worker"] * is_several + ["in every epoch"] * is_repeated
    held = ", ".join(loader.probe.generators)
    are = "is" if len(loader.probe.generators) == 1 else "are"
    return Finding(
        name="same-random-numbers",
        title=f"The same random numbers {' and '.join(again)}: {held} {are} copied to each worker",
        risk="wrong results",
        cost=1.0,
        evidence={
            "drawn from": held,
            "workers": f"{loader.num_workers}, each with a copy in the same state",
            "seeded by the loader": "random, numpy.random and torch's global generator only",
        },
        cure={
            "torch": "worker_init_fn that seeds it from torch.initial_seed(), or make it in __getitem__",
            "infeed": "rng = infeed.get_rng() in __getitem__",
        },
        loader=describe(loader),
    )


def same_samples(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that each torch worker reads the whole iterable dataset; ``infeed.DataLoader`` uses one worker for it."""
    del run
    # A worker_init_fn may shard the dataset.
    if loader.library == "infeed" or loader.num_workers < 2 or loader.has_init or not loader.has_one_reader:
        return None
    return Finding(
        name="same-samples",
        title=f"Every sample comes {loader.num_workers} times: each worker reads the whole stream",
        risk="wrong results",
        cost=1.0,
        evidence={
            "workers": f"{loader.num_workers}, each with a copy of the dataset",
            "share": "its __iter__ does not ask get_worker_info() which part is its own, and there is no worker_init_fn",
        },
        cure={
            "torch": "let __iter__ read a share, by torch.utils.data.get_worker_info()",
            "infeed": "infeed.DataLoader lets one worker read such a stream; by infeed.get_worker_info() several share it",
        },
        loader=describe(loader),
    )
