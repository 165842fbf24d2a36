"""What both examples share: the optimizers, their learning rates, and the search for the best of them."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thalweg
from thalweg.torch import LAMB, LARS, Adafactor, Kron, Optimizer

#: The loss of a run is the mean of its last steps, since single batches vary.
LAST = 10


def vectors(name: str, p: Tensor) -> bool:
    """Biases and the weights of normalisation, which LARS and LAMB had better leave to their plain rule."""
    return p.ndim < 2


OPTIMIZERS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    # without its trust ratio, LARS is SGD
    "SGD": lambda model, lr: LARS(model.named_parameters(), lr, momentum=0.0, trust=False),
    "SGD, momentum 0.9": lambda model, lr: LARS(model.named_parameters(), lr, momentum=0.9, trust=False),
    "LARS": lambda model, lr: LARS(
        model.named_parameters(), lr, overrides=[(vectors, dict(trust=False, lr_scale=0.01))]
    ),
    "LAMB": lambda model, lr: LAMB(model.named_parameters(), lr, overrides=[(vectors, dict(trust=False))]),
    # matrices with an axis below 128 are factored too, or little would be factored here
    "Adafactor": lambda model, lr: Adafactor(model.named_parameters(), lr, min_dim_size_to_factor=16),
    "Kron": lambda model, lr: Kron(model.named_parameters(), lr),
}


@dataclass(frozen=True)
class Problem:
    """A model, its batches and its loss. Both functions take a seed and always answer it alike."""

    model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    #: As many for everyone, each about twice the one before.
    rates: Mapping[str, Sequence[float]]


def train(problem: Problem, name: str, lr: float, steps: int, seed: int) -> list[float]:
    """The loss before each step: up to 10 percent of the steps to warm up, then down to 0 in a straight line."""
    model = problem.model(seed)
    optimizer = OPTIMIZERS[name](model, lr)
    warmup = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / warmup, 1 - t / steps))
    curve: list[float] = []
    for _, (inputs, targets) in zip(range(steps), problem.batches(seed), strict=False):
        loss = problem.loss(model, inputs, targets)
        curve.append(loss.item())
        if not math.isfinite(curve[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return curve


def final(curve: Sequence[float]) -> float:
    last = curve[-LAST:]
    return statistics.fmean(last) if all(map(math.isfinite, last)) else math.inf


def sweep(problem: Problem, name: str, steps: int, seeds: int) -> dict[str, Any]:
    """Train at every rate, from every seed, and keep the rate whose final losses have the lowest mean."""
    runs = {lr: [train(problem, name, lr, steps, seed) for seed in range(seeds)] for lr in problem.rates[name]}
    means = {lr: statistics.fmean(map(final, curves)) for lr, curves in runs.items()}
    best = min(means, key=means.__getitem__)
    return {
        "optimizer": name,
        "lr": best,
        "inside": min(means) < best < max(means),
        "final": means[best],
        "finals": [final(curve) for curve in runs[best]],
        # JSON has no infinity
        "means": {str(lr): mean if math.isfinite(mean) else None for lr, mean in means.items()},
        "curves": [[round(loss, 5) for loss in curve] for curve in runs[best]],
    }


def main(title: str, problem: Problem, arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs at each learning rate (default: %(default)s)")
    parser.add_argument("--only", choices=OPTIMIZERS, action="append", help="leave out all others; may be repeated")
    parser.add_argument("--out", type=Path, help="write losses and curves to this file, as JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # these models are too small for more

    sys.stdout.write(f"{'optimizer':18}  {'lr':>8}  final loss\n")
    results = []
    for name in given.only or OPTIMIZERS:
        found = sweep(problem, name, given.steps, given.seeds)
        results.append(found)
        spread = "" if given.seeds == 1 else f"  ({min(found['finals']):.4f} to {max(found['finals']):.4f})"
        edge = "" if found["inside"] else "  at the edge of its rates"
        sys.stdout.write(f"{name:18}  {found['lr']:8g}  {found['final']:.4f}{spread}{edge}\n")
        sys.stdout.flush()
    if given.out is not None:
        versions = {"thalweg": thalweg.__version__, "torch": torch.__version__, "python": platform.python_version()}
        record = {"title": title, "steps": given.steps, "seeds": given.seeds, "versions": versions, "results": results}
        given.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
