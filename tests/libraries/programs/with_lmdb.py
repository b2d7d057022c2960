import json

import lmdb
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    """Holds an open environment, as many image datasets do."""

    def __init__(self, path, **options):
        self.environment = lmdb.open(path, readonly=True, lock=False, **options)

    def __len__(self):
        with self.environment.begin() as transaction:
            return transaction.stat()["entries"]

    def __getitem__(self, index):
        with self.environment.begin(buffers=True) as transaction:
            return np.frombuffer(transaction.get(b"%04d" % index), "f4").copy()


class OpenedInWorkers(Dataset):
    def __init__(self, path):
        self.path = path
        self.environment = None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.environment is None:
            self.environment = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        with self.environment.begin() as transaction:
            return np.frombuffer(transaction.get(b"%04d" % index), "f4").copy()


def write(path, **options):
    with lmdb.open(path, map_size=2**24, **options) as environment, environment.begin(write=True) as transaction:
        for number in range(40):
            transaction.put(b"%04d" % number, np.full(4, number, "f4").tobytes())


def main():
    torch.manual_seed(0)
    write("folder.lmdb")
    write("file.lmdb", subdir=False)
    write("closed.lmdb")
    datasets = {
        "opened": Records("folder.lmdb", readahead=False, meminit=False),
        "one file": Records("file.lmdb", subdir=False),
        "opened in workers": OpenedInWorkers("closed.lmdb"),
    }
    for name, dataset in datasets.items():
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
        for epoch in range(2):
            for batch in loader:
                print(json.dumps({name: [epoch, batch.tolist()]}))


if __name__ == "__main__":
    main()
