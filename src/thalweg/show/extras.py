"""What the base install does not bring, asked for by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ModuleNotFoundError):
    """A package that an extra would have installed; the message says which."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """A context for imports that ``thalweg[name]`` brings: its error says how to install what is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "a package").partition(".")[0]
        raise MissingExtra(f'{package} is not installed: pip install "thalweg[{name}]"', name=missing.name) from missing


def need(name: str, *packages: str) -> None:
    """Raise now if packages of an extra are missing, and not when the work that needs them is done."""
    with extra(name):
        for package in packages:
            importlib.import_module(package)
