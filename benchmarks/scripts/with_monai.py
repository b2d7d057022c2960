import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, RandFlipd, ScaleIntensityd

from marks import mark

mark("imported")


def main():
    transform = Compose([ScaleIntensityd("image"), RandFlipd("image", prob=0.5, spatial_axis=0)])
    dataset = Dataset(
        [{"image": torch.full((1, 16, 16), float(number)), "label": number % 2} for number in range(2000)], transform
    )
    loader = DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2)
    for _ in range(2):
        mark("epoch")
        for _ in loader:
            mark("batch")
    mark("end")


if __name__ == "__main__":
    main()
