"""Train on a Hugging Face dataset. Arrow tables are shared with workers through the page cache, not copied.

pip install "infeed[torch]" datasets
python hugging_face_datasets.py
"""

import torch
from datasets import Dataset

from infeed.torch import DataLoader


def tokenize(example: dict) -> dict:
    tokens = [ord(letter) % 64 for letter in example["text"][:16]]
    return {"tokens": tokens + [0] * (16 - len(tokens))}


texts = [f"sentence number {number} is {'long' if number % 2 else 'short'}" for number in range(256)]
dataset = Dataset.from_dict({"text": texts, "label": [number % 2 for number in range(256)]})
dataset = dataset.map(tokenize, remove_columns=["text"]).with_format("torch")

model = torch.nn.Sequential(torch.nn.EmbeddingBag(64, 16), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
for epoch in range(2):
    total = 0
    for batch in loader:  # datasets loads all rows of a chunk in one call: __getitems__
        loss = torch.nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += len(batch["label"])
    print(f"epoch {epoch}: {total} samples, loss {loss.item():.3f}")
print(loader.statistics())
