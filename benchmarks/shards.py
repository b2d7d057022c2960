"""Measures reading of shards with infeed, WebDataset, litdata and torch, from a local disk and from an S3 server.

    python -m benchmarks.shards [--samples 8000] [--size 30000] [--s3] [--json FILE]

Each run is a new process; libraries alternate, and the result is the median. Samples are random bytes and a label.
Every library decodes them with the same function in its workers, and yields batches. The S3 server (s3rver) runs locally
and competes for CPU cores: ratios are meaningful, but rates differ from those of cloud storage. Shards are in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

BATCH_SIZE: Final = 64
SHARDS: Final = 8


def decode_image(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).copy()


class Files:
    """The samples as single files, for torch's loader."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.img"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path = self._paths[index]
        return decode_image(path.read_bytes()), int(path.with_suffix(".cls").read_bytes())


def _infeed(place: dict[str, Any], workers: int, **options: Any) -> Iterable[Any]:
    import infeed

    storage = {"storage_options": place["options"]} if place["is_s3"] else {}
    dataset = infeed.open(
        place["shards"], columns=["img", "cls"], decode={"img": decode_image, "cls": int}, index=place["index"], **storage
    )
    return infeed.DataLoader(dataset, BATCH_SIZE, num_workers=workers, seed=1, **options)


def infeed_exact(place: dict[str, Any], workers: int) -> Iterable[Any]:
    import infeed

    return _infeed(place, workers, sampler=infeed.RandomSampler())


def infeed_block(place: dict[str, Any], workers: int) -> Iterable[Any]:
    return _infeed(place, workers, shuffle="block")


def infeed_in_order(place: dict[str, Any], workers: int) -> Iterable[Any]:
    return _infeed(place, workers)


def webdataset(place: dict[str, Any], workers: int) -> Iterable[Any]:
    import webdataset as wds

    urls = place["urls"]
    pipeline = wds.WebDataset(urls, shardshuffle=SHARDS, empty_check=False).shuffle(1000)
    pipeline = pipeline.to_tuple("img", "cls").map_tuple(decode_image, int).batched(BATCH_SIZE)
    return wds.WebLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=True)


def litdata(place: dict[str, Any], workers: int) -> Iterable[Any]:
    import litdata as ld

    dataset = ld.StreamingDataset(place["litdata"], shuffle=True, seed=1, transform=_litdata_decoded)
    return ld.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=True)


def torch_files(place: dict[str, Any], workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    dataset: Any = Files(Path(place["files"]))
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=True)


CASES: Final[dict[str, tuple[Callable[..., Iterable[Any]], str, bool]]] = {
    "infeed, exact shuffle": (infeed_exact, "infeed", True),
    "infeed, block shuffle": (infeed_block, "infeed", True),
    "infeed, in order": (infeed_in_order, "infeed", True),
    "WebDataset": (webdataset, "webdataset", True),
    "litdata": (litdata, "litdata", False),
    "torch, file by file": (torch_files, "torch", False),
}


def measure(name: str, place: dict[str, Any], workers: int, epochs: int) -> float:
    """Return samples per second of the epochs after the first."""
    loader = CASES[name][0](place, workers)
    rates = []
    for epoch in range(epochs + 1):
        began = time.perf_counter()
        count = sum(len(batch["cls"] if isinstance(batch, dict) else batch[1]) for batch in loader)
        if epoch:
            rates.append(count / (time.perf_counter() - began))
    return statistics.median(rates)


def measure_resume(place: dict[str, Any], workers: int) -> float:
    """Return the seconds from loading a mid-epoch state to the first batch, including worker start-up."""
    first: Any = infeed_block(place, workers)
    state = {**first.state_dict(), "position": BATCH_SIZE * 20, "step": 20}
    next(iter(first))
    first.close()
    loader: Any = infeed_block(place, workers)
    began = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    took = time.perf_counter() - began
    loader.close()
    return took


def write(folder: Path, samples: int, size: int) -> dict[str, Any]:
    from infeed.data.pack import Sample, write_shards

    rng = np.random.default_rng(1)
    (folder / "files").mkdir(parents=True)
    written = []
    for number in range(samples):
        data = rng.bytes(size)
        (folder / "files" / f"{number:07d}.img").write_bytes(data)
        (folder / "files" / f"{number:07d}.cls").write_text(str(number % 1000))
        written.append(Sample(f"{number:07d}", {"img": data, "cls": b"%d" % (number % 1000)}))
    shards = folder / "shards"
    shard_bytes = -(-samples // SHARDS) * (size + 4)
    for _ in write_shards(written, shards, "s", shard_bytes, 0):
        pass
    if importlib.util.find_spec("litdata"):
        from litdata import optimize

        optimize(
            fn=partial(_litdata_sample, folder / "files"),
            inputs=list(range(samples)),
            output_dir=str(folder / "litdata"),
            chunk_bytes=shard_bytes,
            num_workers=1,
            verbose=False,
        )
    urls = sorted(str(path) for path in shards.glob("*.tar"))
    return {
        "shards": urls, "urls": urls, "files": str(folder / "files"), "litdata": str(folder / "litdata"), "is_s3": False,
        "index": str(folder / "index"), "options": {},
    }  # fmt: skip


def _litdata_sample(folder: Path, number: int) -> tuple[bytes, int]:
    path = folder / f"{number:07d}.img"
    return path.read_bytes(), int(path.with_suffix(".cls").read_bytes())


def _litdata_decoded(sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    return decode_image(sample[0]), sample[1]


def upload(server: Any, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    names = [os.path.basename(path) for path in place["shards"]]
    for path, name in zip(place["shards"], names, strict=True):
        server.put(name, Path(path).read_bytes())
    return {
        **place, "is_s3": True, "shards": [f"s3://data/{name}" for name in names],
        "urls": [f"pipe:curl -s http://127.0.0.1:{server.port}/data/{name}" for name in names],
        "options": server.options(), "index": str(folder / "s3-index"),
    }  # fmt: skip


def _child(name: str, place: dict[str, Any], workers: int, epochs: int) -> float:
    command = [sys.executable, "-m", "benchmarks.shards", "--run", json.dumps([name, place, workers, epochs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return float("nan")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--size", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--s3", action="store_true", help="from an S3 server on this machine instead of from local files")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        name, place, workers, epochs = json.loads(arguments.run)
        print(measure_resume(place, workers) if name == "resume" else measure(name, place, workers, epochs))
        return
    folder = Path(tempfile.mkdtemp(prefix="infeed-shards-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = write(folder, arguments.samples, arguments.size)
        if arguments.s3:
            from tests.shards.s3 import serving

            (folder / "s3").mkdir()
            place = upload(stack.enter_context(serving(folder / "s3")), place, folder)
        names = [
            name
            for name, (_, module, has_s3) in CASES.items()
            if importlib.util.find_spec(module) and (has_s3 or not arguments.s3)
        ]
        found: dict[str, list[float]] = {name: [] for name in [*names, "resume"]}
        for _ in range(arguments.repeats):
            for name, rates in found.items():
                rates.append(_child(name, place, arguments.workers, arguments.epochs))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    resume = medians.pop("resume")
    base = medians.get("WebDataset", float("nan"))
    for name, rate in medians.items():
        print(f"{name:24} {rate:10,.0f} samples/s {rate * arguments.size / 1e6:8,.0f} MB/s {rate / base:6.2f} x WebDataset")
    print(f"resume in mid-epoch, first batch: {resume:.3f} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "all": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
