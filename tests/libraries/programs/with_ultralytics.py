import json
from pathlib import Path

import cv2
import numpy as np
import torch
from ultralytics.cfg import get_cfg
from ultralytics.data.build import InfiniteDataLoader, build_dataloader
from ultralytics.data.dataset import YOLODataset


def make_images(folder):
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(12):
        cv2.imwrite(str(folder / "images" / f"{number:02}.png"), np.full((64, 64, 3), 20 * number, np.uint8))
        (folder / "labels" / f"{number:02}.txt").write_text(f"{number % 2} 0.5 0.5 0.{number % 5 + 1} 0.3\n")


def main():
    torch.manual_seed(0)
    make_images(Path("yolo"))
    names = {0: "zero", 1: "one"}
    dataset = YOLODataset(
        img_path="yolo/images", imgsz=64, augment=False, hyp=get_cfg(), batch_size=4, data={"names": names, "channels": 3}, task="detect"
    )
    loaders = {
        "built": build_dataloader(dataset, batch=4, workers=2, shuffle=True),
        "infinite": InfiniteDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=dataset.collate_fn),
    }
    assert isinstance(loaders["built"], InfiniteDataLoader)
    for name, loader in loaders.items():
        for epoch in range(3):
            if epoch == 2:
                loader.reset()
            for batch in loader:
                files = [Path(file).name for file in batch["im_file"]]
                values = batch["img"].double().mean((1, 2, 3)).tolist()
                print(json.dumps({name: [epoch, files, values, batch["cls"].tolist(), batch["bboxes"].tolist(), batch["batch_idx"].tolist()]}))


if __name__ == "__main__":
    main()
