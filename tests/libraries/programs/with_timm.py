import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, create_dataset, create_loader


def make_images(folder):
    for number in range(24):
        path = folder / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 10 * number, np.uint8)).save(path)


def main():
    make_images(Path("images"))
    device = torch.device("cpu")
    options = {"input_size": (3, 32, 32), "batch_size": 5, "num_workers": 2, "device": device}
    for name, more in {
        "evaluation": {},
        "prefetcher off": {"use_prefetcher": False},
        "multi-epochs": {"use_multi_epochs_loader": True, "persistent_workers": True},
        "training": {"is_training": True, "no_aug": True, "persistent_workers": True},
        "mixup": {"is_training": True, "no_aug": True, "collate_fn": None, "use_prefetcher": False},
    }.items():
        torch.manual_seed(0)
        dataset = create_dataset("", root="images", is_training=more.get("is_training", False))
        loader = create_loader(dataset, **options, **more)
        mixup = Mixup(mixup_alpha=0.2, num_classes=3) if name == "mixup" else None
        np.random.seed(0)
        for epoch in range(2):
            for images, targets in loader:
                if mixup and len(images) % 2 == 0:
                    images, targets = mixup(images, targets)
                values = images.double().mean((1, 2, 3)).tolist()
                print(json.dumps({name: [epoch, list(images.shape), str(images.dtype), values, targets.tolist()]}))


if __name__ == "__main__":
    main()
