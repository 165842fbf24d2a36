"""One picture: what each optimizer keeps in memory, as bars of parameters, gradients, state and peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thalweg.plan.planning import Plan
from thalweg.plan.terminal import human_count
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.pictures import INK, QUIET, entitle, figure, name_rows, save, write
from thalweg.show.units import human_bytes

with extra("cli"):
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, MaxNLocator

#: Inches: of a bar, and of what stands above and below all of them.
BAR, AROUND = 0.5, 1.9
#: Around what crosses the bars, so that it is seen on any colour.
HALO = withStroke(linewidth=3, foreground="white")
FROZEN, PARAMETERS, GRADIENTS = "#8f8f8f", "#b5b5b5", "#d3d3d3"
PEAK: Any = {"facecolor": "white", "hatch": "////"}


def draw(found: Plan, folder: Path, stem: str = "plan") -> list[Path]:
    """Write the picture as PNG and as SVG."""
    picture = figure(9.5, AROUND + BAR * len(found.costs))
    draw_bars(picture.subplots(), found)
    return save(picture, folder, stem)


def draw_bars(axes: Axes, found: Plan) -> None:
    name_rows(axes, [cost.optimizer for cost in found.costs])
    for place, (cost, label) in enumerate(zip(found.costs, axes.get_yticklabels(), strict=True)):
        share, colour = cost.share, colour_of(cost.optimizer)
        label.set(color=colour, fontweight="bold", fontsize=10.5)
        start = 0
        faces = {FROZEN: share.frozen_bytes, PARAMETERS: share.parameter_bytes, GRADIENTS: share.parameter_bytes}
        for face, size in (faces | {colour: share.state_bytes}).items():
            axes.barh(place, size, left=start, height=0.66, facecolor=face, edgecolor="none", linewidth=0.0)
            start += size
        peak = share.peak_bytes or 0
        axes.barh(place, peak, left=start, height=0.66, **PEAK, edgecolor=colour, linewidth=0.8)
        weight = "bold" if cost.fits else "normal"
        at = (start + peak, place)
        write(axes, human_bytes(at[0]), at, (6, 0), va="center", fontweight=weight, path_effects=[HALO], zorder=4)
    longest = max(cost.share.total_bytes for cost in found.costs)
    axes.set_xlim(0, 1.14 * max(longest, found.memory or 0))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(size)))
    if found.memory is not None:
        axes.axvline(found.memory, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), path_effects=[HALO], zorder=3)
        above: Any = {"xycoords": ("data", "axes fraction"), "ha": "center", "fontsize": 9.5}
        write(axes, human_bytes(found.memory), (found.memory, 1), (0, 3), **above)
    draw_legend(axes, found)
    entitle(axes, f"Memory to train {found.model.name}", subtitle(found))


def draw_legend(axes: Axes, found: Plan) -> None:
    faces = {"parameters": PARAMETERS, "gradients": GRADIENTS, "state": QUIET}
    faces = {"frozen": FROZEN, **faces} if found.model.frozen else faces
    parts = [Patch(facecolor=face, label=label) for label, face in faces.items()]
    if any(cost.share.peak_bytes is not None for cost in found.costs):
        parts.append(Patch(**PEAK, edgecolor=QUIET, label="peak in a step"))
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0, -0.08 - 0.3 / len(found.costs)), "borderpad": 0}
    axes.legend(handles=parts, ncols=len(parts), frameon=False, fontsize=9.5, labelcolor=INK, **place)


def subtitle(found: Plan) -> str:
    dtypes = " and ".join(sorted({tensor.dtype for tensor in found.model.tensors}))
    place = found.place
    ranks = f", on the fullest of {place.world} ranks ({place.layout})" if place.world > 1 else ""
    frozen = " trained" if found.model.frozen else ""
    return f"{human_count(found.model.parameters)} parameters{frozen}, {dtypes}{ranks}; without activations"
