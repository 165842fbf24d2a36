"""The frame of every page: one HTML file that opens anywhere, light or dark, and asks nothing of a network."""

from __future__ import annotations

import html
import json
import math
from importlib import resources
from string import Template
from typing import Any

from thalweg.show.extras import extra
from thalweg.show.palette import THEMES


def read_part(name: str, package: str = __name__) -> str:
    """A file beside the code of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def frame_page(*, verb: str, title: str, verdict: str, style: str, body: str, scripts: str) -> str:
    """A whole page. Title and verdict are text; body and scripts are HTML, the body from within its header on."""
    return Template(read_part("frame.html")).substitute(
        verb=verb,
        title=html.escape(title),
        verdict=html.escape(verdict),
        style="\n".join(
            (tones("light", ":root"), tones("dark", ':root[data-theme="dark"]'), read_part("page.css"), style)
        ),
        theme=read_part("theme.js"),
        body=body,
        scripts=scripts,
    )


def tones(theme: str, where: str) -> str:
    """The colours of a theme as variables of CSS."""
    return f"{where} {{ {' '.join(f'--{name}: {colour};' for name, colour in THEMES[theme].items())} }}"


def plotly_script() -> str:
    """All of plotly.js, so that charts need no network."""
    with extra("cli"):
        from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def embed(data: Any) -> str:
    """JSON that can stand in a script element: ASCII, without the sign that could end it, null for what is infinite."""
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
