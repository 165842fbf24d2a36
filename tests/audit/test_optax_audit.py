"""An audit of one update of optax: ours on every rule, and chains of optax's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import thalweg.optax
from thalweg.audit import AS_PAGE, AuditError
from thalweg.rules import LAMB, RULES, SGD, AdamW, Rule


def numbers(seed: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal((12, 8)), dtype) for name in ("first", "second")}


def audited(solver: Any, steps: int = 3, dtype: str = "float32", **page: Any) -> Any:
    """The audit of the last of some steps."""
    params, update = numbers(0, dtype), jax.jit(solver.update)
    state = solver.init(params)
    for t in range(1, steps):
        updates, state = update(numbers(t, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return thalweg.optax.audit(solver, numbers(steps, dtype), state, params, **page)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(state_dtype="int8", max_grad_norm=1.0)], ids=["plain", "int8, clipped"])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_our_rules(rule: type[Rule], options: dict[str, Any]) -> None:
    report = audited(thalweg.optax.transformation(rule, 0.01, **options))
    report.check()
    assert {line.verdict for line in report.lines} == {AS_PAGE}


def test_a_schedule_and_sixteen_bits() -> None:
    report = audited(thalweg.optax.adamw(lambda count: 0.1 / (count + 1)), dtype="bfloat16")
    assert {line.lr for line in report.lines} == {"0.03333"}
    report.check()


@pytest.mark.parametrize(
    ("solver", "page"),
    [
        (optax.adamw(0.01), AdamW(weight_decay=1e-4)),
        (optax.lamb(0.01, weight_decay=0.1), LAMB(weight_decay=0.1, exempt=None)),
        (optax.sgd(0.01, momentum=0.9), SGD(momentum=0.9)),
    ],
    ids=["adamw", "lamb", "sgd"],
)
def test_chains_of_optax(solver: Any, page: Rule) -> None:
    audited(solver, rule=page, lr=0.01).check()


def test_causes_are_named() -> None:
    decayed = audited(optax.adamw(0.01, weight_decay=0.0), rule=AdamW(weight_decay=0.1), lr=0.01)
    assert "decay is missing" in decayed.findings[0]
    faster = audited(optax.adamw(0.03, weight_decay=0.0), rule=AdamW(weight_decay=0.0), lr=0.01)
    assert "moved 3 times as far as the page" in faster.findings[0]
    with pytest.raises(AuditError, match="say the page"):
        audited(optax.adamw(0.01))
