"""A race as a picture, drawn by matplotlib from the same series as the report.

python examples/draw_race.py [race.png [report]]

The race is that of ``thalweg race`` on digits, and continues from the records of the folder. A name that ends with .svg
gives an SVG.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from thalweg.race import race
from thalweg.race.page import BASELINES, colours_of
from thalweg.race.summary import Summary, below_zero, in_percent

#: Identical pictures are identical files, byte for byte.
REPEATABLE: Any = {"svg.hashsalt": "thalweg", "svg.fonttype": "none"}
QUIET, FAINT = "#777777", "#e4e4e4"


def draw_race(summary: Summary, path: str) -> None:
    """Loss by step, and the final score if there is one."""
    colours = {name: on_light for name, (on_light, _) in colours_of(summary).items()}
    ended = [{**each, "colour": colours[each["contestant"]]} for each in summary["results"] if each["loss"] is not None]
    scored = [result for result in ended if result["score"] is not None]
    with matplotlib.rc_context(REPEATABLE):
        picture = Figure(figsize=(11 if scored else 8.5, 5.2), dpi=160, facecolor="white", layout="constrained")
        places: Any = picture.subplots(1, 2 if scored else 1, squeeze=False, width_ratios=(2.1, 1) if scored else None)
        seeds = "one seed" if summary["seeds"] == 1 else f"mean and range of {summary['seeds']} seeds"
        draw_curves(places[0][0], ended, log=not below_zero(summary))
        entitle(places[0][0], summary["loss_name"], f"each at its best learning rate; {seeds}")
        if scored:
            draw_final_scores(places[0][1], scored, summary)
            entitle(places[0][1], summary["score_name"], "mean and range of seeds")
        picture.savefig(path, metadata={"Date": None} if path.endswith(".svg") else {"Software": None})


def entitle(axes: Any, title: str, note: str) -> None:
    axes.set_title(f"{title[:1].upper()}{title[1:]}\n", loc="left", fontsize=13, fontweight="bold")
    axes.text(0, 1.03, note, color=QUIET, transform=axes.transAxes)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.tick_params(which="both", length=0)


def draw_curves(axes: Any, results: Sequence[Summary], *, log: bool) -> None:
    """Curves in their bands, with names at their ends, moved apart where they would overlap."""
    for result in results:
        curve, colour, dash = result["curve"], result["colour"], "--" if result["contestant"] in BASELINES else "-"
        axes.fill_between(curve["step"], curve["low"], curve["high"], color=colour, alpha=0.13, linewidth=0)
        axes.plot(curve["step"], curve["loss"], color=colour, linestyle=dash, linewidth=2)
    axes.set(xlabel="steps", yscale="log" if log else "linear")
    axes.margins(x=0)
    axes.figure.draw_without_rendering()
    below = axes.transAxes.inverted()
    heights = spread([float(below.transform(axes.transData.transform((0, each["loss"])))[1]) for each in results])
    for result, height in zip(results, heights, strict=True):
        words = f"{result['contestant']}  lr {result['lr']:g}"
        end = (result["curve"]["step"][-1], result["loss"])
        line = {"arrowstyle": "-", "color": result["colour"], "linewidth": 0.8, "relpos": (0, 0.5)}
        place: Any = {"xytext": (1.03, height), "textcoords": "axes fraction", "va": "center", "fontweight": "bold"}
        axes.annotate(words, end, color=result["colour"], arrowprops=line, annotation_clip=False, **place)


def spread(heights: Sequence[float], gap: float = 0.05) -> list[float]:
    """Heights near these, in the same order, with at least that gap between them."""
    places = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for _ in range(100):
        for low, high in itertools.pairwise(places):
            lack = gap - (moved[high] - moved[low])
            if lack > 0:
                moved[low], moved[high] = moved[low] - lack / 2, moved[high] + lack / 2
    return moved


def draw_final_scores(axes: Any, results: Sequence[Summary], summary: Summary) -> None:
    """A mark for the mean and a line over the seeds, the best at the top."""
    sign = 1 if summary["best_score"] == "most" else -1
    ranked = sorted(results, key=lambda result: sign * result["score"])
    for row, result in enumerate(ranked):
        colour, mark = result["colour"], "D" if result["contestant"] in BASELINES else "o"
        axes.plot([result["score_low"], result["score_high"]], [row, row], color=colour, alpha=0.4, linewidth=2)
        axes.plot(result["score"], row, mark, color=colour, markersize=8)
    axes.set_yticks(range(len(ranked)), [result["contestant"] for result in ranked])
    if in_percent(summary):
        axes.xaxis.set_major_formatter(lambda value, place: f"{100 * value:.3g}%")


def main(path: str = "race.png", folder: str = "report") -> None:
    draw_race(race("digits", folder=folder).run().summary, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
