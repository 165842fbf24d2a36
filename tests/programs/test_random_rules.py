"""Rules that nobody wrote, drawn from what a space can do: their programs compute what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agree import agree
from programs import program_of, run_program

from thalweg.arrays import Scalar, Squares
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Moment
from thalweg.spaces import numpy as xp

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = (4, 3)
#: Operations of two values that stay finite, and reductions of one.
PAIRS: dict[str, Any] = {
    "add": lambda xp, x, y: x + y,
    "sub": lambda xp, x, y: x - y,
    "mul": lambda xp, x, y: x * y,
    "over": lambda xp, x, y: x / (xp.abs(y) + 1.0),
    "root": lambda xp, x, y: xp.sqrt(xp.abs(x) + xp.abs(y)),
    "maximum": lambda xp, x, y: xp.maximum(x, y),
    "minimum": lambda xp, x, y: xp.minimum(x, y),
    "where": lambda xp, x, y: xp.where(x > y, x, -y),
    "neg": lambda xp, x, y: -x,
}
SUMS: dict[str, Any] = {
    "squares": lambda xp, x: xp.sums(Squares(x, None))[0],
    "mean": lambda xp, x: xp.means((x, None))[0],
    "largest": lambda xp, x: xp.amax(xp.abs(x), None),
    "rows": lambda xp, x: xp.means(Squares(x, (1,)))[0],
}
NAMES = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Drawn(Rule):
    """Each line computes something of what came before; the last ones are the results."""

    lines: tuple[tuple[str, int, int], ...] = ()
    weight: Scalar = 0.25

    def entries(self, shape: Any) -> Any:
        return {name: Moment() for name in NAMES}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, lr_scale: Any = 1, **rest: Any) -> Update:
        values = [g, p, *s.values(), self.weight * g]
        for op, i, j in self.lines:
            x, y = values[i % len(values)], values[j % len(values)]
            if op in PAIRS:
                values.append(PAIRS[op](xp, x, y) + 0.5 * g)  # as large as a parameter again
            else:
                values.append(SUMS[op](xp, x) * 0.1 * p + x)
        (size,) = xp.sums(Squares(values[-1], None))
        state = dict(zip(NAMES, (values[-2], values[-3]), strict=True))
        return Update(values[-1] * (-lr * lr_scale), state, xp.isfinite(size), {"size": size})


LINES = st.lists(
    st.tuples(st.sampled_from([*PAIRS, *SUMS]), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6
).map(tuple)


@given(lines=LINES, seed=st.integers(0, 2**16))
def test_programs_compute_what_the_rule_does(lines: Any, seed: int) -> None:
    rule, random = Drawn(lines=lines), np.random.default_rng(seed)
    inputs = {name: random.standard_normal(SHAPE) for name in ("p", "g", *NAMES)}
    state = {name: inputs[name] for name in NAMES}
    update = rule.update(xp, inputs["g"], state, inputs["p"], t=3, lr=0.1, lr_scale=0.5)
    program = program_of(rule, SHAPE)
    after = {"p": inputs["p"] + update.delta, **update.state, "size": update.stats["size"]}
    for exact in ((), NAMES[:1], NAMES):
        for guarded in (False, True):
            given = dict(exact=exact, guarded=guarded, t=3, lr=0.1, lr_scale=0.5)
            found = run_program(program, rule, inputs["p"], inputs["g"], state, **given)
            for key, value in after.items():
                mine = {"p": found.p, **found.state, **found.stats}[key]
                np.testing.assert_allclose(
                    mine, value, rtol=1e-12, atol=1e-12, err_msg=f"{key}, {program.graph.values}"
                )


@pytest.mark.slow
@given(lines=LINES, seed=st.integers(0, 2**16))
@settings(max_examples=settings.default.max_examples // 8 + 1)  # each is compiled
def test_native_code_steps_as_the_rule_does(lines: Any, seed: int) -> None:
    agree("numpy native", Drawn, {"w": (70, 41), "v": (3, 5)}, lr=0.1, lines=lines, drawn=seed, steps=1, moves=False)
