"""Options that are fields: what follows from the annotation and from what the field says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from own_rules import Signed

import thalweg.numpy
from thalweg import Scalar, option
from thalweg.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Every(Signed):
    """One of each kind."""

    beta: float = option(0.9, "Memory.", low=0, below=1, stores="momentum_dtype", elsewhere="b1")
    rate: Scalar = option(1.0, above=0)
    pair: tuple[Scalar, Scalar] = option((0.5, 0.5), low=0, high=1)
    bounds: tuple[float, float] | None = option(None, is_range=True, needs="flag")
    flag: bool = option(False)
    mode: Literal["a", "b"] | None = option("a", needs="flag")
    inner: Scalar | Literal["eta"] = option(1.0, low=0, needs="mode = 'b'")
    count: int = option(1, low=1, below=4)
    limit: int | None = option(None, low=0, needs="count > 1")
    seed_like: int = option(0)
    maybe: bool | Literal["often"] = option(True, requires={"often": "count = 1: there is no second chance"})
    plain: float = 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(beta=1.0), "beta must be a finite number >= 0 and < 1, got 1.0"),
        (dict(beta=True), "beta must be a finite number >= 0 and < 1, got True"),
        (dict(rate=0.0), "rate must be a finite number > 0, got 0.0"),
        (dict(rate=None), "rate must be a finite number > 0, got None"),
        (dict(pair=(0.5, 2)), "pair[1] must be a finite number >= 0 and <= 1, got 2"),
        (dict(pair=0.5), "pair must be a pair of numbers, got 0.5"),
        (dict(bounds=(2.0, 1.0)), "bounds must be (low, high) with low < high, got (2.0, 1.0)"),
        (dict(flag=1), "flag must be True or False, got 1"),
        (dict(mode="c"), "mode must be one of 'a', 'b', None, got 'c'"),
        (dict(inner="eat"), "inner must be one of 'eta', got 'eat'"),
        (dict(inner=-1.0), "inner must be a finite number >= 0, got -1.0"),
        (dict(count=4), "count must be a whole number >= 1 and < 4, got 4"),
        (dict(count=1.0), "count must be a whole number >= 1 and < 4, got 1.0"),
        (dict(limit=-1), "limit must be a whole number >= 0, got -1"),
        (dict(seed_like=0.5), "seed_like must be a whole number, got 0.5"),
        (dict(maybe=1), "maybe must be one of True, False, 'often', got 1"),
        (dict(maybe="seldom"), "maybe must be one of True, False, 'often', got 'seldom'"),
        (dict(maybe="often", count=2), "maybe='often' needs count=1: there is no second chance"),
    ],
    ids=str,
)
def test_a_value_that_the_field_does_not_allow_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Every(**options).validate()
    assert str(error.value) == message


def test_values_that_the_field_allows_are_served() -> None:
    for options in (
        dict(bounds=(0.0, float("inf"))),
        dict(mode=None),
        dict(inner="eta"),
        dict(limit=None),
        dict(limit=0),
        dict(seed_like=-3),
        dict(maybe="often"),
        dict(plain="whatever"),
    ):
        Every(**options).validate()


def test_an_option_without_effect_is_named_with_what_it_needs() -> None:
    assert (
        Every().idle(0.1).items()
        >= {
            "bounds": "flag=True",
            "mode": "flag=True",
            "inner": "mode='b'",
            "limit": "a count above 1",
        }.items()
    )
    assert Every(beta=0.0).idle(0.1)["momentum_dtype"] == "a beta above 0"
    assert Every(flag=True, mode="b", count=2).idle(0.1) == {"precond_dtype": "Kron or SOAP, which have factors"}
    with pytest.raises(OptionError, match="limit=3 has no effect here: it needs a count above 1"):
        thalweg.numpy.optimizer(Every)(0.1, limit=3)


def test_a_name_of_another_library_leads_to_the_option() -> None:
    with pytest.raises(OptionError, match="Every has no option 'b1': here it is beta"):
        thalweg.numpy.optimizer(Every)(0.1, b1=0.5)


def test_a_rule_whose_types_are_known_only_where_it_was_written_is_checked_all_the_same() -> None:
    class Kind:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Local(Signed):
        kind: Kind | None = None
        power: float = option(0.5, low=0)
        is_on: bool = option(False)

    with pytest.raises(OptionError, match="power must be a finite number >= 0"):
        Local(power=-1.0).validate()
    with pytest.raises(OptionError, match="is_on must be True or False"):
        Local(is_on=1).validate()
