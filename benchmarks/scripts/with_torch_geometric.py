import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from marks import mark

mark("imported")


class Rings(InMemoryDataset):
    def __init__(self):
        super().__init__()
        self.data, self.slices = self.collate([self.ring(3 + number % 4, number) for number in range(2000)])

    @staticmethod
    def ring(size, label):
        nodes = torch.arange(size)
        edges = torch.stack([nodes, (nodes + 1) % size])
        return Data(x=torch.full((size, 2), float(label)), edge_index=edges, y=torch.tensor([label]))


def main():
    loader = DataLoader(Rings(), batch_size=50, shuffle=True, num_workers=2)
    for _ in range(2):
        mark("epoch")
        for _ in loader:
            mark("batch")
    mark("end")


if __name__ == "__main__":
    main()
