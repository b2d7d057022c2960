import polars as pl
import torch
from torch.utils.data import DataLoader, Dataset

from marks import mark

mark("imported")


class Sentences(Dataset):
    def __init__(self):
        self.table = pl.DataFrame({"number": range(2000), "text": [f"sentence {number}" for number in range(2000)]})

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        number, text = self.table.row(index)
        return torch.tensor(number), text


def main():
    loader = DataLoader(Sentences(), batch_size=50, shuffle=True, num_workers=2)
    for _ in range(2):
        mark("epoch")
        for _ in loader:
            mark("batch")
    mark("end")


if __name__ == "__main__":
    main()
