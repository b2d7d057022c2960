"""The ``num-workers`` check: whether a different number of workers would be faster."""

from __future__ import annotations

from typing import Final

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.counting import MOST_WORKERS, best_workers, slowest_s
from infeed.doctor.findings.crowding import may_hold_gil, waits_for_gil, waits_for_pools
from infeed.doctor.findings.finding import Finding, describe, way_s
from infeed.doctor.findings.waiting import LEAST_LOAD_S, waits, waits_for_collate, waits_for_slow
from infeed.formatting import format_seconds

# Propose a change only if it saves at least this share of the time.
_GAIN: Final = 0.1


def num_workers(run: Run, loader: LoaderSeen) -> Finding | None:
    """Report that another number of workers would be faster."""
    if not run.has_own_loop or not loader.is_load_known or not waits(loader):
        return None
    if loader.is_auto or loader.is_gathered or waits_for_pools(run, loader) or waits_for_gil(run, loader):
        # infeed chooses the count, no worker loads samples, or fixing thread pools or the GIL changes the best count.
        return None
    away, wait = loader.away_s / loader.batch_count, loader.waited_s / loader.batch_count
    best = best_workers(run, loader)
    # Both the training loop and the workers pay for the transfer. Count all of it, so the estimate is conservative.
    way = way_s(loader)
    if best > loader.num_workers and loader.load_s >= max(LEAST_LOAD_S, way):
        # If the current workers are slower than expected, scale the estimate for more workers by the same factor.
        should = max(away, loader.load_s / max(1, loader.num_workers), slowest_s(loader, loader.num_workers))
        scale = max(1.0, (away + wait - way) / should) if loader.num_workers else 1.0
        after = max(away, scale * loader.load_s / best, slowest_s(loader, best)) + way
    elif loader.num_workers and loader.load_s < wait:
        best, after = 0, away + loader.load_s
    else:
        return None
    gain = 1 - after / (away + wait)
    if gain < _GAIN:
        return None
    kind = ", worker='process'  # threads compute one at a time in Python" if best > 1 and may_hold_gil(run, loader) else ""
    mostly = ", mostly in collate_fn" if waits_for_collate(loader) else ""
    # The share of slow samples belongs to the slow-samples finding: without them, fewer workers are needed.
    rest = 1 - loader.slow_share if waits_for_slow(loader) else 1.0
    return Finding(
        name="num-workers",
        title=f"num_workers={best} would be better than {loader.num_workers}: about {gain:.0%} less time",
        risk="time",
        cost=rest * gain * (loader.waited_s + loader.away_s) / run.seconds,
        evidence={
            "loading a batch": f"{format_seconds(loader.load_s)} by one worker{mostly}",
            "the loop's own work": f"{format_seconds(away)} a batch",
            **({"the way from a worker": f"about {format_seconds(way)} a batch"} if best else {}),
            "cores": f"{run.core_count:g}",
            "why": _why(run, loader, best),
        },
        cure={
            "torch": f"num_workers={best}" + (", persistent_workers=True" if best else ""),
            "infeed": f"num_workers={best}{kind}",
        },
        loader=describe(loader),
    )


def _why(run: Run, loader: LoaderSeen, best: int) -> str:
    """Explain the choice of this number."""
    if not best:
        return "loading is cheaper than what workers cost"
    away, bound = loader.away_s / loader.batch_count, slowest_s(loader, best)
    if bound > max(away, loader.load_s / best):
        return f"more would wait for slow samples: because of them a batch comes every {format_seconds(bound)} at best"
    if loader.load_s / best <= away:
        return "enough to keep up with the loop"
    if loader.has_one_reader:
        return "the stream does not share itself among workers, so that more would not help"
    if best == MOST_WORKERS:
        return "the most that is ever proposed"
    return "as many as there are processors for" + (", because they mostly wait" if best > run.core_count else "")
