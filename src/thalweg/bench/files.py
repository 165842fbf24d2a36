"""A run as files: all samples in JSON, the tables in Markdown, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

from thalweg.bench.draw import draw
from thalweg.bench.markdown import page
from thalweg.bench.record import Bench


def write(found: Bench, folder: Path) -> list[Path]:
    """bench.json, bench.md, bench.png and bench.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    record, tables = folder / "bench.json", folder / "bench.md"
    record.write_text(as_json(found), encoding="utf-8")
    tables.write_text(page(found), encoding="utf-8")
    return [record, tables, *draw(found, folder)]


def as_json(found: Bench) -> str:
    return json.dumps(found.plain(), indent=1) + "\n"
