"""How our pictures look: the data in front, everything else quiet, and colours that the colour-blind tell apart."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thalweg.show.extras import extra

with extra("cli"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, QUIET, FAINT = "#333333", "#777777", "#e4e4e4"
LINE_HEIGHT = 0.048  # of a label, as a share of the axes
#: Identical pictures are identical files, byte for byte.
REPEATABLE: Any = {"svg.hashsalt": "thalweg", "svg.fonttype": "none", "font.family": ["DejaVu Sans"]}


def figure(width: float, height: float, *, dpi: int = 160) -> Figure:
    """An empty figure of so many inches, which no window and no global state knows of."""
    made = Figure(
        figsize=(width, height), dpi=dpi, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(made)
    return made


def save(picture: Figure, folder: Path, stem: str, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{kind}" for kind in kinds]
    with matplotlib.rc_context(REPEATABLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in letters that our font has not
        for path in paths:
            metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            picture.savefig(path, metadata=metadata)
    return paths


def quieten(axes: Axes) -> None:
    """Let the data stand out: no box, faint grid behind."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=INK, labelsize=10)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def entitle(axes: Axes, title: str, subtitle: str = "") -> None:
    """A title, and in smaller letters what has to be known. Dollar signs in them are dollars, not formulas."""
    look: dict[str, Any] = {"color": INK, "fontsize": 13, "fontweight": "bold", "parse_math": False}
    axes.set_title(title, loc="left", pad=26 if subtitle else 10, **look)
    if subtitle:
        axes.annotate(
            subtitle,
            (0, 1),
            xytext=(0, 12),
            xycoords="axes fraction",
            textcoords="offset points",
            color=QUIET,
            fontsize=10,
            parse_math=False,
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
