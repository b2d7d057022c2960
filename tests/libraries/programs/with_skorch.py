import json

import numpy as np
import torch
from skorch import NeuralNetClassifier


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 8)).astype("f4")
    labels = (inputs.sum(1) > 0).astype("i8")
    net = NeuralNetClassifier(
        torch.nn.Linear(8, 2),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=3,
        batch_size=16,
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        iterator_valid__num_workers=2,
        verbose=0,
    )
    net.fit(inputs, labels)
    for row in net.history[:, ("train_loss", "valid_loss", "valid_acc")]:
        print(json.dumps({"history": [float(value) for value in row]}))
    print(json.dumps({"predictions": net.predict(inputs).tolist()}))


if __name__ == "__main__":
    main()
