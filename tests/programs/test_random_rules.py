"""Rules that nobody wrote, drawn from what a space can do: their graphs and their passes compute what they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from evaluate import evaluate, numbers_of, simulate

from thalweg.arrays import Scalar, Squares
from thalweg.programs.schedule import schedule
from thalweg.programs.trace import trace
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Moment
from thalweg.spaces import numpy as xp

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.served import reason_unserved
from thalweg.kernels.cpu.tables import END, MEASURE, Operand, Options, Tables
from thalweg.settings import Handling

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

    def validate(self) -> None:
        super().validate()

    def entries(self, shape: Any) -> Any:
        return {name: Moment() for name in NAMES}

    def update(
        self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any = 1, noise: Any = None
    ) -> Update:
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


def given_arrays(rule: Drawn, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {name: random.standard_normal(SHAPE) for name in ("p", "g", *NAMES)}
    return {**arrays, **numbers_of(rule), "t": 3, "lr": 0.1, "lr_scale": 0.5}


@given(lines=LINES, seed=st.integers(0, 2**16))
def test_graphs_and_passes_compute_what_the_rule_does(lines: Any, seed: int) -> None:
    rule = Drawn(lines=lines)
    inputs = given_arrays(rule, seed)
    state = {name: inputs[name] for name in NAMES}
    update = rule.update(xp, inputs["g"], state, inputs["p"], t=3, lr=0.1, lr_scale=0.5)
    program = trace(rule, SHAPE, dict.fromkeys(NAMES, SHAPE))
    found = evaluate(program, inputs)
    for key, value in {"delta": update.delta, **update.state, "size": update.stats["size"]}.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-12, atol=1e-12, err_msg=key)
    after = {"p": inputs["p"] + update.delta, "g": inputs["g"], **update.state}
    for exact in ((), NAMES[:1], NAMES):
        for guarded in (False, True):
            passes = schedule(program, dict.fromkeys(program.memory, 4), exact=exact, guarded=guarded)
            memory = simulate(passes, inputs)
            for key, value in after.items():
                np.testing.assert_allclose(memory[key], value, rtol=1e-12, atol=1e-12, err_msg=f"{key}, {passes}")


def stepped_natively(rule: Rule, arrays: dict[str, Any]) -> dict[str, Any]:
    """The parameter and its state after a step by native code."""
    own = {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    p, g, *state = (own[name].ctypes.data for name in ("p", "g", *NAMES))
    shape, dtypes = own["p"].shape, (own["p"].dtype.name,) * 4
    operand = Operand("w", shape, p, g, tuple(state), dtypes, 0)
    options = [Options(rule, Handling(), 3, 0.1, 0.5)]
    tables = Tables([operand], options)
    tables.fill(options, 1)
    tables.run(MEASURE, END)
    return own


@pytest.mark.slow
@pytest.mark.skipif(reason_missing() is not None, reason="there is no native core here")
@given(lines=LINES, seed=st.integers(0, 2**16))
@settings(max_examples=settings.default.max_examples // 6 + 1)  # each is compiled
def test_native_code_computes_what_the_rule_does(lines: Any, seed: int) -> None:
    rule, random = Drawn(lines=lines), np.random.default_rng(seed)
    if reason := reason_unserved(rule, Handling(), (70, 41)):
        assert "rows and columns" in reason or "rows or columns" in reason or "amax" in reason
        return
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-3)):
        arrays = {name: random.standard_normal((70, 41)).astype(dtype) for name in ("p", "g", *NAMES)}
        exact = {name: array.astype("float64") for name, array in arrays.items()}
        state = {name: exact[name] for name in NAMES}
        update = rule.update(xp, exact["g"], state, exact["p"], t=3, lr=0.1, lr_scale=0.5)
        found = stepped_natively(rule, arrays)
        for key, value in {"p": exact["p"] + update.delta, **update.state}.items():
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance * scale, err_msg=key)


def test_the_simulation_sees_what_is_missing() -> None:
    """A pass that reads too little is found out, or the test above would prove nothing."""
    rule = Drawn(lines=(("squares", 0, 0),))
    program = trace(rule, SHAPE, dict.fromkeys(NAMES, SHAPE))
    found = schedule(program, dict.fromkeys(program.memory, 4))
    poorer = replace(found, passes=(replace(found.passes[0], reads=()), *found.passes[1:]))
    with pytest.raises(AssertionError, match="is not read in this pass"):
        simulate(poorer, given_arrays(rule, 0))
