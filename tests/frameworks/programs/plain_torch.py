"""A plain PyTorch training loop: python plain_torch.py [num_workers]. No main guard, transforms written here."""

import json
import sys

import numpy as np
from torch.utils.data import DataLoader, Dataset

import torch
from torch import nn

num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.manual_seed(0)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).float().div(255)


class Normalize:
    def __init__(self, mean, std):
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image):
        return (image - self.mean) / self.std


class CenterCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        top = (image.shape[0] - self.size) // 2
        left = (image.shape[1] - self.size) // 2
        return image[top : top + self.size, left : left + self.size]


class Images(Dataset):
    """Images computed from their index, so that workers draw no random numbers."""

    def __init__(self, count, transform):
        self.count = count
        self.transform = transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        label = index % 4
        image = rng.integers(0, 128, (20, 20, 3), dtype=np.uint8)
        image[label * 4 : label * 4 + 5] += 100
        return {"image": self.transform(image), "label": label, "name": f"image-{index}"}


transform = Compose([CenterCrop(16), ToTensor(), Normalize([0.3, 0.3, 0.3], [0.2, 0.2, 0.2]), lambda x: x.clamp(-3, 3)])
train = DataLoader(Images(203, transform), batch_size=16, shuffle=True, num_workers=num_workers)
test = DataLoader(Images(50, transform), batch_size=20, num_workers=num_workers)

model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.LazyLinear(4))
model(torch.zeros(1, 3, 16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
losses = []
for epoch in range(2):
    model.train()
    for batch in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = sum((model(b["image"]).argmax(1) == b["label"]).sum().item() for b in test)
print(json.dumps({"program": "plain_torch", "losses": losses, "right": right}))
