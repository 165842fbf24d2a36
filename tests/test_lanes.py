"""What `make test` leaves to `make test-all`: combinations of what it meets, and nothing that it does not meet."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from lanes import covering, mark_nightly

RULES, LAYOUTS, DTYPES = ["LARS", "LAMB", "Kron"], ["rows", "columns", "both", "copies"], ["float32", "float64"]


class Item:
    """As much of a test as lanes look at."""

    def __init__(self, *names: str, number: int = 0, nightly: bool = False, **params: Any) -> None:
        self.nodeid = f"tests/test_x.py::test_x[{number}]"
        self.marks = {"in_turn": pytest.mark.in_turn(*names).mark}
        if nightly:
            self.add_marker(pytest.mark.nightly)
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def iter_markers(self, name: str) -> list[Any]:
        assert name == "parametrize"
        return [pytest.mark.parametrize(one, [value]).mark for one, value in self.callspec.params.items()]

    def add_marker(self, marker: Any) -> None:
        self.marks[marker.name] = marker.mark


def kept(*names: str) -> list[tuple[str, str, str]]:
    """Those of all combinations that are not marked."""
    every = list(product(RULES, LAYOUTS, DTYPES))
    items = [Item(*names, rule=rule, layout=layout, dtype=dtype) for rule, layout, dtype in every]
    mark_nightly(items)  # type: ignore[arg-type]
    return [one for one, item in zip(every, items, strict=True) if item.get_closest_marker("nightly") is None]


def test_every_value_is_met_by_as_few_as_can_be() -> None:
    rules, layouts, dtypes = zip(*kept(), strict=True)
    assert sorted(layouts) == sorted(LAYOUTS)
    assert set(rules) == set(RULES)
    assert [dtypes.count(dtype) for dtype in DTYPES] == [2, 2]


def test_names_say_which_values_are_meant() -> None:
    assert [(rule, dtype) for rule, _, dtype in kept("rule", "dtype")] == [
        ("LARS", "float32"),
        ("LAMB", "float64"),
        ("Kron", "float32"),
    ]


def test_what_is_left_to_the_night_by_hand_covers_nothing() -> None:
    items = [Item(rule="LARS", nightly=True), Item(rule="LARS")]
    mark_nightly(items)  # type: ignore[arg-type]
    assert items[1].get_closest_marker("nightly") is None


@pytest.mark.parametrize("names", [("rules",), ("rule", "layout")])
def test_a_name_that_is_no_parameter_is_told(names: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError, match=f"in_turn names {names[-1]}, which it has not"):
        mark_nightly([Item(*names, rule="LARS")])  # type: ignore[list-item]


def test_the_diagonal_of_a_table() -> None:
    table = [frozenset({(("row",), row), (("column",), column)}) for row, column in product("abcde", "fghij")]
    assert len(covering(table)) == 5
