"""The paths of optimizers down functions of two variables, over contour lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thalweg.race.summary import Summary
from thalweg.show.extras import extra
from thalweg.show.pictures import INK, QUIET, entitle, figure

with extra("cli"):
    from matplotlib.axes import Axes
    from matplotlib.patheffects import withStroke

#: Lines of equal height, as many as this between the lowest and the highest, evenly spaced in their logarithm.
LEVELS = 26
#: Heights below this are the floor of the valley.
FLOOR = 1e-2


def draw_maps(courses: Sequence[Summary], looks: Mapping[str, Mapping[str, Any]]) -> Any:
    columns = min(2, len(courses))
    rows = -(-len(courses) // columns)
    picture = figure(5.4 * columns, 4.7 * rows + 0.4, dpi=110)  # maps are large files
    panels = picture.subplots(rows, columns, squeeze=False).ravel()
    for axes, course in zip(panels, courses, strict=False):
        draw_map(axes, course, looks)
    for axes in panels[len(courses) :]:
        axes.set_visible(False)
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines() if line.get_label() in looks}
    ordered = [handles[name] for name in looks if name in handles]
    beside = legend_columns(list(handles), picture.get_figwidth())
    picture.legend(handles=ordered, loc="outside lower center", ncols=beside, frameon=False, fontsize=11)
    return picture


def legend_columns(names: Sequence[str], width: float) -> int:
    """How many names find room beside one another in so many inches."""
    each = 0.65 + 0.085 * max(map(len, names), default=0)
    return max(1, min(len(names), int(width / each)))


def line_style(look: Mapping[str, Any]) -> str:
    """Solid for ours, dashed for baselines, dashes and dots for those of other libraries."""
    return "--" if look["baseline"] else "-." if look.get("rival") else "-"


def draw_map(axes: Axes, course: Summary, looks: Mapping[str, Mapping[str, Any]]) -> None:
    grid = course["contours"]
    heights = np.log10(np.maximum(grid["value"], FLOOR))
    levels = np.linspace(heights.min(), heights.max(), LEVELS)
    axes.contourf(grid["x"], grid["y"], heights, levels=levels, cmap="Blues_r", alpha=0.75)
    axes.contour(grid["x"], grid["y"], heights, levels=levels, colors="white", linewidths=0.5, alpha=0.7)
    for x, y in grid["minima"]:
        axes.plot(x, y, "*", color=INK, markersize=11, markeredgecolor="white", zorder=4)
    # the best last, on top of the others
    for result in reversed(course["results"]):
        if result["path"] is None:
            continue
        look = looks[result["contestant"]]
        x, y = np.array(result["path"], float).T
        style = line_style(look)
        axes.plot(
            x,
            y,
            style,
            color=look["colour"],
            linewidth=1.5,
            label=result["contestant"],
            path_effects=[withStroke(linewidth=2.9, foreground="white", alpha=0.8)],
            zorder=3,
        )
        axes.plot(x[-1], y[-1], "o", color=look["colour"], markersize=7, markeredgecolor="white", zorder=5)
    start = next((result["path"][0] for result in course["results"] if result["path"]), None)
    if start is not None:
        axes.plot(*start, "o", color="white", markeredgecolor=INK, markersize=8, zorder=5)
    axes.set(xlim=(grid["x"][0], grid["x"][-1]), ylim=(grid["y"][0], grid["y"][-1]))
    axes.tick_params(length=0, colors=QUIET, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    entitle(axes, course["title"], course["about"])
