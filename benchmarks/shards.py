"""Measures reading of shards with infeed, WebDataset, litdata and torch, from a local disk and from an S3 server.

    python -m benchmarks.shards --json benchmarks/results/NAME.json      everything; takes tens of minutes
    python -m benchmarks.shards --quick                                  fewer samples, one repeat: a tendency

Each run is a new process. Libraries alternate, and each repeat starts with a different one; the result is the median. Samples
are random bytes and a label. Every library decodes them with the same function in its workers, and yields batches. The first
epoch, which starts workers, does not count. Local files are in the page cache. The S3 server (s3rver, of npm) runs locally
and competes for CPU cores: ratios are meaningful, but rates differ from those of cloud storage. On S3, litdata keeps at most
one megabyte of chunks in its own cache, so that every epoch reads from the server, as with the others.

Needs torch, webdataset, litdata, obstore, boto3 (litdata, for S3), psutil and pytest; libraries that are not installed are left
out. The S3 server needs node and npm.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks import machine

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


class Objects:
    """The samples as single objects on S3, for torch's loader. Each worker connects itself."""

    def __init__(self, options: dict[str, Any], count: int) -> None:
        self._options, self._count = options, count
        self._store: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self._store is None:
            from obstore.store import from_url

            self._store = from_url("s3://data/files", client_options={"allow_http": True}, **self._options)
        name = f"{index:07d}"
        return decode_image(self._read(f"{name}.img")), int(self._read(f"{name}.cls"))

    def _read(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._store, name).bytes())


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


def infeed_blocks(size: int, window: int, place: dict[str, Any], workers: int) -> Iterable[Any]:
    import infeed

    return _infeed(place, workers, sampler=infeed.RandomSampler(block_size=size, window=window))


def webdataset(place: dict[str, Any], workers: int) -> Iterable[Any]:
    import webdataset as wds

    pipeline = wds.WebDataset(place["urls"], shardshuffle=SHARDS, empty_check=False).shuffle(1000)
    pipeline = pipeline.to_tuple("img", "cls").map_tuple(decode_image, int).batched(BATCH_SIZE)
    return wds.WebLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=True)


def litdata(place: dict[str, Any], workers: int) -> Iterable[Any]:
    import litdata as ld

    more: dict[str, Any] = {}
    if place["is_s3"]:
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litdata has no option for it; workers are forked
        options = place["options"]
        storage = {
            "endpoint_url": options["endpoint"], "region_name": options["region"],
            "aws_access_key_id": options["access_key_id"], "aws_secret_access_key": options["secret_access_key"],
        }  # fmt: skip
        more = {"storage_options": storage, "cache_dir": tempfile.mkdtemp(dir=place["scratch"]), "max_cache_size": "1MB"}
    dataset = ld.StreamingDataset(place["litdata"], shuffle=True, seed=1, transform=_litdata_decoded, **more)
    return ld.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=True)


def torch_single(place: dict[str, Any], workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    dataset: Any = Objects(place["options"], place["samples"]) if place["is_s3"] else Files(Path(place["files"]))
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=True)


class Case(NamedTuple):
    make: Callable[[dict[str, Any], int], Iterable[Any]]
    module: str  # that it needs
    is_for_s3_only: bool = False


CASES: Final[dict[str, Case]] = {
    "infeed, exact shuffle": Case(infeed_exact, "infeed"),
    "infeed, block shuffle": Case(infeed_block, "infeed"),
    "infeed, in order": Case(infeed_in_order, "infeed"),
    "WebDataset": Case(webdataset, "webdataset"),
    "litdata": Case(litdata, "litdata"),
    "torch, file by file": Case(torch_single, "torch"),
} | {
    f"infeed, block_size={size}, window={window}": Case(partial(infeed_blocks, size, window), "infeed", True)
    for size, window in ((4, 1), (8, 1), (8, 4), (16, 1), (16, 4), (32, 1), (32, 16))
}
RESUME: Final = "resume"


def measure(name: str, place: dict[str, Any], workers: int, epochs: int) -> tuple[float, float]:
    """Return samples per second of the epochs after the first, and the mean number of runs of neighbours in a batch."""
    loader = CASES[name].make(place, workers)
    rates, runs = [], []
    for epoch in range(epochs + 1):
        labels = []
        began = time.perf_counter()
        for batch in loader:
            labels.append(batch["cls"] if isinstance(batch, dict) else batch[1])
        took = time.perf_counter() - began
        if epoch:
            rates.append(sum(map(len, labels)) / took)
            runs += [1 + int((np.diff(np.sort(np.asarray(one))) != 1).sum()) for one in labels]
    return statistics.median(rates), statistics.mean(runs)


def measure_resume(place: dict[str, Any], workers: int) -> float:
    """Return the seconds from loading a mid-epoch state to the first batch, including worker start-up."""
    step = place["samples"] // BATCH_SIZE // 2
    first: Any = infeed_block(place, workers)
    state = {**first.state_dict(), "position": BATCH_SIZE * step, "step": step}
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
        (folder / "files" / f"{number:07d}.cls").write_text(str(number))
        written.append(Sample(f"{number:07d}", {"img": data, "cls": b"%d" % number}))
    shards = folder / "shards"
    # The end of an archive takes up to two records of 10 KiB.
    shard_bytes = -(-samples // SHARDS) * written[0].archived_bytes() + 20_480
    for _ in write_shards(written, shards, "s", shard_bytes, 0):
        pass
    if importlib.util.find_spec("litdata"):
        # In a process of its own, because it changes how multiprocessing starts processes.
        _run_child("litdata", [str(folder), samples, shard_bytes])
    urls = sorted(str(path) for path in shards.glob("*.tar"))
    return {
        "shards": urls, "urls": urls, "files": str(folder / "files"), "litdata": str(folder / "litdata"), "is_s3": False,
        "index": str(folder / "index"), "options": {}, "samples": samples, "scratch": str(folder),
    }  # fmt: skip


def write_litdata(folder: Path, samples: int, chunk_bytes: int) -> None:
    from litdata import optimize

    optimize(
        fn=partial(_litdata_sample, folder / "files"),
        inputs=list(range(samples)),
        output_dir=str(folder / "litdata"),
        chunk_bytes=chunk_bytes,
        num_workers=1,
        verbose=False,
    )


def _litdata_sample(folder: Path, number: int) -> tuple[bytes, int]:
    path = folder / f"{number:07d}.img"
    return path.read_bytes(), int(path.with_suffix(".cls").read_bytes())


def _litdata_decoded(sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    return decode_image(sample[0]), sample[1]


def upload(server: Any, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    with ThreadPoolExecutor(8) as pool:
        for kind in ("shards", "files", "litdata"):
            paths = sorted((folder / kind).glob("*"))
            list(pool.map(lambda path, kind=kind: server.put(f"{kind}/{path.name}", path.read_bytes()), paths))
    names = [os.path.basename(path) for path in place["shards"]]
    return {
        **place, "is_s3": True, "shards": [f"s3://data/shards/{name}" for name in names],
        "urls": [f"pipe:curl -s http://127.0.0.1:{server.port}/data/shards/{name}" for name in names],
        "options": server.options(), "index": str(folder / "s3-index"), "litdata": "s3://data/litdata",
    }  # fmt: skip


def _run_child(kind: str, arguments: list[Any]) -> Any:
    """Run one measurement in a new process; return ``None`` if it failed."""
    command = [sys.executable, "-m", "benchmarks.shards", "--run", json.dumps([kind, arguments])]
    path = os.pathsep.join(filter(None, (str(machine.ROOT), str(machine.ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=machine.ROOT, env=environ)
    if done.returncode:
        print(f"{kind} {arguments[:1]} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _run(kind: str, arguments: list[Any]) -> Any:
    if kind == "litdata":
        return write_litdata(Path(arguments[0]), *arguments[1:])
    return measure_resume(*arguments[1:3]) if kind == RESUME else measure(*arguments)


def measure_place(name: str, place: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of each run. A run that failed has only its place and case."""
    names = [
        case
        for case, what in CASES.items()
        if importlib.util.find_spec(what.module) and (place["is_s3"] or not what.is_for_s3_only)
    ]
    names = [case for case in [*names, RESUME] if arguments.cases in case]
    records: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        first = repeat % len(names)
        for case in names[first:] + names[:first]:
            kind = RESUME if case == RESUME else "case"
            found = _run_child(kind, [case, place, arguments.workers, arguments.epochs])
            values: dict[str, float] = {}
            if found is not None:
                values = {"first_batch_s": found} if case == RESUME else {"samples_per_s": found[0], "runs_per_batch": found[1]}
            records.append({"place": name, "case": case, **values})
    return records


def summarize(records: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians of the repeats by place and case, and rates relative to WebDataset. Cases that failed are missing."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for place, case in dict.fromkeys((one["place"], one["case"]) for one in records):
        runs = [one for one in records if (one["place"], one["case"]) == (place, case)]
        names = dict.fromkeys(name for one in runs for name in one if name not in ("place", "case"))
        of = {name: statistics.median(one[name] for one in runs if name in one) for name in names}
        if of:
            summary.setdefault(place, {})[case] = of
    for cases in summary.values():
        base = cases.get("WebDataset", {}).get("samples_per_s")
        for of in cases.values():
            if base and "samples_per_s" in of:
                of["times_webdataset"] = of["samples_per_s"] / base
    return summary


def show(title: str, cases: dict[str, dict[str, float]], size: int) -> None:
    print(f"\n{title}")
    for name, of in cases.items():
        if name == RESUME:
            print(f"resume in the middle of an epoch, first batch: {of['first_batch_s']:.3f} s")
            continue
        rate = of["samples_per_s"]
        times = f"{of['times_webdataset']:6.2f} x WebDataset " if "times_webdataset" in of else ""
        print(
            f"{name:32} {rate:10,.0f} samples/s {rate * size / 1e6:8,.0f} MB/s {times}"
            f"{of['runs_per_batch']:5.1f} runs of neighbours per batch of {BATCH_SIZE}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--size", type=int, default=30_000, help="bytes per sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 samples, one epoch, one repeat")
    parser.add_argument("--places", default="local,s3", help="local, s3 or both (default)")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write records, medians and machine to FILE")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(_run(*json.loads(arguments.run))))
        return
    if arguments.quick:
        arguments.samples, arguments.epochs, arguments.repeats = 1000, 1, 1
    places = arguments.places.split(",")
    described = machine.describe(("infeed", "torch", "webdataset", "litdata", "obstore"))
    folder = Path(tempfile.mkdtemp(prefix="infeed-shards-"))
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        local = write(folder, arguments.samples, arguments.size)
        for name in places:
            place = local
            if name == "s3":
                from tests.shards.s3 import serving

                (folder / "s3").mkdir()
                place = upload(stack.enter_context(serving(folder / "s3")), local, folder)
            records += measure_place(name, place, arguments)
            show(name, summarize(records).get(name, {}), arguments.size)
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name not in ("json", "run")}
        left_out = sorted({case.module for case in CASES.values() if not importlib.util.find_spec(case.module)})
        result = {
            "machine": described, "arguments": {**options, "batch_size": BATCH_SIZE, "shards": SHARDS}, "left_out": left_out,
            "summary": summarize(records), "records": records,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
