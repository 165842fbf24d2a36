"""How our pictures look: the data in front, everything else quiet, and colours that the colour-blind tell apart."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.show.extras import extra
from thalweg.show.palette import THEMES

with extra("cli"):
    import matplotlib
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, PercentFormatter

INK, QUIET, FAINT = (THEMES["picture"][tone] for tone in ("ink", "quiet", "faint"))
#: Points in a pixel of a plotly figure.
POINTS = 0.75
#: By plotly's dashes, matplotlib's; and markers likewise.
DASHES = {"solid": "-", "6px,4px": "--", "9px,3px,2px,3px": "-.", "2px,4px": (0, (1, 3))}
MARKERS = {"circle": "o", "circle-open": "o", "diamond": "D", "x-thin": "x"}
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


def write(axes: Axes, text: str, point: tuple[float, float], away: tuple[float, float], **look: Any) -> Text:
    """Words at so many points from a point of the axes. Dollar signs in them are dollars, not formulas."""
    usual: Any = {"color": INK, "fontsize": 10, "textcoords": "offset points", "parse_math": False}
    return axes.annotate(text, point, xytext=away, **{**usual, **look})


def entitle(axes: Axes, title: str, subtitle: str = "") -> None:
    """A title, and in smaller letters what has to be known."""
    look: dict[str, Any] = {"color": INK, "fontsize": 13, "fontweight": "bold", "parse_math": False}
    axes.set_title(title, loc="left", pad=26 if subtitle else 10, **look)
    if subtitle:
        write(axes, subtitle, (0, 1), (0, 12), color=QUIET, xycoords="axes fraction")


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows for bars, from the top, each with its name."""
    quieten(axes)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


# ---- figures of plotly, drawn by matplotlib, which needs no browser


def resolve_colours(figure: Any, tones: Mapping[str, str]) -> Any:
    """The same figure with a colour for each name behind an @."""
    if isinstance(figure, str):
        return tones.get(figure[1:], figure) if figure.startswith("@") else figure
    if isinstance(figure, Mapping):
        return {key: resolve_colours(value, tones) for key, value in figure.items()}
    return [resolve_colours(value, tones) for value in figure] if isinstance(figure, (list, tuple)) else figure


def draw_figure(axes: Axes, figure: Mapping[str, Any], tones: Mapping[str, str]) -> None:
    """Draw the traces, axes, lines and names of a plotly figure: of what plotly can, what our charts use."""
    figure = resolve_colours(figure, tones)
    layout = figure["layout"]
    quieten(axes)
    for name in ("x", "y"):
        draw_axis(axes, name, layout[f"{name}axis"])
    on_map = any(trace["type"] == "contour" for trace in figure["data"])
    for order, trace in enumerate(figure["data"], start=2):
        if trace["type"] == "contour":
            draw_contour(axes, trace)
        else:
            draw_trace(axes, trace, order, halo=on_map)
    for shape in layout.get("shapes", ()):
        line = shape["line"]
        axes.axhline(shape["y0"], color=line["color"], linewidth=POINTS * line["width"], linestyle=DASHES[line["dash"]])
    for name in ("x", "y"):
        if span := layout[f"{name}axis"].get("range"):
            ends = [10**end for end in span] if layout[f"{name}axis"].get("type") == "log" else span
            axes.set(**{f"{name}lim": ends})
    for label in layout.get("annotations", ()):
        draw_label(axes, label, log=layout["yaxis"].get("type") == "log")


def draw_axis(axes: Axes, name: str, wanted: Mapping[str, Any]) -> None:
    axis = getattr(axes, f"{name}axis")
    axes.set(**{f"{name}scale": wanted.get("type", "linear"), f"{name}label": wanted.get("title", {}).get("text", "")})
    if wanted.get("tickvals"):
        axis.set_major_locator(FixedLocator(wanted["tickvals"]))
        axis.set_major_formatter(lambda value, place: wanted["ticktext"][place or 0])
        axis.set_minor_formatter(NullFormatter())
    elif wanted.get("type", "linear") == "linear":
        axis.set_major_locator(MaxNLocator(5 if name == "x" else 7, steps=[1, 2, 2.5, 5, 10]))
    if wanted.get("tickformat"):
        axis.set_major_formatter(PercentFormatter(1, decimals=int(wanted["tickformat"][1])))
    if wanted.get("showgrid") is False:
        axes.grid(visible=False, axis=name)  # type: ignore[arg-type]
    if wanted.get("showticklabels") is False:
        axis.set_ticks([])


def draw_contour(axes: Axes, trace: Mapping[str, Any]) -> None:
    heights, lines = np.array(trace["z"]), trace["contours"]
    levels = np.arange(lines["start"], lines["end"] + lines["size"] / 2, lines["size"])
    colours = LinearSegmentedColormap.from_list("", [tuple(stop) for stop in trace["colorscale"]])
    shown: Any = {"cmap": colours, "norm": Normalize(levels[0], levels[-1]), "extend": "both"}
    axes.contourf(trace["x"], trace["y"], heights, levels=levels, **shown)
    line = trace["line"]
    axes.contour(trace["x"], trace["y"], heights, levels=levels, colors=line["color"], linewidths=line["width"])
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_trace(axes: Axes, trace: Mapping[str, Any], order: int, *, halo: bool) -> None:
    x, y = (np.array([np.nan if value is None else value for value in trace[name]], float) for name in ("x", "y"))
    mode, line, label = trace["mode"], trace.get("line", {}), trace.get("contestant", "")
    around: Any = {"path_effects": [withStroke(linewidth=2.9, foreground="white", alpha=0.8)]} if halo else {}
    if trace.get("fill"):
        ends = np.flatnonzero(np.isnan(x))
        for begin, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
            axes.fill(x[begin:end], y[begin:end], color=trace["fillcolor"], linewidth=0)
        return
    for direction in ("x", "y"):
        if bars := trace.get(f"error_{direction}"):
            reach: Any = {f"{direction}err": [bars["arrayminus"], bars["array"]]}
            axes.errorbar(x, y, fmt="none", ecolor=bars["color"], alpha=0.4, elinewidth=1.5, **reach)
    if "lines" in mode:
        kept = ~np.isnan(y) if trace.get("connectgaps") else slice(None)
        style: Any = {"color": line["color"], "linestyle": DASHES[line["dash"]], "linewidth": POINTS * line["width"]}
        axes.plot(x[kept], y[kept], label=label, zorder=order, **style, **around)
    if "markers" in mode:
        draw_marks(axes, x, y, trace["marker"], order)
    for at, text in enumerate(trace.get("text", ())):
        font = trace["textfont"]
        look: Any = {"color": font["color"], "fontsize": POINTS * font["size"]}
        write(axes, text, (x[at], y[at]), (0, 8), ha="center", **look)


def draw_marks(axes: Axes, x: Any, y: Any, marker: Mapping[str, Any], order: int) -> None:
    edge = marker.get("line", {})
    symbol = marker.get("symbol", "circle")
    face = "none" if symbol == "circle-open" else marker.get("color", "none")
    look: Any = {"marker": MARKERS[symbol], "markersize": POINTS * marker["size"], "markerfacecolor": face}
    look |= {
        "markeredgecolor": edge.get("color", marker.get("color")),
        "markeredgewidth": POINTS * edge.get("width", 0),
    }
    axes.plot(x, y, linestyle="none", zorder=order, **look)


def draw_label(axes: Axes, label: Mapping[str, Any], *, log: bool) -> None:
    """A name beside an end of a curve, with a thin line to it where it had to move; or one at the edge of the axes."""
    font, y = label["font"], 10 ** label["y"] if log else label["y"]
    look: Any = {"color": font["color"], "fontsize": POINTS * font["size"], "annotation_clip": False}
    look |= {"fontweight": "bold" if "weight" in font else "normal", "va": label.get("yanchor", "center")}
    text, point, side = html.unescape(label["text"]), (label["x"], y), label["xanchor"]
    if label.get("xref") == "paper":
        away = -8 if side == "right" else 0
        write(axes, text, point, (away, 0), xycoords=("axes fraction", "data"), ha=side, **look)
        return
    line = {"arrowstyle": "-", "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0, "color": font["color"]}
    write(axes, text, point, (16, POINTS * label["yshift"]), arrowprops=line, **look)
