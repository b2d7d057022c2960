"""Probes a dataset directly: times samples, measures its size, tries to pickle it, and finds random generators in it.

Runs in the program's main process after the program has ended or its time is up.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

import numpy as np

import infeed
from infeed.autotune.capacity import slow_s
from infeed.doctor.evidence import Journal
from infeed.doctor.monitor import Watched
from infeed.formatting import type_name
from infeed.memory.pickling import dump_by_value
from infeed.memory.search import Steps, find_culprit, find_heavy, path_of, walk

_MOST_SAMPLES: Final = 300
_WARM: Final = 2
_MOST_SLOW: Final = 5
# Time collate_fn twice, because the first call may import modules; above _COLLATE_S that does not matter.
_COLLATES: Final = 2
_COLLATE_S: Final = 0.5
# Limits of the search for generators.
_LOOKS: Final = 500
_DEPTH: Final = 4
_ELEMENTS: Final = 20
# Larger datasets are not test-pickled: that would take longer than the run.
_MOST_PICKLED: Final = 1 << 30


def probe(watched: Watched, journal: Journal, seconds: float) -> None:
    """Probe a loader's dataset, and write each result to the journal as soon as it is known."""

    def note(**facts: Any) -> None:
        journal.write("probe", loader=watched.number, **facts)

    heavy = find_heavy(watched.dataset, "dataset")
    note(heavy=[(f"{one.path}, {one.what}", one.size, one.is_array) for one in heavy])
    if sum(one.size for one in heavy) < _MOST_PICKLED:
        note(**_try_to_send(watched))
    generators = find_generators(watched.dataset)
    states = [_state(generator) for _, generator in generators]
    try:
        note(**_load_some(watched, seconds))
    except Exception as error:
        note(error=f"{type(error).__name__}: {error}")
    drawn = [path for (path, generator), state in zip(generators, states, strict=True) if _state(generator) != state]
    note(generators=drawn)


def _try_to_send(watched: Watched) -> dict[str, Any]:
    given = {"dataset": watched.dataset, "collate_fn": watched.collate_fn, "worker_init_fn": watched.worker_init_fn}
    found: dict[str, Any] = {}
    for name, value in given.items():
        try:
            dump_by_value(value, set())
        except Exception as error:  # user code in __reduce__ may raise anything
            culprit = find_culprit(value, name)
            if culprit is None:
                found.setdefault("unsendable", f"{name}: {error}")
            else:
                path, part = culprit
                found.setdefault("unsendable", f"{path} is a {type_name(part)}")
        try:
            pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception as error:
            found.setdefault("unpicklable", f"{name}: {error}")
    return found


class _Nowhere:
    """A file object that discards its data."""

    def write(self, data: Any) -> int:
        return len(data)


# --- samples


def _load_some(watched: Watched, seconds: float) -> dict[str, Any]:
    if not watched.settings["is_stream"]:
        indices = list(itertools.islice(_indices(watched), _MOST_SAMPLES))
        take = watched.dataset.__getitem__
        if hasattr(watched.dataset, "__getitems__"):
            rows = watched.settings["batch_size"] or watched.batch_rows or 1
            groups = [indices[at : at + rows] for at in range(0, len(indices), rows)]
            return _measure([(group, len(group)) for group in groups], watched.dataset.__getitems__, watched, seconds)
        return _measure([(index, 1) for index in indices], take, watched, seconds)
    stream, shards_itself = _open(watched)
    facts = _measure([(number, 1) for number in range(_MOST_SAMPLES)], lambda _: next(stream), watched, seconds)
    return {"shards_itself": shards_itself, **facts}


def _open(watched: Watched) -> tuple[Iterator[Any], bool]:
    """Open an iterable dataset. Also return whether it called ``get_worker_info`` up to its first sample."""
    library = watched.settings["library"]
    asking = {infeed.get_worker_info.__code__} if library != "torch" else set()
    if library != "infeed":
        asking.add(importlib.import_module("torch.utils.data").get_worker_info.__code__)
    was_asked = False

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal was_asked
        del argument
        was_asked = was_asked or (event == "call" and frame.f_code in asking)

    # Use a profile hook: replacing the function would miss modules that imported it by name.
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        stream = iter(watched.dataset)
        first = list(itertools.islice(stream, 1))
    finally:
        sys.setprofile(before)
    # torch shards DataPipes itself before it iterates them.
    is_pipe = any(cls.__name__ == "IterDataPipe" for cls in type(watched.dataset).__mro__)
    return itertools.chain(first, stream), was_asked or is_pipe


def _indices(watched: Watched) -> Iterator[Any]:
    """Return indices to load: a random choice over the dataset, or those of the program's own sampler."""
    sampler = watched.sampler
    module = type(sampler).__module__
    if sampler is not None and not module.startswith(("torch.utils.data", "infeed")):
        return iter(sampler)
    length = len(watched.dataset)
    if length <= _MOST_SAMPLES:
        return iter(range(length))
    chosen = random.Random(0).sample(range(length), _MOST_SAMPLES)
    return iter(chosen)


def _measure(tasks: list[tuple[Any, int]], take: Callable[[Any], Any], watched: Watched, seconds: float) -> dict[str, Any]:
    """Load and time each task (an index or a list of indices) until time is up."""
    times: list[float] = []
    counts: list[int] = []
    loaded: list[Any] = []  # the tasks of `times`
    samples: list[Any] = []
    failed: Exception | None = None
    deadline = time.perf_counter() + seconds
    rows = watched.settings["batch_size"] or watched.batch_rows or 1
    # Warm-up: the first tasks open files and import modules.
    warm = min(_WARM, len(tasks) // 2)
    cpu = switches = read = 0.0
    for number, (what, count) in enumerate(tasks):
        if number == warm:
            cpu, switches, read = time.process_time(), _switches(), _read_bytes()
        began = time.perf_counter()
        try:
            sample = take(what)
        except StopIteration:
            break
        except Exception as error:  # the loader may skip it (on_error), or the program itself fails on it
            failed = failed or error
            if watched.settings["is_stream"] or time.perf_counter() > deadline:
                break
            continue
        ended = time.perf_counter()
        if len(samples) < rows:
            samples += sample if count > 1 else [sample]
        if number >= warm:
            times.append((ended - began) / count)
            counts.append(count)
            loaded.append(what)
        if ended > deadline and times:
            break
    if not times:
        if failed is not None:
            raise failed
        return {}
    total = sum(counts)
    facts: dict[str, Any] = {
        "sample_count": total,
        "sample_s": sum(one * count for one, count in zip(times, counts, strict=True)) / total,
        "median_s": statistics.median(times),
        "cpu_s": (time.process_time() - cpu) / total,  # all threads: libraries have thread pools
        # Per call: a __getitems__ call waits for all its samples at once.
        "switches": (_switches() - switches) / len(times) if _has_usage() else None,
        "read_bytes": (_read_bytes() - read) / total,
    }
    if total == len(times) and not watched.settings["is_stream"]:
        facts["slow"] = _find_slow(loaded, times, take)
    module = getattr(watched.collate_fn, "__module__", None) or ""
    is_own = watched.collate_fn is not None and not module.startswith("torch.utils.data")
    if is_own or watched.settings["library"] == "torch":  # infeed writes rows directly instead of calling default_collate
        is_batch = watched.settings["batch_size"] or watched.batch_rows
        facts |= {"has_collate_fn": is_own, "is_collate_known": False}
        with suppress(Exception):  # collate_fn may not accept these samples
            for _ in range(_COLLATES):
                facts |= _collate(watched.collate_fn, samples if is_batch else samples[0])
                if facts["collate_s"] > _COLLATE_S:
                    break
    return facts


def _collate(collate_fn: Callable[[Any], Any], samples: Any) -> dict[str, Any]:
    began, cpu, switches = time.perf_counter(), time.process_time(), _switches()
    collate_fn(samples)
    return {
        "is_collate_known": True,
        "collate_s": time.perf_counter() - began,
        "collate_cpu_s": time.process_time() - cpu,
        "collate_switches": _switches() - switches if _has_usage() else None,
    }


def _find_slow(indices: list[Any], times: list[float], take: Callable[[Any], Any]) -> list[tuple[str, float]]:
    """Return samples that are slow in a second measurement too, which excludes cold caches and preemption."""
    limit = slow_s(statistics.median(times))
    ranked = sorted(zip(times, indices, strict=True), key=lambda pair: -pair[0])
    slow = []
    for seconds, index in ranked[:_MOST_SLOW]:
        if seconds < limit:
            break
        began = time.perf_counter()
        take(index)
        again = time.perf_counter() - began
        if again >= limit:
            slow.append((repr(index), min(seconds, again)))
    return slow


def _has_usage() -> bool:
    return sys.platform == "linux"


def _switches() -> float:
    if sys.platform != "linux":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _read_bytes() -> float:
    """Return the bytes that this thread has read from files, from disk or cache."""
    if sys.platform != "linux":
        return 0.0
    try:
        with open("/proc/thread-self/io") as file:
            return next((float(line.split()[1]) for line in file if line.startswith("rchar")), 0.0)
    except OSError:
        return 0.0


# --- random generators


def find_generators(dataset: Any) -> list[tuple[str, Any]]:
    """Return random generators held by the dataset, or global in the modules of its classes, with their paths."""
    found: list[tuple[str, Any]] = []
    modules = {cls.__module__ for cls in type(dataset).__mro__ if not _is_library(cls.__module__)}

    def visit(value: Any, steps: Steps) -> bool:
        if isinstance(value, str | bytes | int | float | type | ModuleType | np.ndarray):
            return False
        if _state(value) is not None:
            found.append((path_of("dataset", steps), value))
            return False
        if not _is_library(type(value).__module__):
            modules.add(type(value).__module__)
        return True

    walk(dataset, visit, looks=_LOOKS, depth=_DEPTH, most=_ELEMENTS)
    seen = {id(generator) for _, generator in found}
    for name in sorted(modules):
        for key, value in list(vars(sys.modules.get(name, object)).items()) if name in sys.modules else ():
            if id(value) not in seen and _state(value) is not None:
                seen.add(id(value))
                found.append((f"{name}.{key}", value))
    return found


def _is_library(module: str) -> bool:
    """Whether to skip a module's global generators: loaders seed those of the standard library, NumPy and torch."""
    first = module.partition(".")[0]
    return first in sys.stdlib_module_names or first in ("numpy", "torch", "infeed")


def _state(value: Any) -> Any:
    """Return the state of a random generator in comparable form; ``None`` for any other object."""
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return None
