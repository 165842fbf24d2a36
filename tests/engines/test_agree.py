"""Every engine steps as the reference does, whatever the rule, its options, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")
import strategies
from agree import ENGINES, agree
from hypothesis import given
from hypothesis import strategies as st

from thalweg.rules import RULES, Rule

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_engine = pytest.mark.parametrize("engine", ENGINES)


@every_engine
@every_rule
@given(data=st.data())
def test_an_engine_steps_as_the_reference(engine: str, rule: type[Rule], data: Any) -> None:
    options = data.draw(strategies.options(rule))
    dtype = data.draw(strategies.dtypes)
    gradients = data.draw(strategies.dtypes) if ENGINES[engine].mixes_dtypes else dtype
    made = rule(**{name: value for name, value in options.items() if name in rule.__dataclass_fields__})
    shapes = data.draw(strategies.shapes(made))
    agree(
        engine,
        rule,
        shapes,
        dtype,
        gradients=gradients,
        steps=2,
        drawn=data.draw(st.integers(0, 9)),
        moves=False,
        **options,
    )


@every_engine
@every_rule
def test_an_engine_serves_every_rule_itself(engine: str, rule: type[Rule]) -> None:
    """With what the rule has by default, and nothing is left to another engine."""
    wide = {"matrix": (34, 20), "stack": (5, 12, 3)}
    shapes = wide if rule.__name__ == "Muon" else {"number": (), "vector": (1030,), **wide}
    agree(engine, rule, shapes, lr=rule.typical_lr or rule.default_lr, strict=True)
