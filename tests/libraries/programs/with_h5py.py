import json

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Opened(Dataset):
    """Holds an open file."""

    def __init__(self, path):
        self.file = h5py.File(path, "r")

    def __len__(self):
        return len(self.file["x"])

    def __getitem__(self, index):
        return self.file["x"][index]


class OpenedInWorkers(Opened):
    def __init__(self, path):
        self.path = path

    def __getattr__(self, name):
        if name != "file":
            raise AttributeError(name)
        self.file = h5py.File(self.path, "r")
        return self.file

    def __len__(self):
        return 20


def main():
    torch.manual_seed(0)
    with h5py.File("data.h5", "w") as file:
        file["x"] = np.arange(60.0).reshape(20, 3)
    for dataset in (Opened("data.h5"), OpenedInWorkers("data.h5")):
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
        for epoch in range(2):
            for batch in loader:
                print(json.dumps({type(dataset).__name__: [epoch, batch.tolist()]}))


if __name__ == "__main__":
    main()
