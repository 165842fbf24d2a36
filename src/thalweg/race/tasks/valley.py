"""The classic test functions of two variables: nothing to learn from, and everything to be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from thalweg.race.array_task import ArrayTask
from thalweg.race.task import Array, Landscape


@dataclass(frozen=True, kw_only=True)
class Function(Landscape):
    """A function of two numbers whose least value is 0."""

    name: str
    about: str
    gradient: Callable[[float, float], tuple[float, float]]
    start: tuple[float, float]


FUNCTIONS = (
    Function(
        name="Rosenbrock",
        about="A curved valley that is easy to enter and slow to walk down.",
        value=lambda x, y: (1 - x) ** 2 + 100 * (y - x * x) ** 2,
        gradient=lambda x, y: (-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)),
        start=(-1.2, 1.0),
        minima=((1.0, 1.0),),
        x=(-1.8, 1.8),
        y=(-0.7, 2.2),
    ),
    Function(
        name="Ravine",
        about="A straight valley at an angle, a thousand times steeper across than along.",
        value=lambda x, y: (x + y - 3) ** 2 / 200 + 5 * (y - x) ** 2,
        gradient=lambda x, y: ((x + y - 3) / 100 - 10 * (y - x), (x + y - 3) / 100 + 10 * (y - x)),
        start=(-1.0, -0.2),
        minima=((1.5, 1.5),),
        x=(-1.6, 2.4),
        y=(-1.3, 2.2),
    ),
    Function(
        name="Beale",
        about="A flat floor with sharp walls at its corners.",
        value=lambda x, y: (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2,
        gradient=lambda x, y: (
            2 * (1.5 - x + x * y) * (y - 1)
            + 2 * (2.25 - x + x * y**2) * (y**2 - 1)
            + 2 * (2.625 - x + x * y**3) * (y**3 - 1),
            2 * (1.5 - x + x * y) * x + 4 * (2.25 - x + x * y**2) * x * y + 6 * (2.625 - x + x * y**3) * x * y**2,
        ),
        start=(1.0, 1.6),
        minima=((3.0, 0.5),),
        x=(-0.5, 4.3),
        y=(-1.2, 2.0),
    ),
    Function(
        name="Himmelblau",
        about="Four valleys, each as deep as the others.",
        value=lambda x, y: (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2,
        gradient=lambda x, y: (
            4 * x * (x * x + y - 11) + 2 * (x + y * y - 7),
            2 * (x * x + y - 11) + 4 * y * (x + y * y - 7),
        ),
        start=(-0.5, -1.0),
        minima=((3.0, 2.0), (-2.805118, 3.131312), (-3.779310, -3.283186), (3.584428, -1.848126)),
        x=(-5.0, 5.0),
        y=(-5.0, 5.0),
    ),
)

#: Half a decade apart, and wide: the functions differ more than networks do.
RATES = {
    **dict.fromkeys(
        ("AdamW", "AdEMAMix", "MARS", "LAMB", "Adafactor", "Muon", "SOAP"),
        (3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    ),
    **dict.fromkeys(("Lion", "Kron"), (3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
    "SGD": (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "LARS": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
}


def tasks() -> list[ArrayTask]:
    return [task(function) for function in FUNCTIONS]


def task(function: Function) -> ArrayTask:
    def init(seed: int) -> dict[str, Array]:
        """The classic start for seed 0, and places around it for others."""
        away = 0.1 * np.random.default_rng(seed).standard_normal(2) if seed else np.zeros(2)
        # a column, not a vector: so Kron has an axis of size 2 to learn a whole matrix for
        return {"position": (np.array(function.start) + away).reshape(2, 1)}

    def gradients(params: dict[str, Array], batch: None) -> dict[str, Array]:
        x, y = params["position"].ravel().tolist()
        try:
            slope = function.gradient(x, y)
        except OverflowError:  # so far away that Python's numbers end
            slope = (np.nan, np.nan)
        return {"position": np.array(slope).reshape(2, 1)}

    def evaluate(params: dict[str, Array]) -> float:
        x, y = params["position"].ravel()
        return float(function.value(x, y))

    return ArrayTask(
        name=f"valley/{function.name.lower()}",
        title=function.name,
        about=function.about,
        init=init,
        gradients=gradients,
        evaluate=evaluate,
        steps=200,
        seeds=1,
        target=1e-3,
        loss_name="height above the minimum",
        rates=RATES,
        halving=False,  # a path that is high up halfway may well be the one that arrives
        options={"Kron": {"max_skew": None}},
        landscape=function,
    )
