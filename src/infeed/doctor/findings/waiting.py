"""Time checks: whether the training loop waits for data, the bottleneck, slow storage, slow samples, missing pinning."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from infeed.doctor.evidence import LoaderSeen, Run, gives_up
from infeed.doctor.findings.counting import MOST_WORKERS, best_workers
from infeed.doctor.findings.crowding import ONE_THREAD, may_hold_gil, waits_for_gil, waits_for_pools
from infeed.doctor.findings.finding import MOST_OF_IT, Finding, collate_text, describe, sample_text
from infeed.formatting import format_bytes, format_count, format_seconds, format_workers

# Report a wait share from this value: up to a tenth may come from the first batches or from other programs.
_WAIT_SHARE: Final = 0.1
_LEAST_BATCHES: Final = 4
# Workers are not the bottleneck if they could produce a batch in less than this share of the time between batches.
_IDLING: Final = 0.5
_LEAST_WAITED_S: Final = 0.25  # in total; less may be noise
# A batch that loads faster gains so little from a worker that a busy machine cancels the gain.
LEAST_LOAD_S: Final = 5e-3
# Loading in the main process is faster if it takes less than this share of the wait for workers.
_QUICKER: Final = 0.8
# All CPU cores count as busy if workers use this share of them; the training loop uses some too.
_BUSY: Final = 0.5

# A sample is I/O-bound from this share of its time off the CPU.
_OFF_CPU: Final = 0.6
_LEAST_READ: Final = 512
_LEAST_SAMPLE_S: Final = 1e-4

_SLOW_SHARE: Final = 0.05
_TIMEOUT_S: Final = 1  # for shorter samples, restarting a worker costs more than waiting

_INLINE: Final = "itself: there are no workers, so that it loads every sample"
_USE_INFEED: Final = "from infeed.torch import DataLoader"
_CLOSER: Final = "a copy on a local disk; fewer, larger files"
_LIGHTER: Final = "fewer, larger arrays in a sample; larger batches"
_CHEAPER: Final = "cheaper samples: decode, resize or tokenize once, beforehand"
_SHARE: Final = "let each worker read its own part in __iter__, by get_worker_info()"
_BENCH: Final = "infeed bench module:dataset tries settings"

# Smaller batches copy to the device in no more time than the call itself takes.
_LEAST_PINNED: Final = 256 << 10
# Approximate copy rates to a GPU in bytes/s, from pageable and from pinned memory.
_PAGEABLE: Final = 6e9
_PINNED: Final = 24e9


def loop_waits(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that the training loop, and with it the GPU, waits for batches."""
    if not run.has_own_loop or not waits(loader):
        return None
    who = "The GPU" if run.has_gpu else "The loop"
    count = loader.batch_count
    reason = _reason(run, loader)
    evidence = {
        "waited": f"{format_seconds(loader.waited_s)} of {format_seconds(loader.waited_s + loader.away_s)}",
        "a batch": f"{format_seconds(loader.waited_s / count)} of waiting, {format_seconds(loader.away_s / count)} of work",
        "for": reason.text,
    }
    workers = run.workers_of(loader) if loader.kind == "process" else []
    if workers:
        evidence["workers"] = f"{sum(one.cpu_share for one in workers) / len(workers):.0%} of a core each"
    if loader.probe.sample_count and not loader.is_gathered:  # direct loading differs from gathering rows
        evidence["a sample"] = sample_text(loader.probe)
        if waits_for_collate(loader):
            evidence["collate_fn"] = f"{collate_text(loader.probe)}, for a batch"
    change, in_infeed = (
        f"{cure}; {_BENCH}" if reason.is_for_bench else cure for cure in (reason.cure, reason.in_infeed or reason.cure)
    )
    return Finding(
        name="loop-waits",
        title=f"{who} waits for data {loader.wait_share:.0%} of the time",
        risk="time",
        cost=loader.waited_s / run.seconds,
        evidence=evidence,
        cure={
            "torch": change,
            "infeed": f"{_USE_INFEED}; {in_infeed}" if loader.library == "torch" else in_infeed,
        },
        loader=describe(loader),
    )


def waits(loader: LoaderSeen) -> bool:
    """Whether the training loop waits enough to report: number of batches, total time and share of the time."""
    is_known = loader.batch_count >= _LEAST_BATCHES and loader.waited_s >= _LEAST_WAITED_S
    return is_known and loader.wait_share >= _WAIT_SHARE


class _Reason(NamedTuple):
    """The bottleneck and its fix, whether or not another finding gives more detail."""

    text: str
    cure: str
    is_for_bench: bool = True  # `infeed bench` only varies workers; False if workers do not help
    in_infeed: str = ""  # the fix in infeed, if different


def _reason(run: Run, loader: LoaderSeen) -> _Reason:
    if waits_for_slow(loader):
        worst = loader.probe.slow[0]
        worst_s = f"index {worst.which} {format_seconds(worst.seconds)}"
        text = f"a few slow samples: they take {loader.slow_share:.0%} of the loading; {worst_s}"
        return _Reason(text, "make these samples cheaper or leave them out; more workers would wait for them as well", False)
    if loader.kind == "inline":
        return _reason_inline(run, loader)
    if loader.has_one_reader:
        is_read_once = loader.library == "infeed" or loader.num_workers == 1
        how = "one worker reads all of it" if is_read_once else "each worker reads all of it, and gives the same samples again"
        text = f"the stream: it does not share itself among workers; {how}"
        return _Reason(text, f"{_SHARE}; more workers help only then", False)
    threads = waits_for_pools(run, loader)
    if threads:
        text = "processors: libraries use more threads in workers than there are cores, and with one each it would come sooner"
        return _Reason(text, threads if loader.library == "torch" else ONE_THREAD, False, ONE_THREAD)
    if waits_for_gil(run, loader):
        cores = format_count(run.core_count, "core")
        used = f"{format_workers(loader.num_workers, loader.kind)} use {loader.own_cores:.1f} of {cores}"
        text = f"the GIL, probably: in Python one thread computes at a time, and {used}"
        return _Reason(text, "workers that are processes, as torch's are", in_infeed="worker='process'")
    if storage_bound(run, loader) is not None and not waits_for_collate(loader):
        is_most = loader.is_auto or loader.num_workers >= MOST_WORKERS
        return _Reason("storage: samples wait to be read", _CLOSER if is_most else f"more workers than cores; {_CLOSER}")
    if loader.is_load_known and loader.load_s < _QUICKER * loader.waited_s / loader.batch_count:
        text = "the way from the workers: loading a batch here takes less than its coming over"
        return _Reason(text, _LIGHTER if loader.is_auto else f"num_workers=0; or {_LIGHTER}")
    if loader.is_load_known and not loader.is_auto:  # "auto" had fewer workers earlier in the run
        could_s = loader.load_s / max(1, loader.num_workers)
        comes_s = (loader.waited_s + loader.away_s) / loader.batch_count
        if could_s < _IDLING * comes_s:
            could, comes = format_seconds(could_s), format_seconds(comes_s)
            text = f"the way from workers: they could load one every {could}, one comes every {comes}"
            return _Reason(text, f"{_LIGHTER}; nothing else on these processors")
    text, cure = _reason_workers(run, loader)
    if waits_for_collate(loader):
        text = f"collate_fn: it takes {loader.collate_share:.0%} of the loading; {text}"
        cheaper = "a cheaper collate_fn" if loader.probe.has_collate_fn else "fewer, larger arrays in a sample"
    else:
        cheaper = _CHEAPER
    return _Reason(text, f"{cure}; {cheaper}" if cure else cheaper)


def _reason_workers(run: Run, loader: LoaderSeen) -> tuple[str, str]:
    """Return the bottleneck text and the fix for workers that perform as expected, besides cheaper samples."""
    if loader.num_workers >= run.core_count and _cores_used(run, loader) >= _BUSY * run.core_count:
        return "processors: all are at work", ""
    less = "workers: they bring less than the loop takes"
    if loader.is_auto:
        return f"{less}; infeed decides how many there are", ""
    if not loader.is_load_known:
        return "workers: there are too few", "more workers"
    best = best_workers(run, loader)
    if best <= loader.num_workers:
        return less, ""
    kind = ", worker='process'" if may_hold_gil(run, loader) else ""
    return "workers: there are too few", f"num_workers={best}{kind}"


def _reason_inline(run: Run, loader: LoaderSeen) -> _Reason:
    if loader.is_gathered:
        text = "itself: rows are taken out of arrays"
        return _Reason(text, "larger batches, narrower rows; workers have nothing to do there", False)
    if 0 < loader.load_s < LEAST_LOAD_S:
        return _Reason(_INLINE, "larger batches, cheaper samples; so little work gains nothing from workers", False)
    if loader.has_one_reader:
        return _Reason(_INLINE, f"num_workers=1, which loads while the loop works; for more of them {_SHARE}", False)
    best = f"num_workers={best_workers(run, loader)}" if loader.is_load_known else "num_workers=1 or more"
    return _Reason(_INLINE, f"{best}, which load{'s' if best.endswith('=1') else ''} while the loop works")


def waits_for_collate(loader: LoaderSeen) -> bool:
    """Whether collation takes most of the loading time."""
    return loader.collate_share >= MOST_OF_IT


def _cores_used(run: Run, loader: LoaderSeen) -> float:
    """Return the CPU cores that workers use: measured for processes, else from the probe; one per worker if unknown."""
    workers = run.workers_of(loader) if loader.kind == "process" else []
    if workers:
        return sum(one.cpu_share for one in workers)
    return loader.num_workers * loader.cpu_share


def storage_bound(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that samples spend most of their time waiting for reads."""
    probe = loader.probe
    read = probe.read_bytes
    if read < _LEAST_READ or probe.sample_s < _LEAST_SAMPLE_S:
        return None
    on = probe.cpu_s / probe.sample_s
    off = 1 - on
    if off < _OFF_CPU or not gives_up(probe.switches):
        return None
    if run.has_own_loop and not waits(loader):
        return None  # reads are fast enough
    most = min(MOST_WORKERS, max(loader.num_workers + 1, math.ceil(run.core_count / max(on, 0.05))))
    if loader.has_one_reader:
        torch = infeed = f"{_CLOSER}; {_SHARE}, and then more workers than cores"
    elif loader.num_workers >= MOST_WORKERS:
        torch = infeed = _CLOSER
    else:
        torch = f"more workers than cores (up to {most}); {_CLOSER}"
        infeed = f"worker='thread', num_workers={most}; {_CLOSER}"
        if loader.is_auto:
            infeed = _CLOSER if loader.kind == "thread" else f"worker='thread'; {_CLOSER}"
    return Finding(
        name="storage-bound",
        title=f"Reading is slow: samples wait {off:.0%} of their time for storage",
        risk="time",
        cost=off * (1 - loader.collate_share) * _waited_share(run, loader),
        evidence={
            "a sample": sample_text(probe),
            "read": f"{format_bytes(read)} a sample, {format_bytes(read / probe.sample_s)}/s by one reader",
        },
        cure={"torch": torch, "infeed": infeed},
        loader=describe(loader),
    )


def _waited_share(run: Run, loader: LoaderSeen) -> float:
    """Return the share of the run that faster loading can save: the waiting time, or all of it if the doctor iterates."""
    return loader.waited_s / run.seconds if run.has_own_loop else 1.0


def slow_samples(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that a few samples take far longer than the others and delay their batches."""
    probe = loader.probe
    if not probe.slow or (run.has_own_loop and not waits(loader)):
        return None
    share = loader.slow_share
    if share < _SLOW_SHARE:
        return None
    worst = probe.slow[0]
    times = worst.seconds / max(probe.median_s, 1e-9)
    others = "several workers share a batch, so that others go on"
    leave = f"sample_timeout={_TIMEOUT_S}, on_error='skip' leave out what takes longer"
    if loader.kind == "thread":
        leave = f"worker='process', {leave}"  # a thread cannot be stopped
    return Finding(
        name="slow-samples",
        title=f"A few samples are very slow: index {worst.which} takes {times:,.0f} times the usual",
        risk="time",
        cost=share * _waited_share(run, loader),
        evidence={
            "slow": ", ".join(f"{one.which}: {format_seconds(one.seconds)}" for one in probe.slow),
            "usual": f"{format_seconds(probe.median_s)} (median of {probe.sample_count})",
            "share": f"{share:.0%} of the loading time of those that were tried",
        },
        cure={
            "torch": "make these samples smaller, or in_order=False so that others go ahead (torch 2.6)",
            "infeed": f"{others}; {leave}" if worst.seconds > _TIMEOUT_S else others,
        },
        loader=describe(loader),
    )


def waits_for_slow(loader: LoaderSeen) -> bool:
    """Whether slow samples are the bottleneck: they take most of the loading time, or all others would arrive in time."""
    share = loader.slow_share
    if share < _SLOW_SHARE or not waits(loader):
        return False
    others_s = (1 - share) * loader.load_s / max(1, loader.num_workers)
    is_enough = bool(loader.num_workers) and others_s <= loader.away_s / loader.batch_count
    return share >= MOST_OF_IT or is_enough


def no_pinning(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that batches go to a GPU from memory that is not pinned."""
    if not (run.has_own_loop and run.has_gpu) or loader.is_pinned or loader.is_on_device:
        return None
    if loader.batch_bytes < _LEAST_PINNED:
        return None
    count = loader.given_count
    lost = count * loader.batch_bytes * (1 / _PAGEABLE - 1 / _PINNED)
    return Finding(
        name="no-pinning",
        title="Batches are not pinned: the loop stands still while each is copied to the GPU",
        risk="time",
        cost=min(1.0, lost / run.seconds),
        evidence={
            "a batch": format_bytes(loader.batch_bytes),
            "copies": f"{format_count(count, 'batch', 'batches')}, about {format_seconds(lost)} longer than from pinned memory",
        },
        cure={
            "torch": "pin_memory=True, and batch.to(device, non_blocking=True)",
            "infeed": "device='cuda'  # copies ahead of the loop, from memory that is pinned already",
        },
        loader=describe(loader),
    )
