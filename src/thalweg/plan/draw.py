"""One picture: what each optimizer keeps in memory, as bars of parameters, gradients, state and peak."""

from __future__ import annotations

from pathlib import Path

from thalweg.plan.planning import Plan
from thalweg.plan.terminal import human_count
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.pictures import FAINT, INK, QUIET, entitle, figure, quieten, save
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


def draw(found: Plan, folder: Path, stem: str = "plan") -> list[Path]:
    """Write the picture as PNG and as SVG."""
    picture = figure(9.5, AROUND + BAR * len(found.costs))
    axes = picture.subplots()
    draw_bars(axes, found)
    return save(picture, folder, stem)


def draw_bars(axes: Axes, found: Plan) -> None:
    quieten(axes)
    axes.grid(False, axis="y")
    for place, cost in enumerate(found.costs):
        share, colour = cost.share, colour_of(cost.optimizer)
        start = 0
        for size, face, hatch in (
            (share.frozen_bytes, FROZEN, None),
            (share.parameter_bytes, PARAMETERS, None),
            (share.parameter_bytes, GRADIENTS, None),
            (share.state_bytes - share.host_bytes, colour, None),
            (share.peak_bytes or 0, "white", "////"),
        ):
            edge, width = (colour, 0.8) if hatch else ("none", 0.0)
            axes.barh(
                place, size, left=start, height=0.66, facecolor=face, hatch=hatch, edgecolor=edge, linewidth=width
            )
            start += size
        axes.annotate(
            human_bytes(start),
            (start, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=10,
            fontweight="bold" if cost.fits else "normal",
            path_effects=[HALO],
            zorder=4,
        )
    axes.set_yticks(range(len(found.costs)), [cost.optimizer for cost in found.costs])
    for label, cost in zip(axes.get_yticklabels(), found.costs, strict=True):
        label.set(color=colour_of(cost.optimizer), fontweight="bold", fontsize=10.5)
    axes.set_ylim(len(found.costs) - 0.5, -0.5)
    longest = max(cost.share.total_bytes for cost in found.costs)
    axes.set_xlim(0, 1.14 * max(longest, found.memory or 0))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(size)))
    if found.memory is not None:
        axes.axvline(found.memory, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), path_effects=[HALO], zorder=3)
        axes.annotate(
            human_bytes(found.memory),
            (found.memory, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=9.5,
        )
    draw_legend(axes, found)
    entitle(axes, f"Memory to train {found.model.name}", subtitle(found))


def draw_legend(axes: Axes, found: Plan) -> None:
    parts = [Patch(facecolor=FROZEN, label="frozen")] if found.model.frozen else []
    parts += [
        Patch(facecolor=PARAMETERS, label="parameters"),
        Patch(facecolor=GRADIENTS, label="gradients"),
        Patch(facecolor=QUIET, label="state"),
    ]
    if any(cost.share.peak_bytes is not None for cost in found.costs):
        parts.append(Patch(facecolor="white", edgecolor=QUIET, hatch="////", label="peak in a step"))
    axes.legend(
        handles=parts,
        loc="upper left",
        bbox_to_anchor=(0, -0.08 - 0.3 / len(found.costs)),
        ncols=len(parts),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        edgecolor=FAINT,
        borderpad=0,
    )


def subtitle(found: Plan) -> str:
    dtypes = " and ".join(sorted({tensor.dtype for tensor in found.model.tensors}))
    place = found.place
    ranks = f", on the fullest of {place.world} ranks ({place.layout})" if place.world > 1 else ""
    frozen = " trained" if found.model.frozen else ""
    return f"{human_count(found.model.parameters)} parameters{frozen}, {dtypes}{ranks}; without activations"
