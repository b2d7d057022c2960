import json

import numpy as np
import webdataset as wds
from torch.utils.data import DataLoader


def write_shards():
    for shard in range(4):
        with wds.TarWriter(f"shard-{shard}.tar") as writer:
            for number in range(shard * 10, shard * 10 + 10):
                writer.write({"__key__": f"{number:03}", "x.npy": np.full(3, number, "f4"), "cls": number % 3, "json": {"n": number}})


def main():
    write_shards()
    shards = "shard-{0..3}.tar"
    plain = wds.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.npy", "cls", "json").batched(4)
    shuffled = wds.WebDataset(shards, shardshuffle=4, seed=7, detshuffle=True).shuffle(8, seed=7).decode().to_tuple("x.npy", "cls", "json")
    loaders = {
        "DataLoader": DataLoader(plain, batch_size=None, num_workers=2),
        "shuffled": DataLoader(shuffled.batched(4), batch_size=None, num_workers=2),
        "WebLoader": wds.WebLoader(shuffled.batched(4), batch_size=None, num_workers=2).unbatched().batched(5),
    }
    for name, loader in loaders.items():
        for epoch in range(2):
            for arrays, classes, records in loader:
                print(json.dumps({name: [epoch, arrays.tolist(), np.asarray(classes).tolist(), records]}))
    # Without a seed its order differs in every run.
    unseeded = wds.WebDataset(shards, shardshuffle=4).shuffle(8).decode().to_tuple("json").batched(4)
    loader = DataLoader(unseeded, batch_size=None, num_workers=2)
    print(json.dumps({"unseeded": sorted(record["n"] for (records,) in loader for record in records)}))


if __name__ == "__main__":
    main()
