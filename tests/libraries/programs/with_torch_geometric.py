import json

import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader, DenseDataLoader, DynamicBatchSampler, RandomNodeLoader
from torch_geometric.transforms import ToDense


class Rings(InMemoryDataset):
    def __init__(self, transform=None):
        super().__init__(transform=transform)
        self.data, self.slices = self.collate([self.ring(3 + number % 4, number) for number in range(24)])

    @staticmethod
    def ring(size, label):
        nodes = torch.arange(size)
        edges = torch.stack([nodes, (nodes + 1) % size])
        return Data(x=torch.full((size, 2), float(label)), edge_index=edges, y=torch.tensor([label]))


def main():
    torch.manual_seed(0)
    rings = Rings()
    loaders = {
        "shuffled": DataLoader(rings, batch_size=5, shuffle=True, num_workers=2, follow_batch=["x"]),
        "by nodes": DataLoader(rings, batch_sampler=DynamicBatchSampler(rings, max_num=16, mode="node"), num_workers=2),
        "dense": DenseDataLoader(Rings(ToDense(6)), batch_size=5, num_workers=2),
        "parts": RandomNodeLoader(Rings.ring(30, 1), num_parts=3, num_workers=2),
    }
    for name, loader in loaders.items():
        for epoch in range(2):
            for batch in loader:
                print(json.dumps({name: [epoch, type(batch).__name__, {key: value.tolist() for key, value in sorted(batch.to_dict().items()) if torch.is_tensor(value)}]}))


if __name__ == "__main__":
    main()
