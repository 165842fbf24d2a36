"""What the base install does not bring, asked for by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ModuleNotFoundError):
    """A package that an extra would have installed; the message says which."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports that ``thalweg[name]`` brings: says how to install what is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "a package").partition(".")[0]
        raise MissingExtra(f'{package} is not installed: pip install "thalweg[{name}]"', name=missing.name) from missing
