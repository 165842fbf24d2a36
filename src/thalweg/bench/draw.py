"""One picture: how long a step took, a panel for each model and a bar for each contestant."""

from __future__ import annotations

from pathlib import Path

from thalweg.bench.record import Bench, Comparison, Row
from thalweg.bench.report import milliseconds
from thalweg.plan.terminal import human_count
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.pictures import INK, QUIET, entitle, figure, name_rows, save, write

with extra("cli"):
    from matplotlib.axes import Axes

#: Inches: of a bar, and of what stands above and below the bars of a panel.
BAR, AROUND = 0.34, 1.5
PEER, REFERENCE = "#c4c4c4", "#8f8f8f"


def draw(found: Bench, folder: Path, stem: str = "bench") -> list[Path]:
    """Write the picture as PNG and SVG; nothing where nothing was measured."""
    measured = [comparison for comparison in found.comparisons if comparison.rows]
    if not measured:
        return []
    heights = [AROUND + BAR * len(comparison.rows) for comparison in measured]
    picture = figure(10, sum(heights))
    panels = picture.subplots(len(measured), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, comparison in zip(panels, measured, strict=True):
        draw_panel(axes, comparison)
    return save(picture, folder, stem)


def draw_panel(axes: Axes, found: Comparison) -> None:
    """Draw medians as bars from the top, quartiles as lines over them, floors as ticks, the host's time as circles."""
    rows = found.rows
    name_rows(axes, [row.contestant for row in rows])
    for place, row in enumerate(rows):
        low, high = (1e3 * seconds for seconds in row.quartiles)
        right = max(high, 1e3 * row.median, 1e3 * (row.host_median or 0))
        axes.barh(place, 1e3 * row.median, height=0.68, color=choose_colour(found, row))
        axes.plot([low, high], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        if row.host_median is not None:
            axes.plot([1e3 * row.host_median], [place], marker="o", color=INK, markerfacecolor="white")
        if row.share_of_floor is not None:
            axes.plot(2 * [1e3 * row.median * row.share_of_floor], [place - 0.34, place + 0.34], color=QUIET)
        ratio = row.ratio if row.host_ratio is None else row.host_ratio
        compared = "" if row.contestant == found.reference else f"  ({ratio:.2f} ×)"
        label = write(axes, milliseconds(row.median) + compared, (right, place), (6, 0), va="center", fontsize=9.5)
        label.set_in_layout(False)  # there is room for it within the axes
    axes.set_xlim(0, 1.3e3 * max(max(row.median, row.quartiles[1], row.host_median or 0) for row in rows))
    explained = "bars: the device; circles and ratios: the host" if rows[0].host else "median, and the quartiles"
    floors = "; ticks: the floor" if any(row.share_of_floor is not None for row in rows) else ""
    axes.set_xlabel(f"milliseconds a step ({explained}{floors})")
    subtitle = f"{human_count(found.parameters)} parameters, {found.tensors} tensors"
    entitle(axes, found.model + (" (disturbed)" if found.disturbed else ""), subtitle)


def choose_colour(found: Comparison, row: Row) -> str:
    """Ours have the colour of their rule; the reference is darker than other peers."""
    if row.package == "thalweg":
        return colour_of(row.rule)
    return REFERENCE if row.contestant == found.reference else PEER
