"""What `make test` leaves to `make test-all`: combinations of what it meets, and nothing that it does not meet."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import by_turns, once, one_in

RULES, LAYOUTS, DTYPES = ["LARS", "LAMB", "Kron"], ["rows", "columns", "both", "copies"], ["float32", "float64"]
every_rule = pytest.mark.parametrize("rule", RULES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def example() -> Any:
    """A test that nobody runs, with three parametrizations."""

    @every_rule
    @every_layout
    @every_dtype
    def test(rule: str, layout: str, dtype: str) -> None: ...

    return test


def rows_of(test: Any) -> list[Any]:
    (mark,) = test.pytestmark
    return list(mark.args[1])


def kept(test: Any) -> list[tuple[Any, ...]]:
    """The values of a test that are not marked, as dtype, layout and rule."""
    return [row.values for row in rows_of(test) if not row.marks]


def test_lists_take_turns_until_the_longest_is_through() -> None:
    test = by_turns()(example())
    assert kept(test) == [
        ("float32", "rows", "LARS"),
        ("float32", "both", "Kron"),
        ("float64", "columns", "LAMB"),
        ("float64", "copies", "LARS"),
    ]
    assert len(rows_of(test)) == 24
    assert rows_of(test)[0].id == "float32-rows-LARS"


def test_until_the_longest_of_those_named_is_through_or_once() -> None:
    assert kept(by_turns("dtype")(example())) == [("float32", "rows", "LARS"), ("float64", "columns", "LAMB")]
    assert kept(by_turns("dtype", first=1)(example())) == [("float32", "both", "Kron"), ("float64", "columns", "LAMB")]
    assert kept(once(0)(example())) == [("float32", "rows", "LARS")]
    assert kept(once(3)(example())) == [("float64", "copies", "LARS")]
    with pytest.raises(ValueError, match="test has no parameter rules"):
        by_turns("rules")(example())


def test_values_that_are_left_to_the_night_take_no_turn() -> None:
    @pytest.mark.parametrize(("size", "layout"), one_in(2, [(1, "rows"), (2, "columns"), (4, "both")]))
    @pytest.mark.parametrize("rule", ["LARS", pytest.param("LAMB", marks=pytest.mark.slow, id="second")], indirect=True)
    def test(rule: str, size: int, layout: str) -> None: ...

    test = by_turns()(test)
    assert test.pytestmark[0].kwargs == {"indirect": ["rule"]}
    rows = {row.id: [mark.name for mark in row.marks] for row in rows_of(test)}
    assert rows == {
        "LARS-1-rows": [],
        "LARS-2-columns": ["nightly"],
        "LARS-4-both": ["nightly"],
        "second-1-rows": ["slow", "nightly"],
        "second-2-columns": ["slow", "nightly"],
        "second-4-both": ["slow"],
    }


def test_some_rows_of_a_table() -> None:
    rows = one_in(2, ["a", ("b", 1), pytest.param("c", id="third"), pytest.param("d", marks=pytest.mark.slow)])
    assert [row.values for row in rows] == [("a",), ("b", 1), ("c",), ("d",)]
    assert [[mark.name for mark in row.marks] for row in rows] == [[], ["nightly"], [], ["slow", "nightly"]]
    assert rows[2].id == "third"
    assert [[mark.name for mark in row.marks] for row in one_in(3, "abc", first=1)] == [["nightly"], [], ["nightly"]]
