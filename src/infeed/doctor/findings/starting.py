"""Checks of worker start-up: forks with running threads, restarts per epoch, unpicklable datasets, batches that never come."""

from __future__ import annotations

from typing import Final

from infeed.doctor.evidence import Fork, LoaderSeen, ProcessSeen, Run
from infeed.doctor.findings.finding import Finding, describe
from infeed.formatting import format_seconds

# Native threads that a forked process does not need. OpenBLAS stops its threads before a fork and restarts them after it.
# torch sets one thread in its workers, so OpenMP's pool and its own are unused there. Workers do not use the background
# threads of CUDA and memory allocators.
_HARMLESS: Final = ("OpenBLAS", "OpenMP", "MKL", "torch", "nvidia", "libcuda", "jemalloc")
# Harmless Python threads: tqdm's monitor, and torch's threads that feed queues and pin memory.
_HARMLESS_THREADS: Final = ("tqdm.", "_pin_memory_loop", "QueueFeederThread")

_NEVER_FORKS: Final = "from infeed.torch import DataLoader  # never forks this process"
# infeed.torch falls back to torch's workers for loaders that it does not support.
_FORKS_FOR_TORCH: Final = (
    "leave out what its warning names, such as multiprocessing_context='fork': then it never forks this process"
)

# Reporting thresholds for restarts: share of the run, and seconds per restart.
_RESTART_SHARE: Final = 0.02
_RESTART_S: Final = 0.02
_RESTART_MUCH: Final = 0.1  # share of the run that is reported however short each restart is

# A program is stuck if it waited for one batch this share of the run, and this many times longer than usual.
_STUCK_SHARE: Final = 0.8
_STUCK_TIMES: Final = 20
# A worker that uses less than this share of a CPU core is idle.
_IDLE: Final = 0.05


def no_batch(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the training loop waited for one batch until time was up."""
    if not loader.waiting_s or not run.seconds:
        return None
    usual = _usual_s(loader)
    if loader.waiting_s < _STUCK_SHARE * run.seconds or loader.waiting_s < _STUCK_TIMES * usual:
        return None
    shares = _shares_while_waiting(run, loader)
    busy = max(shares, default=0.0)
    is_forked = any(_dangers(fork) for fork in loader.forks)
    evidence = {"waiting": f"{format_seconds(loader.waiting_s)} of {format_seconds(run.seconds)} for one batch"}
    if shares:
        who = "1, which" if len(shares) == 1 else f"{len(shares)}, of which the busiest"
        evidence["workers"] = f"{who} used {busy:.0%} of a core"
    if is_forked and busy < _IDLE:  # a worker that waits for a lock uses no CPU
        evidence["cause"] = "probably a lock: workers were forked while other threads ran, see fork-with-threads"
        cure = {"torch": "multiprocessing_context='forkserver'", "infeed": _without_forks(loader)}
    else:
        # infeed can kill a worker process, but not the main process or a thread.
        before = "num_workers=1; then " if loader.kind == "inline" else ""
        after = ", with worker='process'" if loader.kind == "thread" else ""
        infeed = f"{before}hang_warning=10 logs the sample and its stack; sample_timeout=60 ends it{after}"
        cure = {"torch": f"{before}timeout=60 makes it an error", "infeed": infeed}
    return Finding(
        name="no-batch",
        title="A batch does not come: the workers do nothing" if shares and busy < _IDLE else "A batch does not come",
        risk="hang",
        cost=min(1.0, loader.waiting_s / run.seconds),
        evidence=evidence,
        cure=cure,
        loader=describe(loader),
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


def _usual_s(loader: LoaderSeen) -> float:
    """Return the average wait for a batch; 0 if no wait after the first was measured."""
    return loader.waited_s / max(1, loader.batch_count)


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
    who = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(dangers.items()))
    others = sorted({name for fork in loader.forks for name in fork.libraries} - dangers.keys())
    evidence = {"threads": who, "forks": f"{len(found)} while they ran"}
    if others:
        evidence["harmless"] = f"{', '.join(others)}: these manage without their threads"
    cure = "multiprocessing_context='forkserver', or start the threads after the workers"
    if "cv2" in dangers:
        rest = " and start the other threads after the workers" if len(dangers) > 1 else ""
        cure = f"cv2.setNumThreads(0) before the first use of cv2{rest}, or multiprocessing_context='forkserver'"
    return Finding(
        name="fork-with-threads",
        title=f"Workers are forked while other threads run ({', '.join(sorted(dangers))}): a lock they hold stays locked",
        risk="hang",
        cost=0.5,
        evidence=evidence,
        cure={"torch": cure, "infeed": _without_forks(loader)},
        loader=describe(loader),
    )


def _without_forks(loader: LoaderSeen) -> str:
    return _NEVER_FORKS if loader.library == "torch" else _FORKS_FOR_TORCH


def _dangers(fork: Fork) -> dict[str, int]:
    """Return the running threads that may hold a lock a worker needs: their number, by owner."""
    found = {name: count for name, count in fork.libraries.items() if not name.startswith(_HARMLESS)}
    for thread in fork.python_threads:
        if not any(word in thread for word in _HARMLESS_THREADS):
            found[f"Python thread {thread.removesuffix(' (threading)')}"] = 1
    return found


def restarted_workers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that every epoch restarts the workers."""
    later = [epoch.start_s for epoch in loader.epochs[1:] if epoch.has_batch]
    if not run.has_own_loop or not later or loader.is_persistent or loader.kind != "process":
        return None
    usual = max(_usual_s(loader), loader.load_s)  # running workers need this time for the first batch too
    lost = sum(max(0.0, start - usual) for start in later)
    share = lost / run.seconds
    if share < _RESTART_SHARE or (share < _RESTART_MUCH and lost / len(later) < _RESTART_S):
        return None
    return Finding(
        name="restarted-workers",
        title=f"Workers are started anew for every epoch: {format_seconds(lost / len(later))} each time",
        risk="time",
        cost=share,
        evidence={
            "epochs": str(len(loader.epochs)),
            "first batch": f"{format_seconds(sum(later) / len(later))} after each start"
            + (f"; a usual batch: {format_seconds(usual)}" if usual else ""),
            "lost": f"{format_seconds(lost)}, {share:.0%} of the run",
        },
        cure={
            "torch": "persistent_workers=True, and one loader for all epochs",
            "infeed": "infeed.DataLoader keeps its workers; of infeed.torch's: persistent_workers=True",
        },
        loader=describe(loader),
    )


def cannot_be_sent(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the dataset or a function cannot be pickled, so workers get it only by forking."""
    probe = loader.probe
    if loader.kind != "process":
        return None
    is_torch = loader.library == "torch"
    if probe.unsendable and (probe.unpicklable or not is_torch):
        what, why = probe.unsendable, "it cannot be pickled"
        cure = "open it where it is used (on first use, or in worker_init_fn), or leave it out with __getstate__"
    elif is_torch and probe.unpicklable and not (loader.start_method == "fork" and run.is_fork_default):
        what, why = probe.unpicklable, "pickle, with which torch sends, cannot send it"
        cure = "put the function or class at the top of a module"
    else:
        return None
    works = "no"
    if loader.start_method == "fork":
        forks = "torch forks here: not" if run.is_fork_default else "the program asks for 'fork': by default not here, nor"
        works = f"only because {forks} on Windows, macOS or Python 3.14"
    return Finding(
        name="cannot-be-sent",
        title=f"Cannot be sent to workers: {what}",
        risk="failure",
        cost=0.5 if loader.start_method == "fork" else 1.0,
        evidence={"what": what, "why": why, "works now": works},
        cure={"torch": cure, "infeed": f"{cure}; or worker='thread'" if probe.unsendable else "sends it as it is"},
        loader=describe(loader),
    )
