"""All checks of the doctor: pure functions, one per problem, which take evidence and return a finding or ``None``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from infeed.doctor import risk_checks as risks
from infeed.doctor import time_checks as times
from infeed.doctor.evidence import LoaderSeen, Run
from infeed.doctor.finding import RISKS, Finding

_CHECKS: Final[dict[str, Callable[[Run, LoaderSeen], Finding | None]]] = {
    "no-batch": risks.no_batch,
    "fork-with-threads": risks.fork_with_threads,
    "not-picklable": risks.not_picklable,
    "same-random-numbers": risks.same_random_numbers,
    "same-samples": risks.same_samples,
    "data-bound": times.data_bound,
    "num-workers": times.num_workers,
    "slow-storage": times.slow_storage,
    "slow-samples": times.slow_samples,
    "restarted-workers": times.restarted_workers,
    "thread-pools": times.thread_pools,
    "no-pinning": times.no_pinning,
    "memory-growth": risks.memory_growth,
    "large-objects": risks.large_objects,
}
NAMES: Final = tuple(_CHECKS)


def examine(run: Run) -> list[Finding]:
    """Return all findings, most costly first: risks to the whole run, then time, then memory."""
    found = [finding for loader in run.loaders for check in _CHECKS.values() if (finding := check(run, loader)) is not None]
    return sorted(found, key=lambda finding: (RISKS.index(finding.risk), -finding.cost))
