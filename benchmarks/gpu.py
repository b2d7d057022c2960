"""Measures transfer of batches to a GPU: throughput, CPU cost in the main process, and waiting time of training steps.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Each measurement runs in a new process. Libraries alternate, and the result is the median of the repeats. Needs a CUDA device,
torch and, for the training steps, torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import revision  # noqa: E402  # found only through the path set above

SIDE: Final = 224
MODES: Final = ("torch", "torch_pin", "infeed_pin", "infeed_device")


class Images:
    """Samples that cost one copy: an existing image and its label."""

    def __init__(self, length: int, dtype: str) -> None:
        self._length = length
        self._picture = (np.random.default_rng(0).random((3, SIDE, SIDE)) * 255).astype(dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._picture, index % 1000


class Jpegs:
    """Samples that are decoded and resized with OpenCV."""

    def __init__(self, length: int) -> None:
        import cv2

        rng = np.random.default_rng(0)
        small = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        picture = cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        noisy = np.clip(picture + rng.integers(-12, 12, picture.shape), 0, 255).astype(np.uint8)
        self._length, self._data = length, cv2.imencode(".jpg", noisy, [1, 90])[1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        import cv2

        picture = cv2.resize(cv2.imdecode(self._data, 1), (SIDE, SIDE))
        return np.ascontiguousarray(picture.transpose(2, 0, 1)), index % 1000


def open_loader(mode: str, dataset: Any, batch_size: int, workers: int, convert: Callable[[Any], Any] | None) -> Any:
    common = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": True, "drop_last": True}
    if mode.startswith("torch"):
        from torch.utils.data import DataLoader as TorchLoader

        return TorchLoader(dataset, pin_memory=mode == "torch_pin", **common)
    from infeed import Device
    from infeed.torch import DataLoader

    if mode == "infeed_pin":
        return DataLoader(dataset, pin_memory=True, **common)
    return DataLoader(dataset, device=Device("cuda:0", convert=convert), **common)


def on_device(mode: str, loader: Any, convert: Callable[[Any], Any] | None) -> Iterator[Any]:
    for batch in loader:
        if mode == "infeed_device":
            yield batch
            continue
        moved = [part.cuda(non_blocking=mode != "torch") for part in batch]
        yield moved if convert is None else convert(moved)


def measure_copy(mode: str, dtype: str, batch_size: int, workers: int, length: int) -> dict[str, float]:
    """Measure the transfer to a GPU that does no other work."""
    import torch

    dataset = Images(length, dtype)
    loader = open_loader(mode, dataset, batch_size, workers, None)
    result = {}
    for _ in range(3):
        torch.cuda.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        count = sum(1 for _ in on_device(mode, loader, None))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        nbytes = count * batch_size * 3 * SIDE * SIDE * np.dtype(dtype).itemsize
        result = {
            "gb_per_s": nbytes / seconds / 1e9,
            "images_per_s": count * batch_size / seconds,
            "main_cpu_ms_per_batch": (time.process_time() - cpu) / count * 1e3,
        }
    return result


def measure_step(mode: str, net_name: str, source: str, batch_size: int, workers: int, steps: int) -> dict[str, float]:
    """Measure a training step alone and with a loader."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    net = getattr(torchvision.models, net_name)().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loss_of = torch.nn.CrossEntropyLoss()

    def step(pictures: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(net(pictures), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    pictures = torch.rand(batch_size, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch_size,), device="cuda")
    alone = 0.0
    for count in (8, 30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step(pictures, labels)
        torch.cuda.synchronize()
        alone = count * batch_size / (time.perf_counter() - start)
    dataset: Any = Jpegs(steps * batch_size) if source == "jpeg" else Images(steps * batch_size, source)
    from infeed.torch import ImageConvert

    def lay_out(batch: Any) -> Any:
        return [batch[0].to(memory_format=torch.channels_last), batch[1]]

    convert = lay_out if source == "float32" else ImageConvert(torch.bfloat16, channels_last=True)
    loader = open_loader(mode, dataset, batch_size, workers, convert)
    fed = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        for given, labels in on_device(mode, loader, convert):
            step(given, labels)
            count += 1
        torch.cuda.synchronize()
        fed = count * batch_size / (time.perf_counter() - start)
    return {"alone_images_per_s": alone, "fed_images_per_s": fed, "share": fed / alone}


def measure_bus() -> dict[str, float]:
    """Measure the upper limit: repeated copies of one pinned buffer."""
    import torch

    host = torch.empty(64 * 3 * SIDE * SIDE, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    for count in (5, 100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {"gb_per_s": count * host.nbytes / seconds / 1e9}


def run_one(case: str, mode: str, workers: int) -> dict[str, float]:
    kind, *rest = case.split(":")
    if kind == "bus":
        return measure_bus()
    if kind == "copy":
        # At least 0.17 s with infeed: 400 batches of uint8 take 0.09 s, of which the start of the epoch is a large part.
        batch_count = 150 if mode.startswith("torch") else 800 if rest[0] == "uint8" else 400
        return measure_copy(mode, rest[0], 64, workers, 64 * batch_count)
    batch_size = 512 if rest[0] == "resnet18" else 256
    return measure_step(mode, rest[0], rest[1], batch_size, workers, 40 if mode.startswith("torch") else 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="bus,copy:float32,copy:uint8,step:resnet18:float32,step:resnet50:float32,"
                        "step:resnet18:uint8,step:resnet50:uint8,step:resnet18:jpeg,step:resnet50:jpeg")  # fmt: skip
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(*options.one, options.workers)))
        return
    records = []
    for case in options.cases.split(","):
        for repeat in range(options.repeats):
            for mode in ["bus"] if case == "bus" else options.modes.split(","):
                records.append({"case": case, "mode": mode, "repeat": repeat, **_fresh(case, mode, options.workers)})
                print(records[-1], flush=True)
    summary = _summary(records)
    for (case, mode), figures in summary.items():
        print(f"{case:24s} {mode:14s} " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if options.json is not None:
        listed = [{"case": case, "mode": mode, **figures} for (case, mode), figures in summary.items()]
        options.json.write_text(json.dumps({"machine": _machine(), "summary": listed, "records": records}, indent=1))


def _fresh(case: str, mode: str, workers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", case, mode, "--workers", str(workers)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _summary(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    grouped: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        figures = grouped.setdefault((record["case"], record["mode"]), {})
        for name, value in record.items():
            if isinstance(value, float):
                figures.setdefault(name, []).append(value)
    return {key: {name: statistics.median(values) for name, values in figures.items()} for key, figures in grouped.items()}


def _machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
        "numpy": np.__version__, "kernel": platform.release(), **revision(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
