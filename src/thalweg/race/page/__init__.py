"""The report of a race: one HTML file that opens anywhere, without a network. Its words and tables are made here."""

from __future__ import annotations

import datetime
from functools import partial
from html import escape
from pathlib import Path
from string import Template

from thalweg.race import figures
from thalweg.race.figures import Figure, Looks, looks_of, themes
from thalweg.race.summary import Summary, below_zero
from thalweg.race.table import Column, columns_of, is_known
from thalweg.show.page import embed, frame_page, plotly_script, read_part
from thalweg.show.palette import VIRIDIS
from thalweg.show.units import count_words

own = partial(read_part, package=__name__)


def write(summary: Summary, path: Path) -> None:
    """Write the report of a race, as told by its summary, into one self-contained HTML file."""
    whole = document(summary)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole, encoding="utf-8", newline="\n")


def document(summary: Summary) -> str:
    """The whole file. It depends on nothing but the summary and the version of plotly."""
    looks, courses = looks_of(summary), summary["courses"]
    missing = summary["missing"]
    body = Template(own("page.html")).substitute(
        missing=f"{count_words(missing, 'run is', 'runs are')} missing: this was drawn before the end.",
        nothing_missing="" if missing else "hidden",
        chips="".join(map(chip, summary["contestants"])),
        courses="".join(f"<option>{escape(name_of(course))}</option>" for course in courses),
        one_course="" if len(courses) > 1 else "hidden",
        command=escape(summary["command"]),
        surroundings=escape(surroundings(summary)),
    )
    report = {
        "log": not any(map(below_zero, courses)),
        "themes": {theme: tones for theme, tones in themes(summary).items() if theme != "picture"},
        "places": {name: place for place, name in enumerate(looks)},
        "template": figures.template(),
        "ramp": VIRIDIS,
        "courses": [course_page(course, summary, looks) for course in courses],
    }
    data = f'<script type="application/json" id="report">{embed(report)}</script>'
    script = f'<script type="module">\n{own("page.js")}</script>'
    return frame_page(
        verb="race",
        title=summary["title"],
        verdict=courses[0]["verdict"] if courses else "",
        style=own("page.css")
        + "\n".join(f".tint-{place} {{ --colour: var(--tint-{place}); }}" for place in range(len(looks))),
        body=body,
        scripts="\n".join((plotly_script(), data, script)),
    )


def course_page(course: Summary, summary: Summary, looks: Looks) -> Figure:
    """All that the page shows of a course: words by the place they stand at, the table, and the figures."""
    scores = [result["curve"]["score"] or () for result in course["results"]]
    scored = course["score_name"] is not None and any(len(seen) - seen.count(None) > 1 for seen in scores)
    alike = [c for c in summary["courses"] if c["task"] == course["task"] and c["batch_size"] is not None]
    several = len({other["batch_size"] for other in alike}) > 1
    clocks = {"steps": "step", "seconds": "seconds"}
    return {
        "words": words(course, summary),
        "table": results_table(course, summary),
        "figures": {
            "map": None if course["contours"] is None else figures.draw_map(course, looks),
            "loss": {
                f"{scale} {clock}": figures.draw_losses(course, looks, log=scale == "log", clock=by)
                for scale in ("log", "linear")
                for clock, by in clocks.items()
            },
            "score": {clock: figures.draw_scores(course, looks, clock=by) for clock, by in clocks.items()}
            if scored
            else None,
            "sweep": figures.draw_sweep(course, looks),
            "batch-loss": figures.draw_batches(alike, looks, "loss") if several else None,
            "batch-score": figures.draw_batches(alike, looks, "score") if several and course["score_name"] else None,
            "update": figures.draw_layers(course, "update"),
            "trust": figures.draw_layers(course, "trust"),
        },
    }


def words(course: Summary, summary: Summary) -> dict[str, str]:
    titles = {other["title"] for other in summary["courses"]}
    many = len(course["seeds"]) > 1
    seeds = f"mean of {count_words(len(course['seeds']), 'seed')}, and their range" if many else "one seed"
    batches = "" if course["batch_size"] is None else f" with batches of {course['batch_size']:,}"
    parameters = f", {count_words(course['results'][0]['parameters'], 'parameter')}" if course["results"] else ""
    others = " Dashes and dots: other libraries." if any(c.get("rival") for c in summary["contestants"]) else ""
    band = "Mean over seeds, in a band from the least to the largest. " if many else ""
    return {
        "title": course["title"] if len(titles) > 1 else summary["title"],
        "verdict": course["verdict"],
        "about": course["about"],
        "results-note": f"{count_words(course['steps'], 'step')}{batches}{parameters}; {seeds}. Each optimizer at the "
        f"best of its learning rates. {course['search']}",
        "loss-title": course["loss_name"],
        "loss-note": f"{band}Dashed: baselines.{others}",
        "score-title": course["score_name"] or "",
        "score-note": "Mean over seeds.",
        "sweep-note": f"Final {course['loss_name']} at each rate. Ringed: the one chosen. Crosses: diverged, or off "
        "the chart. Hollow: stopped early, with the loss it had. Near the best, in the table: how far apart the rates "
        f"around it are that lose at most {100 * summary['near']:g}\u00a0% of what it won.",
        "batch-loss-title": f"{course['loss_name']} by batch size",
        "batch-score-title": f"{course['score_name']} by batch size",
    }


def results_table(course: Summary, summary: Summary) -> str:
    """The table as HTML. Cells carry the values by which the page sorts them."""
    columns = [column for column in columns_of(course) if column.title and is_known(column, course)]
    heads = [("optimizer", ""), *((column.title, column.best) for column in columns)]
    head = "".join(
        f'<th scope="col"><button type="button" data-best="{best}">{escape(title)}</button></th>'
        for title, best in heads
    )
    contestants = {who["name"]: (place, who) for place, who in enumerate(summary["contestants"])}
    rows = []
    for result in course["results"]:
        place, who = contestants[result["contestant"]]
        note = who["options"] or ""
        if who["baseline"]:
            note = ": ".join(filter(None, ("baseline", who.get("given"))))
        name = escape(result["contestant"])
        first = (
            f'<th scope="row" data-value="{name}" title="{escape(who["options"] or "")}">'
            f'<span class="who tint-{place}"><span class="dot"></span>'
            f'<span class="name">{name}</span></span><small>{escape(note)}</small></th>'
        )
        cells = "".join(results_cell(column, result, course["results"]) for column in columns)
        rows.append(f'<tr data-contestant="{name}">{first}{cells}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def results_cell(column: Column, result: Summary, results: list[Summary]) -> str:
    value = column.value(result)
    best = column.is_best(result, results)
    text = escape(column.missing if value is None else column.words(value)).replace(" ", "\u00a0")
    inside = f"<b>{text}</b>" if best else f"<span>{text}</span>"
    low, high = ((result.get(f"{column.range}_{end}") if column.range else None) for end in ("low", "high"))
    if low is not None and high is not None and (low != high or value is None):
        around = "in some seeds" if value is None else f"{column.words(low)} to {column.words(high)}"
        inside += f"<small>{escape(around)}</small>"
    known = "" if value is None else f' data-value="{escape(str(value))}"'
    return f"<td{known}{' class=best' if best else ''}>{inside}</td>"


def chip(contestant: Summary) -> str:
    name = escape(contestant["name"])
    return (
        f'<button type="button" class="chip" data-contestant="{name}" title="{escape(contestant["options"] or "")}" '
        f'aria-pressed="true"><span class="dot"></span><span class="name">{name}</span></button>'
    )


def name_of(course: Summary) -> str:
    size = course["batch_size"]
    return str(course["title"] if size is None else f"{course['title']}, batches of {size:,}")


def surroundings(summary: Summary) -> str:
    machine = summary["machine"]  # empty where no run is recorded
    try:
        made = datetime.datetime.fromisoformat(summary["made"]).astimezone(datetime.timezone.utc)
        date = f"{made.day} {made:%B %Y at %H:%M} UTC"
    except ValueError:
        date = str(summary["made"])
    cores = machine.get("cores") and count_words(machine["cores"], "core")
    versions = (f"{package} {version}" for package, version in summary["versions"].items())
    told = [date, machine.get("gpu"), machine.get("cpu"), cores, machine.get("system"), *versions]
    return " · ".join(each for each in told if each)
