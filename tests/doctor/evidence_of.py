"""Constructed programs, as the doctor may observe them."""

from __future__ import annotations

from typing import Any

from infeed.doctor.checks import examine
from infeed.doctor.evidence import EpochSeen, LoaderSeen, Moment, Probe, ProcessSeen, Run, SlowIndex
from infeed.doctor.finding import Finding

MB = 1 << 20


def loader(*, wait: float = 0.0, away: float = 0.1, batches: int = 20, **options: Any) -> LoaderSeen:
    """A torch loader with one epoch of `batches` batches, each with this wait and this step time."""
    epoch = EpochSeen(0.0, start_s=0.1, has_batch=True, waits=[wait] * batches, aways=[away] * batches)
    given = {"number": 0, "library": "torch", "dataset": "Faces", "kind": "process", "num_workers": 2, "epochs": [epoch]}
    given |= {"start_method": "fork", "is_persistent": True, "batch_size": 10, **options}
    return LoaderSeen(**given)


def run(seen: LoaderSeen, **options: Any) -> Run:
    given = {"program": "train.py", "seconds": 10.0, "core_count": 4, "memory_bytes": 16_000 * MB, **options}
    return Run(**given, loaders=[seen])


def names(seen: LoaderSeen, **options: Any) -> list[str]:
    return [finding.name for finding in examine(run(seen, **options))]


def uneven(count: int = 4, **options: Any) -> LoaderSeen:
    """Some of 200 samples take 0.3 s, the others 4 ms; batches of 8, two workers, epochs of 25 batches."""
    slow = [SlowIndex(str(50 * number), 0.3) for number in range(count)]
    mean = (count * 0.3 + (200 - count) * 0.004) / 200
    probe = Probe(sample_count=200, sample_s=mean, median_s=0.004, cpu_s=1e-4, switches=1.0, slow=slow)
    given: dict[str, Any] = {"wait": 0.05, "away": 0.005, "batches": 24, "batch_size": 8, "probe": probe}
    return loader(**{**given, **options})


def moments(sizes: list[int]) -> dict[int, ProcessSeen]:
    return {7: ProcessSeen(7, [Moment(float(at), size * MB, 0.0) for at, size in enumerate(sizes)])}


def costly(sample_s: float) -> Probe:
    """CPU-bound samples."""
    return Probe(sample_count=100, sample_s=sample_s, median_s=sample_s, cpu_s=sample_s, switches=0.0)


def stream(*, shards_itself: bool = False, **options: Any) -> LoaderSeen:
    """An iterable dataset with one reader that takes 0.1 s per batch, in a data-bound training loop."""
    probe = Probe(sample_count=100, sample_s=0.01, median_s=0.01, cpu_s=0.001, switches=1.0, shards_itself=shards_itself)
    return loader(**{"wait": 0.09, "away": 0.01, "is_stream": True, "probe": probe, **options})


def auto(**options: Any) -> LoaderSeen:
    """A loader of infeed with ``num_workers="auto"``, with 8 workers by now."""
    return loader(**{"library": "infeed", "start_method": "", "asked": "'auto'", "is_auto": True, "num_workers": 8, **options})


def found(seen: LoaderSeen, **options: Any) -> dict[str, Finding]:
    """Returns the findings by name."""
    return {finding.name: finding for finding in examine(run(seen, **options))}
