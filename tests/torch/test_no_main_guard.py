"""A typical PyTorch script without a main guard, with `num_workers=2`: with torch on Windows it fails with `BrokenPipeError`.

It has the shape of PyTorch's own CIFAR-10 tutorial. torchvision is replaced by the few names that the tutorial uses, with
synthetic images.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import Journal, start_python

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.torch]

# torch takes 20 s to import under Wine, in the program and in its workers.
_SECONDS = 240.0

TORCHVISION = {
    "__init__.py": "from torchvision import datasets, transforms\n",
    "transforms.py": """
        import torch

        class Compose:
            def __init__(self, transforms):
                self.transforms = transforms
            def __call__(self, image):
                for transform in self.transforms:
                    image = transform(image)
                return image

        class ToTensor:
            def __call__(self, image):
                return torch.from_numpy(image).permute(2, 0, 1).contiguous().float().div(255)

        class Normalize:
            def __init__(self, mean, std):
                self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
            def __call__(self, image):
                return (image - self.mean) / self.std
    """,
    "datasets.py": """
        import numpy as np
        from torch.utils.data import Dataset

        class CIFAR10(Dataset):
            def __init__(self, root, train=True, transform=None, download=False):
                count = 40 if train else 20
                self.data = np.random.default_rng(train).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
                self.targets = [number % 10 for number in range(count)]
                self.transform = transform
            def __len__(self):
                return len(self.data)
            def __getitem__(self, index):
                return self.transform(self.data[index]), self.targets[index]
    """,
}

SCRIPT = """
import sys
from pathlib import Path
import torch
import torchvision
import torchvision.transforms as transforms
from tests.helpers import Journal
{head}
Journal(Path("journal")).write("top level")

transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
batch_size = 4
trainset = torchvision.datasets.CIFAR10(root="./data", train=True, download=True, transform=transform)
trainloader = {loader}(trainset, batch_size=batch_size, shuffle=True, num_workers=2)
testset = torchvision.datasets.CIFAR10(root="./data", train=False, download=True, transform=transform)
testloader = {loader}(testset, batch_size=batch_size, shuffle=False, num_workers=2)

images, labels = next(iter(trainloader))
print(tuple(images.shape), tuple(labels.shape))

net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
for epoch in range(2):
    seen = []
    for inputs, labels in trainloader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        seen += labels.tolist()
    print(sorted(seen) == sorted(trainset.targets))
with torch.no_grad():
    seen = [label for images, labels in testloader for label in labels.tolist()]
print(seen == testset.targets)
"""


@pytest.mark.parametrize("way", ["import", "infeed run"])
def test_a_script_without_a_main_guard_trains(tmp_path: Path, way: str) -> None:
    """With one changed import, or none; nothing in the script runs twice."""
    (tmp_path / "torchvision").mkdir()
    for name, code in TORCHVISION.items():
        (tmp_path / "torchvision" / name).write_text(dedent(code), encoding="utf-8")
    if way == "import":
        script, command = SCRIPT.format(head="from infeed.torch import DataLoader", loader="DataLoader"), ["train.py"]
    else:
        script, command = SCRIPT.format(head="", loader="torch.utils.data.DataLoader"), ["-m", "infeed", "run", "train.py"]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")

    result = start_python(command, cwd=tmp_path).finish(_SECONDS)

    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert result.out.splitlines() == ["(4, 3, 32, 32) (4,)", "True", "True", "True"]
    assert Journal(tmp_path / "journal").lines() == ["top level"]
    if way == "infeed run":
        assert "2 loaders on infeed's engine" in result.err
