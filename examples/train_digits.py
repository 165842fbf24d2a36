"""Train a small convolutional network on handwritten digits with each optimizer.

The digits come with thalweg, so that nothing is downloaded.
Usage: python examples/train_digits.py --steps 200 --out digits.json
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compare import Problem, main
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.race import digits

BATCH = 64


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    known = digits.load()
    images, labels = torch.from_numpy(known.train_images), torch.from_numpy(known.train_labels)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def loss(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(network(inputs), targets)


RATES = {
    "SGD": (0.1, 0.2, 0.5, 1.0, 2.0),
    "SGD, momentum 0.9": (0.02, 0.05, 0.1, 0.2, 0.5),
    "LARS": (2.0, 5.0, 10.0, 20.0, 50.0),
    "LAMB": (0.005, 0.01, 0.02, 0.05, 0.1),
    "Adafactor": (0.02, 0.05, 0.1, 0.2, 0.5),
    "Kron": (0.001, 0.002, 0.005, 0.01, 0.02),
}

if __name__ == "__main__":
    main("A small convolutional network on handwritten digits", Problem(model, batches, loss, RATES))
