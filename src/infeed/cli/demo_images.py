"""Images for the demo: creates a folder of JPEG files and reads it as training code does.

Needs Pillow. The classes are in a separate module, so every kind of worker can import them without the rest of the command
line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from infeed.workers.rng import get_rng

__all__ = ["CLASSES", "CROP_SIDE", "IMAGE_SIZE", "ImageFolder", "TorchImages", "make_images"]

CLASSES: Final = ("circle", "square", "triangle")
IMAGE_SIZE: Final = (320, 240)
CROP_SIDE: Final = 224

TorchTensor: TypeAlias = Any

# The usual ImageNet channel means and standard deviations, rearranged so that one multiplication and one subtraction turn
# bytes into normalized floats.
_MEAN: Final = np.array([0.485, 0.456, 0.406], dtype=np.float32).reshape(3, 1, 1)
_DEVIATION: Final = np.array([0.229, 0.224, 0.225], dtype=np.float32).reshape(3, 1, 1)
_SCALE: Final = 1 / (255 * _DEVIATION)
_OFFSET: Final = _MEAN / _DEVIATION


@final
class ImageFolder:
    """Dataset of ``(image, label)`` for each ``<class>/<name>.jpg`` below a folder.

    The image is a random crop, flipped half of the time, normalized, channels first. Crop and flip draw from
    ``infeed.get_rng()``, so they are the same with every kind of worker.

    Args:
        root: The folder whose subfolders are the classes; labels follow their sorted order.
    """

    def __init__(self, root: Path) -> None:
        self._paths = sorted(root.glob("*/*.jpg"))
        names = sorted({path.parent.name for path in self._paths})
        self._labels = [names.index(path.parent.name) for path in self._paths]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        rng = get_rng()
        with Image.open(self._paths[index]) as file:
            width, height = file.size
            left = int(rng.integers(width - CROP_SIDE + 1))
            top = int(rng.integers(height - CROP_SIDE + 1))
            pixels = np.asarray(file.convert("RGB").crop((left, top, left + CROP_SIDE, top + CROP_SIDE)))
        if rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        # Write into a preallocated array: a plain product would keep the channels-last memory layout.
        image = np.empty((3, CROP_SIDE, CROP_SIDE), dtype=np.float32)
        np.multiply(pixels.transpose(2, 0, 1), _SCALE, out=image)
        image -= _OFFSET
        return image, self._labels[index]


@final
class TorchImages:
    """The same samples with the image as a tensor, as written for torch's loader."""

    def __init__(self, images: ImageFolder) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[TorchTensor, int]:
        import torch  # optional; the demo runs this only if torch is installed

        image, label = self._images[index]
        return torch.from_numpy(image), label


def make_images(root: Path, count: int) -> Iterator[Path]:
    """Write images below ``root`` and yield the path of each after it is written.

    They are the same on every run: soft colour gradients, one shape that is the class, and noise. The noise gives a JPEG file
    about the size and decoding cost of a photograph.
    """
    rng = np.random.default_rng(0)
    width, height = IMAGE_SIZE
    # One noise array, shifted for each image: new noise per image would take most of the time.
    noise = rng.normal(0, 6, size=(2 * height, 2 * width, 3)).astype(np.int16)
    for name in CLASSES:
        (root / name).mkdir()
    for number in range(count):
        name = CLASSES[number % len(CLASSES)]
        clouds = Image.fromarray(rng.integers(0, 256, size=(6, 8, 3), dtype=np.uint8))
        image = clouds.resize(IMAGE_SIZE, Image.Resampling.BICUBIC)
        _draw_shape(image, name, rng)
        y, x = (int(rng.integers(0, limit)) for limit in (height, width))
        pixels = np.asarray(image).astype(np.int16) + noise[y : y + height, x : x + width]
        path = root / name / f"{number:06d}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)
        yield path


def _draw_shape(image: Image.Image, name: str, rng: np.random.Generator) -> None:
    width, height = IMAGE_SIZE
    radius = int(rng.integers(height // 8, height // 3))
    x = int(rng.integers(radius, width - radius))
    y = int(rng.integers(radius, height - radius))
    red, green, blue = (int(value) for value in rng.integers(0, 256, size=3))
    box = (x - radius, y - radius, x + radius, y + radius)
    draw = ImageDraw.Draw(image)
    if name == "circle":
        draw.ellipse(box, fill=(red, green, blue))
    elif name == "square":
        draw.rectangle(box, fill=(red, green, blue))
    else:
        draw.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill=(red, green, blue))
