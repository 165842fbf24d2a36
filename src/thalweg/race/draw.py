"""The pictures of a race, PNG and SVG: how fast everyone learned, at which rates, with which batches, by which way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thalweg.race import figures
from thalweg.race.figures import Figure, looks_of, themes
from thalweg.race.summary import Summary, below_zero
from thalweg.show.pictures import draw_figure, entitle, figure, save


class Panel(NamedTuple):
    """One chart of a picture, with its title and what has to be known of it."""

    title: str
    about: str
    chart: Figure


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Write every picture that the race has something for, each as PNG and SVG."""
    looks, tones = looks_of(summary), themes(summary)["picture"]
    courses = [course for course in summary["courses"] if course["results"]]
    if not courses:
        return []
    pictures: dict[str, Any] = {}
    maps = [course for course in courses if course["contours"] is not None]
    if maps:
        panels = [Panel(c["title"], c["about"], figures.draw_map(c, looks)) for c in maps]
        pictures["valley"] = compose(panels, tones, columns=2, size=(5.4, 4.7), legend=True, dpi=110)
    else:
        pictures["race"] = draw_race(courses[0], looks, tones)
    panels = [
        Panel(name_of(c, courses), "by learning rate; ringed: chosen; hollow: stopped", figures.draw_sweep(c, looks))
        for c in courses
    ]
    pictures["sweep"] = compose(panels, tones, size=(4.6, 4.2), legend=True)
    sizes = [course for course in courses if course["batch_size"] is not None]
    if len(sizes) > 1:
        scored = all(course["score_name"] is not None for course in sizes)
        names = {"loss": sizes[0]["loss_name"], **({"score": sizes[0]["score_name"]} if scored else {})}
        panels = [
            Panel(capital(name), "as many examples for every batch size", figures.draw_batches(sizes, looks, key))
            for key, name in names.items()
        ]
        pictures["batches"] = compose(panels, tones, size=(5.6, 4.4), legend=True)
    return [path for stem, picture in pictures.items() for path in save(picture, folder, stem)]


def draw_race(course: Summary, looks: figures.Looks, tones: Any) -> Any:
    """Loss by step, and the final score if there is one."""

    def label(result: Summary) -> str:
        return f"{result['contestant']}  lr {result['lr']:g}"

    losses = figures.draw_losses(course, looks, log=not below_zero(course), label=label)
    losses["layout"]["annotations"] = [each for each in losses["layout"]["annotations"] if "name" in each]
    seeds = "one seed" if len(course["seeds"]) == 1 else f"mean and range of {len(course['seeds']):,} seeds"
    panels = [Panel(capital(course["loss_name"]), f"each at its best learning rate; {seeds}", losses)]
    if course["score_name"] is None:
        return compose(panels, tones, size=(8.5, 5.2))
    scores = Panel(capital(course["score_name"]), "mark: mean; line: seeds", figures.draw_final_scores(course, looks))
    return compose([*panels, scores], tones, size=(5.5, 5.2), widths=(2.1, 1))


def compose(
    panels: Sequence[Panel],
    tones: Any,
    *,
    size: tuple[float, float],
    columns: int = 4,
    widths: Sequence[float] | None = None,
    legend: bool = False,
    dpi: int = 160,
) -> Any:
    """A picture of panels of so many inches each, with the names of all below them if they have no labels."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    picture = figure(size[0] * columns, size[1] * rows + 0.4 * legend, dpi=dpi)
    places = picture.subplots(rows, columns, squeeze=False, width_ratios=widths).ravel()
    for axes, panel in zip(places, panels, strict=False):
        draw_figure(axes, panel.chart, tones)
        entitle(axes, panel.title, panel.about)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    if legend:
        lines = {line.get_label(): line for axes in places for line in axes.get_lines()}
        lines = {name: line for name, line in lines.items() if not name.startswith("_") and name}
        # as many beside one another as find room
        beside = int(picture.get_figwidth() / (0.65 + 0.085 * max(map(len, lines), default=1)))
        picture.legend(
            handles=list(lines.values()), loc="outside lower center", ncols=max(1, beside), frameon=False, fontsize=10
        )
    return picture


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def name_of(course: Summary, courses: Sequence[Summary]) -> str:
    """A course's title; with its batch size where that is what tells courses apart."""
    alike = [other for other in courses if other["title"] == course["title"]]
    return course["title"] if len(alike) == 1 else f"Batches of {course['batch_size']:,}"
