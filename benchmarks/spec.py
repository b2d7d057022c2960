"""Declares metrics, targets and sizes of a case as data, so that the runner and the report are independent of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Better: TypeAlias = Literal["higher", "lower", "neither"]
SizeName: TypeAlias = Literal["full", "quick", "tiny"]
Parameters: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    unit: str
    better: Better


@dataclass(frozen=True, slots=True)
class Target:
    """A limit that infeed should meet.

    With ``against``, the limit applies to the advantage over that library: how many times better the median is. Without it,
    the limit applies to the median.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    against: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """Loader options for every library; an adapter translates them into calls of its library."""

    dataset: Any
    batch_size: int
    num_workers: int
    shuffle: bool = False
    seed: int = 7
    # The dataset is a tuple of arrays with equal first dimension; the adapter gathers rows with the means of the library.
    is_arrays: bool = False

    @property
    def length(self) -> int:
        return len(self.dataset[0]) if self.is_arrays else len(self.dataset)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one loader that every case reports, from construction to close."""

    first_batch_s: float
    close_s: float
    cpu_main_s: float
    cpu_children_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    metrics: Mapping[str, float]
    figures: Figures
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark.

    The first of ``metrics`` is the main one. ``libraries`` lists the variants that run the case; ratios compare with
    ``baseline`` (None if the libraries do different amounts of work).
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    targets: tuple[Target, ...]
    libraries: tuple[str, ...]
    baseline: str | None
    warm_up: str
    sizes: Mapping[SizeName, Parameters]
    run: Callable[[str, Parameters], Outcome]
    note: str = ""

    def __post_init__(self) -> None:
        names = {metric.name for metric in self.metrics}
        for target in self.targets:
            if target.metric not in names:
                raise ValueError(f"target on {target.metric!r}, which case {self.name!r} does not report")
            if (target.at_least is None) == (target.at_most is None):
                raise ValueError(f"a target of case {self.name!r} must have exactly one of at_least and at_most")
            if target.against is not None and target.against not in self.libraries:
                raise ValueError(f"target against {target.against!r}, which does not run case {self.name!r}")
