"""Rules that need whole tensors, written with the names that their methods had in thalweg 0.2.0."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import thalweg.numpy
import thalweg.rules
from thalweg.rules import Direction, Kron, Preparation, Update, WholeRule
from thalweg.rules.whole import FORMER_NAMES


def define_centred() -> type[WholeRule]:
    @dataclass(frozen=True, kw_only=True)
    class Centred(WholeRule):
        def shown(self, xp: Any, g: Any, s: Any, p: Any, t: Any) -> Preparation:
            return Preparation((g,), {})

        def made(self, xp: Any, tensors: Any, s: Any, *, due: Any = True, noise: Any = None) -> Direction:
            return Direction(tensors[0] - xp.means((tensors[0], None))[0], {}, {})

        def taken(self, xp: Any, made: Any, s: Any, p: Any, state: Any, *, due: Any, lr: Any) -> Update:
            return Update(made.tensor * -lr, state)

    return Centred


def test_a_rule_with_the_former_names_steps_and_is_told_once_for_each() -> None:
    with pytest.warns(DeprecationWarning, match="Centred") as warned:
        rule = define_centred()
    said = [str(each.message) for each in warned]
    assert said == [
        "Centred.shown is called prepare since thalweg 0.3.0: rename it",
        "Centred.made is called transform since thalweg 0.3.0: rename it",
        "Centred.taken is called apply since thalweg 0.3.0: rename it",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = {"w": np.zeros(4)}
        thalweg.numpy.optimizer(rule)(lr=0.5).step(params, {"w": np.array([1.0, 3.0, 5.0, 7.0])})
    assert params["w"].tolist() == [1.5, 0.5, -0.5, -1.5]


def test_a_rule_that_extends_one_of_the_package_under_a_former_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"Halved\.taken is called apply"):

        @dataclass(frozen=True, kw_only=True)
        class Halved(Kron):
            def taken(self, *given: Any, **named: Any) -> Update:
                update = super().taken(*given, **named)
                return update._replace(delta=update.delta * 0.5)

    deltas = []
    for rule in (Kron, Halved):
        params = {"w": np.zeros((2, 3))}
        thalweg.numpy.optimizer(rule)(lr=0.5).step(params, {"w": np.arange(6.0).reshape(2, 3)})
        deltas.append(params["w"])
    assert np.any(deltas[0] != 0)
    assert np.array_equal(deltas[1], deltas[0] * 0.5)


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_an_option_may_have_a_former_name(former: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind = type("Named", (Kron,), {former: True, "__annotations__": {former: "bool"}})
        assert getattr(dataclass(frozen=True, kw_only=True)(kind)(), former) is True


@pytest.mark.parametrize(("former", "record"), [("Shown", Preparation), ("Made", Direction)])
def test_records_are_found_under_their_former_names(former: str, record: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"thalweg.rules.{former} is called {record.__name__}"):
        assert getattr(thalweg.rules, former) is record
