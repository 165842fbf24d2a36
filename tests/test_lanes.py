"""What `make test` leaves to `make test-all`: combinations of what it meets, and nothing that it does not meet."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import by_turns, once, one_in


def example() -> Any:
    """A test that nobody runs, with three parametrizations."""

    @pytest.mark.parametrize("rule", ["LARS", "LAMB", pytest.param("Kron", marks=pytest.mark.slow, id="third")])
    @pytest.mark.parametrize("layout", ["rows", "columns", "both", "copies"])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test(rule: str, layout: str, dtype: str) -> None: ...

    return test


def kept(test: Any) -> list[str]:
    """The rows of a test that the night does not have alone."""
    (mark,) = test.pytestmark
    return [row.id for row in mark.args[1] if "nightly" not in {mark.name for mark in row.marks}]


def test_lists_take_turns_until_the_longest_is_through_or_one_that_is_named_or_once() -> None:
    test = by_turns()(example())
    assert kept(test) == ["float32-rows-LARS", "float32-both-third", "float64-columns-LAMB", "float64-copies-LARS"]
    assert len(test.pytestmark[0].args[1]) == 24
    assert kept(by_turns("dtype")(example())) == ["float32-rows-LARS", "float64-columns-LAMB"]
    assert kept(by_turns("dtype", first=1)(example())) == ["float32-both-third", "float64-columns-LAMB"]
    assert kept(once(0)(example())) == ["float32-rows-LARS"]
    with pytest.raises(ValueError, match="test has no parameter rules"):
        by_turns("rules")(example())


def test_values_that_are_left_to_the_night_take_no_turn() -> None:
    @pytest.mark.parametrize(("size", "layout"), one_in(2, [(1, "rows"), (2, "columns"), (4, "both")]))
    @pytest.mark.parametrize("rule", ["LARS", "LAMB"], indirect=True)
    def test(rule: str, size: int, layout: str) -> None: ...

    test = by_turns()(test)
    assert test.pytestmark[0].kwargs == {"indirect": ["rule"]}
    assert kept(test) == ["LARS-1-rows", "LAMB-4-both"]


def test_some_rows_of_a_table() -> None:
    rows = one_in(2, ["a", ("b", 1), pytest.param("c", id="third"), pytest.param("d", marks=pytest.mark.slow)])
    assert [(row.values, row.id, [mark.name for mark in row.marks]) for row in rows] == [
        (("a",), None, []),
        (("b", 1), None, ["nightly"]),
        (("c",), "third", []),
        (("d",), None, ["slow", "nightly"]),
    ]
