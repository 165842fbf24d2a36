"""Rules that nobody wrote, drawn from what a space can do: native code of their programs computes what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from agree import agree
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.arrays import Scalar, Squares
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Moment

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


@pytest.mark.slow
@given(
    lines=LINES,
    drawn=st.integers(0, 2**16),
    on_nonfinite=st.sampled_from(["propagate", "skip"]),
    state_dtype=st.sampled_from([None, "float16"]),
)
@settings(max_examples=settings.default.max_examples // 6 + 1)  # each is compiled
def test_native_code_steps_as_the_rule_does(lines: Any, **given: Any) -> None:
    """Also where state is rounded, and where nothing is written before all is known to be finite."""
    agree("numpy native", Drawn, {"w": (70, 41), "v": (3, 5)}, lr=0.1, lines=lines, steps=1, moves=False, **given)
