"""The report as a file: our page, style and scripts, plotly.js and the numbers, all in one."""

from __future__ import annotations

import html
import json
import math
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from thalweg.show.extras import extra
from thalweg.show.page import part as shared

own = partial(shared, package="thalweg.race.page")

#: In the order in which they build upon one another.
SCRIPTS = (
    "words.js",
    "colours.js",
    "frame.js",
    "curves.js",
    "rates.js",
    "layers.js",
    "table.js",
    "page.js",
)


def write(summary: dict[str, Any], path: Path) -> None:
    """Write the report of a race, as told by its summary, into one self-contained HTML file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(summary), encoding="utf-8", newline="\n")


def document(summary: dict[str, Any]) -> str:
    """The whole file. It depends on nothing but the summary and the version of plotly."""
    with extra("cli"):
        from plotly.offline import get_plotlyjs

    return Template(own("page.html")).substitute(
        title=html.escape(str(summary["title"])),
        style=shared("page.css") + own("page.css"),
        theme=shared("theme.js"),
        plotly=get_plotlyjs(),
        summary=embedded(summary),
        script="\n".join(own(name) for name in SCRIPTS),
    )


def embedded(summary: dict[str, Any]) -> str:
    """JSON that can stand in a script element: ASCII, and without the sign that could end it."""
    return json.dumps(finite(summary), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """The same, with None for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value
