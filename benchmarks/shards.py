"""Measures reading of shards with infeed, WebDataset, litdata and torch, from a local disk and from an S3 server.

Also how fast infeed and ``tarfile`` find the members of a shard, and how fast obstore and s3fs (fsspec) read ranges.

    python -m benchmarks.shards --json benchmarks/results/NAME.json      everything; takes tens of minutes
    python -m benchmarks.shards --quick                                  fewer samples, one repeat: a tendency

Each run is a new process. Libraries alternate, and each repeat starts with a different one; the result is the median. Samples
are random bytes and a label. Every library decodes them with the same function in its workers, and yields batches. The first
epoch, which starts workers, does not count. Local files are in the page cache. The S3 server (s3rver, of npm) runs locally
and competes for CPU cores: ratios are meaningful, but rates differ from those of cloud storage. On S3, litdata keeps at most
one megabyte of chunks in its own cache, so that every epoch reads from the server, as with the others.

Needs torch, webdataset, litdata, obstore, boto3 (litdata, for S3), s3fs, psutil and pytest; libraries that are not installed
are left out. The S3 server needs node and npm.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
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
TARGETS: Final[dict[tuple[str, str], tuple[str, float]]] = {  # at least; of seconds, at most
    ("local", "infeed, exact shuffle"): ("times_webdataset", 3.0),
    ("local", "infeed, block shuffle"): ("times_webdataset", 3.0),
    ("s3", "infeed, block shuffle"): ("times_webdataset", 1.0),
    ("local", RESUME): ("first_batch_s", 0.2),
    ("s3", RESUME): ("first_batch_s", 0.2),
}
_MEMBERS: Final = 50_000
_RANGES: Final = 1000
_RANGE_BYTES: Final = 100_000


def measure(name: str, place: dict[str, Any], workers: int, epochs: int) -> dict[str, float]:
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
    return {"samples_per_s": statistics.median(rates), "runs_per_batch": statistics.mean(runs)}


def measure_resume(place: dict[str, Any], workers: int) -> dict[str, float]:
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
    return {"first_batch_s": took}


def measure_scan(name: str, path: str) -> dict[str, float]:
    """Return members per second of finding the members of a tar file."""
    began = time.perf_counter()
    if name == "tarfile":
        with tarfile.open(path) as archive:
            count = len(archive.getmembers())
    else:
        from infeed.data.tar_scan import LOCAL, scan_tar

        with open(path, "rb") as file:
            found = scan_tar(path, lambda offset, size: os.pread(file.fileno(), size, offset), os.path.getsize(path), LOCAL)
        count = len(found.codes)
    assert count == _MEMBERS
    return {"members_per_s": count / (time.perf_counter() - began)}


def measure_ranges(name: str, place: dict[str, Any]) -> dict[str, float]:
    """Return how fast a client reads ranges of an object, concurrently, with its CPU time and how long its import takes."""
    began = time.perf_counter()
    module = importlib.import_module(name)
    import_s = time.perf_counter() - began
    url, options = place["shards"][0], place["options"]
    # Twice as far apart as they are long, so that no client merges them.
    starts = [number * 3 * _RANGE_BYTES % (place["samples"] * 1000) for number in range(_RANGES)]
    if name == "s3fs":
        system = module.S3FileSystem(
            key=options["access_key_id"],
            secret=options["secret_access_key"],
            client_kwargs={"endpoint_url": options["endpoint"], "region_name": options["region"]},
        )
        system.cat_file(url, 0, 2)  # connects

        def read() -> list[bytes]:
            return list(system.cat_ranges([url] * _RANGES, starts, [start + _RANGE_BYTES for start in starts]))
    else:
        store = module.store.from_url("s3://data", client_options={"allow_http": True}, **options)
        path = url.removeprefix("s3://data/")
        module.get_range(store, path, start=0, length=2)

        def read() -> list[bytes]:
            with ThreadPoolExecutor(32) as pool:
                return list(pool.map(lambda start: module.get_range(store, path, start=start, length=_RANGE_BYTES), starts))

    began, cpu = time.perf_counter(), time.process_time()
    found = read()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert all(len(one) == _RANGE_BYTES for one in found)
    return {"ranges_per_s": _RANGES / took, "cpu_ms_per_range": 1000 * cpu / _RANGES, "import_s": import_s}


def write_members(folder: Path) -> str:
    """Write a tar file of small members, and return its path."""
    from infeed.data.pack import Sample, write_shards

    for _ in write_shards((Sample(f"{n:07d}", {"cls": b"%d" % n}) for n in range(_MEMBERS)), folder, "m", 1 << 40, 0):
        pass
    return str(next(folder.glob("*.tar")))


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
    if _is_installed("litdata"):
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


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


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
    measured = {"case": measure, RESUME: measure_resume, "scan": measure_scan, "ranges": measure_ranges}
    return measured[kind](*arguments)


def loading_runs(place: dict[str, Any], arguments: argparse.Namespace) -> dict[str, tuple[str, list[Any]]]:
    """Return kind and arguments of the runs that load samples, by case."""
    names = [case for case, what in CASES.items() if _is_installed(what.module) and (place["is_s3"] or not what.is_for_s3_only)]
    runs: dict[str, tuple[str, list[Any]]] = {
        case: ("case", [case, place, arguments.workers, arguments.epochs]) for case in names
    }
    return {**runs, RESUME: (RESUME, [place, arguments.workers])}


def measure_place(name: str, runs: dict[str, tuple[str, list[Any]]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of each run. A run that failed has only its place and case."""
    names = [case for case in runs if arguments.cases in case]
    records: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        first = repeat % max(1, len(names))
        for case in names[first:] + names[:first]:
            records.append({"place": name, "case": case, **(_run_child(*runs[case]) or {})})
    return records


def summarize(records: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians of the repeats by place and case, and rates relative to WebDataset. Cases that failed are missing.

    Where there is a target, ``is_target_met`` says whether the median meets it.
    """
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
    for (place, case), (name, target) in TARGETS.items():
        of = summary.get(place, {}).get(case, {})
        if name in of:
            of["is_target_met"] = of[name] <= target if name.endswith("_s") else of[name] >= target
    return summary


def show(title: str, cases: dict[str, dict[str, float]], size: int) -> None:
    print(f"\n{title}")
    for name, of in cases.items():
        target = "" if "is_target_met" not in of else " target met" if of["is_target_met"] else " target MISSED"
        if "samples_per_s" not in of:
            values = ", ".join(f"{key} {value:,.3f}" for key, value in of.items() if key != "is_target_met")
            print(f"{name:32} {values}{target}")
            continue
        rate = of["samples_per_s"]
        times = f"{of['times_webdataset']:6.2f} x WebDataset " if "times_webdataset" in of else ""
        print(
            f"{name:32} {rate:10,.0f} samples/s {rate * size / 1e6:8,.0f} MB/s {times}"
            f"{of['runs_per_batch']:5.1f} runs of neighbours per batch of {BATCH_SIZE}{target}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--size", type=int, default=30_000, help="bytes per sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 samples, one epoch, one repeat")
    parser.add_argument("--places", default="local,s3,index,ranges", help="which of these to measure (default: all)")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write records, medians and machine to FILE")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(_run(*json.loads(arguments.run))))
        return
    if arguments.quick:
        arguments.samples, arguments.epochs, arguments.repeats = 1000, 1, 1
    described = machine.describe(("infeed", "torch", "webdataset", "litdata", "obstore", "s3fs"))
    folder = Path(tempfile.mkdtemp(prefix="infeed-shards-"))
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        local = write(folder, arguments.samples, arguments.size)

        @cache
        def s3() -> dict[str, Any]:
            from tests.shards.s3 import serving

            (folder / "s3").mkdir()
            return upload(stack.enter_context(serving(folder / "s3")), local, folder)

        for name in arguments.places.split(","):
            if name == "index":
                path = write_members(folder / "members")
                runs = {library: ("scan", [library, path]) for library in ("infeed", "tarfile")}
            elif name == "ranges":
                runs = {library: ("ranges", [library, s3()]) for library in ("obstore", "s3fs") if _is_installed(library)}
            else:
                runs = loading_runs(s3() if name == "s3" else local, arguments)
            records += measure_place(name, runs, arguments)
            show(name, summarize(records).get(name, {}), arguments.size)
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name not in ("json", "run")}
        needed = {*(case.module for case in CASES.values()), "s3fs"}
        left_out = sorted(module for module in needed if not _is_installed(module))
        result = {
            "machine": described, "arguments": {**options, "batch_size": BATCH_SIZE, "shards": SHARDS}, "left_out": left_out,
            "summary": summarize(records), "records": records,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
