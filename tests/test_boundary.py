"""Where parameters meet rules: precision, rounding, and the guard against non-finite numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from thalweg.boundary import advance, rounded_stochastically
from thalweg.dtypes import DTYPES
from thalweg.rules import LAMB, RULES, Adafactor, Kron, Rule, Update
from thalweg.rules.entries import Entry, Factor, Moment, Norm
from thalweg.rules.noise import uniform
from thalweg.settings import Handling
from thalweg.spaces import numpy as xp
from thalweg.storage import first_state, storage


def bits(x: Any) -> Any:
    return x.shape, x.dtype.name, x.tobytes()


@dataclass(frozen=True, kw_only=True)
class Probe(Rule):
    """Writes down what it was given, and adds what it is told to."""

    delta: Any = 0.0
    finite: Any = np.True_
    seen: Any = None

    def validate(self) -> None: ...

    def entries(self, shape: Any) -> dict[str, Entry]:
        return {"exp_avg": Moment(), "Q_0": Factor((2,), scale=0.0), "L_0": Norm()}

    def update(
        self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any = 1.0, noise: Any = None
    ) -> Any:
        self.seen.append({"g": g, "s": s, "p": p, "t": t, "lr": lr, "lr_scale": lr_scale, "noise": noise})
        delta = np.full(p.shape, self.delta, p.dtype)
        return Update(delta, {key: x + 1 for key, x in s.items()}, self.finite, {"told": 7})


def step(p: Any, g: Any, probe: Probe | None = None, state: Any = None, **given: Any) -> Any:
    handling = Handling(**{k: given.pop(k) for k in list(given) if k in Handling.__dataclass_fields__})
    probe = replace(probe or Probe(), seen=[])
    state = first_state(xp, probe, handling, p) if state is None else state
    call = {"t": 3, "lr": 0.1, "lr_scale": 2.0, "tensor": 5, **given}
    with np.errstate(all="ignore"):
        result = advance(xp, probe, handling, p, g, state, **call)
    return result, probe.seen[0]


@pytest.mark.parametrize(
    ("key", "handling", "wanted"),
    [
        ("exp_avg", {}, "float32"),
        ("exp_avg", dict(momentum_dtype="float64"), "float64"),
        ("exp_avg", dict(momentum_dtype="bfloat16", state_dtype="float16"), "bfloat16"),
        ("exp_avg_sq", dict(momentum_dtype="bfloat16"), "float32"),
        ("exp_avg_sq", dict(state_dtype="bfloat16"), "bfloat16"),
        ("row_var", dict(state_dtype="bfloat16", precond_dtype="float16"), "bfloat16"),
        ("Q_11", dict(precond_dtype="bfloat16", state_dtype="float16"), "bfloat16"),
        ("Q_0", dict(state_dtype="float16"), "float16"),
        ("Q_0", dict(momentum_dtype="float16"), "float32"),
        ("L_0", dict(state_dtype="float16", precond_dtype="float16"), "float32"),
        ("refresh", dict(state_dtype="float16"), "float32"),
    ],
)
def test_where_state_is_stored(key: str, handling: dict[str, str], wanted: str) -> None:
    rules = (LAMB(), (3,)), (Adafactor(min_dim_size_to_factor=0), (3, 4)), (Kron(merge=None), (1,) * 12)
    kept = {name: entry for rule, shape in rules for name, entry in rule.entries(shape).items()}
    assert storage(kept[key], "float32", Handling(**handling)) == wanted


@pytest.mark.parametrize(("dtype", "wide"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_rules_see_wide_numbers_and_parameters_and_state_stay_as_they_are_stored(dtype: str, wide: str) -> None:
    p, g = np.array([1, 2], dtype), np.array([3.0, 4.0], "float64")
    result, seen = step(p, g, Probe(delta=-0.25), state_dtype="float16")
    assert {seen["p"].dtype, seen["g"].dtype} == {np.dtype(wide)}
    assert {key: x.dtype for key, x in seen["s"].items()} == {"exp_avg": wide, "Q_0": wide, "L_0": wide}
    assert (seen["t"], seen["lr"], seen["lr_scale"], seen["g"].tolist()) == (3, 0.1, 2.0, [3.0, 4.0])
    assert (result.p.dtype, result.p.tolist()) == (p.dtype, [0.75, 1.75])
    assert {key: x.dtype for key, x in result.state.items()} == {"exp_avg": "float16", "Q_0": "float16", "L_0": wide}
    assert (result.stats, result.finite) == ({"told": 7}, None)


def test_parameters_are_rounded_once() -> None:
    """A bit more than half the distance to the next number goes up; what is added is not rounded by itself."""
    distance = float(np.finfo("float16").eps)
    p = np.ones(100, "float16")
    result, _ = step(p, p, Probe(delta=distance / 2 * (1 + 2.0**-12)))
    assert (result.p == 1 + distance).all()


@pytest.mark.parametrize(
    ("given", "factor"),
    [(dict(maximize=True), -1), (dict(grad_scale=0.5), 0.5), (dict(grad_scale=2, maximize=True), -2)],
)
def test_gradients_are_scaled_and_turned(given: dict[str, Any], factor: float) -> None:
    assert step(np.ones(2), np.array([3.0, 4.0]), **given)[1]["g"].tolist() == [3 * factor, 4 * factor]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("dtype", "on_nonfinite"), [("float16", "propagate"), ("float32", "skip"), ("float64", "skip")]
)
def test_nothing_is_written_to(name: str, dtype: str, on_nonfinite: str) -> None:
    """Read-only arrays would say so."""
    rule, handling = RULES[name](), Handling(on_nonfinite=on_nonfinite, maximize=True, rounding="stochastic")
    p, g = np.full((3, 4), 0.5, dtype), np.linspace(-1, 1, 12).reshape(3, 4).astype(dtype)
    state = first_state(xp, rule, handling, p)
    for x in (p, g, *state.values()):
        x.flags.writeable = False
    result = advance(xp, rule, handling, p, g, state, t=1, lr=10.0, lr_scale=1.0, tensor=0, grad_scale=0.5)
    assert np.array_equal(result.p, p) == (name == "SOAP")  # whose first step makes its bases alone
    assert not np.shares_memory(result.p, p)
    assert not any(np.shares_memory(x, g) or np.shares_memory(x, p) for x in result.state.values())
    assert {key: x.dtype for key, x in result.state.items()} == {key: x.dtype for key, x in state.items()}


def test_noise_is_drawn_when_asked_for_and_by_place() -> None:
    def drawn(**given: Any) -> bytes:
        return step(np.ones(100, "float32"), np.ones(100), **given)[1]["noise"]().tobytes()

    assert drawn() == drawn()
    assert len({drawn(), drawn(t=4), drawn(tensor=6), drawn(seed=1)}) == 4


@pytest.mark.parametrize(
    ("start", "told", "finite"),
    [
        (1.0, dict(delta=1.0), [True]),
        (1.0, dict(delta=np.nan), [False]),
        (1.0, dict(delta=-np.inf), [False]),
        (1.0, dict(delta=1.0, finite=np.array(False)), [False]),  # as the rule says
        (1.0, dict(delta=1.0, finite=np.array([[True], [False]])), [False]),  # one slice is enough
        (1.0, dict(delta=1.0, finite=np.array([[True], [True]])), [True]),
        (6e4, dict(delta=5503.0), [True]),  # float16 ends at 65504
        (6e4, dict(delta=5536.0), [False]),
    ],
)
def test_what_is_not_finite_changes_nothing(start: float, told: dict[str, Any], finite: list[bool]) -> None:
    p = np.full((2, 3), start, "float16")
    for on_nonfinite in ("skip", "raise"):
        result, _ = step(p, np.ones((2, 3)), Probe(**told), on_nonfinite=on_nonfinite)
        assert [bool(result.finite)] == finite
        if finite[0]:
            assert bits(result.p) == bits((p.astype("float32") + told["delta"]).astype("float16"))
            assert all((x == 1).all() for x in result.state.values())
        elif on_nonfinite == "skip":
            assert bits(result.p) == bits(p)
            assert all((x == 0).all() for x in result.state.values())
    through, _ = step(p, np.ones((2, 3)), Probe(**told))
    assert through.finite is None
    assert not (through.p == p).any()


def below_and_above(x: Any, dtype: str) -> tuple[Any, Any]:
    """The two numbers of a 16-bit dtype next to x, as float32. For bfloat16 by cutting off half of the bits."""
    if dtype == "float16":
        near = x.astype("float16")
        low = np.where(near.astype("float32") <= x, near, np.nextafter(near, np.float16(-np.inf)))
        high = np.where(near.astype("float32") >= x, near, np.nextafter(near, np.float16(np.inf)))
        return low.astype("float32"), high.astype("float32")
    toward_zero = (x.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    away = ((x.view("uint32") & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view("float32")
    away = np.where(toward_zero == x, x, away)
    return np.minimum(toward_zero, away), np.maximum(toward_zero, away)


@pytest.mark.parametrize(("dtype", "sizes"), [("float16", (-24.0, 15.9)), ("bfloat16", (-133.0, 126.0))])
def test_numbers_are_rounded_at_random_to_a_neighbour_by_how_far_it_is(dtype: str, sizes: tuple[float, float]) -> None:
    """Numbers of all sizes that the dtype has; one a quarter of the way up goes up in a quarter of the cases."""

    def rounded(x: Any, chance: float) -> Any:
        with np.errstate(all="ignore"):
            return rounded_stochastically(xp, x, dtype, np.full(x.shape, chance, "float32"))

    rng = np.random.default_rng(0)
    x = (2.0 ** rng.uniform(*sizes, 4000) * rng.choice([-1.0, 1.0], 4000)).astype("float32")
    low, high = below_and_above(x, dtype)
    assert (low < high).mean() > 0.9
    for chance in (2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24):
        assert ((rounded(x, chance) == low) | (rounded(x, chance) == high)).all()
        assert np.array_equal(rounded(low, chance), low), "what can be written is left"
    low, _ = below_and_above(np.abs(x), dtype)
    quarter = low + xp.spacing(low, DTYPES[dtype].digits, DTYPES[dtype].least) / 4
    ups = [(rounded(quarter, chance) > low).all() for chance in (0.125, 0.5, 0.7, 0.8, 0.875)]
    assert ups == [True, False, False, False, False]
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], "float32")
    assert np.array_equal(rounded(special, 0.75), special, equal_nan=True)


def test_draws_are_apart_from_those_of_the_noise() -> None:
    """Or else rounding would follow what it rounds."""
    p = np.ones(1000, "float16")
    result, _ = step(p, p, Probe(delta=2.0**-11), rounding="stochastic")
    up = result.p > 1
    assert 400 < up.sum() < 600
    for stream in (0, 1):  # of these two the noise is made
        chance = uniform(xp, np.ones(1000, "float32"), seed=0, tensor=5, t=3, stream=stream)
        assert 400 < (up == (chance < 0.5)).sum() < 600


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_parameters_are_never_rounded(dtype: str) -> None:
    p = np.full(100, 0.1, dtype)
    nearest, stochastic = (step(p, p, Probe(delta=0.3), rounding=r)[0].p for r in ("nearest", "stochastic"))
    assert bits(nearest) == bits(stochastic)
