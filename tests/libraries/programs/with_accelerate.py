import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 42

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": index % 2}


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            last = accelerator.gradient_state.end_of_dataloader
            print(json.dumps({"batch": [epoch, batch["x"][:, 0].tolist(), batch["y"].tolist(), round(loss.item(), 5), last]}))
    for batch in accelerator.skip_first_batches(loader, 4):
        print(json.dumps({"skipped": batch["x"][:, 0].tolist()}))


if __name__ == "__main__":
    main()
