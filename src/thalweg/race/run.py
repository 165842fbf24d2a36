"""Running the race: the same network, batches and number of epochs for everyone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from thalweg.numpy import Optimizer
from thalweg.race import network
from thalweg.race.contestants import Contestant, Schedule
from thalweg.race.digits import Digits

BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the race stands after an epoch."""

    contestant: str
    lr: float
    seed: int
    epoch: int
    #: On the training set.
    loss: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training run."""

    contestant: str
    lr: float
    seed: int
    #: Loss on the training set before the first epoch and after each; infinite from divergence on.
    losses: tuple[float, ...]
    #: Share of the test set recognized, at the same times.
    accuracies: tuple[float, ...]
    #: Spent on gradients and steps, not on measuring; no part of what a repetition must reproduce.
    seconds: float = field(compare=False)
    parameter_count: int
    state_bytes: int

    @property
    def state_bytes_per_parameter(self) -> float:
        return self.state_bytes / self.parameter_count


def run(
    contestants: Iterable[Contestant],
    data: Digits,
    *,
    epochs: int,
    seeds: Sequence[int] = (0,),
    on_epoch: Callable[[Progress], None] = lambda progress: None,
) -> list[Record]:
    """Train once with every contestant, learning rate and seed.

    A seed fixes the first parameters and the order of the batches, so that all contestants meet
    the same ones; the whole race is a function of its arguments, the seconds apart.
    """
    return [
        train(contestant, lr, seed, data, epochs=epochs, on_epoch=on_epoch)
        for contestant in contestants
        for lr in contestant.rates
        for seed in seeds
    ]


def best(records: Iterable[Record]) -> dict[str, list[Record]]:
    """For each contestant the runs of its best learning rate, one for each seed.

    Best is the least final training loss, averaged over seeds: the test set has no say.
    """
    by_rate: dict[str, dict[float, list[Record]]] = {}
    for record in records:
        by_rate.setdefault(record.contestant, {}).setdefault(record.lr, []).append(record)
    return {name: min(rates.values(), key=mean_final_loss) for name, rates in by_rate.items()}


def mean_final_loss(records: Sequence[Record]) -> float:
    return math.fsum(record.losses[-1] for record in records) / len(records)


def mean_final_accuracy(records: Sequence[Record]) -> float:
    return math.fsum(record.accuracies[-1] for record in records) / len(records)


def train(
    contestant: Contestant,
    lr: float,
    seed: int,
    data: Digits,
    *,
    epochs: int,
    on_epoch: Callable[[Progress], None],
) -> Record:
    """One run. It stops learning where it diverges, yet its record has its full length."""
    params = network.init(seed)
    batches = np.random.default_rng(seed)
    optimizer = contestant.make(linear_decay(lr, epochs * steps_per_epoch(data)))
    loss, accuracy = measure(params, data)
    losses, accuracies, seconds = [loss], [accuracy], 0.0

    for epoch in range(1, epochs + 1):
        if math.isfinite(loss):
            start = time.perf_counter()
            train_one_epoch(optimizer, params, data, batches)
            seconds += time.perf_counter() - start
            loss, accuracy = measure(params, data)
        losses.append(loss)
        accuracies.append(accuracy)
        on_epoch(Progress(contestant=contestant.name, lr=lr, seed=seed, epoch=epoch, loss=loss))

    return Record(
        contestant=contestant.name,
        lr=lr,
        seed=seed,
        losses=tuple(losses),
        accuracies=tuple(accuracies),
        seconds=seconds,
        parameter_count=sum(p.size for p in params.values()),
        state_bytes=sum(entry.nbytes for state in optimizer.state.values() for entry in state.values()),
    )


def linear_decay(lr: float, steps: int) -> Schedule:
    """From lr at step 1 down to lr / steps at the last, so that no one is judged amid its noise."""
    return lambda t: lr * (steps + 1 - t) / steps


def steps_per_epoch(data: Digits) -> int:
    return len(data.train_labels) // BATCH_SIZE


def train_one_epoch(optimizer: Optimizer, params: network.Params, data: Digits, batches: np.random.Generator) -> None:
    """Steps over full batches in a new random order; the few images left over wait for another epoch."""
    order = batches.permutation(len(data.train_labels))
    # a rate that is too large is part of any sweep: its overflows are recorded, not warned of
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in order[: steps_per_epoch(data) * BATCH_SIZE].reshape(-1, BATCH_SIZE):
            _, gradients = network.loss_and_gradients(params, data.train_images[batch], data.train_labels[batch])
            optimizer.step(params, gradients)


def measure(params: network.Params, data: Digits) -> tuple[float, float]:
    """Loss on the training set, infinite if it is no number, and accuracy on the test set."""
    with np.errstate(over="ignore", invalid="ignore"):
        loss, _ = network.evaluate(params, data.train_images, data.train_labels)
        _, accuracy = network.evaluate(params, data.test_images, data.test_labels)
    return (loss if math.isfinite(loss) else math.inf), accuracy
