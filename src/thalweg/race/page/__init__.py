"""The report of a race: one HTML file that opens anywhere, light or dark, without a network."""

from __future__ import annotations

import datetime
import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from thalweg.race.figures import colours_of, draw_losses, draw_scores, draw_sweep
from thalweg.race.summary import Summary, below_zero
from thalweg.race.table import columns_of, describe_conditions, write_cell
from thalweg.show.extras import extra
from thalweg.show.units import count_words

BAND = "Mean over seeds, in a band from the least to the largest. "


def write_report(summary: Summary, folder: Path) -> Path:
    """Write the report of a race, as told by its summary, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(make_page(summary), encoding="utf-8", newline="\n")
    return path


def make_page(summary: Summary) -> str:
    """The whole file."""
    with extra("cli"):
        from plotly.offline import get_plotlyjs

    colours = list(colours_of(summary).values())
    tints = ["".join(f"--tint-{place}: {pair[theme]}; " for place, pair in enumerate(colours)) for theme in range(2)]
    report = {
        "log": not below_zero(summary),
        "figures": {"loss": draw_losses(summary), "score": draw_scores(summary), "sweep": draw_sweep(summary)},
    }
    return Template(read_part("page.html")).substitute(
        title=escape(summary["title"]),
        verdict=escape(summary["verdict"]),
        about=escape(summary["about"]),
        style=f":root {{ {tints[0]}}}\n:root[data-theme=dark] {{ {tints[1]}}}\n" + read_part("page.css"),
        chips="".join(
            make_chip(place, who["name"], who["options"]) for place, who in enumerate(summary["contestants"])
        ),
        conditions=escape(describe_size(summary) + describe_conditions(summary)),
        table=make_table(summary),
        loss_name=escape(summary["loss_name"]),
        loss_note=f"{BAND if summary['seeds'] > 1 else ''}Dashed: baselines. Dashes and dots: other libraries.",
        score_name=escape(summary["score_name"] or ""),
        no_score="" if report["figures"]["score"] else "hidden",
        command=escape(summary["command"]),
        surroundings=escape(describe_surroundings(summary)),
        plotly=get_plotlyjs(),
        report=json.dumps(report).replace("<", "\\u003c"),  # nothing in it can end its element
        script=read_part("page.js"),
    )


def read_part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def make_chip(place: int, name: str, options: str) -> str:
    return (
        f'<button type="button" class="chip" style="--colour: var(--tint-{place})" data-contestant="{escape(name)}" '
        f'title="{escape(options)}" aria-pressed="true"><span class="dot"></span>{escape(name)}</button>'
    )


def make_table(summary: Summary) -> str:
    """The table as HTML. Cells carry the values by which the page sorts them."""
    columns, results = columns_of(summary), summary["results"]
    titles = [("optimizer", ""), *((column.title, column.best) for column in columns)]
    head = "".join(
        f'<th scope="col"><button type="button" data-best="{best}">{escape(title)}</button></th>'
        for title, best in titles
    )
    who = {who["name"]: (place, who["options"]) for place, who in enumerate(summary["contestants"])}
    rows = []
    for result in results:
        name = result["contestant"]
        place, options = who[name]
        cells = [
            f'<th scope="row" data-value="{escape(name)}" style="--colour: var(--tint-{place})">'
            f'<span class="dot"></span>{escape(name)}<small>{escape(options)}</small></th>'
        ]
        for column in columns:
            value = result[column.key]
            best = ' class="best"' if column.is_best(result, results) else ""
            spread = column.spread(result)
            inside = f"<span>{escape(write_cell(column, result))}</span>" + (
                f"<small>{spread}</small>" if spread else ""
            )
            cells.append(f'<td{best} data-value="{"" if value is None else value}">{inside}</td>')
        rows.append(f'<tr data-contestant="{escape(name)}">{"".join(cells)}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def describe_size(summary: Summary) -> str:
    batches = "" if summary["batch_size"] is None else f" with batches of {summary['batch_size']:,}"
    parameters = f", {count_words(summary['results'][0]['parameters'], 'parameter')}" if summary["results"] else ""
    seeds = f"{count_words(summary['seeds'], 'seed')}"
    return f"{count_words(summary['steps'], 'step')}{batches}{parameters}; {seeds}. "


def describe_surroundings(summary: Summary) -> str:
    machine, made = summary["machine"], datetime.datetime.fromisoformat(summary["made"])
    cores = machine.get("cores") and count_words(machine["cores"], "core")
    versions = (f"{package} {version}" for package, version in summary["versions"].items())
    words = [
        f"{made:%Y-%m-%d %H:%M} UTC",
        machine.get("gpu"),
        machine.get("cpu"),
        cores,
        machine.get("system"),
        *versions,
    ]
    return " · ".join(word for word in words if word)
