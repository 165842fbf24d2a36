"""What all pages share: one style, and light or dark as the reader likes it."""

from __future__ import annotations

from importlib import resources


def part(name: str, package: str = __name__) -> str:
    """A file beside the code of a package: of this one, what all pages share."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
