"""The charts of a race as plotly figures. The report shows them as they are; PNG and SVG are drawn from the same.

Colours are names behind an @, which ``themes`` resolves for light pages, dark pages and pictures. The vertical axis of
a chart that ``follows`` is fitted anew when the report hides an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.race.summary import Summary, below_zero, in_percent
from thalweg.show.palette import THEMES, VIRIDIS, shade
from thalweg.show.units import percent, short_number

Figure = dict[str, Any]
Numbers = Sequence[float | None]
#: Below, a loss counts as 0, which no logarithmic axis can show.
LEAST = 1e-16
#: Pixels: the height of the axes of a tall chart, and between the names at the ends of its curves.
HEIGHT, GAP = 400.0, 18.0
#: Pixels of a heat map, which has lower rows where more layers than fit are shown, and of what stands below it.
LOWEST, HIGHEST, BELOW = 112, 620, 64
PLACE = "x %{x:.4~g}, y %{y:.4~g}<extra></extra>"
#: Of each curve the nearest point: by the clock no two have one at the same time.
NEAREST = {"hovermode": "x unified", "hoverdistance": -1}
VALUE = "%{fullData.name} <b>%{customdata}</b><extra></extra>"


@dataclass(frozen=True)
class Look:
    """How the traces of one optimizer look: solid, or dashed for baselines, or dash-dotted for other libraries."""

    name: str
    colour: str
    faint: str
    dash: str

    @property
    def line(self) -> Figure:
        return {"color": self.colour, "width": 2.4, "dash": self.dash}

    def trace(self, mode: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Figure:
        """A trace of plotly that belongs to the optimizer; ``contestant`` is for the page, which hides by it."""
        owner = {"contestant": self.name, "name": plain(self.name)}
        return {**owner, "type": "scatter", "mode": mode, "x": x, "y": y, **more}

    def label(self, text: str, **more: Any) -> Figure:
        """A name in the optimizer's colour, where ``more`` says; it goes when the optimizer is hidden."""
        font = {"color": self.colour, "size": 14, "weight": 600}
        return {"name": self.name, "text": plain(text), "showarrow": False, "font": font, **more}


Looks = Mapping[str, Look]


def looks_of(summary: Summary) -> dict[str, Look]:
    return {
        who["name"]: Look(
            who["name"],
            f"@{place}",
            f"@{place} faint",
            "6px,4px" if who["baseline"] else "9px,3px,2px,3px" if who.get("rival") else "solid",
        )
        for place, who in enumerate(summary["contestants"])
    }


def themes(summary: Summary) -> dict[str, dict[str, str]]:
    """By theme, the colour that each name stands for."""
    found = {theme: dict(tones) for theme, tones in THEMES.items()}
    for theme, tones in found.items():
        dark = theme == "dark"
        for place, who in enumerate(summary["contestants"]):
            tones[f"{place}"] = shade(who["colour"]) if dark else who["colour"]
            tones[f"{place} faint"] = tones[f"{place}"] + ("33" if dark else "21")
    return found


def template() -> Figure:
    """What all charts share: the data in front, everything else quiet."""
    axis = {
        "gridcolor": "@faint",
        "linecolor": "@strong",
        "showline": True,
        "tickfont": {"color": "@quiet", "size": 13},
        "zeroline": False,
        "spikecolor": "@strong",
        "spikethickness": 1,
        "spikedash": "solid",
        "automargin": True,
        "exponentformat": "power",
        "minexponent": 4,
        "title": {"font": {"color": "@quiet", "size": 14}, "standoff": 12},
    }
    clear = "rgba(0,0,0,0)"
    return {
        "layout": {
            "font": {"size": 14, "color": "@ink"},
            "paper_bgcolor": clear,
            "plot_bgcolor": clear,
            "margin": {"l": 8, "r": 14, "t": 22, "b": 8},
            "showlegend": False,
            "hoverlabel": {
                "bgcolor": "@paper",
                "bordercolor": "@strong",
                "align": "left",
                "namelength": -1,
                "font": {"color": "@ink", "size": 14},
            },
            "modebar": {"bgcolor": clear, "color": "@quiet", "activecolor": "@ink"},
            "xaxis": axis,
            "yaxis": axis,
        }
    }


# ---- curves


def draw_losses(
    course: Summary,
    looks: Looks,
    *,
    log: bool,
    clock: str = "step",
    label: Callable[[Summary], str] = lambda result: shorten(result["contestant"], 14),
) -> Figure:
    """The mean over seeds of everyone's loss, in a band from the least to the largest, by "step" or by "seconds"."""
    results = course["results"]
    seen = [v for r in results for key in ("low", "high", "loss") for v in r["curve"][key] if v is not None]
    positive = [v for r in results for key in ("low", "loss") for v in r["curve"][key] if v is not None and v > 0]
    lift = lift_from(max(LEAST, min(positive, default=math.inf)) if log else -math.inf)
    limit = above_start(results, 10 if log else 1.5)
    span = air_around([lift(value) for value in seen if value <= limit], log=log)
    data = [draw_band(result, looks, clock, lift) for result in results]
    data += [draw_curve(result, looks, clock, result["curve"]["loss"], lift, short_number) for result in results]
    y = {**(log_axis(span) if log else {"type": "linear"}), "autorangeoptions": {"clipmax": limit}}
    layout = time_axes(course, clock, y, span)
    labels = label_ends(results, looks, span, log, clock, label) if span else []
    target = course["target"]
    if target is not None:
        line = {"color": "@quiet", "width": 1.2, "dash": "2px,4px"}
        across = {"xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
        layout["shapes"] = [{"type": "line", **across, "layer": "below", "line": line}]
        place = {"xref": "paper", "x": 0, "y": on_axis(target, log), "xanchor": "left", "yanchor": "bottom"}
        font = {"color": "@quiet", "size": 13}
        labels.append({**place, "text": f"target {short_number(target)}", "showarrow": False, "font": font})
    return {"follows": True, "data": data, "layout": layout | {"annotations": labels}}


def draw_scores(course: Summary, looks: Looks, *, clock: str = "step") -> Figure:
    words = score_words(course)
    scored = [result for result in course["results"] if result["curve"]["score"]]
    data = [draw_curve(result, looks, clock, result["curve"]["score"], lambda v: v, words) for result in scored]
    span = air_around([value for result in scored for value in result["curve"]["score"]])
    y = {"tickformat": ".0%" if in_percent(course) else ""}
    return {"follows": True, "data": data, "layout": time_axes(course, clock, y, span)}


def time_axes(course: Summary, clock: str, y: Figure, span: Sequence[float] | None) -> Figure:
    title, moment = ("seconds", "%{x:.3~g} s") if clock == "seconds" else ("steps", "step %{x}")
    last = max((result["curve"][clock][-1] for result in course["results"]), default=1)
    return {
        "xaxis": {"title": {"text": title}, "range": [0, last], "unifiedhovertitle": {"text": moment}},
        "yaxis": {**y, "range": span} if span else y,
        **NEAREST,
    }


def draw_curve(
    result: Summary,
    looks: Looks,
    clock: str,
    values: Numbers,
    lift: Callable[[Any], Any],
    words: Callable[[Any], str],
) -> Figure:
    """Hovering shows the number itself, even where the axis cannot."""
    look, lifted = looks[result["contestant"]], [lift(v) for v in values]
    hover = {"customdata": [words(value) for value in values], "hovertemplate": VALUE}
    return look.trace("lines", result["curve"][clock], lifted, line=look.line, **hover)


def draw_band(result: Summary, looks: Looks, clock: str, lift: Callable[[Any], Any]) -> Figure:
    """From the least to the largest over seeds: a closed shape for each stretch where no seed has diverged."""
    look, curve, times = looks[result["contestant"]], result["curve"], result["curve"][clock]
    stretches: list[list[int]] = [[]]
    for at, loss in enumerate(curve["loss"]):
        if loss is None:
            stretches.append([])
        else:
            stretches[-1].append(at)
    x: list[float | None] = []
    y: list[float | None] = []
    for stretch in (each for each in stretches if len(each) > 1):
        x += [*(times[at] for at in stretch), *(times[at] for at in reversed(stretch)), None]
        y += [*(lift(curve["high"][at]) for at in stretch), *(lift(curve["low"][at]) for at in reversed(stretch)), None]
    return look.trace("lines", x, y, fill="toself", hoverinfo="skip", line={"width": 0}, fillcolor=look.faint)


def label_ends(
    results: Sequence[Summary],
    looks: Looks,
    span: Sequence[float],
    log: bool,
    clock: str,
    label: Callable[[Summary], str],
) -> list[Figure]:
    """Names beside the ends of the curves, moved apart where they would overlap."""
    lift = lift_from(LEAST if log else -math.inf)
    ends = []
    for result in (result for result in results if result["loss"] is not None):
        last = result["curve"]["loss"][-1]
        end = on_axis(lift(result["loss"] if last is None else last), log)
        y = min(max(end, span[0]), span[1])  # a curve that has left the chart is named at its edge
        ends.append((HEIGHT * (y - span[0]) / (span[1] - span[0]), y, result))
    ends.sort(key=lambda end: end[0])
    pixels = spread([pixel for pixel, _, _ in ends], GAP)
    labels = []
    for (before, y, result), pixel in zip(ends, pixels, strict=True):
        place = {"x": result["curve"][clock][-1], "y": y, "xshift": 6, "yshift": pixel - before, "xanchor": "left"}
        labels.append(looks[result["contestant"]].label(label(result), **place))
    return labels


# ---- what is known at the end


def draw_final_scores(course: Summary, looks: Looks) -> Figure:
    """The final score of everyone, best at the top: a mark for the mean, and a line over the range of seeds."""
    words = score_words(course)
    sign = 1 if course["best_score"] == "most" else -1
    ranked = sorted((r for r in course["results"] if r["score"] is not None), key=lambda result: sign * result["score"])
    data, labels = [], []
    for row, result in enumerate(ranked):
        look = looks[result["contestant"]]
        marker = {"color": look.colour, "size": 12, "symbol": "diamond" if look.dash == "6px,4px" else "circle"}
        text = {"text": [words(result["score"])], "textposition": "top center"}
        font = {"color": look.colour, "size": 13}
        bars = reach([result], "score", look)
        data.append(
            look.trace("markers+text", [result["score"]], [row], marker=marker, error_x=bars, **text, textfont=font)
        )
        labels.append(look.label(look.name, xref="paper", x=0, y=row, xanchor="right"))
    y = {"range": [-0.5, len(ranked) - 0.3], "showgrid": False, "showticklabels": False}
    x = {"tickformat": ".1%" if in_percent(course) else ""}
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, "annotations": labels}}


def draw_sweep(course: Summary, looks: Looks) -> Figure:
    """Final loss by learning rate, the chosen one ringed; what diverged stands as a cross at the top."""
    results = [result for result in course["results"] if result["sweep"]["lr"]]
    worst = above_start(course["results"], 100)  # a finite number, but nothing was learned
    log = not below_zero(course)
    floor = LEAST if log else -math.inf

    def lift(loss: float | None) -> float | None:
        return None if loss is None or loss > worst else max(loss, floor)

    low, high = air_around([lift(v) for r in results for v in r["sweep"]["loss"]], log=log) or [-1.0, 1.0]
    air = (high - low) * 0.05
    top = 10 ** (high + air) if log else high + air
    rates = air_around([lr for result in results for lr in result["sweep"]["lr"]], log=True)
    y = {**(log_axis([low, high]) if log else {}), "range": [low, high + 2 * air]}
    data = [trace for result in results for trace in draw_rates(result, looks, lift, top)]
    x = {"title": {"text": "learning rate"}, **log_axis(rates)}
    return {"follows": True, "data": data, "layout": {"xaxis": x, "yaxis": y, "hovermode": "closest"}}


def draw_rates(result: Summary, looks: Looks, lift: Callable[[Any], Any], top: float) -> list[Figure]:
    look, sweep = looks[result["contestant"]], result["sweep"]
    rates, losses, stopped = sweep["lr"], sweep["loss"], sweep["stopped"]
    failed = [at for at, loss in enumerate(losses) if lift(loss) is None]
    early = [at for at, step in enumerate(stopped) if step is not None and at not in failed]
    ended = [lift(loss) if step is None else None for loss, step in zip(losses, stopped, strict=True)]
    chosen = [at for at, lr in enumerate(rates) if lr == result["lr"]]
    hover = "%{fullData.name}<br>lr %{x:.3~g}: <b>%{customdata}</b><extra></extra>"

    def mark(places: Sequence[int], y: Numbers, words: Sequence[str], marker: Figure) -> Figure:
        x = [rates[at] for at in places]
        return look.trace("markers", x, y, customdata=words, marker=marker, hovertemplate=hover)

    words = ["diverged" if loss is None else short_number(loss) for loss in losses]
    line = {"line": {**look.line, "width": 2}, "marker": {"color": look.colour, "size": 6}, "connectgaps": True}
    ring = {"color": "@paper", "size": 11, "line": {"color": look.colour, "width": 3}, "opacity": 1}
    cross = {"symbol": "x-thin", "size": 8, "line": {"color": look.colour, "width": 2}}
    hollow = {"symbol": "circle-open", "size": 7, "color": look.colour, "line": {"width": 1}}
    return [
        look.trace("lines+markers", rates, ended, customdata=words, hovertemplate=hover, **line),
        mark(chosen, [ended[at] for at in chosen], [words[at] for at in chosen], ring),
        mark(failed, [top] * len(failed), [words[at] for at in failed], cross),
        mark(
            early,
            [lift(losses[at]) for at in early],
            [f"{words[at]}, stopped at step {stopped[at]}" for at in early],
            hollow,
        ),
    ]


def draw_batches(courses: Sequence[Summary], looks: Looks, key: str) -> Figure:
    """One number at the end of each course of a task, by batch size, with its range over seeds."""
    words = short_number if key == "loss" else score_words(courses[0])
    data = []
    for name, look in looks.items():
        found = {c["batch_size"]: r for c in courses for r in c["results"] if r["contestant"] == name}
        found = {size: result for size, result in sorted(found.items()) if result[key] is not None}
        if found:
            results = list(found.values())
            values = [result[key] for result in results]
            hover = {"customdata": [words(value) for value in values], "hovertemplate": VALUE}
            style = {"line": look.line, "marker": {"color": look.colour, "size": 8}}
            bars = reach(results, key, look)
            data.append(look.trace("lines+markers", list(found), values, error_y=bars, **style, **hover))
    log = key == "loss" and not any(map(below_zero, courses))
    span = air_around([value for trace in data for value in trace["y"]], log=log)
    y = log_axis(span) if log else {"tickformat": ".1%" if key == "score" and all(map(in_percent, courses)) else ""}
    sizes = sorted({course["batch_size"] for course in courses})
    ticks = {"tickmode": "array", "tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
    x = {"title": {"text": "batch size"}, "type": "log", **ticks}
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, **NEAREST}}


def reach(results: Sequence[Summary], key: str, look: Look) -> Figure:
    """Error bars over the range of seeds."""

    def away(end: str) -> list[float]:
        ends = [result[f"{key}_{end}"] for result in results]
        return [0.0 if e is None else abs(e - r[key]) for e, r in zip(ends, results, strict=True)]

    bars = {"type": "data", "symmetric": False, "array": away("high"), "arrayminus": away("low")}
    return {**bars, "color": look.colour, "thickness": 1.5, "width": 0}


def draw_map(course: Summary, looks: Looks) -> Figure:
    """Paths over the contour lines of a function of two variables."""
    ground = course["contours"]
    heights = [[math.log10(max(v, LEAST)) if ground["log"] else v for v in row] for row in ground["value"]]
    known = sorted(height for row in heights for height in row)
    # from above the lowest ground, which a grid cannot resolve, to the highest
    start, end = known[len(known) * 3 // 100], known[-1]
    walked = [result for result in course["results"] if result["path"]]
    contour = {
        **{"type": "contour", "x": ground["x"], "y": ground["y"], "z": heights, "autocontour": False},
        "contours": {"start": start, "end": end, "size": (end - start) / 18 or 1},
        "line": {"color": "@contour", "width": 0.7, "smoothing": 1},
        "colorscale": [[0, "@valley"], [0.6, "@slope"], [1, "@height"]],
        **{"hoverinfo": "skip", "showscale": False},
    }
    minimum = {"symbol": "x-thin", "size": 13, "line": {"color": "@ink", "width": 2.5}}
    begin = {"symbol": "circle", "size": 12, "color": "@paper", "line": {"color": "@ink", "width": 2}}
    data = [
        contour,
        *(trace for result in reversed(walked) for trace in draw_path(result, looks)),  # the best on top
        draw_places(ground["minima"], minimum, "minimum"),
        draw_places([result["path"][0] for result in walked[:1]], begin, "start"),
    ]
    x, y = ({"range": [ground[k][0], ground[k][-1]], "showgrid": False, "ticks": ""} for k in ("x", "y"))
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, "hovermode": "closest"}}


def draw_path(result: Summary, looks: Looks) -> list[Figure]:
    look, path = looks[result["contestant"]], result["path"]
    end = {"color": look.colour, "size": 10, "line": {"color": "@paper", "width": 1.5}}
    x, y = ([point[axis] for point in path] for axis in (0, 1))
    last = f"%{{fullData.name}}, at the end<br>{PLACE}"
    return [
        look.trace("lines", x, y, line=look.line, hovertemplate=f"%{{fullData.name}}<br>{PLACE}"),
        look.trace("markers", x[-1:], y[-1:], marker=end, hovertemplate=last),
    ]


def draw_places(points: Sequence[Sequence[float]], marker: Figure, name: str) -> Figure:
    x, y = ([point[axis] for point in points] for axis in (0, 1))
    where = {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y}
    return {**where, "marker": marker, "hovertemplate": f"{name}<br>{PLACE}"}


# ---- layers


def draw_layers(course: Summary, kind: str) -> Figure | None:
    """Heat maps of "update" sizes or "trust" ratios, one for each optimizer, and their common scale of colours."""
    known = [result for result in course["results"] if result["layers"] and result["layers"][kind] is not None]
    # a trust ratio that is 1 throughout is one that was turned off
    shown = [r for r in known if kind != "trust" or any(value != 1 for row in r["layers"][kind] for value in row)]
    if not shown:
        return None
    logs = sorted(math.log10(v) for r in shown for row in r["layers"][kind] for v in row if v is not None and v > 0)
    low, high = (logs[len(logs) // 100], logs[-(len(logs) // 100) - 1]) if logs else (-1.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    panels = [{"contestant": r["contestant"], **draw_heat(r, kind, low, high)} for r in shown]
    return {"panels": panels, "scale": [short_number(10**low, 2), short_number(10**high, 2)]}


def draw_heat(result: Summary, kind: str, low: float, high: float) -> Figure:
    names, values = result["layers"]["names"], result["layers"][kind]
    every = -(-len(names) * 15 // (HIGHEST - BELOW))
    named = range(0, len(names), every)
    texts = [
        [f"{plain(name)}<br><b>{short_number(value)}</b>" for value in row]
        for name, row in zip(names, values, strict=True)
    ]
    heat = {
        **{"contestant": result["contestant"], "name": plain(result["contestant"]), "type": "heatmap"},
        **{"x": result["layers"]["step"], "y": list(range(len(names))), "customdata": values, "text": texts},
        # colours stand for powers of ten; what has none is left blank
        "z": [[math.log10(value) if value is not None and value > 0 else None for value in row] for row in values],
        **{"zmin": low, "zmax": high, "showscale": False, "hoverongaps": False, "xgap": 0, "ygap": 1},
        "colorscale": [[at / (len(VIRIDIS) - 1), colour] for at, colour in enumerate(VIRIDIS)],
        "hovertemplate": "%{text} at step %{x}<extra></extra>",
    }
    y = {
        **{"autorange": "reversed", "showgrid": False, "ticks": "", "ticklabelstandoff": 6, "tickmode": "array"},
        **{"tickvals": list(named), "ticktext": [plain(shorten(names[at], 26)) for at in named]},
    }
    return {
        "height": min(HIGHEST, max(LOWEST, 26 * len(names) + BELOW)),
        "data": [heat],
        "layout": {
            **{"xaxis": {"title": {"text": "steps"}, "showgrid": False}, "yaxis": y, "hovermode": "closest"},
            **{"margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "minreducedheight": 20},
        },
    }


# ---- axes and words


def log_axis(span: Sequence[float] | None) -> Figure:
    """A logarithmic axis with a label for each power of ten, or for every few of them, or plotly's own choice."""
    decades = span[1] - span[0] if span else 0
    labels = {"dtick": math.ceil(decades / 8)} if decades > 1.5 else {}
    # plotly writes powers of ten a quarter larger than other labels
    return {"type": "log", "tickfont": {"size": 11}, **labels}


def on_axis(value: float, log: bool) -> float:
    """A value as plotly's annotations and ranges want it."""
    return math.log10(value) if log else value


def air_around(values: Sequence[float | None], *, log: bool = False) -> list[float] | None:
    """From the least to the largest with a little air, as an axis wants it; None where there is nothing to show."""
    shown = [on_axis(v, log) for v in values if v is not None and math.isfinite(v) and (not log or v > 0)]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    air = (high - low) * 0.04 or (0.5 if log else abs(high) * 0.1 or 1.0)
    return [low - air, high + air]


def above_start(results: Sequence[Summary], times: float) -> float:
    """So many times the largest first loss; as far above it where it is negative."""
    starts = [result["curve"]["loss"][0] for result in results]
    return max((s + (times - 1) * abs(s) for s in starts if s), default=1e300)


def lift_from(floor: float) -> Callable[[Any], Any]:
    return lambda value: None if value is None else max(value, floor)


def score_words(course: Summary) -> Callable[[Any], str]:
    return percent if in_percent(course) else short_number


def plain(text: str) -> str:
    """As plain text: plotly reads tags, entities and, between dollars, formulas; a page reads @ as a colour."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("$", "&#36;"), ("@", "&#64;")):
        text = text.replace(sign, entity)
    return text


def shorten(text: str, most: int) -> str:
    """Long names lose their middle: their ends tell more."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


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
