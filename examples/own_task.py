"""A race on a problem of your own: a small convolutional network on handwritten digits, in PyTorch.

Usage, in this folder: thalweg race own_task:task
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thalweg.race import ModelTask, digits

TRAIN, TEST = [(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in digits.load()]


def model(seed: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def batches(seed: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images, labels = TRAIN
    while True:
        chosen = torch.randint(len(labels), (batch_size,), generator=generator)
        yield images[chosen], labels[chosen]


def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(network(images), labels)


def evaluate(network: nn.Module) -> tuple[Tensor, Tensor]:
    """The training loss, which decides the race, and the test score, which is only shown."""
    device = next(network.parameters()).device
    train, (images, labels) = [x.to(device) for x in TRAIN], [x.to(device) for x in TEST]
    return loss(network, train), (network(images).argmax(1) == labels).float().mean()


task = ModelTask(
    name="convnet",
    title="A convolutional network on digits",
    model=model,
    batches=batches,
    loss=loss,
    evaluate=evaluate,
    steps=200,
    batch_size=64,
    seeds=1,
    target=0.1,
    score_name="test accuracy",
)
