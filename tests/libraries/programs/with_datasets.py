import json

import torch
from datasets import Dataset, load_from_disk
from torch.utils.data import DataLoader


def square(sample):
    return {"square": sample["i"] ** 2}


def main():
    torch.manual_seed(0)
    table = Dataset.from_dict({"i": list(range(40)), "text": [f"sentence {i}" for i in range(40)]})
    mapped = table.map(square).filter(lambda sample: sample["i"] % 5).with_format("torch")
    stream = table.to_iterable_dataset(num_shards=4).map(square).shuffle(seed=3, buffer_size=8)
    mapped.save_to_disk("saved")
    cases = (
        ("map", mapped, True),
        ("memory-mapped", load_from_disk("saved"), True),
        ("iterable", stream, None),
        # The second worker has nothing to read.
        ("one shard", table.to_iterable_dataset().map(square), None),
    )
    for name, dataset, shuffle in cases:
        loader = DataLoader(dataset, batch_size=8, shuffle=shuffle, num_workers=2)
        for epoch in range(2):
            if shuffle is None:
                dataset.set_epoch(epoch)
            for batch in loader:
                print(json.dumps({name: [epoch, batch["i"].tolist(), batch["square"].tolist(), batch["text"]]}))


if __name__ == "__main__":
    main()
