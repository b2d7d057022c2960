import json

import torch
from tensordict import MemoryMappedTensor, TensorDict, tensorclass
from torch.utils.data import DataLoader


@tensorclass
class Frames:
    image: torch.Tensor
    label: torch.Tensor


def same(batch):
    return batch


def main():
    torch.manual_seed(0)
    source = TensorDict({"x": torch.arange(24.0).view(12, 2), "nested": {"y": torch.arange(12)}}, batch_size=[12])
    frames = Frames(
        image=MemoryMappedTensor.from_tensor(torch.arange(48).view(12, 4)), label=torch.arange(12), batch_size=[12]
    ).memmap("frames")
    loaders = {
        "whole batches": DataLoader(source, batch_size=5, shuffle=True, num_workers=2, collate_fn=same),
        "stacked": DataLoader(source, batch_size=5, num_workers=2, collate_fn=torch.stack),
        "memory-mapped": DataLoader(frames, batch_size=5, num_workers=2, collate_fn=same),
    }
    for name, loader in loaders.items():
        for epoch in range(2):
            for batch in loader:
                values = batch.to_tensordict() if name == "memory-mapped" else batch
                flat = {".".join(key) if isinstance(key, tuple) else key: values[key].tolist() for key in values.keys(True, True)}
                print(json.dumps({name: [epoch, type(batch).__name__, list(batch.batch_size), dict(sorted(flat.items()))]}))


if __name__ == "__main__":
    main()
