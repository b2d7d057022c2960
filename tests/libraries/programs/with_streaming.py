import json

import numpy as np
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


def main():
    clean_stale_shared_memory()
    with MDSWriter(out="mds", columns={"i": "int", "x": "ndarray"}, size_limit=1024) as writer:
        for number in range(64):
            writer.write({"i": number, "x": np.full(8, number, "f4")})
    for shuffle in (False, True):
        for kind in (DataLoader, StreamingDataLoader):
            dataset = StreamingDataset(local="mds", shuffle=shuffle, shuffle_seed=5, batch_size=8, num_canonical_nodes=1)
            loader = kind(dataset, batch_size=8, num_workers=2)
            for epoch in range(2):
                for batch in loader:
                    print(json.dumps({kind.__name__: [shuffle, epoch, batch["i"].tolist(), batch["x"].sum(1).tolist()]}))
            del loader, dataset
    # A state taken after three batches, resumed by another loader.
    loader = StreamingDataLoader(StreamingDataset(local="mds", shuffle=True, batch_size=8, num_canonical_nodes=1), batch_size=8, num_workers=2)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            state = loader.state_dict()
            break
    loader = StreamingDataLoader(StreamingDataset(local="mds", shuffle=True, batch_size=8, num_canonical_nodes=1), batch_size=8, num_workers=2)
    loader.load_state_dict(state)
    for batch in loader:
        print(json.dumps({"resumed": batch["i"].tolist()}))


if __name__ == "__main__":
    main()
