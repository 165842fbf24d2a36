"""The three lanes of tests, and how a test of many parameters says which of them each lane has.

A test without a marker is in every lane. One marked `slow` is not in `make test-fast`. One marked `nightly` is in
`make test-all` alone. Parameters are marked like tests: `one_in`, `by_day`, `by_turns` and `once` write these marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


def one_in(number: int, table: Iterable[Any], first: int = 0) -> list[Any]:
    """Parameters of a long table, of which `make test` has one of every so many.

    first: where it begins. Tests of the same table begin at different rows, so that most rows are met by one of them.
    """
    rows = [as_param(row) for row in table]
    return [row if place % number == first % number else with_nightly(row) for place, row in enumerate(rows)]


def by_turns(*names: str, first: int = 0) -> Callable[[Test], Test]:
    """Above several parametrizations: `make test` has the first values of all lists, the second of all, and so on.

    A list that is at its end begins again, until the longest is through; with names, the longest of those named.
    All other combinations are marked `nightly`. first: where every list begins.
    """

    def apply(test: Test) -> Test:
        lists = take_lists(test)
        chosen = [each for each in lists if not names or not set(names).isdisjoint(each.names)]
        if unknown := set(names) - {name for each in lists for name in each.names}:
            raise ValueError(f"{test.__name__} has no parameter {', '.join(sorted(unknown))}")
        return parametrize(test, lists, max(len(each.ordinary) for each in chosen), first)

    return apply


def once(place: int) -> Callable[[Test], Test]:
    """Above parametrizations: `make test` has one combination, of the values at this place of every list."""

    def apply(test: Test) -> Test:
        return parametrize(test, take_lists(test), 1, place)

    return apply


def by_day(day: Iterable[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Rows of parameters, of which these are not left to the night."""
    day, rows = set(day), list(rows)
    assert day <= set(rows), day - set(rows)
    return [pytest.param(*row, marks=() if row in day else pytest.mark.nightly) for row in rows]


class List:
    """One parametrization: its names, and its rows with their ids."""

    def __init__(self, mark: pytest.Mark) -> None:
        names, table = mark.args
        self.names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        self.indirect = self.names if mark.kwargs.get("indirect") else []
        ids = mark.kwargs.get("ids")
        given = list(ids) if ids is not None and not callable(ids) else None
        self.rows = []
        for place, each in enumerate(table):
            row = as_param((each,) if len(self.names) == 1 and not hasattr(each, "marks") else each)
            words = [word_of(ids, name, value, place) for name, value in zip(self.names, row.values, strict=True)]
            name = row.id or (given and given[place]) or "-".join(words)
            self.rows.append(pytest.param(*row.values, id=str(name), marks=row.marks))
        #: Places of the rows that are not left to the night by themselves.
        self.ordinary = [place for place, row in enumerate(self.rows) if not is_nightly(row)]


def take_lists(test: Any) -> list[List]:
    """Take the parametrizations off a test or a class."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return [List(mark) for mark in marks]


def parametrize(test: Test, lists: Sequence[List], number: int, first: int) -> Test:
    """Every combination; `number` of them, which take each list by turns, are not marked `nightly`."""
    turns = range(first, first + number)
    kept = {tuple(each.ordinary[turn % len(each.ordinary)] for each in lists) for turn in turns}
    params = []
    for places in product(*(range(len(each.rows)) for each in lists)):
        rows = [each.rows[place] for each, place in zip(lists, places, strict=True)]
        values = [value for row in rows for value in row.values]
        marks = [mark for row in rows for mark in row.marks]
        param = pytest.param(*values, id="-".join(str(row.id) for row in rows), marks=marks)
        params.append(param if places in kept or is_nightly(param) else with_nightly(param))
    names, indirect = ([name for each in lists for name in getattr(each, of)] for of in ("names", "indirect"))
    return pytest.mark.parametrize(names, params, indirect=indirect)(test)


def as_param(row: Any) -> Any:
    """A row of one value, or of several where it is a tuple or a list, as pytest has it."""
    return row if hasattr(row, "marks") else pytest.param(*(row if isinstance(row, (tuple, list)) else (row,)))


def with_nightly(param: Any) -> Any:
    return pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.nightly])


def is_nightly(param: Any) -> bool:
    return any(mark.name == "nightly" for mark in param.marks)


def word_of(ids: Any, name: str, value: Any, place: int) -> str:
    """What stands for a value in the name of a test."""
    if callable(ids) and (word := ids(value)) is not None:
        return str(word)
    if isinstance(value, (str, int, float, bool, type(None))):
        return str(value)
    return getattr(value, "__name__", f"{name}{place}")
