"""Handwritten digits, and a network of two hidden layers: small, quick, and hard enough to tell optimizers apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thalweg.race import digits, network
from thalweg.race.array_task import ArrayTask, shuffle_batches
from thalweg.race.task import Array

#: The best of each was found by wider sweeps with the race's own seeds: a demonstration, not a benchmark.
RATES = {
    "SGD": (0.15, 0.2, 0.3, 0.5, 0.7),
    "AdamW": (0.015, 0.02, 0.03, 0.05, 0.07),
    "LARS": (7.0, 10.0, 15.0, 20.0, 30.0),
    "LAMB": (0.015, 0.02, 0.03, 0.05, 0.07),
    "Adafactor": (0.07, 0.1, 0.15, 0.2, 0.3),
    "Muon": (0.02, 0.03, 0.05, 0.07, 0.1),
    "Kron": (0.003, 0.005, 0.007, 0.01, 0.015),
    "SOAP": (0.015, 0.02, 0.03, 0.05, 0.07),
}


def task() -> ArrayTask:
    data = digits.load()

    def batches(seed: int, batch_size: int) -> Iterator[tuple[Array, Array]]:
        for chosen in shuffle_batches(len(data.train_labels), seed, batch_size):
            yield data.train_images[chosen], data.train_labels[chosen]

    def gradients(params: network.Params, batch: tuple[Array, Array]) -> Mapping[str, Any]:
        return network.loss_and_gradients(params, *batch)[1]

    def evaluate(params: network.Params) -> tuple[float, float]:
        loss, _ = network.evaluate(params, data.train_images, data.train_labels)
        _, accuracy = network.evaluate(params, data.test_images, data.test_labels)
        return loss, accuracy

    return ArrayTask(
        name="digits",
        title="Handwritten digits",
        about="A network of two hidden layers learns 1,437 handwritten digits of 8 x 8 pixels, and is tested on 360.",
        init=network.init,
        batches=batches,
        gradients=gradients,
        evaluate=evaluate,
        steps=220,
        batch_size=64,
        target=0.05,
        score_name="test accuracy",
        rates=RATES,
    )
