import json

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader, decollate_batch
from monai.transforms import Compose, EnsureChannelFirstd, Lambdad, RandFlipd, ScaleIntensityRanged, ToTensord
from monai.utils import set_determinism


def main():
    set_determinism(seed=0)
    volumes = [{"image": np.full((4, 4, 4), i, "f4"), "label": i} for i in range(20)]
    fixed = [
        EnsureChannelFirstd("image", channel_dim="no_channel"),
        ScaleIntensityRanged("image", a_min=0, a_max=20, b_min=0, b_max=1),
        Lambdad("label", lambda label: 2 * label),
        ToTensord("image"),
    ]
    loaders = {
        "cached": DataLoader(CacheDataset(volumes, Compose(fixed), progress=False), batch_size=4, shuffle=True, num_workers=2),
        "threaded": ThreadDataLoader(Dataset(volumes, Compose(fixed)), batch_size=4, num_workers=2),
        # Cubes of one value: a flip has no effect on them, and the transform draws random numbers in workers.
        "random": DataLoader(Dataset(volumes, Compose([*fixed, RandFlipd("image", prob=0.5)])), batch_size=4, num_workers=2),
    }
    for name, loader in loaders.items():
        for epoch in range(2):
            for batch in loader:
                image = batch["image"]
                parts = [float(part["image"].mean()) for part in decollate_batch(batch)]
                operations = [operation["class"] for operation in image.applied_operations[0]] if name != "random" else None
                print(json.dumps({name: [epoch, type(image).__name__, list(image.shape), parts, batch["label"].tolist(), operations]}))
    assert torch.is_tensor(image)


if __name__ == "__main__":
    main()
