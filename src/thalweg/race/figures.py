"""The charts of a race: a table of series, and the figures that plotly draws of it in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.race.summary import Summary, below_zero, in_percent
from thalweg.rules import RULES
from thalweg.show.units import short_number

Figure = dict[str, Any]
#: By Okabe and Ito, whose colours the colour-blind tell apart too, and as they are seen on dark paper: of the rules of
#: the package in their order, the first two of them baselines in grey; then for all others as they come.
COLOURS = (
    *(("#858585", "#858585"), ("#2b2b2b", "#d4d4d4"), ("#e69f00", "#e69f00"), ("#0072b2", "#308dc1")),
    *(("#009e73", "#009e73"), ("#6a3d9a", "#9272b5"), ("#d55e00", "#d55e00"), ("#3d7a85", "#508791")),
    *(("#5f7d00", "#6f8a1a"), ("#c2185b", "#d35787"), ("#8c564b", "#a2766d"), ("#cc79a7", "#cc79a7")),
    *(("#56b4e9", "#56b4e9"), ("#8c6d31", "#987c46"), ("#7b4173", "#9f7499"), ("#393b79", "#7d7ea7")),
)
BASELINES = 2


@dataclass(frozen=True)
class Series:
    """What a chart shows of one contestant, and how it looks."""

    name: str
    #: On light and on dark paper.
    colours: tuple[str, str]
    #: As plotly has it: "dash" for baselines, "dashdot" for those of other libraries.
    dash: str
    result: Mapping[str, Any]

    @property
    def curve(self) -> Mapping[str, Any]:
        """Means over seeds, with the least and the largest loss, by step and by seconds, until the run diverged."""
        curve = self.result["curve"]
        last = next((at for at, loss in enumerate(curve["loss"]) if loss is None), len(curve["loss"]))
        return {key: None if values is None else values[:last] for key, values in curve.items()}


def colours_of(summary: Summary) -> dict[str, tuple[str, str]]:
    """By contestant, also of those that have no result."""
    names = [who["name"] for who in summary["contestants"]]
    others = [name for name in names if name not in RULES]
    places = {name: place for place, name in enumerate([*RULES, *others])}
    return {name: COLOURS[places[name] % len(COLOURS)] for name in names}


def list_series(summary: Summary) -> list[Series]:
    """The table that every figure is drawn from, the best first."""
    colours = colours_of(summary)
    dashes = dict.fromkeys(list(RULES)[:BASELINES], "dash")
    dashes |= {who["name"]: "dashdot" for who in summary["contestants"] if who["foreign"]}
    return [
        Series(name, colours[name], dashes.get(name, "solid"), result)
        for result in summary["results"]
        for name in [result["contestant"]]
    ]


# ---- for plotly: the page gives traces their colours, and moves them from ``meta.step`` to ``meta.seconds``


def draw_losses(summary: Summary) -> Figure:
    """Everyone's mean loss, in a band from the least to the largest of any seed."""
    series = list_series(summary)
    start = max((abs(each.curve["loss"][0]) for each in series), default=1.0)
    data = [draw_band(each) for each in series] + [draw_curve(each, "loss", "%{y:.3~g}") for each in series]
    layout = time_axes({"autorangeoptions": {"clipmax": 10 * start}, "exponentformat": "power"})
    if summary["target"] is not None:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": summary["target"], "y1": summary["target"]}
        words = {"text": f"target {short_number(summary['target'])}", "textposition": "start"}
        layout["shapes"] = [{**line, "layer": "below", "line": {"width": 1, "dash": "dot"}, "label": words}]
    return {"data": data, "layout": layout}


def draw_scores(summary: Summary) -> Figure | None:
    """Everyone's mean score; None where there is none, or only at the end."""
    series = [each for each in list_series(summary) if any(each.curve["score"] or ())]
    if not any(score is not None for each in series for score in each.curve["score"][:-1]):
        return None
    form = ".1%" if in_percent(summary) else ".3~g"
    data = [draw_curve(each, "score", f"%{{y:{form}}}") for each in series]
    return {"data": data, "layout": time_axes({"tickformat": ".0%" if in_percent(summary) else ""})}


def draw_sweep(summary: Summary) -> Figure:
    """Final loss by learning rate: the chosen one ringed, those that were stopped early hollow."""
    data = []
    for each in list_series(summary):
        sweep = each.result["sweep"]
        points = [
            point for point in zip(sweep["lr"], sweep["loss"], sweep["stopped"], strict=True) if point[1] is not None
        ]
        ended = [(lr, loss) for lr, loss, stopped in points if stopped is None]
        chosen = [lr == each.result["lr"] for lr, _ in ended]
        data.append(
            trace(
                each, [lr for lr, _ in ended], [loss for _, loss in ended], "lines+markers",
                line={"width": 2, "dash": each.dash},
                marker={"size": [13 if ring else 6 for ring in chosen], "opacity": 1,
                        "symbol": ["circle-open-dot" if ring else "circle" for ring in chosen]},
            )
        )  # fmt: skip
        early = [(lr, loss) for lr, loss, stopped in points if stopped is not None]
        hollow = {"symbol": "circle-open", "size": 7}
        data.append(trace(each, [lr for lr, _ in early], [loss for _, loss in early], "markers", marker=hollow))
    scale = "linear" if below_zero(summary) else "log"
    worst = 100 * max((abs(each.curve["loss"][0]) for each in list_series(summary)), default=1.0)
    y = {"type": scale, "autorangeoptions": {"clipmax": worst}, "exponentformat": "power"}
    x = {"type": "log", "title": {"text": "learning rate"}, "exponentformat": "power", "dtick": 1}
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, "hovermode": "closest"}}


def time_axes(y: Figure) -> Figure:
    return {"xaxis": {"rangemode": "tozero"}, "yaxis": y, "hovermode": "x unified", "hoverdistance": -1}


def trace(series: Series, x: Sequence[Any], y: Sequence[Any], mode: str, **more: Any) -> Figure:
    hover = "%{fullData.name}, lr %{x:.3~g}: <b>%{y:.3~g}</b><extra></extra>"
    meta = {"contestant": series.name, **more.pop("meta", {})}
    return {"name": escape(series.name), "x": x, "y": y, "mode": mode, "hovertemplate": hover, "meta": meta, **more}


def draw_curve(series: Series, key: str, form: str) -> Figure:
    curve = series.curve
    hover = f"%{{fullData.name}} <b>{form}</b><extra></extra>"
    times = {"step": curve["step"], "seconds": curve["seconds"]}
    line = {"width": 2.4, "dash": series.dash}
    return trace(series, curve["step"], curve[key], "lines", line=line, hovertemplate=hover, meta=times)


def draw_band(series: Series) -> Figure:
    curve = series.curve
    around = [*curve["high"], *reversed(curve["low"])]
    times = {clock: [*curve[clock], *reversed(curve[clock])] for clock in ("step", "seconds")}
    return trace(series, times["step"], around, "lines", fill="toself", hoverinfo="skip", line={"width": 0}, meta=times)


def escape(text: str) -> str:
    """As plain text: plotly reads tags, entities and, between dollars, formulas."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("$", "&#36;")):
        text = text.replace(sign, entity)
    return text
