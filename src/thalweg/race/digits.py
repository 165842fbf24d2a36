"""1,797 handwritten digits of 8 x 8 pixels, and a network of two hidden layers that learns them.

"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository (1998), https://doi.org/10.24432/C50P49, CC BY 4.0; its test part, as distributed with
scikit-learn. ``DATA_LICENSE.md`` says what was changed. The network is plain numpy, its backward
pass written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import TypeAlias

import numpy as np

from thalweg.race.task import Array, ArrayTask, shuffle_batches

Params: TypeAlias = dict[str, Array]

#: The images are stored in random order, so the first of them are a fair sample.
TRAIN_COUNT = 1437
BRIGHTEST = 16
#: (name, inputs, outputs) of each layer, first to last; a ReLU stands between them.
LAYERS = (("hidden.0", 64, 128), ("hidden.1", 128, 128), ("output", 128, 10))


def load() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """1,437 digits to train on and 360 to test on: images as rows of 64 float32 in [0, 1], and labels 0 to 9."""
    with (resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images = stored["images"].reshape(-1, 64).astype(np.float32) / BRIGHTEST
        labels = stored["labels"].astype(np.int64)
    return (images[:TRAIN_COUNT], labels[:TRAIN_COUNT]), (images[TRAIN_COUNT:], labels[TRAIN_COUNT:])


def init(seed: int) -> Params:
    """First parameters, float32, uniform within 1 / sqrt(inputs) as torch.nn.Linear draws them."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, inputs, outputs in LAYERS:
        bound = inputs**-0.5
        params[f"{name}.weight"] = rng.uniform(-bound, bound, (outputs, inputs)).astype(np.float32)
        params[f"{name}.bias"] = rng.uniform(-bound, bound, outputs).astype(np.float32)
    return params


def evaluate(params: Params, images: Array, labels: Array) -> tuple[float, float]:
    """Mean cross-entropy, and the share of images whose digit was recognized."""
    _, log_probabilities = forward(params, images)
    # subtracted, not negated: a loss of nothing is 0, not -0
    loss = 0.0 - float(log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64))
    return loss, float(np.mean(log_probabilities.argmax(axis=1) == labels))


def compute_gradients(params: Params, images: Array, labels: Array) -> Params:
    """The gradient of the mean cross-entropy with respect to each parameter, in the parameters' dtype."""
    inputs, log_probabilities = forward(params, images)
    gradients = {}
    # d loss / d logits of softmax and cross-entropy together
    upstream = np.exp(log_probabilities)
    upstream[np.arange(len(labels)), labels] -= 1
    upstream /= len(labels)
    for (name, _, _), x in zip(reversed(LAYERS), reversed(inputs), strict=True):
        gradients[f"{name}.weight"] = upstream.T @ x
        gradients[f"{name}.bias"] = upstream.sum(axis=0)
        # x left a ReLU, whose slope is 1 where x is positive; the gradient of the images is computed and not used
        upstream = (upstream @ params[f"{name}.weight"]) * (x > 0)
    return {name: gradients[name] for name in params}


def forward(params: Params, images: Array) -> tuple[list[Array], Array]:
    """What enters each layer, and the logarithms of the ten probabilities."""
    inputs: list[Array] = []
    x = images
    for name, _, _ in LAYERS:
        # the first inputs are the images themselves, which no ReLU has to touch
        x = np.maximum(x, 0) if inputs else x
        inputs.append(x)
        x = x @ params[f"{name}.weight"].T + params[f"{name}.bias"]
    shifted = x - x.max(axis=1, keepdims=True)
    return inputs, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def task() -> ArrayTask:
    train, test = load()

    def batches(seed: int, batch_size: int) -> Iterator[tuple[Array, Array]]:
        for chosen in shuffle_batches(TRAIN_COUNT, seed, batch_size):
            yield train[0][chosen], train[1][chosen]

    return ArrayTask(
        name="digits",
        title="Handwritten digits",
        about="A network of two hidden layers learns 1,437 handwritten digits of 8 x 8 pixels, and is tested on 360.",
        init=init,
        batches=batches,
        gradients=lambda params, batch: compute_gradients(params, *batch),
        evaluate=lambda params: (evaluate(params, *train)[0], evaluate(params, *test)[1]),
        steps=120,
        batch_size=64,
        target=0.05,
        score_name="test accuracy",
    )
