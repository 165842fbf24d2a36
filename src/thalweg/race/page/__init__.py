"""The report of a race: one HTML file that opens anywhere, without a network."""

from __future__ import annotations

from thalweg.race.page.document import write

__all__ = ["write"]
