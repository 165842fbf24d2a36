"""Every engine steps as the reference does, whatever the rule, its options, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import strategies
from agree import ENGINES, agree, engine_params
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from thalweg.errors import OptionError
from thalweg.rules import RULES, Rule

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
#: Every engine, and which share of the examples it is tried with: some compile a program for each, or interpret it.
SHARES = {
    "torch reference": 3,
    "torch lists": 2,
    "numpy native": 4,
    "torch native": 4,
    "torch triton": 12,
    "optax xla": 25,
    "optax update": 25,
    "optax native": 25,
}
#: What an engine leaves to array libraries, and says so: rules that are products of matrices alone.
LEFT_TO_OTHERS = {
    ("numpy native", "Muon"),
    ("torch native", "Muon"),
    ("optax native", "Muon"),
    ("optax native", "Kron"),
    ("optax native", "SOAP"),
}


def with_examples(engine: str) -> Any:
    """The test of an engine with its share of examples: the first is always the simplest of all.

    Where each is a program, one that fails is shown as it was drawn: to look for a simpler one takes minutes.
    """
    share = SHARES.get(engine, 1)
    phases = [Phase.explicit, Phase.generate] if share > 3 else settings.default.phases
    return settings(max_examples=max(2, settings.default.max_examples // share), phases=phases)


@pytest.mark.slow
@pytest.mark.parametrize("engine", engine_params())
@every_rule
def test_an_engine_steps_as_the_reference(engine: str, rule: type[Rule]) -> None:
    """Whatever the options, shapes and dtypes."""

    @with_examples(engine)
    @given(data=st.data())
    def try_examples(data: Any) -> None:
        options = data.draw(strategies.options(rule))
        if engine.startswith("optax") and options.get("on_nonfinite") == "raise":
            options["on_nonfinite"] = "skip"  # compiled programs do not raise
        dtype = data.draw(strategies.dtypes)
        gradients = data.draw(strategies.dtypes) if ENGINES[engine].mixes_dtypes else dtype
        made = rule(**{name: value for name, value in options.items() if name in rule.__dataclass_fields__})
        shapes, drawn = data.draw(strategies.shapes(made)), data.draw(st.integers(0, 9))
        agree(engine, rule, shapes, dtype, gradients=gradients, steps=2, drawn=drawn, moves=False, **options)

    try_examples()


@pytest.mark.parametrize("engine", engine_params())
@every_rule
def test_an_engine_serves_every_rule_itself(engine: str, rule: type[Rule]) -> None:
    """With what the rule has by default, and nothing is left to another engine."""
    wide = {"matrix": (34, 20), "stack": (5, 12, 3)}
    shapes = wide if rule.__name__ == "Muon" else {"number": (), "vector": (1030,), **wide}
    if (engine, rule.__name__) in LEFT_TO_OTHERS:
        with pytest.raises(OptionError, match="cannot run"):
            agree(engine, rule, shapes, lr=rule.typical_lr or rule.default_lr, strict=True)
    else:
        agree(engine, rule, shapes, lr=rule.typical_lr or rule.default_lr, strict=True)
