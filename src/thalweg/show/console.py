"""The terminal: colours and moving bars only on a terminal, and tables that look alike."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from thalweg.show.extras import extra

with extra("cli"):
    from rich import box
    from rich.console import Console
    from rich.table import Table


def console() -> Console:
    """Where results go. Not a terminal: no colours, no bars, and lines as long as they need to be."""
    replace_unknown_letters(sys.stdout)
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200, no_color=True)


def aside() -> Console:
    """Where progress and remarks go, so that results can be piped."""
    watched = sys.stderr.isatty()
    return Console(stderr=True, highlight=False, no_color=not watched, soft_wrap=not watched)


def replace_unknown_letters(stream: TextIO) -> None:
    """A stream that has no letter for something, as in ASCII, gets a question mark instead of failing."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def make_table(**look: Any) -> Table:
    """An empty table: titles above a line, nothing around."""
    left: Any = {"title_justify": "left", "caption_justify": "left"}
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **left, **look)
