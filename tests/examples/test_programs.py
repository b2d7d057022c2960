"""The examples run and do what they demonstrate."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 110.0  # Less than pytest's faulthandler_timeout.

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run(name: str, folder: Path, *arguments: str, needs: Sequence[str] = (), launcher: Sequence[str] = ()) -> str:
    """Runs an example in `folder` and returns its output."""
    missing = [module for module in needs if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.torch
def test_a_folder_of_images_is_trained_on(tmp_path: Path) -> None:
    """The example generates images of two classes and trains a small network to separate them."""
    out = run("image_folder_with_opencv.py", tmp_path, needs=["torch", "cv2"])

    accuracy = [line for line in out.splitlines() if line.startswith("epoch 2:")]
    assert len(accuracy) == 1
    assert int(accuracy[0].split()[2].rstrip("%")) >= 90


def test_a_killed_program_resumes(tmp_path: Path) -> None:
    """The example compares the interrupted run with an uninterrupted one."""
    out = run("resume_after_kill.py", tmp_path)

    assert "killed after" in out
    assert "400 samples, each once, in the order and with the random numbers of an uninterrupted run" in out


@pytest.mark.torch
def test_lightning_resumes_in_mid_epoch(tmp_path: Path) -> None:
    assert "the 96 samples that the first run had not" in run(
        "lightning_trainer.py", tmp_path, str(tmp_path), needs=["torch", "lightning"]
    )


@pytest.mark.torch
def test_accelerate_keeps_the_loader(tmp_path: Path) -> None:
    out = run("accelerate_training.py", tmp_path, needs=["torch", "accelerate"])

    assert "over 16 batches" in out
    assert "1,536 samples" in out  # The statistics of infeed's loader.


@pytest.mark.torch
def test_a_hugging_face_dataset_is_loaded(tmp_path: Path) -> None:
    assert "epoch 1: 256 samples" in run("hugging_face_datasets.py", tmp_path, needs=["torch", "datasets"])


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


@pytest.mark.torch
def test_two_ranks_share_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs under torchrun; the example checks on each rank that every sample was delivered once."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = run("two_ranks_with_torchrun.py", tmp_path, needs=["torch"], launcher=TORCHRUN)

    assert "epoch 1: [100, 100] samples per rank, each sample once" in out


CLUSTER = """
from ray.cluster_utils import Cluster
head = {"num_cpus": 4, "object_store_memory": 200 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
print("address", cluster.address, flush=True)
import sys; sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.linux("Ray is tested on Linux")
def test_two_ranks_under_torchrun_have_workers_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster belongs to another process, because Ray leaves descriptors open in the process that starts it."""
    pytest.importorskip("ray")
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout is not None
        address = next(line for line in cluster.stdout if line.startswith("address ")).split()[1]
        monkeypatch.setenv("RAY_ADDRESS", address)
        try:
            out = run("two_ranks_with_torchrun.py", tmp_path, needs=["torch"], launcher=TORCHRUN)
        finally:
            cluster.communicate()

    assert "epoch 1: [100, 100] samples per rank, each sample once" in out


@pytest.mark.long
@pytest.mark.linux("Ray is tested on Linux")
def test_ranks_have_workers_on_other_nodes(tmp_path: Path) -> None:
    """The example starts a cluster of three nodes."""
    out = run("workers_on_ray.py", tmp_path, needs=["ray"])

    assert "2 ranks, 500 and 500 samples: together each sample once" in out


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.linux("Ray is tested on Linux")
def test_ray_train_has_workers_on_other_nodes(tmp_path: Path) -> None:
    """Two ranks on the first of three nodes. Also needs pandas, which comes with ray[train]."""
    out = run("ray_train.py", tmp_path, needs=["torch", "ray", "pandas", "tensorboardX"])

    assert "200 samples per rank" in out


def test_jax_fits_a_line(tmp_path: Path) -> None:
    out = run("jax_training.py", tmp_path, needs=["jax"])

    assert float(out.splitlines()[3].split()[-1]) < 0.01, out


@pytest.mark.torch
def test_jpegs_arrive_on_the_device_and_are_converted(tmp_path: Path) -> None:
    """Runs on the CPU without a GPU; the example checks type, layout and device itself."""
    assert "8 batches on cpu" in run("jpeg_into_gpu.py", tmp_path, needs=["torch", "PIL"])


@pytest.mark.torch
def test_statistics_arrive_in_tensorboard(tmp_path: Path) -> None:
    """TensorBoard's own reader finds the statistics and the loss."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = run("plot_in_tensorboard.py", tmp_path, str(tmp_path), needs=["torch"])

    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert len(found.Scalars("loss")) == 64
    assert found.Scalars("data/samples")[-1].value == 2048
    assert {"data/wait_share", "data/samples_per_s", "data/workers", "data/sample_median_s"} <= set(found.Tags()["scalars"])
    assert "samples/s" in out


# Runs each cell without a time limit except that of `run`. In its own process, because the library of Jupyter leaves threads
# running, and over sockets with names.
NOTEBOOK = """
import json, os, sys
from jupyter_client import KernelManager

manager = KernelManager(kernel_name="python3", transport="ipc", ip=os.path.abspath("kernel"))
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready()

def hear(message):
    print(message["content"].get("text", ""), end="")

for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        reply = client.execute_interactive("".join(cell["source"]), output_hook=hear)["content"]
        assert reply["status"] == "ok", "\\n".join(reply["traceback"])
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@pytest.mark.linux("starts a kernel over Unix sockets")
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell of `notebook.ipynb` runs in its own kernel."""
    driver = tmp_path / "driver.py"
    driver.write_text(NOTEBOOK, encoding="utf-8")

    out = run(str(driver), tmp_path, str(EXAMPLES / "notebook.ipynb"), needs=["jupyter_client", "ipykernel"])

    assert "samples/s" in out


def test_every_example_is_tested_and_listed() -> None:
    """Every example is tested above and listed in the examples' README."""
    here = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))

    assert len(names) >= 10
    assert [name for name in names if name not in here] == []
    assert [name for name in names if f"({name})" not in listed] == []
