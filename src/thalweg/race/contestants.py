"""Who races: four rules of ours beside the two everyone knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from thalweg.numpy import LAMB, LARS, Adafactor, Kron, Optimizer

#: A learning rate as a function of the step, which counts from 1.
Schedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer, and the learning rates it may try."""

    name: str
    make: Callable[[Schedule], Optimizer]
    #: As many for everyone, equally dense, and the best of them inside, not at an end.
    rates: tuple[float, ...]
    #: By Okabe and Ito, whose colours the colour-blind tell apart too; baselines are grey.
    colour: str
    #: There to be compared with.
    baseline: bool = False


CONTESTANTS = (
    # with the trust ratio off, LARS is SGD with momentum and LAMB is AdamW
    Contestant(
        name="SGD",
        make=lambda lr: LARS(lr=lr, momentum=0.9, trust=False),
        rates=(0.15, 0.2, 0.3, 0.5, 0.7),
        colour="#858585",
        baseline=True,
    ),
    Contestant(
        name="AdamW",
        make=lambda lr: LAMB(lr=lr, trust=False),
        rates=(0.015, 0.02, 0.03, 0.05, 0.07),
        colour="#2b2b2b",
        baseline=True,
    ),
    Contestant(
        name="LARS",
        make=lambda lr: LARS(lr=lr, momentum=0.9),
        rates=(7.0, 10.0, 15.0, 20.0, 30.0),
        colour="#e69f00",
    ),
    Contestant(
        name="LAMB",
        make=lambda lr: LAMB(lr=lr),
        rates=(0.015, 0.02, 0.03, 0.05, 0.07),
        colour="#0072b2",
    ),
    Contestant(
        name="Adafactor",
        # factor these layers too, which by default are too small to be worth it
        make=lambda lr: Adafactor(lr=lr, min_dim_size_to_factor=0),
        rates=(0.07, 0.1, 0.15, 0.2, 0.3),
        colour="#009e73",
    ),
    Contestant(
        name="Kron",
        make=lambda lr: Kron(lr=lr),
        rates=(0.003, 0.005, 0.007, 0.01, 0.015),
        colour="#d55e00",
    ),
)
