"""Where parameters meet rules: precision, rounding, and the guard against non-finite numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tolerances import MONTE_CARLO

from thalweg.boundary import advance, rounded_stochastically
from thalweg.dtypes import DTYPES
from thalweg.rules import LAMB, RULES, Adafactor, Kron, Rule, Update
from thalweg.rules.entries import Entry, Factor, Moment, Norm
from thalweg.rules.noise import uniform
from thalweg.settings import Handling
from thalweg.spaces import numpy as xp
from thalweg.storage import arithmetic, first_state, storage

#: float16, and bfloat16 by its bits: as the upper half of a float32.
NARROW = ["float16", "bfloat16"]


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


class TestPrecision:
    @pytest.mark.parametrize(
        ("dtype", "wide"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64",) * 2]
    )
    def test_arithmetic_is_float32_unless_the_parameter_is_wider(self, dtype: str, wide: str) -> None:
        assert arithmetic(dtype) == wide

    @pytest.mark.parametrize(
        ("key", "handling", "wanted"),
        [
            ("exp_avg", {}, "float32"),
            ("exp_avg", dict(state_dtype="float16"), "float16"),
            ("exp_avg", dict(momentum_dtype="float64"), "float64"),
            ("exp_avg", dict(momentum_dtype="bfloat16", state_dtype="float16"), "bfloat16"),
            ("momentum_buffer", dict(momentum_dtype="bfloat16"), "bfloat16"),
            ("exp_avg_sq", dict(momentum_dtype="bfloat16"), "float32"),
            ("exp_avg_sq", dict(state_dtype="bfloat16"), "bfloat16"),
            ("row_var", dict(state_dtype="bfloat16", precond_dtype="float16"), "bfloat16"),
            ("Q_0", dict(precond_dtype="bfloat16"), "bfloat16"),
            ("Q_11", dict(precond_dtype="bfloat16", state_dtype="float16"), "bfloat16"),
            ("Q_0", dict(state_dtype="float16"), "float16"),
            ("Q_0", dict(momentum_dtype="float16"), "float32"),
            ("L_0", dict(state_dtype="float16", precond_dtype="float16"), "float32"),
            ("refresh", dict(state_dtype="float16"), "float32"),
        ],
    )
    def test_where_state_is_stored(self, key: str, handling: dict[str, str], wanted: str) -> None:
        rules = (LAMB(), (3,)), (Adafactor(min_dim_size_to_factor=0), (3, 4)), (Kron(merge=None), (1,) * 12)
        kept = {name: entry for rule, shape in rules for name, entry in rule.entries(shape).items()}
        assert storage(kept[key], "float32", Handling(**handling)) == wanted

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_rules_see_wide_numbers_and_parameters_stay_narrow(self, dtype: str) -> None:
        p, g = np.ones(3, dtype), np.ones(3, "float64")
        result, seen = step(p, g, state_dtype="float16")
        assert {seen["p"].dtype.name, seen["g"].dtype.name} == {"float32"}
        assert {x.dtype.name for x in seen["s"].values()} == {"float32"}
        assert result.p.dtype == p.dtype
        assert {key: x.dtype.name for key, x in result.state.items()} == {
            "exp_avg": "float16",
            "Q_0": "float16",
            "L_0": "float32",
        }

    def test_parameters_are_rounded_once(self) -> None:
        """A bit more than half the distance to the next number goes up; what is added is not rounded by itself."""
        distance = float(np.finfo("float16").eps)
        p = np.ones(3, "float16")
        result, _ = step(p, p, Probe(delta=distance / 2 * (1 + 2.0**-12)))
        assert (result.p == 1 + distance).all()

    @pytest.mark.parametrize("name", RULES)
    def test_the_first_state_is_stored_as_later_ones(self, name: str) -> None:
        rule, handling = RULES[name](), Handling(state_dtype="float16")
        p = np.ones((3, 4), "float32")
        first = first_state(xp, rule, handling, p)
        result = advance(
            xp, rule, handling, p, np.full((3, 4), 0.5, "float32"), first, t=1, lr=0.1, lr_scale=1.0, tensor=0
        )
        assert {k: (x.shape, x.dtype) for k, x in result.state.items()} == {
            k: (x.shape, x.dtype) for k, x in first.items()
        }


class TestAdvance:
    def test_what_is_handed_to_the_rule(self) -> None:
        p, g = np.array([1.0, 2.0]), np.array([3.0, 4.0])
        result, seen = step(p, g, Probe(delta=-0.25))
        assert {seen["p"].dtype, seen["g"].dtype} == {np.dtype("float64")}
        assert (seen["t"], seen["lr"], seen["lr_scale"]) == (3, 0.1, 2.0)
        assert seen["g"].tolist() == [3.0, 4.0]
        assert result.p.tolist() == [0.75, 1.75]
        assert result.stats == {"told": 7}
        assert result.finite is None

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (dict(maximize=True), [-3.0, -4.0]),
            (dict(grad_scale=0.5), [1.5, 2.0]),
            (dict(grad_scale=0.5, maximize=True), [-1.5, -2.0]),
        ],
    )
    def test_gradients_are_scaled_and_turned(self, given: dict[str, Any], wanted: list[float]) -> None:
        assert step(np.ones(2), np.array([3.0, 4.0]), **given)[1]["g"].tolist() == wanted

    @pytest.mark.parametrize("name", RULES)
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    @pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
    def test_nothing_is_written_to(self, name: str, dtype: str, on_nonfinite: str) -> None:
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

    def test_noise_is_drawn_when_asked_for_and_by_place(self) -> None:
        def drawn(**given: Any) -> bytes:
            return step(np.ones(100, "float32"), np.ones(100), **given)[1]["noise"]().tobytes()

        assert drawn() == drawn()
        others = [drawn(t=4), drawn(tensor=6), drawn(seed=1)]
        assert len({drawn(), *others}) == 4
        noise = step(np.ones(20_000), np.ones(20_000))[1]["noise"]()
        assert abs(noise.mean()) < MONTE_CARLO
        assert abs(noise.std() - 1) < MONTE_CARLO


class TestGuard:
    @pytest.mark.parametrize("delta", [np.nan, np.inf, -np.inf])
    def test_a_result_that_is_not_finite(self, delta: float) -> None:
        p, g = np.ones(3, "float32"), np.ones(3, "float32")
        skipped, _ = step(p, g, Probe(delta=delta), on_nonfinite="skip")
        assert not skipped.finite
        assert bits(skipped.p) == bits(p)
        assert all((x == 0).all() for x in skipped.state.values())
        told, _ = step(p, g, Probe(delta=delta), on_nonfinite="raise")
        assert not told.finite
        through, _ = step(p, g, Probe(delta=delta))
        assert through.finite is None
        assert not np.isfinite(through.p).any()

    def test_a_rule_that_says_so(self) -> None:
        p = np.ones(3, "float32")
        result, _ = step(p, p, Probe(delta=1.0, finite=np.array(False)), on_nonfinite="skip")
        assert not result.finite
        assert bits(result.p) == bits(p)

    def test_one_slice_is_enough(self) -> None:
        p = np.ones((2, 3), "float32")
        for finite, wanted in (([[True], [False]], False), ([[True], [True]], True)):
            result, _ = step(p, p, Probe(delta=1.0, finite=np.array(finite)), on_nonfinite="skip")
            assert bool(result.finite) is wanted
            assert (result.p == (2.0 if wanted else 1.0)).all()

    def test_all_is_well(self) -> None:
        p = np.ones(3, "float32")
        for on_nonfinite in ("skip", "raise"):
            result, _ = step(p, p, Probe(delta=1.0), on_nonfinite=on_nonfinite)
            assert result.finite
            assert (result.p == 2).all()
            assert all((x == 1).all() for x in result.state.values())

    @pytest.mark.parametrize(("delta", "finite"), [(5503.0, True), (5536.0, False)])
    def test_float16_ends_at_65504(self, delta: float, finite: bool) -> None:
        p = np.full(3, 6e4, "float16")
        result, _ = step(p, p, Probe(delta=delta), on_nonfinite="skip")
        assert bool(result.finite) is finite
        assert (result.p == (65504 if finite else 6e4)).all()


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


def numbers(dtype: str, count: int = 4000) -> Any:
    """float32 numbers of all sizes that the 16-bit dtype has, its smallest and both signs included."""
    rng = np.random.default_rng(0)
    low, high = {"float16": (-24.0, 15.9), "bfloat16": (-133.0, 126.0)}[dtype]
    return (2.0 ** rng.uniform(low, high, count) * rng.choice([-1.0, 1.0], count)).astype("float32")


class TestRounding:
    @pytest.mark.parametrize("dtype", NARROW)
    @pytest.mark.parametrize("chance", [2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24])
    def test_one_of_the_two_neighbours(self, dtype: str, chance: float) -> None:
        x = numbers(dtype)
        low, high = below_and_above(x, dtype)
        rounded = rounded_stochastically(xp, x, dtype, np.full(x.shape, chance, "float32"))
        assert ((rounded == low) | (rounded == high)).all()
        assert (low < high).mean() > 0.9

    @pytest.mark.parametrize("dtype", NARROW)
    def test_the_chance_decides_by_the_distance(self, dtype: str) -> None:
        """A number a quarter of the way up goes up in a quarter of the cases."""
        low, _ = below_and_above(np.abs(numbers(dtype)), dtype)
        step = xp.spacing(low, DTYPES[dtype].digits, DTYPES[dtype].least)
        x, chances = low + step / 4, (0.125, 0.5, 0.7, 0.8, 0.875)
        ups = [(rounded_stochastically(xp, x, dtype, np.full(x.shape, c, "float32")) > low).all() for c in chances]
        assert ups == [True, False, False, False, False]

    @pytest.mark.parametrize("dtype", NARROW)
    @pytest.mark.parametrize("chance", [2.0**-24, 0.5, 0.999, 1 - 2.0**-24])
    def test_what_can_be_written_is_left(self, dtype: str, chance: float) -> None:
        x, _ = below_and_above(numbers(dtype), dtype)
        assert np.array_equal(rounded_stochastically(xp, x, dtype, np.full(x.shape, chance, "float32")), x)

    @pytest.mark.parametrize("dtype", NARROW)
    def test_special_numbers(self, dtype: str) -> None:
        x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], "float32")
        with np.errstate(all="ignore"):
            rounded = rounded_stochastically(xp, x, dtype, np.full(5, 0.75, "float32"))
        assert np.array_equal(rounded, x, equal_nan=True)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_wide_parameters_are_never_rounded(self, dtype: str) -> None:
        p = np.full(100, 0.1, dtype)
        nearest, stochastic = (step(p, p, Probe(delta=0.3), rounding=r)[0].p for r in ("nearest", "stochastic"))
        assert bits(nearest) == bits(stochastic)

    def test_draws_are_apart_from_those_of_the_noise(self) -> None:
        """Or else rounding would follow what it rounds."""
        p = np.ones(1000, "float16")
        result, _ = step(p, p, Probe(delta=2.0**-11), rounding="stochastic")
        up = result.p > 1
        assert 400 < up.sum() < 600
        for stream in (0, 1):  # of these two the noise is made
            chance = uniform(xp, np.ones(1000, "float32"), seed=0, tensor=5, t=3, stream=stream)
            assert 400 < (up == (chance < 0.5)).sum() < 600

    def test_narrow_ones_are(self) -> None:
        p = np.ones(100, "float16")
        stochastic, _ = step(p, p, Probe(delta=2.0**-12), rounding="stochastic")
        nearest, _ = step(p, p, Probe(delta=2.0**-12))
        assert bits(nearest.p) == bits(p)
        assert 10 < (stochastic.p > 1).sum() < 40
