"""Train an image classifier on a folder of JPEG files, decoded with OpenCV in worker processes.

pip install "infeed[torch]" opencv-python-headless
python image_folder_with_opencv.py path/to/folder     # one subfolder per class
python image_folder_with_opencv.py                    # generates a small folder of images
"""

import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

import infeed
from infeed.torch import DataLoader, ImageConvert

SIZE = 64


def generate(folder: Path) -> Path:
    """Write 120 images of two classes: dark noise and bright noise."""
    rng = np.random.default_rng(0)
    for label, brightness in (("dark", 60), ("bright", 190)):
        (folder / label).mkdir(parents=True)
        for number in range(60):
            pixels = rng.normal(brightness, 40, (96, 128, 3)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / label / f"{number}.jpg"), pixels)
    return folder


class ImageFolder(torch.utils.data.Dataset):
    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = [
            (str(path), label) for label, name in enumerate(self.classes) for path in sorted((folder / name).glob("*.jpg"))
        ]
        self.files = infeed.share(files)  # all workers read one copy of this list

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        image = cv2.imread(path)
        if image is None:
            raise OSError(f"{path} is not an image")
        image = cv2.cvtColor(cv2.resize(image, (SIZE, SIZE)), cv2.COLOR_BGR2RGB)
        if infeed.get_rng().random() < 0.5:  # the same flips for any number of workers
            image = image[:, ::-1]
        return np.ascontiguousarray(image.transpose(2, 0, 1)), label  # uint8: a quarter of the bytes of float32


temporary = None if len(sys.argv) > 1 else tempfile.TemporaryDirectory()
folder = generate(Path(temporary.name) / "images") if temporary else Path(sys.argv[1])
device = "cuda:0" if torch.cuda.is_available() else "cpu"
dataset = ImageFolder(folder)
loader = DataLoader(
    dataset,
    batch_size=20,
    shuffle=True,
    seed=0,
    num_workers=2,  # no `if __name__ == "__main__"` is needed
    persistent_workers=True,
    on_error=infeed.ErrorPolicy("skip", budget=0.05),  # a file that cannot be decoded does not end the run
    device=infeed.Device(device, convert=ImageConvert(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))),  # runs on the device
)
model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(len(dataset.classes))).to(device)
model(torch.zeros(1, 3, SIZE, SIZE, device=device))  # gives the last layer its size
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    correct = total = 0
    for images, labels in loader:
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += (scores.argmax(1) == labels).sum().item()
        total += len(labels)
    print(f"epoch {epoch}: {correct / total:.0%} of {total} images correct")
print(loader.statistics())
