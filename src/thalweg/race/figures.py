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
BASELINES = list(RULES)[:2]


@dataclass(frozen=True)
class Series:
    """What a chart shows of one contestant, and how it looks."""

    name: str
    #: On light paper.
    colour: str
    #: As plotly has it: "dash" for baselines.
    dash: str
    result: Mapping[str, Any]
    #: Means over seeds, with the least and the largest loss, by step and by seconds, until the run diverged.
    curve: Mapping[str, Any]


def colours_of(summary: Summary) -> dict[str, tuple[str, str]]:
    """By contestant, also of those that have no result: on light and on dark paper."""
    names = [who["name"] for who in summary["contestants"]]
    order = [*RULES, *(name for name in names if name not in RULES)]
    return {name: COLOURS[order.index(name) % len(COLOURS)] for name in names}


def list_series(summary: Summary) -> list[Series]:
    """The table that every figure is drawn from, the best first."""
    colours = colours_of(summary)
    table = []
    for result in summary["results"]:
        name, curve = result["contestant"], result["curve"]
        dash = "dash" if name in BASELINES else "solid"
        last = len(curve["loss"]) - curve["loss"].count(None)
        until = {key: values and values[:last] for key, values in curve.items()}
        table.append(Series(name, colours[name][0], dash, result, until))
    return table


# ---- for plotly: the page gives traces their colours, and moves them from ``meta.step`` to ``meta.seconds``


def draw_losses(summary: Summary) -> Figure:
    """Everyone's mean loss, in a band from the least to the largest of any seed."""
    series = list_series(summary)
    data = [draw_band(each) for each in series] + [draw_curve(each, "loss", "%{y:.3~g}") for each in series]
    layout = time_axes({"autorangeoptions": {"clipmax": 10 * first_loss(series)}, "exponentformat": "power"})
    target = summary["target"]
    if target is not None:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target, "layer": "below"}
        words = {"text": f"target {short_number(target)}", "textposition": "start"}
        layout["shapes"] = [{**line, "line": {"width": 1, "dash": "dot"}, "label": words}]
    return {"data": data, "layout": layout}


def draw_scores(summary: Summary) -> Figure | None:
    """Everyone's mean score; None where there is none."""
    series = [each for each in list_series(summary) if each.curve["score"]]
    share = in_percent(summary)
    data = [draw_curve(each, "score", f"%{{y:{'.1%' if share else '.3~g'}}}") for each in series]
    return {"data": data, "layout": time_axes({"tickformat": ".0%" if share else ""})} if data else None


def draw_sweep(summary: Summary) -> Figure:
    """Final loss by learning rate: the chosen one ringed, those that were stopped early hollow."""
    series, data = list_series(summary), []
    for each in series:
        sweep = each.result["sweep"]
        points = list(zip(sweep["lr"], sweep["loss"], sweep["stopped"], strict=True))
        ended = [(lr, loss) for lr, loss, stopped in points if loss is not None and stopped is None]
        early = [(lr, loss) for lr, loss, stopped in points if loss is not None and stopped is not None]
        rings = [lr == each.result["lr"] for lr, _ in ended]
        symbols = ["circle-open-dot" if ring else "circle" for ring in rings]
        marker = {"size": [13 if ring else 6 for ring in rings], "symbol": symbols}
        data.append(draw_points(each, ended, "lines+markers", marker, line={"width": 2, "dash": each.dash}))
        data.append(draw_points(each, early, "markers", {"symbol": "circle-open", "size": 7}))
    scale = "linear" if below_zero(summary) else "log"
    y = {"type": scale, "autorangeoptions": {"clipmax": 100 * first_loss(series)}, "exponentformat": "power"}
    x = {"type": "log", "title": {"text": "learning rate"}, "exponentformat": "power", "dtick": 1}
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, "hovermode": "closest"}}


def first_loss(series: Sequence[Series]) -> float:
    return max((abs(each.curve["loss"][0]) for each in series), default=1.0)


def time_axes(y: Figure) -> Figure:
    return {"xaxis": {"rangemode": "tozero"}, "yaxis": y, "hovermode": "x unified", "hoverdistance": -1}


def draw_points(
    series: Series, points: Sequence[tuple[float, float]], mode: str, marker: Figure, **more: Any
) -> Figure:
    hover = "%{fullData.name}, lr %{x:.3~g}: <b>%{y:.3~g}</b><extra></extra>"
    place = {"x": [lr for lr, _ in points], "y": [loss for _, loss in points], "meta": {"contestant": series.name}}
    return {"name": series.name, **place, "mode": mode, "hovertemplate": hover, "marker": marker, **more}


def draw_curve(series: Series, key: str, form: str) -> Figure:
    meta = {"contestant": series.name, "step": series.curve["step"], "seconds": series.curve["seconds"]}
    look = {"mode": "lines", "line": {"width": 2.4, "dash": series.dash}}
    hover = f"%{{fullData.name}} <b>{form}</b><extra></extra>"
    return {"name": series.name, "y": series.curve[key], "hovertemplate": hover, "meta": meta, **look}


def draw_band(series: Series) -> Figure:
    there_and_back = {clock: series.curve[clock] + series.curve[clock][::-1] for clock in ("step", "seconds")}
    around = series.curve["high"] + series.curve["low"][::-1]
    look = {"mode": "lines", "fill": "toself", "hoverinfo": "skip", "line": {"width": 0}}
    return {"y": around, "meta": {"contestant": series.name, **there_and_back}, **look}
