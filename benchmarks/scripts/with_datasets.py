from datasets import Dataset
from torch.utils.data import DataLoader

from marks import mark

mark("imported")


def main():
    table = Dataset.from_dict({"number": list(range(2000)), "text": [f"sentence {number}" for number in range(2000)]})
    loader = DataLoader(table.with_format("torch"), batch_size=50, shuffle=True, num_workers=2)
    for _ in range(2):
        mark("epoch")
        for _ in loader:
            mark("batch")
    mark("end")


if __name__ == "__main__":
    main()
