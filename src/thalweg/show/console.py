"""The terminal: colours and moving bars only where somebody watches."""

from __future__ import annotations

import sys

from thalweg.show.extras import extra

with extra("cli"):
    from rich.console import Console


def console() -> Console:
    """Where results go. Not a terminal: no colours, no bars, and lines as long as they need to be."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200, no_color=True)


def aside() -> Console:
    """Where progress and remarks go, so that results can be piped."""
    return Console(stderr=True, highlight=False, no_color=not sys.stderr.isatty())
