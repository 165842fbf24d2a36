"""Which tests `make test` leaves to `make test-all`, and `make test-fast` to `make test`: products of parameters.

A test marked `in_turn` keeps as few of its combinations as meet every value of every parameter, and all others are
marked `nightly`. With names, `in_turn("rule", "dtype")`, it is every value of these arguments alone. A module marked
`in_turn(together=True)` keeps every test, and every value in one test or another: each test has one rule, by turns.

`make test-fast` takes every module in this way: what it does without is marked `again`.
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
    pools: dict[str, dict[pytest.Item, Values]] = {}
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is not None and item.get_closest_marker("nightly") is None:
            test = item.nodeid.partition("[")[0]
            pool = test.partition("::")[0] if marker.kwargs.get("together") else test
            pools.setdefault(pool, {})[item] = values_of(item, marker.args)
    mark_others(pools.values(), "nightly")


def mark_again(items: Iterable[pytest.Item]) -> None:
    """Mark what the fast lane does without, of what the ordinary lane has."""
    pools: dict[str, dict[pytest.Item, Values]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "nightly", "gpu"))):
            pools.setdefault(item.nodeid.partition("::")[0], {})[item] = values_of(item)
    mark_others(pools.values(), "again")


def mark_others(pools: Iterable[dict[pytest.Item, Values]], name: str) -> None:
    """Mark all items of a pool but a few that have every value among them."""
    for pool in pools:
        kept = covering(list(pool.values()))
        for place, item in enumerate(pool):
            if place not in kept:
                item.add_marker(getattr(pytest.mark, name))


def values_of(item: pytest.Item, names: Sequence[str] = ()) -> Values:
    """What an item is the test of: the values of these parameters, or of all."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if unknown := set(names) - set(params):
        raise pytest.UsageError(f"{item.nodeid}: in_turn names {', '.join(sorted(unknown))}, which it has not")
    alike = [(name,) for name in names] or [argnames(mark.args[0]) for mark in item.iter_markers("parametrize")]
    if not names:  # those of fixtures too
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
    places = list(range(len(found)))
    while missing:
        places = [i for i in places if not missing.isdisjoint(found[i])]
        best = max(places, key=lambda i: (len(found[i] & missing), -sum(times[v] for v in found[i]), -i))
        kept.add(best)
        times.update(found[best])
        missing -= found[best]
    return kept


def one_in(number: int, table: Iterable[Any], first: int = 0) -> list[Any]:
    """Parameters of a long table, of which the ordinary lane has one of every so many.

    first: where it begins. Tests of the same table begin at different rows, so that most rows are met by one of them.
    """
    found = []
    for place, row in enumerate(table):
        param = row if hasattr(row, "marks") else pytest.param(*(row if isinstance(row, tuple) else (row,)))
        marks = param.marks if place % number == first % number else [*param.marks, pytest.mark.nightly]
        found.append(pytest.param(*param.values, id=param.id, marks=marks))
    return found
