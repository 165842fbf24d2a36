"""The report of a race: one HTML file that opens anywhere, light or dark, without a network."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from thalweg.race.summary import Summary, below_zero, in_percent
from thalweg.rules import RULES
from thalweg.show.extras import extra

#: By Okabe and Ito, whose colours the colour-blind tell apart too, and as they are seen on dark paper: of the rules of
#: the package in their order, the first two of them baselines in grey; then for all others as they come.
COLOURS = (
    *(("#858585", "#858585"), ("#2b2b2b", "#d4d4d4"), ("#e69f00", "#e69f00"), ("#0072b2", "#308dc1")),
    *(("#009e73", "#009e73"), ("#6a3d9a", "#9272b5"), ("#d55e00", "#d55e00"), ("#3d7a85", "#508791")),
    *(("#5f7d00", "#6f8a1a"), ("#c2185b", "#d35787"), ("#8c564b", "#a2766d"), ("#cc79a7", "#cc79a7")),
    *(("#56b4e9", "#56b4e9"), ("#8c6d31", "#987c46"), ("#7b4173", "#9f7499"), ("#393b79", "#7d7ea7")),
)
BASELINES = list(RULES)[:2]

CHIP = (
    '<button type="button" class="chip" style="--colour: var(--tint-$place)" data-contestant="$name" title="$options" '
    'aria-pressed="true"><span class="dot"></span>$name</button>'
)
ROW = (
    '<tr data-contestant="$name"><th scope="row" style="--colour: var(--tint-$place)"><span class="dot"></span>$name'
    "<small>$options</small></th>$cells</tr>"
)
CELL = '<td class="$look"><span>$text</span><small>$seeds</small></td>'


def write_report(summary: Summary, folder: Path) -> Path:
    """Write the report of a race, as told by its summary, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(make_page(summary), encoding="utf-8", newline="\n")
    return path


def make_page(summary: Summary) -> str:
    """The page with its data, styles and scripts in one file."""
    with extra("cli"):
        from plotly.offline import get_plotlyjs

    report = {"summary": summary, "log": not below_zero(summary), "share": in_percent(summary), "baselines": BASELINES}
    light, dark = zip(*colours_of(summary).values(), strict=True)
    people = {
        who["name"]: {"place": place, "name": escape(who["name"]), "options": escape(who["options"])}
        for place, who in enumerate(summary["contestants"])
    }
    rows = [
        Template(ROW).substitute(people[row["contestant"]], cells="".join(map(make_cell, row["cells"])))
        for row in summary["rows"]
    ]
    words = ("title", "verdict", "about", "size", "conditions", "loss_name", "score_name", "command")
    surroundings = {"made": summary["made"], **summary["machine"], **summary["versions"]}
    return Template(read_part("page.html")).substitute(
        {key: escape(str(summary[key] or "")) for key in words},
        style=f":root {{ {tints(light)} }}\n:root[data-theme=dark] {{ {tints(dark)} }}\n{read_part('page.css')}",
        chips="".join(map(Template(CHIP).substitute, people.values())),
        head="".join(f'<th scope="col">{escape(title)}</th>' for title in summary["columns"]),
        rows="".join(rows),
        no_score="" if summary["score_name"] else "hidden",
        surroundings=escape(" · ".join(f"{name} {value}" for name, value in surroundings.items())),
        plotly=get_plotlyjs(),
        # nothing in it can end its element
        report=json.dumps(report).replace("<", "\\u003c"),
        script=read_part("page.js"),
    )


def read_part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def tints(colours: tuple[str, ...]) -> str:
    return " ".join(f"--tint-{place}: {colour};" for place, colour in enumerate(colours))


def make_cell(cell: Summary) -> str:
    text = {key: escape(cell[key]) for key in ("text", "seeds")}
    return Template(CELL).substitute(text, look="best" if cell["is_best"] else "")


def colours_of(summary: Summary) -> dict[str, tuple[str, str]]:
    """By contestant, also of those that have no result: on light and on dark paper."""
    names = [who["name"] for who in summary["contestants"]]
    order = [*RULES, *(name for name in names if name not in RULES)]
    return {name: COLOURS[order.index(name) % len(COLOURS)] for name in names}
