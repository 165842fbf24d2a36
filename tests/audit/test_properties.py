"""An audit is silent for all our rules, with options, shapes and dtypes drawn from their fields, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import strategies
import torch
from agree import draw, draw_gradients, interpreted
from hypothesis import given, settings
from hypothesis import strategies as st

import thalweg.torch
from thalweg.audit import AS_PAGE
from thalweg.errors import NonFiniteError
from thalweg.rules import RULES, Rule
from thalweg.torch.exchange import to_tensor

#: What a verdict may say of a step that is the page's: all of it, or that its dtype cannot hold it.
SILENT = (AS_PAGE, "lost in rounding", "its gradient is not finite")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "foreach", "auto", "triton"])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.filterwarnings("ignore")
def test_silent_for_our_rules(rule: type[Rule], engine: str) -> None:
    if engine == "triton":
        pytest.importorskip("triton")

    @given(st.data())
    @settings(deadline=None, max_examples=max(1, settings.default.max_examples // (12 if engine == "triton" else 5)))
    def try_examples(data: Any) -> None:
        options = data.draw(strategies.options(rule))
        made = rule(**{name: value for name, value in options.items() if name in rule.__dataclass_fields__})
        shapes, dtype = data.draw(strategies.shapes(made)), data.draw(strategies.dtypes)
        steps = data.draw(st.integers(1, 3))
        check_silent(rule, engine, shapes, dtype, steps, data.draw(st.integers(0, 9)), options)

    with interpreted() if engine == "triton" else np.errstate():
        try_examples()


def check_silent(
    rule: type[Rule], engine: str, shapes: Any, dtype: str, steps: int, seed: int, options: dict[str, Any]
) -> None:
    named = [(n, torch.nn.Parameter(to_tensor(p).reshape(p.shape))) for n, p in draw(shapes, dtype, seed).items()]
    wanted = "auto" if engine == "triton" else engine
    optimizer = thalweg.torch.optimizer(rule)(named, **options, engine=wanted)
    for t, grads in enumerate(draw_gradients(shapes, dtype, steps, seed + 100)):
        for name, p in named:
            p.grad = to_tensor(grads[name]).reshape(p.shape)
        try:
            if t + 1 < steps:
                optimizer.step()
                continue
            with thalweg.torch.audit(optimizer) as audit:
                optimizer.step()
        except NonFiniteError:
            return
        for line in audit.lines:
            assert line.verdict.startswith(SILENT), (str(audit), options)
        assert not [fault for fault in audit.faults if "lost in rounding" not in fault], (str(audit), options)
