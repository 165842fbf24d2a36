"""Which tests `make test` leaves to `make test-all`: products of parameters are thinned there.

A test marked `in_turn` keeps as few of its combinations as meet every value of every parameter, and all others are
marked `nightly`. With names, `in_turn("rule", "dtype")`, it is every value of these arguments alone. A module marked
`in_turn(together=True)` keeps every test, and every value in one test or another: each test has one rule, by turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import pytest

#: Names of parameters and what they stand for, or "test" and its name.
Values: TypeAlias = frozenset[tuple[tuple[str, ...], str]]


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark what the ordinary lane does without."""
    pools: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is not None and item.get_closest_marker("nightly") is None:
            test = item.nodeid.partition("[")[0]
            pools.setdefault(test.partition("::")[0] if marker.kwargs.get("together") else test, []).append(item)
    for pool in pools.values():
        kept = covering([values_of(item) for item in pool])
        for place, item in enumerate(pool):
            if place not in kept:
                item.add_marker(pytest.mark.nightly)


def values_of(item: pytest.Item) -> Values:
    """What an item is the test of."""
    marker = item.get_closest_marker("in_turn")
    assert marker is not None
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if unknown := set(marker.args) - set(params):
        raise pytest.UsageError(f"{item.nodeid}: in_turn names {', '.join(sorted(unknown))}, which it has not")
    alike = [(name,) for name in marker.args] or [argnames(mark.args[0]) for mark in item.iter_markers("parametrize")]
    if not marker.args:  # those of fixtures too
        alike += [(name,) for name in params if not any(name in names for names in alike)]
    given = {(names, repr([params[name] for name in names])) for names in alike}
    return frozenset({(("test",), item.nodeid.partition("[")[0]), *given})


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


def one_in(number: int, table: Iterable[Any]) -> list[Any]:
    """Parameters of a long table, of which the ordinary lane has the first of every so many."""
    found = []
    for place, row in enumerate(table):
        param = row if hasattr(row, "marks") else pytest.param(*(row if isinstance(row, tuple) else (row,)))
        marks = param.marks if place % number == 0 else [*param.marks, pytest.mark.nightly]
        found.append(pytest.param(*param.values, id=param.id, marks=marks))
    return found
