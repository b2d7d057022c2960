"""What can be told of a loader, of an iteration and of a batch by looking at them, whoever made them."""

from __future__ import annotations

from typing import Any, Final

# How deep arrays and tensors of a batch are looked for.
_DEPTH: Final = 6


def settings_of(loader: Any) -> dict[str, Any]:
    """What a loader was given, under the names of ``LoaderSeen``."""
    is_torch = type(loader).__module__ != "infeed"
    config = loader if is_torch else loader._core.config
    is_ours = not is_torch or any(cls.__module__.startswith("infeed.") for cls in type(loader).__mro__)
    is_installed = is_torch and "infeed" in getattr(type(loader)._get_iterator, "__module__", "")
    count = config.num_workers
    worker = getattr(config, "worker", "process")
    is_open = str(count) == "auto"  # the number that it is then is the most that there may be
    is_auto = bool(count) and (is_open or worker == "auto")
    kind = f", worker='{worker}'" if worker in ("auto", "thread") else ""
    asked = ("'auto'" if is_open else str(count)) + kind
    context = getattr(config, "multiprocessing_context", None)
    method = ""
    if is_torch and not is_ours and not is_installed and count:
        import multiprocessing

        method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    return {
        "library": "infeed" if not is_torch else "infeed.torch" if is_ours or is_installed else "torch",
        "dataset": type(loader.dataset).__qualname__,
        # Until it is seen what they are: "auto" begins with few, and with processes.
        "kind": "inline" if not count else "process" if worker == "auto" else worker,
        "num_workers": 1 if is_auto else int(count),
        "asked": asked,
        "is_auto": is_auto,
        "is_stream": _is_torch_stream(loader.dataset) if is_torch else config.is_stream,
        "batch_size": loader.batch_size,
        # infeed's own loader always keeps its workers.
        "is_persistent": not is_torch or bool(loader.persistent_workers),
        "is_pinned": bool(config.pin_memory) or getattr(config, "device", None) is not None,
        "has_init": config.worker_init_fn is not None,
        "start_method": method,
    }


def _is_torch_stream(dataset: Any) -> bool:
    return any(
        cls.__name__ == "IterableDataset" and cls.__module__.startswith("torch.utils.data") for cls in type(dataset).__mro__
    )


def workers_of(iterator: Any) -> dict[str, Any] | None:
    """What the workers of an iteration are now, or were when it ended, as ``see_workers`` takes it; of infeed's only."""
    core = getattr(iterator, "_core", None)
    if core is None:
        return None
    seen = core.statistics()
    pids = pids_of(iterator)
    # Where infeed decides: as many as it wants. Some may be starting, or have died a moment ago.
    kind, count = seen.kind, core.staff.count or seen.worker_count
    is_gathered = seen.loads_by == "gathering rows"
    if kind == "inline" and core.config.kind != "inline" and not is_gathered:
        # Statistics know of no workers: they could not be started, or nothing is kept (observe="off").
        if getattr(iterator, "_epoch", iterator)._engine is None:
            return None
        kind, count = core.config.kind, core.config.most_workers
    return {"kind": kind, "count": count, "is_gathered": is_gathered, "is_settled": seen.is_settled, "pids": pids}


def measure(batch: Any, depth: int = 0) -> tuple[int, int, bool]:
    """Bytes of a batch's arrays and tensors, their first length, and whether one is on a device."""
    if hasattr(batch, "nbytes") and hasattr(batch, "shape"):
        device = getattr(getattr(batch, "device", None), "type", "cpu")
        return int(batch.nbytes), int(batch.shape[0]) if len(batch.shape) else 0, device != "cpu"
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    size, rows, is_on_device = 0, 0, False
    if depth < _DEPTH:
        for part in parts:
            part_size, part_rows, part_on_device = measure(part, depth + 1)
            size, rows, is_on_device = size + part_size, rows or part_rows, is_on_device or part_on_device
    return size, rows, is_on_device


def pids_of(iterator: Any) -> list[int]:
    """Process numbers of the workers of an iteration, torch's or infeed's."""
    ask = getattr(iterator, "worker_pids", None)
    if ask is not None:
        return list(ask())
    return [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid is not None]
