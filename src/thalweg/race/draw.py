"""One picture of the race: how fast each contestant learned, and how well in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from thalweg.race.contestants import Contestant
from thalweg.race.run import Record, mean_final_accuracy, mean_final_loss
from thalweg.show.extras import extra

with extra("cli"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

INK, QUIET, FAINT = "#333333", "#777777", "#e4e4e4"
LINE_HEIGHT = 0.048  # of a label, as a share of the axes
LEAST_LOSS = 1e-10  # below, float32 cannot tell a loss from 0, which a logarithmic axis cannot show


def draw(best: Mapping[str, Sequence[Record]], contestants: Sequence[Contestant], path: Path) -> None:
    """Write the picture of each contestant's best runs as a PNG."""
    racing = [contestant for contestant in contestants if contestant.name in best]
    figure = Figure(
        figsize=(11, 5.2), dpi=160, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    curves, dots = figure.subplots(1, 2, width_ratios=(2.1, 1))
    for axes in (curves, dots):
        quieten(axes)
    draw_losses(curves, best, racing)
    draw_accuracies(dots, best, racing)
    figure.savefig(path)


def draw_losses(axes: Axes, best: Mapping[str, Sequence[Record]], contestants: Sequence[Contestant]) -> None:
    """Training loss by epoch: the mean over seeds, in a band from the least to the largest."""
    axes.set_yscale("log")
    ends = {}
    for contestant in contestants:
        losses = np.maximum([record.losses for record in best[contestant.name]], LEAST_LOSS)
        epochs = np.arange(losses.shape[1])
        mean = losses.mean(axis=0)
        style = "--" if contestant.baseline else "-"
        axes.plot(epochs, mean, style, color=contestant.colour, linewidth=2, solid_capstyle="round")
        if np.isfinite(losses).all():
            axes.fill_between(
                epochs, losses.min(axis=0), losses.max(axis=0), color=contestant.colour, alpha=0.12, linewidth=0
            )
        if math.isfinite(mean[-1]):
            ends[contestant] = mean[-1]
    axes.set_xlim(0, len(epochs) - 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    entitle(axes, "Training loss", f"each at its best learning rate; {seeds_said(best)}")
    label_ends(axes, best, ends)


def label_ends(axes: Axes, best: Mapping[str, Sequence[Record]], ends: Mapping[Contestant, float]) -> None:
    """Each curve's name and learning rate beside its end, moved apart where they would overlap."""
    axes.autoscale_view()  # or the limits would be those from before the curves
    to_axes = axes.transScale + axes.transLimits
    heights = {contestant: to_axes.transform((0, loss))[1] for contestant, loss in ends.items()}
    ordered = sorted(heights, key=heights.__getitem__)
    for contestant, height in zip(ordered, spread([heights[c] for c in ordered], LINE_HEIGHT), strict=True):
        axes.annotate(
            f"{contestant.name}  lr {best[contestant.name][0].lr:g}",
            (1, heights[contestant]),
            xytext=(1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=contestant.colour,
            fontsize=10.5,
            fontweight="bold",
            arrowprops={
                "arrowstyle": "-",
                "color": contestant.colour,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 0,
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights, in the same order from below, with at least that gap between them."""
    # levels that may not fall: heights less the gaps below them; equal neighbours are pooled to their mean
    pools: list[tuple[float, int]] = []
    for index, height in enumerate(heights):
        total, count = height - index * gap, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            below, below_count = pools.pop()
            total, count = total + below, count + below_count
        pools.append((total, count))
    levels = [total / count for total, count in pools for _ in range(count)]
    return [level + index * gap for index, level in enumerate(levels)]


def draw_accuracies(axes: Axes, best: Mapping[str, Sequence[Record]], contestants: Sequence[Contestant]) -> None:
    """Final test accuracy: a ring for each seed, a filled mark for their mean."""
    ranked = sorted(contestants, key=lambda c: (mean_final_accuracy(best[c.name]), -mean_final_loss(best[c.name])))
    for row, contestant in enumerate(ranked):
        records = best[contestant.name]
        finals = [record.accuracies[-1] for record in records]
        mean = mean_final_accuracy(records)
        axes.plot(
            [min(finals), max(finals)],
            [row, row],
            color=contestant.colour,
            linewidth=2,
            alpha=0.3,
            solid_capstyle="round",
        )
        axes.plot(finals, [row] * len(finals), "o", color="white", markeredgecolor=contestant.colour, markersize=6)
        axes.plot(mean, row, "D" if contestant.baseline else "o", color=contestant.colour, markersize=9)
        axes.annotate(
            f"{mean:.1%}",
            (mean, row),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=contestant.colour,
            fontsize=10,
        )
    axes.set_yticks(range(len(ranked)), [contestant.name for contestant in ranked])
    for label, contestant in zip(axes.get_yticklabels(), ranked, strict=True):
        label.set(color=contestant.colour, fontweight="bold", fontsize=10.5)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(-0.5, len(ranked) - 0.3)
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    entitle(axes, "Test accuracy", "filled: mean; rings: seeds")


def entitle(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=26)
    axes.annotate(
        subtitle, (0, 1), xytext=(0, 12), xycoords="axes fraction", textcoords="offset points", color=QUIET, fontsize=10
    )


def seeds_said(best: Mapping[str, Sequence[Record]]) -> str:
    count = max(map(len, best.values()))
    return "one seed" if count == 1 else f"mean and range of {count} seeds"


def quieten(axes: Axes) -> None:
    """Let the data stand out: no box, faint grid behind."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=INK, labelsize=10)
    axes.xaxis.label.set_color(INK)
