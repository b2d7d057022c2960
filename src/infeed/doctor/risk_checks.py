"""Checks for hangs, failures, wrong samples and memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from infeed.doctor.evidence import ForkSeen, LoaderSeen, Moment, ProcessSeen, Run
from infeed.doctor.finding import Finding, describe
from infeed.formatting import format_bytes, format_count, format_seconds

# A program is stuck if it waited for one batch this share of the run, and this many times longer than usual.
_STUCK_SHARE: Final = 0.8
_STUCK_TIMES: Final = 20
# A worker that uses less than this share of a CPU core is idle.
_IDLE: Final = 0.05


def no_batch(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the training loop waited for one batch until time was up."""
    if not loader.waiting_s or not run.seconds:
        return None
    if loader.waiting_s < _STUCK_SHARE * run.seconds or loader.waiting_s < _STUCK_TIMES * loader.usual_wait_s:
        return None
    shares = _shares_while_waiting(run, loader)
    busy = max(shares, default=0.0)
    is_idle = bool(shares) and busy < _IDLE
    evidence = {"waiting": f"{format_seconds(loader.waiting_s)} of {format_seconds(run.seconds)} for one batch"}
    if shares:
        which = "" if len(shares) == 1 else "the busiest "
        evidence["workers"] = f"{len(shares)}; {which}used {busy:.0%} of a core"
    if any(_dangers(fork) for fork in loader.forks) and busy < _IDLE:  # a worker that waits for a lock uses no CPU
        evidence["cause"] = "probably a lock: workers were forked while other threads ran (see fork-with-threads)"
        fix = {"torch": "multiprocessing_context='forkserver'", "infeed": _without_forks(loader)}
    else:
        # infeed can kill a worker process, but not the main process or a thread.
        before = "num_workers=1; then " if loader.kind == "inline" else ""
        after = " (needs worker='process')" if loader.kind == "thread" else ""
        infeed = (
            f"{before}hang_warning=10 logs the sample and its stack; sample_timeout=60 with on_error='skip' skips it{after}"
        )
        fix = {"torch": f"{before}timeout=60 raises an error", "infeed": infeed}
    return Finding(
        name="no-batch",
        title="No batch arrives: all workers are idle" if is_idle else "No batch arrives",
        risk="hang",
        cost=min(1.0, loader.waiting_s / run.seconds),
        evidence=evidence,
        fix=fix,
        loader=describe(loader),
        numbers={"waiting_s": loader.waiting_s, "workers": len(shares), "busiest": busy, "is_idle": is_idle},
    )


def _shares_while_waiting(run: Run, loader: LoaderSeen) -> list[float]:
    """Return each worker's CPU share during the wait, without workers that ended before it."""
    workers = run.workers_of(loader)
    began = max((moment.at for worker in workers for moment in worker.moments), default=0.0) - loader.waiting_s
    shares = []
    for worker in workers:
        before = sum(moment.at < began for moment in worker.moments)
        if before < len(worker.moments):
            shares.append(ProcessSeen(worker.pid, worker.moments[max(0, before - 1) :]).cpu_share)
    return shares


# --- forks with running threads

# Native threads that a forked process does not need. OpenBLAS stops its threads before a fork and restarts them after it.
# torch sets one thread in its workers, so OpenMP's pool and its own are unused there. Workers do not use the background
# threads of CUDA and memory allocators.
_HARMLESS: Final = ("OpenBLAS", "OpenMP", "MKL", "torch", "nvidia", "libcuda", "jemalloc")
# Harmless Python threads: tqdm's monitor, and torch's threads that feed queues and pin memory.
_HARMLESS_THREADS: Final = ("tqdm.", "_pin_memory_loop", "QueueFeederThread")
# infeed.torch falls back to torch's workers for loaders that it does not support.
_FORKS_FOR_TORCH: Final = "remove the option that the warning names, such as multiprocessing_context='fork'"


def fork_with_threads(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that workers were forked while other threads were running."""
    del run
    dangers: dict[str, int] = {}
    found = [danger for fork in loader.forks if (danger := _dangers(fork))]
    for danger in found:
        for name, count in danger.items():
            dangers[name] = max(dangers.get(name, 0), count)
    if not dangers:
        return None
    threads = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(dangers.items()))
    others = sorted({name for fork in loader.forks for name in fork.libraries} - dangers.keys())
    evidence = {"threads": threads, "forks": f"{len(found)} while these threads ran"}
    if others:
        evidence["harmless"] = f"{', '.join(others)}: safe to fork"
    fix = "multiprocessing_context='forkserver', or start the threads after the workers"
    if "cv2" in dangers:
        rest = " and start the other threads after the workers" if len(dangers) > 1 else ""
        fix = f"cv2.setNumThreads(0) before the first use of cv2{rest}, or multiprocessing_context='forkserver'"
    return Finding(
        name="fork-with-threads",
        title=f"Workers are forked while other threads run ({', '.join(sorted(dangers))}) and may deadlock",
        risk="hang",
        cost=0.5,
        evidence=evidence,
        fix={"torch": fix, "infeed": _without_forks(loader)},
        loader=describe(loader),
        numbers={"threads": dangers, "forks": len(found)},
    )


def _without_forks(loader: LoaderSeen) -> str:
    if loader.library == "torch":
        return "from infeed.torch import DataLoader  # never forks this process"
    return _FORKS_FOR_TORCH


def _dangers(fork: ForkSeen) -> dict[str, int]:
    """Return the running threads that may hold a lock a worker needs: their number, by owner."""
    found = {name: count for name, count in fork.libraries.items() if not name.startswith(_HARMLESS)}
    for thread in fork.python_threads:
        if not any(word in thread for word in _HARMLESS_THREADS):
            found[f"Python thread {thread.removesuffix(' (threading)')}"] = 1
    return found


# --- pickling


def not_picklable(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the dataset or a function cannot be pickled, so workers get it only by forking."""
    probe = loader.probe
    if loader.kind != "process":
        return None
    is_torch = loader.library == "torch"
    if probe.unsendable and (probe.unpicklable or not is_torch):
        what, why = probe.unsendable, "it cannot be pickled, not even by value"
        fix = "open it where it is used (on first use or in worker_init_fn), or exclude it in __getstate__"
    elif is_torch and probe.unpicklable and not (loader.start_method == "fork" and run.is_fork_default):
        what, why = probe.unpicklable, "torch pickles it by reference"
        fix = "define the function or class at module level"
    else:
        return None
    works = "no"
    if loader.start_method == "fork":
        forks = "torch forks here; fails" if run.is_fork_default else "the program sets 'fork'; fails by default here and"
        works = f"only because {forks} on Windows, macOS and Python 3.14"
    return Finding(
        name="not-picklable",
        title=f"Cannot be pickled for workers: {what}",
        risk="failure",
        cost=0.5 if loader.start_method == "fork" else 1.0,
        evidence={"object": what, "reason": why, "works now": works},
        fix={
            "torch": fix,
            "infeed": f"{fix}; or worker='thread'" if probe.unsendable else "no change needed: infeed pickles it by value",
        },
        loader=describe(loader),
    )


# --- wrong samples


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
    where = ["in every worker"] * is_several + ["in every epoch"] * is_repeated
    held = ", ".join(loader.probe.generators)
    return Finding(
        name="same-random-numbers",
        title=f"Same random numbers {' and '.join(where)}: each worker gets a copy of {held}",
        risk="wrong results",
        cost=1.0,
        evidence={
            "generators": held,
            "workers": f"{loader.num_workers}, each with a copy in the same state",
            "loaders seed": "only random, numpy.random and torch's global generator",
        },
        fix={
            "torch": "seed it in worker_init_fn from torch.initial_seed(), or create it in __getitem__",
            "infeed": "rng = infeed.get_rng() in __getitem__",
        },
        loader=describe(loader),
        numbers={"generators": list(loader.probe.generators)},
    )


def same_samples(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that each torch worker reads the whole iterable dataset; ``infeed.DataLoader`` uses one worker for it."""
    del run
    # A worker_init_fn may shard the dataset.
    if loader.library == "infeed" or loader.num_workers < 2 or loader.has_init or not loader.has_one_reader:
        return None
    return Finding(
        name="same-samples",
        title=f"Every sample is delivered {loader.num_workers} times: each worker reads the whole iterable dataset",
        risk="wrong results",
        cost=1.0,
        evidence={
            "workers": f"{loader.num_workers}, each with a copy of the dataset",
            "sharding": "__iter__ does not call get_worker_info(), and there is no worker_init_fn",
        },
        fix={
            "torch": "yield only this worker's share in __iter__ (torch.utils.data.get_worker_info())",
            "infeed": "infeed.DataLoader reads it with one worker; for more, yield a share of it (infeed.get_worker_info())",
        },
        loader=describe(loader),
        numbers={"copies": loader.num_workers},
    )


# --- memory

# A worker grows while it imports modules, opens files and fills buffers. Only growth after the first third of its life that
# continues in the last third counts; growth below these thresholds may still be start-up. One large step is not a leak either:
# the pages that a forked process shares become its own when the other process ends.
_LEAST_MOMENTS: Final = 6
_LEAST_LIFE_S: Final = 2.0
_LARGEST_STEP: Final = 0.5
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
    full_s = run.memory_bytes / at_once
    return Finding(
        name="memory-growth",
        title=f"Memory of each worker grows by {format_bytes(rate * 60)} per minute",
        risk="memory",
        cost=min(1.0, at_once * 60 / max(run.memory_bytes, 1)),
        evidence={
            "growing": f"{len(grown)} of {format_count(len(workers), 'worker')}, by {format_bytes(total)} so far",
            "out of memory": f"in {format_seconds(full_s)} ({format_bytes(run.memory_bytes)} free)",
        },
        fix={
            "torch": "find what the dataset accumulates; forked workers copy the Python objects that they read: use arrays",
            "infeed": "find what the dataset accumulates; infeed.share(...) stores large lists and dicts once for all workers",
        },
        loader=describe(loader),
        numbers={"bytes_per_s": rate, "growing": len(grown), "workers": len(workers), "bytes": total, "full_s": full_s},
    )


def _growth(moments: list[Moment]) -> tuple[float, int] | None:
    """Return growth in bytes per second and in bytes, if a process has grown and is still growing."""
    if len(moments) < _LEAST_MOMENTS:
        return None
    begin, end = moments[0].at, moments[-1].at
    if end - begin < _LEAST_LIFE_S:
        return None
    third = (end - begin) / 3
    early = next(one for one in moments if one.at >= begin + third)
    late = next(one for one in moments if one.at >= end - third)
    last = moments[-1]
    size = last.uss_bytes - early.uss_bytes
    largest_step = max(after.uss_bytes - before.uss_bytes for before, after in pairwise(moments) if before.at >= early.at)
    is_growing = last.uss_bytes - late.uss_bytes >= _LAST_THIRD * size and largest_step <= _LARGEST_STEP * size
    if size < max(_LEAST_GROWTH, _LEAST_SHARE * early.uss_bytes) or not is_growing:
        return None
    return size / (last.at - early.at), size


def large_objects(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the dataset holds large objects that every worker copies."""
    if loader.kind != "process":
        return None
    costs = [(what, _copies(loader, is_array) * size) for what, size, is_array in loader.probe.heavy]
    costs = [(what, cost) for what, cost in costs if cost]
    total = sum(cost for _, cost in costs)
    if total < min(_MUCH_BYTES, _MUCH_SHARE * run.memory_bytes) or not total:
        return None
    is_forked = loader.start_method == "fork"
    once = "infeed.share(...), which stores it once"
    return Finding(
        name="large-objects",
        title=f"Copies of large objects take {format_bytes(total)} in {format_count(loader.num_workers, 'worker')}",
        risk="memory",
        cost=min(1.0, total / max(run.memory_bytes, 1)),
        evidence={
            **{f"object {number}": what for number, (what, _) in enumerate(costs[:3], 1)},
            "reason": "reading a Python object writes its reference count, which copies its memory page in each worker"
            if is_forked
            else "each worker gets a pickled copy",
        },
        fix={
            "torch": once if _copies_arrays(loader) else f"an array instead of Python objects (NumPy, Arrow), or {once}",
            "infeed": "self.items = infeed.share(items)",
        },
        loader=describe(loader),
        numbers={"bytes": total, "is_forked": is_forked},
    )


def _copies(loader: LoaderSeen, is_array: bool) -> int:
    return 0 if is_array and not _copies_arrays(loader) else loader.num_workers


def _copies_arrays(loader: LoaderSeen) -> bool:
    """Whether workers copy arrays: infeed keeps them in shared memory, and reading a forked array does not copy its pages."""
    return loader.library == "torch" and loader.start_method != "fork"
