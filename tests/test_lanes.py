"""What `make test` leaves to `make test-all`: combinations of what it meets, and nothing that it does not meet."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from lanes import covering, mark_again, mark_nightly, one_in

RULES, LAYOUTS, DTYPES = ["LARS", "LAMB", "Kron"], ["rows", "columns", "both", "copies"], ["float32", "float64"]


class Item:
    """As much of a test as lanes look at."""

    def __init__(self, *names: str, test: str = "test_x", together: bool = False, **params: Any) -> None:
        self.nodeid = f"tests/test_x.py::{test}[...]"
        self.marks = {"in_turn": pytest.mark.in_turn(*names, together=together).mark}
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


def test_values_of_fixtures_are_met_too() -> None:
    items = [Item(rule=rule, layout=layout) for rule in RULES for layout in LAYOUTS]
    for item in items:  # of which only the rule is a mark of the test
        item.iter_markers = lambda name: [pytest.mark.parametrize("rule", RULES).mark]  # type: ignore[method-assign]
    mark_nightly(items)  # type: ignore[arg-type]
    kept = [item.callspec.params for item in items if item.get_closest_marker("nightly") is None]
    assert sorted(one["layout"] for one in kept) == sorted(LAYOUTS)
    assert {one["rule"] for one in kept} == set(RULES)


def test_what_is_left_to_the_night_by_hand_covers_nothing() -> None:
    items = [Item(rule="LARS"), Item(rule="LARS")]
    items[0].add_marker(pytest.mark.nightly)
    mark_nightly(items)  # type: ignore[arg-type]
    assert items[1].get_closest_marker("nightly") is None


def test_tests_of_a_module_may_share_their_parameters() -> None:
    tests = ["test_a", "test_b", "test_c", "test_d"]
    items = [Item(rule=rule, test=test, together=True) for test in tests for rule in RULES]
    items.append(Item(test="test_e", together=True))
    mark_nightly(items)  # type: ignore[arg-type]
    kept = [item for item in items if item.get_closest_marker("nightly") is None]
    assert [item.nodeid.partition("::")[2] for item in kept] == [f"{test}[...]" for test in [*tests, "test_e"]]
    assert [item.callspec.params["rule"] for item in kept[:3]] == RULES


def test_the_fast_lane_has_every_test_and_every_value_of_a_module() -> None:
    items = [Item(rule=rule, test=test) for test in ("test_a", "test_b") for rule in RULES]
    for item in items[:2]:
        item.add_marker(pytest.mark.slow)
    for mark in (mark_nightly, mark_again):
        mark(items)  # type: ignore[arg-type]
    kept = [item for item in items if not {"slow", "again", "nightly"} & set(item.marks)]
    assert {item.nodeid for item in kept} == {item.nodeid for item in items}
    assert [item.callspec.params["rule"] for item in kept] == ["Kron", "LARS", "LAMB"]


def test_some_rows_of_a_table() -> None:
    rows = one_in(2, ["a", ("b", 1), pytest.param("c", id="third"), pytest.param("d", marks=pytest.mark.slow)])
    assert [row.values for row in rows] == [("a",), ("b", 1), ("c",), ("d",)]
    assert [[mark.name for mark in row.marks] for row in rows] == [[], ["nightly"], [], ["slow", "nightly"]]
    assert rows[2].id == "third"
    assert [[mark.name for mark in row.marks] for row in one_in(3, "abc", first=1)] == [["nightly"], [], ["nightly"]]


@pytest.mark.parametrize("names", [("rules",), ("rule", "layout")])
def test_a_name_that_is_no_parameter_is_told(names: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError, match=f"in_turn names {names[-1]}, which it has not"):
        mark_nightly([Item(*names, rule="LARS")])  # type: ignore[list-item]


def test_the_diagonal_of_a_table() -> None:
    table = [frozenset({(("row",), row), (("column",), column)}) for row, column in product("abcde", "fghij")]
    assert len(covering(table)) == 5
