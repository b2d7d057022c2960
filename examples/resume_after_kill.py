"""Kill a training program with SIGKILL in mid-epoch, and resume it at the next batch.

pip install infeed
python resume_after_kill.py

The first process is this program itself with the argument `train`. It saves the loader's state after every batch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import infeed


class Numbers:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, float]:
        time.sleep(0.001)
        return index, infeed.get_rng().normal()  # augmentation: the same number after a resume


def train(folder: Path) -> None:
    """One epoch. What is trained on goes to a file, which stands for the weights of a model."""
    checkpoint = folder / "checkpoint.json"
    with infeed.DataLoader(Numbers(), batch_size=10, shuffle=True, seed=7, num_workers=2) as loader:
        seen: list[list[float]] = []
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            seen = saved["seen"]
            loader.load_state_dict(saved["loader"])
            print(f"resumed after {len(seen)} samples")
        for indices, noise in loader:
            seen += [list(pair) for pair in zip(indices.tolist(), noise.tolist(), strict=True)]
            part = folder / "part.json"
            part.write_text(json.dumps({"seen": seen, "loader": loader.state_dict()}))
            os.replace(part, checkpoint)  # a kill leaves the old or the new file, never half of one
            time.sleep(0.01)  # the training step


def sample_count(checkpoint: Path) -> int:
    return len(json.loads(checkpoint.read_text())["seen"]) if checkpoint.exists() else 0


if sys.argv[1:2] == ["train"]:
    train(Path(sys.argv[2]))
    sys.exit()

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    training = subprocess.Popen([sys.executable, __file__, "train", name])
    while sample_count(folder / "checkpoint.json") < 150 and training.poll() is None:
        time.sleep(0.005)
    training.kill()
    training.wait()
    print(f"killed after {sample_count(folder / 'checkpoint.json')} samples")

    train(folder)
    interrupted = json.loads((folder / "checkpoint.json").read_text())["seen"]

with infeed.DataLoader(Numbers(), batch_size=10, shuffle=True, seed=7) as loader:
    whole = [list(pair) for indices, noise in loader for pair in zip(indices.tolist(), noise.tolist(), strict=True)]
assert interrupted == whole
print(f"{len(whole)} samples, each once, in the order and with the random numbers of an uninterrupted run")
