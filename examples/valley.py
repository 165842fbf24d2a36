"""The way down four test functions of two variables, by every rule: a picture.

python examples/valley.py [valley.png]

Each rule takes 200 steps at the best of 13 learning rates, which falls in a straight line. Nothing is random, so that
the picture is always the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

import thalweg.numpy
from thalweg.race.page import COLOURS
from thalweg.rules import RULES

STEPS = 200
#: Half a decade apart; LARS has the same, a thousand times larger: its step is a share of the parameter.
RATES = [10 ** (power / 2) for power in range(-10, 3)]
#: A column of two numbers is one axis of size 2 for Kron and SOAP, and a matrix for Muon. Kron whitens gradients, not
#: their average: there is no noise here that an average would take away.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"weight_decay": 0.0},
    "Kron": {"variant": "polyak", "max_skew": None},
    "Muon": {"ns_dtype": None},
    "SOAP": {"weight_decay": 0.0},
}
PAPER = {"svg.hashsalt": "thalweg", "axes.titleweight": "bold", "axes.titlesize": 14, "xtick.color": "#777777"}


class Valley(NamedTuple):
    name: str
    about: str
    height: Callable[[Any, Any], Any]
    slope: Callable[[float, float], tuple[float, float]]
    start: tuple[float, float]
    x: tuple[float, float]
    y: tuple[float, float]


VALLEYS = (
    Valley(
        "Rosenbrock",
        "A curved valley that is easy to enter and slow to walk down.",
        lambda x, y: (1 - x) ** 2 + 100 * (y - x * x) ** 2,
        lambda x, y: (-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)),
        (-1.2, 1.0),
        (-1.8, 1.8),
        (-0.7, 2.2),
    ),
    Valley(
        "Ravine",
        "A straight valley, a thousand times steeper across than along.",
        lambda x, y: (x + y - 3) ** 2 / 200 + 5 * (y - x) ** 2,
        lambda x, y: ((x + y - 3) / 100 - 10 * (y - x), (x + y - 3) / 100 + 10 * (y - x)),
        (-1.0, -0.2),
        (-1.6, 2.4),
        (-1.3, 2.2),
    ),
    Valley(
        "Beale",
        "A flat floor with sharp walls at its corners.",
        lambda x, y: sum((c - x + x * y**n) ** 2 for n, c in enumerate((1.5, 2.25, 2.625), 1)),
        lambda x, y: (
            sum(2 * (c - x + x * y**n) * (y**n - 1) for n, c in enumerate((1.5, 2.25, 2.625), 1)),
            sum(2 * (c - x + x * y**n) * n * x * y ** (n - 1) for n, c in enumerate((1.5, 2.25, 2.625), 1)),
        ),
        (1.0, 1.6),
        (-0.5, 4.3),
        (-1.2, 2.0),
    ),
    Valley(
        "Himmelblau",
        "Four valleys, each as deep as the others.",
        lambda x, y: (x * x + y - 11) ** 2 + (x + y * y - 7) ** 2,
        lambda x, y: (
            4 * x * (x * x + y - 11) + 2 * (x + y * y - 7),
            2 * (x * x + y - 11) + 4 * y * (x + y * y - 7),
        ),
        (-0.5, -1.0),
        (-5.0, 5.0),
        (-5.0, 5.0),
    ),
)


def walk(valley: Valley, rule: str, lr: float) -> np.ndarray:
    """Where a rule is after each step, up to where it leaves for good."""
    optimizer = thalweg.numpy.optimizer(RULES[rule])(
        lr=lambda t: lr * (STEPS + 1 - t) / STEPS, engine="reference", **OPTIONS.get(rule, {})
    )
    position = np.array(valley.start).reshape(2, 1)
    path = [position.ravel().copy()]
    for _ in range(STEPS):
        if not np.all(np.abs(position) < 1e6):
            break
        optimizer.step({"position": position}, {"position": np.array(valley.slope(*position.ravel())).reshape(2, 1)})
        path.append(position.ravel().copy())
    return np.array(path)


def find_best_path(valley: Valley, rule: str) -> np.ndarray:
    """The path that ends lowest, at any of the rates."""
    paths = [walk(valley, rule, lr * (1000 if rule == "LARS" else 1)) for lr in RATES]
    whole = [path for path in paths if len(path) > STEPS]
    return min(whole, key=lambda path: np.nan_to_num(valley.height(*path[-1]), nan=np.inf))


def draw(valley: Valley, axes: Any) -> None:
    x, y = np.meshgrid(np.linspace(*valley.x, 300), np.linspace(*valley.y, 300))
    heights = np.log10(np.maximum(valley.height(x, y), 1e-16))
    levels = np.linspace(np.quantile(heights, 0.03), heights.max(), 18)
    axes.contourf(x, y, heights, levels=levels, cmap="Blues_r", extend="both", alpha=0.6)
    paths = {rule: find_best_path(valley, rule) for rule in RULES}
    for rule in sorted(paths, key=lambda rule: -valley.height(*paths[rule][-1])):  # the best on top
        colour = COLOURS[list(RULES).index(rule)][0]
        style = "--" if rule in ("SGD", "AdamW") else "-"
        halo = [withStroke(linewidth=2.6, foreground="white", alpha=0.8)]
        axes.plot(*paths[rule].T, style, color=colour, linewidth=1.6, label=rule, path_effects=halo)
        axes.plot(*paths[rule][-1], "o", color=colour, markersize=7, markeredgecolor="white")
    axes.plot(*valley.start, "o", color="white", markersize=9, markeredgecolor="black", markeredgewidth=1.5)
    axes.set(xlim=valley.x, ylim=valley.y)
    axes.set_title(f"{valley.name}\n", loc="left")
    axes.text(0, 1.02, valley.about, color="#777777", transform=axes.transAxes)
    axes.spines[:].set_visible(False)


def main(path: str = "valley.png") -> None:
    with matplotlib.rc_context(PAPER), np.errstate(all="ignore"):
        picture = Figure(figsize=(10.8, 9.8), dpi=110, layout="constrained")
        places = picture.subplots(2, 2).ravel()
        for valley, axes in zip(VALLEYS, places, strict=True):
            draw(valley, axes)
        lines = {line.get_label(): line for line in places[0].get_lines()}
        picture.legend([lines[rule] for rule in RULES], list(RULES), loc="outside lower center", ncols=6, frameon=False)
        picture.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
