"""The pictures of a race: how fast everyone learned, at which rates, with which batches, and by which way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.race.maps import draw_maps, legend_columns, line_style
from thalweg.race.summary import Summary, below_zero, in_percent
from thalweg.show.extras import extra
from thalweg.show.pictures import LINE_HEIGHT, QUIET, entitle, figure, quieten, save, spread

with extra("cli"):
    from matplotlib.axes import Axes
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, PercentFormatter, ScalarFormatter

#: Below, float32 cannot tell a loss from 0, which a logarithmic axis cannot show; above, nobody wants to see it.
LEAST_LOSS, MOST_LOSS = 1e-10, 1e10
Looks = Mapping[str, Mapping[str, Any]]


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Write every picture that the race has something for, each as PNG and SVG."""
    looks = {contestant["name"]: contestant for contestant in summary["contestants"]}
    courses = [course for course in summary["courses"] if course["results"]]
    if not courses:
        return []
    maps = [course for course in courses if course["contours"] is not None]
    paths = []
    if maps:
        paths += save(draw_maps(maps, looks), folder, "valley")
    else:
        paths += save(draw_race(courses[0], looks), folder, "race")
    paths += save(draw_sweeps(courses, looks), folder, "sweep")
    sizes = [course for course in courses if course["batch_size"] is not None]
    if len(sizes) > 1:
        paths += save(draw_batches(sizes, looks), folder, "batches")
    return paths


def draw_race(course: Summary, looks: Looks) -> Any:
    """Loss by step, and the final score if there is one."""
    scored = course["score_name"] is not None
    picture = figure(11, 5.2) if scored else figure(8.5, 5.2)
    columns = picture.subplots(1, 2, width_ratios=(2.1, 1), squeeze=False)[0] if scored else [picture.subplots()]
    for axes in columns:
        quieten(axes)
    draw_losses(columns[0], course, looks)
    if scored:
        draw_scores(columns[1], course, looks)
    return picture


def draw_losses(axes: Axes, course: Summary, looks: Looks) -> None:
    """The mean over seeds, in a band from the least to the largest."""
    axes.set_yscale(loss_scale([course]))
    ends: dict[str, float] = {}
    for result in course["results"]:
        look, curve = looks[result["contestant"]], result["curve"]
        mean, low, high = (shown(curve[key], axes) for key in ("loss", "low", "high"))
        style = line_style(look)
        axes.plot(curve["step"], mean, style, color=look["colour"], linewidth=2, solid_capstyle="round")
        axes.fill_between(curve["step"], low, high, color=look["colour"], alpha=0.12, linewidth=0)
        if np.isfinite(mean[-1]):
            ends[result["contestant"]] = mean[-1]
    if course["target"] is not None:
        axes.axhline(course["target"], color=QUIET, linewidth=0.9, linestyle=(0, (1, 3)))
    axes.set_xlim(0, course["steps"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step" if course["batch_size"] is None else f"step of {course['batch_size']:,} examples")
    entitle(axes, capital(course["loss_name"]), f"each at its best learning rate; {seeds_said(course)}")
    rates = {result["contestant"]: result["lr"] for result in course["results"]}
    label_ends(axes, ends, {name: f"{name}  lr {rates[name]:g}" for name in ends}, looks)


def label_ends(axes: Axes, ends: Mapping[str, float], words: Mapping[str, str], looks: Looks) -> None:
    """A name beside the end of each curve, moved apart where they would overlap."""
    axes.autoscale_view()  # or the limits would be those from before the curves
    to_axes = axes.transScale + axes.transLimits
    heights = {name: to_axes.transform((0, value))[1] for name, value in ends.items()}
    ordered = sorted(heights, key=heights.__getitem__)
    for name, height in zip(ordered, spread([heights[n] for n in ordered], LINE_HEIGHT), strict=True):
        line = {"arrowstyle": "-", "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0}
        axes.annotate(
            words[name],
            (1, heights[name]),
            xytext=(1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=looks[name]["colour"],
            fontsize=10.5,
            fontweight="bold",
            arrowprops={**line, "color": looks[name]["colour"]},
        )


def draw_scores(axes: Axes, course: Summary, looks: Looks) -> None:
    """The final score: a line from the least to the largest seed, a filled mark for their mean."""
    scored = [result for result in course["results"] if result["score"] is not None]
    ranked = sorted(scored, key=lambda result: result["score"])
    for row, result in enumerate(ranked):
        look = looks[result["contestant"]]
        ends = [result["score_low"], result["score_high"]]
        axes.plot(ends, [row, row], color=look["colour"], linewidth=2, alpha=0.3, solid_capstyle="round")
        axes.plot(ends, [row, row], "|", color=look["colour"], markersize=9, alpha=0.6)
        axes.plot(result["score"], row, "D" if look["baseline"] else "o", color=look["colour"], markersize=9)
        axes.annotate(
            score_words(course).format(result["score"]),
            (result["score"], row),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=look["colour"],
            fontsize=10,
        )
    axes.set_yticks(range(len(ranked)), [result["contestant"] for result in ranked])
    for label, result in zip(axes.get_yticklabels(), ranked, strict=True):
        label.set(color=looks[result["contestant"]]["colour"], fontweight="bold", fontsize=10.5)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(-0.5, len(ranked) - 0.3)
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    if in_percent(course):
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    entitle(axes, capital(course["score_name"]), "mark: mean; line: range of seeds")


def draw_sweeps(courses: Sequence[Summary], looks: Looks) -> Any:
    """The final loss by learning rate, one panel for each course."""
    picture = figure(min(4.6 * len(courses), 15), 4.6)
    for axes, course in zip(picture.subplots(1, len(courses), squeeze=False)[0], courses, strict=True):
        quieten(axes)
        axes.set(xscale="log", yscale=loss_scale([course]), xlabel="learning rate")
        for result in course["results"]:
            look, sweep = looks[result["contestant"]], result["sweep"]
            style = line_style(look)
            losses, rates = shown(sweep["loss"], axes), np.array(sweep["lr"])
            early = np.array([step is not None for step in sweep["stopped"]])
            own = {"color": look["colour"], "markersize": 4}
            axes.plot(rates[~early], losses[~early], f"o{style}", label=result["contestant"], **own)
            axes.plot(rates[early], losses[early], "o", markerfacecolor="none", **own)
            axes.plot(result["lr"], shown([result["loss"]], axes), "o", color=look["colour"], markersize=9, alpha=0.5)
        entitle(axes, name_of(course, courses), "final loss by rate; large: chosen; hollow: stopped")
    beside = legend_columns(list(looks), picture.get_figwidth())
    picture.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=beside, frameon=False, fontsize=10
    )
    return picture


def draw_batches(courses: Sequence[Summary], looks: Looks) -> Any:
    """How everyone holds up as batches grow and steps become fewer."""
    scored = all(course["score_name"] is not None for course in courses)
    kinds = [("loss", courses[0]["loss_name"]), *([("score", courses[0]["score_name"])] if scored else [])]
    picture = figure(5.6 * len(kinds), 4.8)
    for axes, (key, title) in zip(picture.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        quieten(axes)
        axes.set(xscale="log", xlabel="batch size", yscale=loss_scale(courses) if key == "loss" else "linear")
        ends: dict[str, float] = {}
        for name, look in looks.items():
            points = [
                (course["batch_size"], result[key])
                for course in courses
                for result in course["results"]
                if result["contestant"] == name and result[key] is not None
            ]
            if not points:
                continue
            style = line_style(look)
            sizes, values = zip(*sorted(points), strict=True)
            axes.plot(sizes, shown(values, axes), f"o{style}", color=look["colour"], markersize=5, linewidth=2)
            if sizes[-1] == max(course["batch_size"] for course in courses):
                ends[name] = float(shown(values, axes)[-1])
        axes.xaxis.set_major_locator(FixedLocator([course["batch_size"] for course in courses]))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        if key == "score" and all(map(in_percent, courses)):
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        label_ends(axes, ends, {name: name for name in ends}, looks)
        entitle(axes, capital(title), "as many examples for every batch size")
    return picture


def loss_scale(courses: Sequence[Summary]) -> str:
    return "linear" if any(below_zero(course) for course in courses) else "log"


def shown(values: Sequence[float | None], axes: Axes) -> Any:
    """Numbers for an axis: what diverged is left out, and on a logarithmic one the rest is within what it can show."""
    known = np.array([np.nan if value is None else value for value in values], float)
    return np.clip(known, LEAST_LOSS, MOST_LOSS) if axes.get_yscale() == "log" else np.minimum(known, MOST_LOSS)


def score_words(course: Summary) -> str:
    """How a score of this course is written."""
    return "{:.1%}" if in_percent(course) else "{:.4g}"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def name_of(course: Summary, courses: Sequence[Summary]) -> str:
    """A course's title; with its batch size where that is what tells courses apart."""
    alike = [other for other in courses if other["title"] == course["title"]]
    return course["title"] if len(alike) == 1 else f"Batches of {course['batch_size']:,}"


def seeds_said(course: Summary) -> str:
    count = len(course["seeds"])
    return "one seed" if count == 1 else f"mean and range of {count} seeds"
