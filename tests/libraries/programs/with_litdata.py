import json
import subprocess
import sys

import litdata
import numpy as np
from torch.utils.data import DataLoader


def make_sample(number):
    return {"i": number, "x": np.full(8, number, "f4")}


def main():
    # In its own process, because optimize() sets the start method of multiprocessing to spawn.
    subprocess.run([sys.executable, __file__, "prepare"], check=True)
    for kind in (DataLoader, litdata.StreamingDataLoader):
        loader = kind(litdata.StreamingDataset("optimized", shuffle=True, seed=3), batch_size=8, num_workers=2)
        for epoch in range(2):
            if kind is DataLoader:
                loader.dataset.set_epoch(epoch + 1)  # litdata's loader does this.
            for batch in loader:
                print(json.dumps({kind.__name__: [epoch, batch["i"].tolist(), batch["x"].sum(1).tolist()]}))
    # A state taken after three batches, resumed by another loader.
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("optimized", shuffle=True), batch_size=8, num_workers=2)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            state = loader.state_dict()
            break
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset("optimized", shuffle=True), batch_size=8, num_workers=2)
    loader.load_state_dict(state)
    for batch in loader:
        print(json.dumps({"resumed": batch["i"].tolist()}))


if __name__ == "__main__":
    if sys.argv[1:] == ["prepare"]:
        litdata.optimize(make_sample, list(range(60)), output_dir="optimized", num_workers=1, chunk_size=10)
    else:
        main()
