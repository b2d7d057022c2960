import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback

from marks import mark

mark("imported")


class Marks(Callback):
    def on_epoch_begin(self, net, **kwargs):
        mark("epoch")

    def on_batch_begin(self, net, **kwargs):
        mark("batch")


def main():
    inputs = np.random.default_rng(0).normal(size=(2000, 8)).astype("f4")
    net = NeuralNetClassifier(
        torch.nn.Linear(8, 2),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=2,
        batch_size=50,
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        iterator_valid__num_workers=2,
        callbacks=[Marks()],
        verbose=0,
    )
    net.fit(inputs, (inputs.sum(1) > 0).astype("i8"))
    mark("end")


if __name__ == "__main__":
    main()
