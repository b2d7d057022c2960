"""Checks for lost time: a training loop that waits for data, its bottleneck, and settings that would be faster."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from infeed.autotune.capacity import (
    BUSY_CORES,
    ENOUGH,
    ESTIMATED_BUSY,
    LEAST_BATCHES,
    MAIN_CAUSE,
    MOST_WORKERS,
    SLOW_SHARE,
    is_io_bound,
    may_queue_for_gil,
    state_of,
    workers_best,
    workers_useful,
)
from infeed.doctor.evidence import LoaderSeen, Probe, Run, can_be_io_bound
from infeed.doctor.finding import Finding, describe
from infeed.formatting import format_bytes, format_count, format_seconds
from infeed.metrics.diagnosis import bottleneck_text

# With less waiting, as with fewer batches, a finding may be noise.
_LEAST_WAITED_S: Final = 0.25
# A batch that loads faster gains so little from a worker that a busy machine cancels the gain.
LEAST_LOAD_S: Final = 5e-3
# Loading in the main process is faster if it takes less than this share of the wait for workers.
_QUICKER: Final = 0.8
# If loading takes less than this share of the time between batches, the GIL is not the bottleneck; the comparison is inexact
# on a busy machine.
_GIL_LOAD: Final = 0.3

_USE_INFEED: Final = "from infeed.torch import DataLoader"
_FASTER_STORAGE: Final = "copy the data to a local disk; use fewer, larger files"
_LIGHTER: Final = "use fewer, larger arrays per sample; larger batches"
_CHEAPER: Final = "preprocess the dataset once (decode, resize, tokenize)"
_SHARD: Final = "yield only this worker's share in __iter__ (get_worker_info())"
_BENCH: Final = "infeed bench module:dataset compares settings"
ONE_THREAD: Final = "threads_per_worker=1 (the default)"

# Cost of transferring a batch from a worker. torch: a queue, two threads, a file descriptor per tensor, and new pages in both
# processes; all its workers together transfer 2.5 GB/s, whatever their number. infeed: a message of a few dozen bytes.
_TORCH_TRANSFER_S: Final = 1e-3
_TORCH_TRANSFER_RATE: Final = 2.5e9
_INFEED_TRANSFER_S: Final = 1e-4
# From another machine: a round trip through Ray, and what one training process receives per second.
_REMOTE_TRANSFER_S: Final = 1e-3
_REMOTE_TRANSFER_RATE: Final = 0.8e9


# --- the training loop waits


def data_bound(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the training loop, and with it the GPU, waits for batches."""
    if not run.has_own_loop or not is_data_bound(loader):
        return None
    count = loader.batch_count
    cause = _find_cause(run, loader)
    text = bottleneck_text(cause.bottleneck, cause.numbers)
    in_collate = is_collate_bound(loader) and cause.bottleneck in _OF_WORKERS
    if in_collate:
        text = f"{bottleneck_text('collate', {'collate_share': loader.collate_share})}; {text}"
    evidence = {
        "waited": f"{format_seconds(loader.waited_s)} of {format_seconds(loader.waited_s + loader.away_s)}",
        "per batch": f"{format_seconds(loader.waited_s / count)} waiting, {format_seconds(loader.away_s / count)} computing",
        "bottleneck": text,
    }
    workers = run.workers_of(loader) if loader.kind == "process" else []
    if workers:
        evidence["workers"] = f"{sum(one.cpu_share for one in workers) / len(workers):.0%} of a core each"
    if loader.probe.sample_count and not loader.is_gathered:  # direct loading differs from gathering rows
        evidence["sample"] = sample_text(loader.probe)
        if is_collate_bound(loader):
            evidence["collate_fn"] = f"{_time_text(loader.probe.collate_s, loader.probe.collate_cpu_s)} per batch"
    change, in_infeed = (f"{fix}; {_BENCH}" if cause.is_for_bench else fix for fix in (cause.fix, cause.in_infeed or cause.fix))
    return Finding(
        name="data-bound",
        title=f"{'The GPU' if run.has_gpu else 'The training loop'} waits for data {loader.wait_share:.0%} of the time",
        risk="time",
        cost=min(1.0, loader.waited_s / run.seconds),
        evidence=evidence,
        fix={"torch": change, "infeed": f"{_USE_INFEED}; {in_infeed}" if loader.library == "torch" else in_infeed},
        loader=describe(loader),
        bottleneck="collate" if in_collate else cause.bottleneck,
        numbers={"wait_share": loader.wait_share, "workers_bottleneck": cause.bottleneck, **cause.numbers},
    )


def is_data_bound(loader: LoaderSeen) -> bool:
    """Whether the training loop waits enough to report: number of batches, total time and share of the time."""
    is_known = loader.batch_count >= LEAST_BATCHES and loader.waited_s >= _LEAST_WAITED_S
    return is_known and state_of(loader.wait_share) == "data-bound"


class _Cause(NamedTuple):
    """The bottleneck and its fix, whether or not another finding gives more detail."""

    bottleneck: str
    numbers: dict[str, Any]
    fix: str
    is_for_bench: bool = True  # `infeed bench` only varies workers; False if workers do not help
    in_infeed: str = ""  # the fix in infeed, if different


# Bottlenecks of workers that perform as expected.
_OF_WORKERS: Final = ("all-cores", "few-workers", "auto-workers")


def _find_cause(run: Run, loader: LoaderSeen) -> _Cause:
    if is_slow_sample_bound(loader):
        worst = loader.probe.slow[0]
        numbers = {"sample": f"index {worst.which}", "seconds": worst.seconds, "median_s": loader.probe.median_s}
        return _Cause("slow-samples", numbers, "make these samples cheaper or skip them; more workers do not help", False)
    if loader.kind == "inline":
        return _find_inline_cause(run, loader)
    if loader.has_one_reader:
        is_one = loader.library == "infeed" or loader.num_workers == 1
        fix = f"{_SHARD}; only then do more workers help"
        return _Cause("one-reader" if is_one else "every-reader", {}, fix, False)
    threads = thread_pool_fix(run, loader)
    if threads:
        return _Cause("thread-pools", {}, threads if loader.library == "torch" else ONE_THREAD, False, ONE_THREAD)
    if is_gil_bound(run, loader):
        numbers = {"used_cores": loader.own_cores, "cores": run.core_count}
        return _Cause("gil", numbers, "worker processes, as in torch", in_infeed="worker='process'")
    if slow_storage(run, loader) is not None and not is_collate_bound(loader):
        is_most = loader.is_auto or loader.num_workers >= MOST_WORKERS
        return _Cause("storage", {}, _FASTER_STORAGE if is_most else f"more workers than cores; {_FASTER_STORAGE}")
    if loader.is_load_known:
        comes_s = (loader.waited_s + loader.away_s) / loader.batch_count
        if loader.load_s < _QUICKER * loader.waited_s / loader.batch_count:
            fix = _LIGHTER if loader.is_auto else f"num_workers=0, or {_LIGHTER}"
            return _Cause("transfer", {"could_s": loader.load_s, "comes_s": comes_s}, fix)
        could_s = loader.load_s / max(1, loader.num_workers)
        if not loader.is_auto and could_s < ESTIMATED_BUSY * comes_s:  # "auto" had fewer workers earlier in the run
            fix = f"{_LIGHTER}; run fewer other programs on these cores"
            return _Cause("transfer", {"could_s": could_s, "comes_s": comes_s}, fix)
    bottleneck, fix = _find_worker_cause(run, loader)
    cheaper = _CHEAPER
    if is_collate_bound(loader):
        cheaper = "a cheaper collate_fn" if loader.probe.has_collate_fn else "fewer, larger arrays per sample"
    return _Cause(bottleneck, {"cores": run.core_count}, f"{fix}; {cheaper}" if fix else cheaper)


def _find_worker_cause(run: Run, loader: LoaderSeen) -> tuple[str, str]:
    """Return the bottleneck and the fix for workers that perform as expected, besides cheaper samples."""
    if (
        not loader.is_on_cluster
        and loader.num_workers >= run.core_count
        and _cores_used(run, loader) >= BUSY_CORES * run.core_count
    ):
        return "all-cores", "workers on other machines (worker='ray' of infeed's loaders)" if may_move(loader) else ""
    if loader.is_auto:
        return "auto-workers", ""
    if not loader.is_load_known:
        return "few-workers", "more workers"
    best = best_workers(run, loader)
    if best <= loader.num_workers:
        return "auto-workers", ""
    kind = ", worker='process'" if may_hold_gil(run, loader) else ""
    return "few-workers", f"num_workers={best}{kind}"


def _find_inline_cause(run: Run, loader: LoaderSeen) -> _Cause:
    if loader.is_gathered:
        return _Cause("gathering", {}, "larger batches or narrower rows; workers do not help", False)
    if 0 < loader.load_s < LEAST_LOAD_S:
        return _Cause("main-process", {}, "larger batches or cheaper samples; workers do not help with so little work", False)
    if loader.has_one_reader:
        return _Cause("main-process", {}, f"num_workers=1, to load during training steps; for more workers, {_SHARD}", False)
    best = f"num_workers={best_workers(run, loader)}" if loader.is_load_known else "num_workers=1 or more"
    return _Cause("main-process", {}, f"{best}, to load during training steps")


def is_collate_bound(loader: LoaderSeen) -> bool:
    """Whether collation takes most of the loading time."""
    return loader.collate_share >= MAIN_CAUSE


def _cores_used(run: Run, loader: LoaderSeen) -> float:
    """Return the CPU cores that workers use: measured for processes, else from the probe; one per worker if unknown."""
    workers = run.workers_of(loader) if loader.kind == "process" else []
    if workers:
        return sum(one.cpu_share for one in workers)
    return loader.num_workers * loader.cpu_share


def may_move(loader: LoaderSeen) -> bool:
    """Return whether cores of other machines would help: loading is CPU-bound, and takes longer than to receive the batches."""
    if loader.is_on_cluster or not loader.is_load_known or is_io_bound(loader.cpu_share):
        return False
    return loader.load_s > _REMOTE_TRANSFER_S + loader.batch_bytes / _REMOTE_TRANSFER_RATE


def transfer_s(loader: LoaderSeen) -> float:
    """Return the time to transfer a batch from a worker to the training loop."""
    if loader.library == "torch":
        return _TORCH_TRANSFER_S + loader.batch_bytes / _TORCH_TRANSFER_RATE
    return _INFEED_TRANSFER_S


def sample_text(probe: Probe) -> str:
    """Format the time of one sample."""
    return _time_text(probe.sample_s, probe.cpu_s)


def _time_text(seconds: float, cpu_s: float) -> str:
    """Format elapsed and CPU time. CPU time is larger if libraries use several cores; 10% allows for clock differences."""
    if cpu_s > 1.1 * seconds:
        return f"{format_seconds(seconds)} ({format_seconds(cpu_s)} CPU time on several cores)"
    return f"{format_seconds(seconds)} ({format_seconds(min(cpu_s, seconds))} CPU time)"


# --- the number of workers

# Propose a change only if it saves at least this share of the time.
_GAIN: Final = 0.1


def best_workers(run: Run, loader: LoaderSeen) -> int:
    """Return how many workers keep up with the training loop, limited by the CPU cores that loading needs."""
    if loader.has_one_reader:
        return 1
    away = loader.away_s / loader.batch_count
    best = workers_best(loader.load_s, away, run.core_count, loader.cpu_share)
    if not loader.probe.slow:
        return best

    def comes_s(workers: int) -> float:
        return max(away, loader.load_s / workers, slowest_s(loader, workers))

    return next(count for count in range(1, best + 1) if ENOUGH * comes_s(count) <= comes_s(best))


def slowest_s(loader: LoaderSeen, workers: int) -> float:
    """Return the minimum average time between two batches that slow samples impose.

    A batch takes at least as long as its slowest sample, and each worker has at most one batch in progress. Other prefetched
    batches are queued behind the slow one in the same worker. An epoch starts with no batches prefetched.
    """
    probe = loader.probe
    if not probe.slow:
        return 0.0
    slow_s = max(one.seconds for one in probe.slow)
    if loader.library == "torch":  # one worker loads the whole batch
        slow_s += (loader.rows - 1) * probe.median_s
    apart = probe.sample_count / (len(probe.slow) * loader.rows)  # batches from one slow sample to the next
    epoch = max((epoch.batch_count for epoch in loader.epochs), default=1)
    return slow_s / max(1.0, apart, min(workers, epoch))


def num_workers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that another number of workers would be faster."""
    if not run.has_own_loop or not loader.is_load_known or not is_data_bound(loader):
        return None
    if loader.is_auto or loader.is_gathered or thread_pool_fix(run, loader) or is_gil_bound(run, loader):
        # infeed chooses the count, no worker loads samples, or fixing thread pools or the GIL changes the best count.
        return None
    away, wait = loader.away_s / loader.batch_count, loader.waited_s / loader.batch_count
    best = best_workers(run, loader)
    # Both the training loop and the workers pay for the transfer. Count all of it, so the estimate is conservative.
    transfer = transfer_s(loader)
    if best > loader.num_workers and loader.load_s >= max(LEAST_LOAD_S, transfer):
        # If the current workers are slower than expected, scale the estimate for more workers by the same factor.
        should = max(away, loader.load_s / max(1, loader.num_workers), slowest_s(loader, loader.num_workers))
        scale = max(1.0, (away + wait - transfer) / should) if loader.num_workers else 1.0
        after = max(away, scale * loader.load_s / best, slowest_s(loader, best)) + transfer
    elif loader.num_workers and loader.load_s < wait:
        best, after = 0, away + loader.load_s
    else:
        return None
    gain = 1 - after / (away + wait)
    if gain < _GAIN:
        return None
    kind = ", worker='process'  # threads run Python code one at a time" if best > 1 and may_hold_gil(run, loader) else ""
    mostly = ", mostly in collate_fn" if is_collate_bound(loader) else ""
    # The share of slow samples belongs to the slow-samples finding: without them, fewer workers are needed.
    rest = 1 - loader.slow_share if is_slow_sample_bound(loader) else 1.0
    why, limit = _limit(run, loader, best)
    return Finding(
        name="num-workers",
        title=f"num_workers={best} instead of {loader.num_workers} would save about {gain:.0%} of the time",
        risk="time",
        cost=rest * gain * (loader.waited_s + loader.away_s) / run.seconds,
        evidence={
            "load a batch": f"{format_seconds(loader.load_s)} in one worker{mostly}",
            "training step": format_seconds(away),
            **({"transfer": f"about {format_seconds(transfer)} per batch"} if best else {}),
            "cores": f"{run.core_count:g}",
            "limit": limit,
        },
        fix={
            "torch": f"num_workers={best}" + (", persistent_workers=True" if best else ""),
            "infeed": f"num_workers={best}{kind}",
        },
        loader=describe(loader),
        numbers={
            "workers": best,
            "gain": gain,
            "load_s": loader.load_s,
            "away_s": away,
            "transfer_s": transfer,
            "limit": why,
        },
    )


def _limit(run: Run, loader: LoaderSeen, best: int) -> tuple[str, str]:
    """Return why this number and no other, as a code and as text."""
    if not best:
        return "overhead", "loading costs less than the transfer from workers"
    away, bound = loader.away_s / loader.batch_count, slowest_s(loader, best)
    if bound > max(away, loader.load_s / best):
        return "slow-samples", f"more workers would wait for slow samples, at least {format_seconds(bound)} per batch"
    if loader.load_s / best <= away:
        return "step", "enough to keep up with the training loop"
    if loader.has_one_reader:
        return "one-reader", "more workers would not help: the iterable dataset does not shard itself"
    if best == MOST_WORKERS:
        return "most", f"the doctor proposes at most {MOST_WORKERS} workers"
    if best > run.core_count:
        return "cores", "all cores used; more than one worker per core, because loading is I/O-bound"
    elsewhere = "; more workers help only on other machines (worker='ray' of infeed's loaders)" if may_move(loader) else ""
    return "cores", f"all cores used{elsewhere}"


# --- contention between workers: thread pools of libraries, and the GIL

# Reporting threshold, as a share of the run: below it the extra threads do no harm.
_LEAST_COST: Final = 0.02


class _Pools(NamedTuple):
    threads: dict[str, int]  # besides the worker's main thread, by library
    each: int
    total: int
    lost_s: float  # the part of the wait that one thread per worker would save

    @property
    def fix(self) -> str:
        fixes = ["cv2.setNumThreads(0) in worker_init_fn"] if "cv2" in self.threads else []
        if self.threads.keys() - {"cv2"}:
            fixes.append("environment variables OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1")
        return "; ".join(fixes)


def thread_pools(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that libraries use several threads in each worker, more in total than CPU cores."""
    pools = _find_pools(run, loader)
    if pools is None or pools.lost_s <= _LEAST_COST * run.seconds:
        return None
    verb = "uses" if len(pools.threads) == 1 else "use"
    names = ", ".join(sorted(pools.threads))
    evidence = {"threads": ", ".join(f"{name}: {count} besides the main thread" for name, count in pools.threads.items())}
    if loader.is_load_known and loader.batch_count:
        comes_s = (loader.waited_s + loader.away_s) / loader.batch_count
        alone = f"{format_seconds(loader.load_s)} in one worker with one thread"
        evidence["load a batch"] = f"{alone}; {loader.num_workers} workers deliver one every {format_seconds(comes_s)}"
    return Finding(
        name="thread-pools",
        title=f"{names} {verb} {pools.each} threads in each worker: {pools.total} for {format_count(run.core_count, 'core')}",
        risk="time",
        cost=pools.lost_s / run.seconds,
        evidence=evidence,
        fix={"torch": pools.fix, "infeed": ONE_THREAD},
        loader=describe(loader),
        numbers={"threads": pools.threads, "each": pools.each, "total": pools.total},
    )


def thread_pool_fix(run: Run, loader: LoaderSeen) -> str:
    """Return the fix for torch's workers if thread pools are the bottleneck, else an empty string."""
    pools = _find_pools(run, loader)
    return pools.fix if pools is not None and pools.lost_s >= MAIN_CAUSE * loader.waited_s > 0 else ""


def _find_pools(run: Run, loader: LoaderSeen) -> _Pools | None:
    if loader.kind != "process":
        return None
    threads: dict[str, int] = {}
    for worker in run.workers_of(loader):
        for name, count in worker.pools.items():
            threads[name] = max(threads.get(name, 0), count)
    each = 1 + sum(threads.values())
    total = loader.num_workers * each
    if not threads or total <= run.core_count:
        return None
    return _Pools(threads, each, total, _lost_to_pools_s(run, loader, total))


def _lost_to_pools_s(run: Run, loader: LoaderSeen, total: int) -> float:
    """Estimate the lost time from the probe with one thread; without a probe, count threads beyond the cores as lost."""
    if not loader.is_load_known:
        return loader.waited_s * (1 - run.core_count / total)
    could_s = loader.load_s / min(loader.num_workers, run.core_count)
    comes_s = max(could_s, loader.away_s / max(1, loader.batch_count)) + transfer_s(loader)
    return min(loader.waited_s, max(0.0, loader.waited_s + loader.away_s - loader.batch_count * comes_s))


def may_hold_gil(run: Run, loader: LoaderSeen) -> bool:
    """Whether workers are CPU-bound threads; they run in parallel only as far as the code releases the GIL."""
    return loader.kind == "thread" and run.has_gil and loader.is_load_known and not is_io_bound(loader.cpu_share)


def is_gil_bound(run: Run, loader: LoaderSeen) -> bool:
    """Whether several CPU-bound threads use no more than about one core although more are available."""
    if not may_hold_gil(run, loader) or loader.num_workers < 2 or not loader.own_cores:
        return False
    if "worker='auto'" in loader.asked:
        return False  # infeed has measured both kinds
    comes_s = (loader.waited_s + loader.away_s) / max(1, loader.batch_count)
    is_one_core = may_queue_for_gil(loader.kind, loader.own_cores, run.core_count, has_gil=run.has_gil)
    return is_one_core and loader.load_s >= _GIL_LOAD * comes_s


# --- storage, slow samples, restarts, pinning

# A sample waits for storage from this share of its time off the CPU.
_OFF_CPU: Final = 0.6
_LEAST_READ: Final = 512
_LEAST_SAMPLE_S: Final = 1e-4
_TIMEOUT_S: Final = 1  # for shorter samples, restarting a worker costs more than waiting
# Reporting thresholds for restarts: share of the run, and seconds per restart.
_RESTART_SHARE: Final = 0.02
_RESTART_S: Final = 0.02
_RESTART_MUCH: Final = 0.1  # share of the run that is reported however short each restart is
# Smaller batches copy to the device in no more time than the call itself takes.
_LEAST_PINNED: Final = 256 << 10
# Approximate copy rates to a GPU in bytes/s, from pageable and from pinned memory.
_PAGEABLE: Final = 6e9
_PINNED: Final = 24e9


def slow_storage(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that samples spend most of their time waiting for reads."""
    probe = loader.probe
    read = probe.read_bytes
    if read < _LEAST_READ or probe.sample_s < _LEAST_SAMPLE_S:
        return None
    cpu_share = probe.cpu_s / probe.sample_s
    if 1 - cpu_share < _OFF_CPU or not can_be_io_bound(probe.switches):
        return None
    if run.has_own_loop and not is_data_bound(loader):
        return None  # reads are fast enough
    most = min(MOST_WORKERS, max(loader.num_workers + 1, workers_useful(run.core_count, cpu_share)))
    if loader.has_one_reader:
        torch = infeed = f"{_FASTER_STORAGE}; {_SHARD}, then use more workers than cores"
    elif loader.num_workers >= MOST_WORKERS:
        torch = infeed = _FASTER_STORAGE
    else:
        torch = f"more workers than cores (up to {most}); {_FASTER_STORAGE}"
        infeed = f"worker='thread', num_workers={most}; {_FASTER_STORAGE}"
        if loader.is_auto:
            infeed = _FASTER_STORAGE if loader.kind == "thread" else f"worker='thread'; {_FASTER_STORAGE}"
    return Finding(
        name="slow-storage",
        title=f"Storage is slow: samples wait for reads {1 - cpu_share:.0%} of their time",
        risk="time",
        cost=(1 - cpu_share) * (1 - loader.collate_share) * _waited_share(run, loader),
        evidence={
            "sample": sample_text(probe),
            "reads": f"{format_bytes(read)} per sample, {format_bytes(read / probe.sample_s)}/s per reader",
        },
        fix={"torch": torch, "infeed": infeed},
        loader=describe(loader),
        numbers={"io_share": 1 - cpu_share, "read_bytes": read, "workers": most},
    )


def _waited_share(run: Run, loader: LoaderSeen) -> float:
    """Return the share of the run that faster loading can save: the waiting time, or all of it if the doctor iterates."""
    return loader.waited_s / run.seconds if run.has_own_loop else 1.0


def slow_samples(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that a few samples take far longer than the others and delay their batches."""
    probe = loader.probe
    if not probe.slow or (run.has_own_loop and not is_data_bound(loader)):
        return None
    share = loader.slow_share
    if share < SLOW_SHARE:
        return None
    worst = probe.slow[0]
    times = worst.seconds / max(probe.median_s, 1e-9)
    others = "several workers share a batch, so the other samples are not delayed"
    skip = f"sample_timeout={_TIMEOUT_S}, on_error='skip' skip samples that take longer"
    if loader.kind == "thread":
        skip = f"worker='process', {skip}"  # a thread cannot be stopped
    return Finding(
        name="slow-samples",
        title=f"A few samples are very slow: index {worst.which} takes {times:,.0f} times the median",
        risk="time",
        cost=share * _waited_share(run, loader),
        evidence={
            "slow": ", ".join(f"{one.which}: {format_seconds(one.seconds)}" for one in probe.slow),
            "median": f"{format_seconds(probe.median_s)} ({probe.sample_count} samples)",
            "share": f"{share:.0%} of the loading time of the samples that were timed",
        },
        fix={
            "torch": "make these samples smaller, or in_order=False so that other batches overtake (torch 2.6)",
            "infeed": f"{others}; {skip}" if worst.seconds > _TIMEOUT_S else others,
        },
        loader=describe(loader),
        numbers={"share": share, "seconds": worst.seconds, "median_s": probe.median_s, "times": times},
    )


def is_slow_sample_bound(loader: LoaderSeen) -> bool:
    """Whether slow samples are the bottleneck: they take most of the loading time, or all others would arrive in time."""
    share = loader.slow_share
    if share < SLOW_SHARE or not is_data_bound(loader):
        return False
    others_s = (1 - share) * loader.load_s / max(1, loader.num_workers)
    is_enough = bool(loader.num_workers) and others_s <= loader.away_s / loader.batch_count
    return share >= MAIN_CAUSE or is_enough


def restarted_workers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that every epoch restarts the workers."""
    later = [epoch.start_s for epoch in loader.epochs[1:] if epoch.has_batch]
    if not run.has_own_loop or not later or loader.is_persistent or loader.kind != "process":
        return None
    usual = max(loader.usual_wait_s, loader.load_s)  # running workers need this time for the first batch too
    lost = sum(max(0.0, start - usual) for start in later)
    share = lost / run.seconds
    if share < _RESTART_SHARE or (share < _RESTART_MUCH and lost / len(later) < _RESTART_S):
        return None
    return Finding(
        name="restarted-workers",
        title=f"Workers restart in every epoch: {format_seconds(lost / len(later))} each time",
        risk="time",
        cost=share,
        evidence={
            "epochs": str(len(loader.epochs)),
            "first batch": f"{format_seconds(sum(later) / len(later))} after each start"
            + (f"; other batches: {format_seconds(usual)}" if usual else ""),
            "lost": f"{format_seconds(lost)}, {share:.0%} of the run",
        },
        fix={
            "torch": "persistent_workers=True, and one loader for all epochs",
            "infeed": "infeed.DataLoader keeps its workers; infeed.torch.DataLoader needs persistent_workers=True",
        },
        loader=describe(loader),
        numbers={"lost_s": lost, "restarts": len(later), "usual_s": usual},
    )


def no_pinning(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that batches go to a GPU from memory that is not pinned."""
    if not (run.has_own_loop and run.has_gpu) or loader.is_pinned or loader.is_on_device:
        return None
    if loader.batch_bytes < _LEAST_PINNED:
        return None
    count = loader.delivered_count
    lost = count * loader.batch_bytes * (1 / _PAGEABLE - 1 / _PINNED)
    return Finding(
        name="no-pinning",
        title="Batches are not in pinned memory: the training loop stops while each is copied to the GPU",
        risk="time",
        cost=min(1.0, lost / run.seconds),
        evidence={
            "batch": format_bytes(loader.batch_bytes),
            "copies": f"{format_count(count, 'batch', 'batches')}, about {format_seconds(lost)} longer than from pinned memory",
        },
        fix={
            "torch": "pin_memory=True, and batch.to(device, non_blocking=True)",
            "infeed": "device='cuda'  # copies ahead of the training loop, from pinned memory",
        },
        loader=describe(loader),
        numbers={"batches": count, "lost_s": lost},
    )
