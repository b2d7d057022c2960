"""Memory checks: workers that keep growing, and large objects that every worker copies."""

from __future__ import annotations

from typing import Final

from infeed.doctor.evidence import LoaderSeen, Moment, Run
from infeed.doctor.findings.finding import Finding, describe
from infeed.formatting import format_bytes, format_count, format_seconds

# A worker grows while it imports modules, opens files and fills buffers. Only growth after the first third of its life that
# continues in the last third counts; growth below these thresholds may still be start-up.
_LEAST_MOMENTS: Final = 6
_LEAST_GROWTH: Final = 16 << 20
_LEAST_SHARE: Final = 0.1
_LAST_THIRD: Final = 0.2

# Reporting thresholds for copied objects: total bytes, or share of free memory.
_MUCH_BYTES: Final = 64 << 20
_MUCH_SHARE: Final = 0.01


def memory_growth(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the memory of workers keeps growing."""
    if loader.kind != "process":
        return None
    workers = run.workers_of(loader)
    grown = [growth for worker in workers if (growth := _growth(worker.moments)) is not None]
    if not grown:
        return None
    rate = sum(rate for rate, _ in grown) / len(grown)
    total = sum(size for _, size in grown)
    at_once = rate * min(len(grown), loader.num_workers)  # restarted workers make `grown` longer than num_workers
    full = run.memory_bytes / at_once
    return Finding(
        name="memory-growth",
        title=f"Workers grow by {format_bytes(rate * 60)} a minute each",
        risk="memory",
        cost=min(1.0, at_once * 60 / max(run.memory_bytes, 1)),
        evidence={
            "growing": f"{len(grown)} of {format_count(len(workers), 'worker')}, by {format_bytes(total)} so far",
            "full": f"what is free ({format_bytes(run.memory_bytes)}) is used up after {format_seconds(full)}",
        },
        cure={
            "torch": "find what the dataset keeps; lists of Python objects grow when read after a fork: use arrays",
            "infeed": "find what the dataset keeps; infeed.share(...) holds large lists and dicts once, for all workers",
        },
        loader=describe(loader),
    )


def _growth(moments: list[Moment]) -> tuple[float, int] | None:
    """Return growth in bytes per second and in bytes, if a process has grown and is still growing."""
    if len(moments) < _LEAST_MOMENTS:
        return None
    begin, end = moments[0].at, moments[-1].at
    third = (end - begin) / 3
    early = next(one for one in moments if one.at >= begin + third)
    late = next(one for one in moments if one.at >= end - third)
    last = moments[-1]
    size = last.uss_bytes - early.uss_bytes
    is_growing = last.uss_bytes - late.uss_bytes >= _LAST_THIRD * size
    if size < max(_LEAST_GROWTH, _LEAST_SHARE * early.uss_bytes) or not is_growing:
        return None
    return size / (last.at - early.at), size


def big_objects(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the dataset holds large objects that every worker copies."""
    if loader.kind != "process":
        return None
    costs = [(what, _copies(loader, is_array) * size) for what, size, is_array in loader.probe.heavy]
    costs = [(what, cost) for what, cost in costs if cost]
    total = sum(cost for _, cost in costs)
    if total < min(_MUCH_BYTES, _MUCH_SHARE * run.memory_bytes) or not total:
        return None
    if loader.start_method == "fork":
        why = "reading a Python object writes its reference count, so that each worker comes to have its own copy"
    else:
        why = "each worker is sent its own copy"
    once = "infeed.share(...), which holds it once"
    return Finding(
        name="big-objects",
        title=f"The dataset holds objects that take {format_bytes(total)} more in {format_count(loader.num_workers, 'worker')}",
        risk="memory",
        cost=min(1.0, total / max(run.memory_bytes, 1)),
        evidence={**{f"object {number}": what for number, (what, _) in enumerate(costs[:3], 1)}, "why": why},
        cure={
            "torch": once if _copies_arrays(loader) else f"an array instead of Python objects (numpy, pyarrow), or {once}",
            "infeed": "self.items = infeed.share(items)",
        },
        loader=describe(loader),
    )


def _copies(loader: LoaderSeen, is_array: bool) -> int:
    return 0 if is_array and not _copies_arrays(loader) else loader.num_workers


def _copies_arrays(loader: LoaderSeen) -> bool:
    """Whether workers copy arrays: infeed keeps them in shared memory, and reading a forked array does not copy its pages."""
    return loader.library == "torch" and loader.start_method != "fork"
