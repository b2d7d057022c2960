"""The doctor's checks: one pure function per problem, which takes evidence and returns a finding or ``None``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.findings.crowding import thread_pools
from infeed.doctor.findings.finding import RISKS, Finding
from infeed.doctor.findings.memory import big_objects, memory_growth
from infeed.doctor.findings.results import same_random_numbers, same_samples
from infeed.doctor.findings.starting import cannot_be_sent, fork_with_threads, no_batch, restarted_workers
from infeed.doctor.findings.waiting import loop_waits, no_pinning, slow_samples, storage_bound
from infeed.doctor.findings.workers import num_workers

__all__ = ["NAMES", "Finding", "examine"]

_CHECKS: Final[dict[str, Callable[[Run, LoaderSeen], Finding | None]]] = {
    "no-batch": no_batch,
    "fork-with-threads": fork_with_threads,
    "cannot-be-sent": cannot_be_sent,
    "same-random-numbers": same_random_numbers,
    "same-samples": same_samples,
    "loop-waits": loop_waits,
    "num-workers": num_workers,
    "storage-bound": storage_bound,
    "slow-samples": slow_samples,
    "restarted-workers": restarted_workers,
    "thread-pools": thread_pools,
    "no-pinning": no_pinning,
    "memory-growth": memory_growth,
    "big-objects": big_objects,
}
NAMES: Final = tuple(_CHECKS)


def examine(run: Run) -> list[Finding]:
    """Return all findings, most costly first: risks to the whole run, then time, then memory."""
    found = [finding for loader in run.loaders for check in _CHECKS.values() if (finding := check(run, loader)) is not None]
    return sorted(found, key=lambda finding: (RISKS.index(finding.risk), -finding.cost))
