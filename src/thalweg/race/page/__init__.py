"""The report of a race: one HTML file that opens anywhere, light or dark, without a network."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from thalweg.race.figures import colours_of, draw_losses, draw_scores, draw_sweep
from thalweg.race.summary import Summary, below_zero
from thalweg.race.table import columns_of, describe_conditions, describe_size, write_cell
from thalweg.show.extras import extra


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

    figures = {"loss": draw_losses(summary), "score": draw_scores(summary), "sweep": draw_sweep(summary)}
    light, dark = zip(*colours_of(summary).values(), strict=True)
    surroundings = {"made": summary["made"], **summary["machine"], **summary["versions"]}
    words = {key: escape(str(summary[key] or "")) for key in ("title", "verdict", "about", "loss_name", "score_name")}
    return Template(read_part("page.html")).substitute(
        words,
        style=f":root {{ {tints(light)} }}\n:root[data-theme=dark] {{ {tints(dark)} }}\n{read_part('page.css')}",
        chips="".join(
            make_chip(place, who["name"], who["options"]) for place, who in enumerate(summary["contestants"])
        ),
        conditions=escape(f"{describe_size(summary)}. {describe_conditions(summary)}"),
        table=make_table(summary),
        no_score="" if figures["score"] else "hidden",
        command=escape(summary["command"]),
        surroundings=escape(" · ".join(f"{name} {value}" for name, value in surroundings.items())),
        plotly=get_plotlyjs(),
        # nothing in it can end its element
        report=json.dumps({"log": not below_zero(summary), "figures": figures}).replace("<", "\\u003c"),
        script=read_part("page.js"),
    )


def read_part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def tints(colours: tuple[str, ...]) -> str:
    return " ".join(f"--tint-{place}: {colour};" for place, colour in enumerate(colours))


def make_chip(place: int, name: str, options: str) -> str:
    return (
        f'<button type="button" class="chip" style="--colour: var(--tint-{place})" data-contestant="{escape(name)}" '
        f'title="{escape(options)}" aria-pressed="true"><span class="dot"></span>{escape(name)}</button>'
    )


def make_table(summary: Summary) -> str:
    """The table as HTML."""
    columns, results = columns_of(summary), summary["results"]
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in ["optimizer", *(c.title for c in columns)])
    who = {who["name"]: (place, who["options"]) for place, who in enumerate(summary["contestants"])}
    rows = []
    for result in results:
        name = result["contestant"]
        place, options = who[name]
        cells = [
            f'<th scope="row" style="--colour: var(--tint-{place})"><span class="dot"></span>{escape(name)}'
            f"<small>{escape(options)}</small></th>"
        ]
        for column in columns:
            best = ' class="best"' if column.is_best(result, results) else ""
            words, spread = escape(write_cell(column, result)), column.spread(result)
            cells.append(f"<td{best}><span>{words}</span><small>{spread}</small></td>")
        rows.append(f'<tr data-contestant="{escape(name)}">{"".join(cells)}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
