import json

import numpy as np
import torch
import zarr
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Holds an open group."""

    def __init__(self, group):
        self.group = group
        self.mean = float(group["x"][:].mean())

    def __len__(self):
        return self.group["x"].shape[0]

    def __getitem__(self, index):
        return self.group["x"][index] - np.float32(self.mean), int(self.group["nested/y"][index])


class Array(Dataset):
    """Holds an open array, and reads whole batches."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return self.array.shape[0]

    def __getitems__(self, indices):
        return list(self.array.oindex[indices])


def write(store):
    group = zarr.create_group(store)
    group.create_array("x", data=np.arange(120, dtype="f4").reshape(40, 3), chunks=(7, 3))
    group.create_array("nested/y", data=np.arange(40) % 5, chunks=(9,))


def main():
    write("data.zarr")
    with zarr.storage.ZipStore("data.zip", mode="w") as store:
        write(store)
    in_memory = zarr.storage.MemoryStore()
    write(in_memory)
    for name, store in (("folder", "data.zarr"), ("zip", zarr.storage.ZipStore("data.zip", mode="r")), ("memory", in_memory)):
        torch.manual_seed(0)
        group = zarr.open_group(store, mode="r")
        samples = DataLoader(Images(group), batch_size=8, shuffle=True, num_workers=2)
        batches = DataLoader(Array(group["x"]), batch_size=8, shuffle=True, num_workers=2)
        for epoch in range(2):
            for x, y in samples:
                print(json.dumps({name: [epoch, x.tolist(), y.tolist()]}))
            for x in batches:
                print(json.dumps({name: [epoch, x.tolist()]}))


if __name__ == "__main__":
    main()
