"""One picture: how long a step took, a panel for each comparison and a bar for each contestant."""

from __future__ import annotations

import statistics
from pathlib import Path

from thalweg.bench import words
from thalweg.bench.record import Bench, Comparison, Row
from thalweg.bench.rules import RULES
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.pictures import INK, QUIET, entitle, figure, quieten, save
from thalweg.show.units import human_bytes

with extra("cli"):
    from matplotlib.axes import Axes

#: Inches: of a bar, and of what stands above and below the bars of a panel.
BAR, AROUND = 0.34, 1.5
PEER, CONTROL = "#c4c4c4", "#8f8f8f"


def draw(found: Bench, folder: Path, stem: str = "bench") -> list[Path]:
    """Write the picture as PNG and SVG; nothing where nothing was measured."""
    measured = [comparison for comparison in found.comparisons if comparison.entrants]
    if not measured:
        return []
    heights = [AROUND + BAR * len(comparison.entrants) for comparison in measured]
    picture = figure(10, sum(heights))
    panels = picture.subplots(len(measured), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, comparison in zip(panels, measured, strict=True):
        draw_panel(axes, comparison)
    return save(picture, folder, stem)


def draw_panel(axes: Axes, found: Comparison) -> None:
    """Medians as bars from the top, quartiles as lines over them, and the floor as a line through all."""
    rows = found.rows
    quieten(axes)
    axes.grid(False, axis="y")
    for place, row in enumerate(rows):
        low, high = (1e3 * seconds for seconds in row.quartiles)
        axes.barh(place, 1e3 * row.median, height=0.68, color=colour(found, row))
        axes.plot([low, high], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        label = axes.annotate(
            said(found, row),
            (max(high, 1e3 * row.median), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9.5,
        )
        label.set_in_layout(False)  # there is room for it within the axes
    axes.set_yticks(range(len(rows)), [row.contestant for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.3e3 * max(max(row.median, row.quartiles[1]) for row in rows))
    axes.set_xlabel("milliseconds a step: median, and the quartiles")
    subtitle = f"{human_count(found.parameters)} parameters, {found.tensors} tensors"
    if found.floor is not None:
        at = 1e3 * found.floor / statistics.median(found.bandwidths)
        axes.axvline(at, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
        subtitle += f"; dashed: {words.a_parameter(found)} at the bandwidth measured"
    entitle(axes, words.title(found) + (" (disturbed)" if found.disturbed else ""), subtitle)


def human_count(count: int) -> str:
    """
    >>> [human_count(n) for n in (54, 25_557_032, 1_235_814_400)]
    ['54', '25.6 M', '1.24 B']
    """
    return human_bytes(count).removesuffix("B").rstrip().replace("G", "B")


def colour(found: Comparison, row: Row) -> str:
    """Ours in the colour of the rule; torch's fused AdamW, the control, darker than other peers."""
    if row.entrant.package == "thalweg":
        return colour_of(RULES[found.rule].title)
    return CONTROL if (row.entrant.package, row.entrant.rule) == ("torch", "adamw") else PEER


def said(found: Comparison, row: Row) -> str:
    ratio = "" if row.contestant == found.reference else f"  ({row.ratio:.2f} ×)"
    return f"{words.milliseconds(row.median)}{ratio}"
