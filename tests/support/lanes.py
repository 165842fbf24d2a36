"""Which tests `make test` leaves to `make test-all`: products of parameters are thinned there.

A test marked `in_turn` keeps as few of its combinations as meet every value of every parameter, and all others are
marked `nightly`. With names, `in_turn("rule", "dtype")`, it is every value of these arguments alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import pytest

#: Names of parameters, and what they stand for.
Values: TypeAlias = frozenset[tuple[tuple[str, ...], str]]


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark what the ordinary lane does without."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turn") and not item.get_closest_marker("nightly"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in products.values():
        kept = covering([values_of(item) for item in product])
        for place, item in enumerate(product):
            if place not in kept:
                item.add_marker(pytest.mark.nightly)


def values_of(item: pytest.Item) -> Values:
    """What an item is the test of."""
    marker = item.get_closest_marker("in_turn")
    callspec = getattr(item, "callspec", None)
    if marker is None or callspec is None:
        raise pytest.UsageError(f"{item.nodeid}: in_turn is for tests with parameters")
    if unknown := set(marker.args) - set(callspec.params):
        raise pytest.UsageError(f"{item.nodeid}: in_turn names {', '.join(sorted(unknown))}, which it has not")
    together = [(name,) for name in marker.args] or [
        argnames(mark.args[0]) for mark in item.iter_markers("parametrize")
    ]
    return frozenset((names, repr([callspec.params[name] for name in names])) for names in together)


def argnames(given: str | Sequence[str]) -> tuple[str, ...]:
    """The names of one parametrization, as pytest reads them."""
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else tuple(given)


def covering(found: Sequence[Values]) -> set[int]:
    """Places of a few that have every value among them, each as seldom as can be: of a table the diagonal."""
    missing: Values = frozenset().union(*found)
    times: Counter[tuple[tuple[str, ...], str]] = Counter()
    kept: set[int] = set()
    while missing:
        best = max(range(len(found)), key=lambda i: (len(found[i] & missing), -sum(times[v] for v in found[i]), -i))
        kept.add(best)
        times.update(found[best])
        missing -= found[best]
    return kept
