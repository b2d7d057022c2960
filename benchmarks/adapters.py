"""Adapters that translate a ``LoaderSpec`` into public calls of each library.

Every adapter keeps workers and pipelines between epochs where the library supports it, as its users would for speed, and closes
them in ``close``. No adapter imports its library before ``prepare``.

infeed  ``infeed.DataLoader``; ``infeed-torch`` is ``infeed.torch.DataLoader`` with torch's arguments.
torch   ``torch.utils.data.DataLoader``, ``persistent_workers=True``, one intra-op thread in the main process. ``torch``
        uses the platform's start method; ``torch-fork`` and ``torch-spawn`` use the one in their name.
spdl    ``spdl.pipeline.PipelineBuilder`` with threads, as SPDL recommends. A thread loads a whole batch; loading single
        samples in threads, in input order, was slower in ``uneven`` and ``jpeg``. The adapter splits one pipeline over an
        endless source into epochs, because a pipeline that ends must be re-created.
grain   ``grain.MapDataset``, batched before it is distributed to worker processes, which was twice as fast with
        small samples as ``grain.DataLoader`` and keeps the order. Workers have no reader threads: Grain recommends this
        for data in memory, and only then does ``num_workers`` mean the same as in the other libraries. The adapter splits
        one endless iterator into epochs, because workers live as long as one iterator.
tensorflow
        ``tf.data.Dataset`` of shuffled indices, batched; ``numpy_function`` loads a whole batch, on as many threads as there
        are workers, in order.
ray     Ray Data on this machine: ``from_numpy`` with the indices of one batch per block, and ``map_batches`` over as many tasks
        as there are workers, in order; the dataset is in the object store. ``ray.init`` runs before the measurement. Each
        epoch is a separate execution, because Ray Data iterates a dataset again that way.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from benchmarks.spec import LoaderSpec

Batch: TypeAlias = Any


class Loader(Protocol):
    keeps_order: bool

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None: ...


class InfeedLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec) -> None:
        import infeed

        self._loader = infeed.DataLoader(
            spec.dataset,
            spec.batch_size,
            shuffle=spec.shuffle,
            num_workers=spec.num_workers,
            seed=spec.seed,
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


class TorchLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec, start_method: str | None = None, *, is_infeed: bool = False) -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        if is_infeed:
            from infeed.torch import DataLoader

        dataset = spec.dataset
        if spec.is_arrays:
            dataset = TensorDataset(*(torch.from_numpy(array) for array in dataset))
        has_workers = spec.num_workers > 0
        self._loader: Any = DataLoader(
            dataset,
            spec.batch_size,
            shuffle=spec.shuffle,
            num_workers=spec.num_workers,
            persistent_workers=has_workers,
            multiprocessing_context=start_method if has_workers else None,
            generator=torch.Generator().manual_seed(spec.seed),
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def close(self) -> None:
        # The only public way to stop the workers is to drop the last reference to the loader.
        self._loader = None


class _ArraySamples:
    """In-memory arrays as a map-style dataset, for libraries that load only single samples."""

    def __init__(self, arrays: tuple[np.ndarray, ...]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(array[index] for array in self._arrays)


def _collate(samples: list[tuple[Any, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(np.stack(leaves) for leaves in zip(*samples, strict=True))


def _endless_indices(spec: LoaderSpec) -> Iterator[list[int]]:
    rng = np.random.default_rng(spec.seed)
    while True:
        order = rng.permutation(spec.length) if spec.shuffle else np.arange(spec.length)
        for start in range(0, spec.length, spec.batch_size):
            yield order[start : start + spec.batch_size].tolist()


class SpdlLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec) -> None:
        from spdl.pipeline import PipelineBuilder

        threads = max(1, spec.num_workers)
        builder: Any = PipelineBuilder()
        builder.add_source(_endless_indices(spec))
        builder.pipe(_batch_loader(spec), concurrency=threads, output_order="input")
        builder.add_sink(2 * threads)
        self._pipeline = builder.build(num_threads=threads)
        self._batch_count = -(-spec.length // spec.batch_size)
        self._running = ExitStack()
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is None:
            self._running.enter_context(self._pipeline.auto_stop())
            self._batches = iter(self._pipeline.get_iterator())
        return itertools.islice(self._batches, self._batch_count)

    def close(self) -> None:
        self._running.close()


def _batch_loader(spec: LoaderSpec) -> Callable[[list[int]], Batch]:
    if spec.is_arrays:
        # User code gathers the rows here, because SPDL does not support arrays.
        return lambda indices: tuple(array[indices] for array in spec.dataset)
    return lambda indices: _collate([spec.dataset[index] for index in indices])


class GrainLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec) -> None:
        import grain

        samples: Any = grain.MapDataset.source(_ArraySamples(spec.dataset) if spec.is_arrays else spec.dataset)
        if spec.shuffle:
            samples = samples.shuffle(seed=spec.seed)
        batches = samples.batch(spec.batch_size).repeat()
        batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if spec.num_workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=spec.num_workers, per_worker_buffer_size=2))
        self._dataset = batches
        self._batch_count = -(-spec.length // spec.batch_size)
        self._batches: Any = None

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is None:
            self._batches = iter(self._dataset)
        return itertools.islice(self._batches, self._batch_count)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


class TensorFlowLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec) -> None:
        import tensorflow as tf

        load = _batch_loader(spec)
        sample = _ArraySamples(spec.dataset)[0] if spec.is_arrays else spec.dataset[0]
        types = [np.asarray(leaf).dtype for leaf in sample]
        threads = max(1, spec.num_workers)
        indices = tf.data.Dataset.range(spec.length)
        if spec.shuffle:
            indices = indices.shuffle(spec.length, seed=spec.seed)

        def load_batch(batch: Any) -> Any:
            return tf.numpy_function(lambda chosen: load(chosen.tolist()), [batch], types)

        batches = indices.batch(spec.batch_size).map(load_batch, num_parallel_calls=threads, deterministic=True)
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        self._dataset = batches.prefetch(2 * threads).with_options(options)

    def __iter__(self) -> Iterator[Batch]:
        return self._dataset.as_numpy_iterator()

    def close(self) -> None:
        self._dataset = None


class RayLoader:
    keeps_order = True

    def __init__(self, spec: LoaderSpec) -> None:
        import ray

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        self._spec, self._epoch = spec, 0
        self._names = [f"leaf{number}" for number in range(len(spec.dataset if spec.is_arrays else spec.dataset[0]))]
        self._source = ray.put(_ArraySamples(spec.dataset) if spec.is_arrays else spec.dataset)

    def __iter__(self) -> Iterator[Batch]:
        import ray

        names, source, size = self._names, self._source, self._spec.batch_size
        length = self._spec.length
        order = np.arange(length)
        if self._spec.shuffle:
            order = np.random.default_rng(self._spec.seed + self._epoch).permutation(length)
        self._epoch += 1

        def load(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            dataset = ray.get(source)
            return dict(zip(names, _collate([dataset[int(index)] for index in batch["item"]]), strict=True))

        indices = ray.data.from_numpy([order[start : start + size] for start in range(0, length, size)])
        batches = indices.rename_columns({"data": "item"}).map_batches(
            load, batch_size=size, num_cpus=1, concurrency=max(1, self._spec.num_workers)
        )
        for batch in batches.iter_batches(batch_size=size, prefetch_batches=2 * max(1, self._spec.num_workers)):
            yield tuple(batch[name] for name in names)

    def close(self) -> None:
        self._source = None


_BUILDERS: Final[Mapping[str, Callable[[LoaderSpec], Loader]]] = {
    "infeed": InfeedLoader,
    "infeed-torch": lambda spec: TorchLoader(spec, is_infeed=True),
    "torch": TorchLoader,
    "torch-fork": lambda spec: TorchLoader(spec, "fork"),
    "torch-spawn": lambda spec: TorchLoader(spec, "spawn"),
    "spdl": SpdlLoader,
    "grain": GrainLoader,
    "tensorflow": TensorFlowLoader,
    "ray": RayLoader,
}

FAMILIES: Final = ("infeed", "torch", "spdl", "grain", "tensorflow", "ray")
PEERS: Final = ("spdl", "grain", "tensorflow", "ray")
_MODULES: Final = {"spdl": "spdl.pipeline", "ray": "ray.data"}


def family_of(library: str) -> str:
    """Return the library that a variant needs: ``infeed-torch`` needs torch and is skipped without it."""
    return "torch" if library == "infeed-torch" else library.split("-")[0]


def is_installed(family: str) -> bool:
    # find_spec also finds a directory of that name without an __init__, but with no origin.
    found = importlib.util.find_spec(family)
    return found is not None and found.origin is not None


def prepare(library: str) -> None:
    """Import the library and apply the settings that a careful user would choose."""
    family = family_of(library)
    importlib.import_module(_MODULES.get(family, family))
    if family == "infeed":
        importlib.import_module("infeed.loader")  # `import infeed` alone imports nothing
    if library == "infeed-torch":
        importlib.import_module("infeed.torch")
    if family == "torch":
        importlib.import_module("torch.utils.data")
        importlib.import_module("torch").set_num_threads(1)
    if family == "grain":
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # Grain reads absl flags, which must be parsed first
    if family == "ray":
        ray = importlib.import_module("ray")
        ray.init(num_cpus=max(64, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)  # same number as workers


def build(library: str, spec: LoaderSpec) -> Loader:
    return _BUILDERS[library](spec)
