"""Where thalweg.optax differs from optax on purpose: each test shows what optax does, and what we do instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optax_runs import compiled, error, problem
from tolerances import FLOAT32, FLOAT64, ROUNDED_STEP

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.optax as ours  # noqa: E402

pytestmark = pytest.mark.nightly

RATES = {"adafactor": 0.01, "lamb": 0.01, "lars": 1.0}
SMALL = {"layers": [{"w": (8, 6), "bias": (6,)}]}
EVERY = pytest.mark.parametrize("name", RATES)
HALVES = pytest.mark.parametrize("half", ["float16", "bfloat16"])


def after(library: Any, name: str, p: Any, g: Any, *, steps: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """Parameter, last update and state after some steps with one gradient."""
    transformation = getattr(library, name)(**{"learning_rate": RATES[name], **options})
    state = transformation.init(p)
    for _ in range(steps):
        updates, state = transformation.update(g, state, p)
        p = optax.apply_updates(p, updates)
    return np.asarray(p).astype(np.float64), updates, state


def dtypes(state: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}


# ---- 16 bits


@EVERY
@HALVES
def test_state_of_16_bit_parameters_is_float32_where_optax_has_16_bits(name: str, half: str) -> None:
    p, g = jnp.ones((4, 4), half), jnp.full((4, 4), 0.1, half)
    _, theirs_update, theirs = after(optax, name, p, g)
    _, update, state = after(ours, name, p, g)
    assert dtypes(theirs) == {half}
    assert dtypes(state) == {"float32"}
    assert update.dtype == theirs_update.dtype == half


@pytest.mark.parametrize("gradient", [0.0, 1e-4])
def test_optax_adafactor_is_nan_for_small_gradients_in_float16(gradient: float) -> None:
    """Squares below 6e-8, and eps itself, are 0 there."""
    p, g = jnp.ones(3, "float16"), jnp.full(3, gradient, "float16")
    assert np.isnan(after(optax, "adafactor", p, g)[0]).all()
    step = 0.0 if gradient == 0 else 0.01
    assert np.abs(1 - step - after(ours, "adafactor", p, g)[0]).max() <= ROUNDED_STEP * step


def test_optax_lamb_in_float16_is_far_from_float32_and_ours_is_close() -> None:
    rng = np.random.default_rng(0)
    p, g = (rng.standard_normal((16, 16)).astype(np.float16) * scale for scale in (np.float16(1), np.float16(1e-3)))
    wide, _, _ = after(ours, "lamb", jnp.asarray(p, "float32"), jnp.asarray(g, "float32"), steps=10)
    theirs, mine = (after(library, "lamb", jnp.asarray(p), jnp.asarray(g), steps=10)[0] for library in (optax, ours))
    moved = np.abs(wide - p).max()
    assert np.abs(theirs - wide).max() > 0.5 * moved
    assert np.abs(mine - wide).max() < ROUNDED_STEP * moved


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_optax_overflows_in_norms_of_float16(name: str) -> None:
    """3000 times 30**2 is more than 65504."""
    p, g = jnp.full(3000, 30, "float16"), jnp.ones(3000, "float16")
    assert np.isinf(after(optax, name, p, g)[0]).all()
    mine, wide = (after(ours, name, p.astype(dtype), g.astype(dtype))[0] for dtype in ("float16", "float32"))
    assert np.abs(mine - wide).max() < ROUNDED_STEP * np.abs(wide - 30).max()


def test_optax_lars_loses_small_gradients_in_float16() -> None:
    """Their norm is 0 there, so that the ratio is taken as 1: a step of 1e-4 instead of 1e-3."""
    p, g = jnp.ones(3, "float16"), jnp.full(3, 1e-4, "float16")
    theirs, mine = (np.asarray(after(library, "lars", p, g)[1], np.float64) for library in (optax, ours))
    right = 1e-3
    assert np.abs(-theirs - right).max() > 0.5 * right
    assert np.abs(-mine - right).max() < ROUNDED_STEP * right


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_optax_changes_the_dtype_of_state_when_gradients_are_wider(name: str) -> None:
    """So that scan refuses it, and jit compiles twice."""
    p, g = jnp.ones(3, "bfloat16"), jnp.ones((2, 3), "float32")

    def run(library: Any) -> Any:
        transformation = getattr(library, name)(RATES[name])
        return jax.lax.scan(lambda s, x: (transformation.update(x, s, p)[1], None), transformation.init(p), g)[0]

    with pytest.raises(TypeError, match="carry"):
        run(optax)
    assert dtypes(run(ours)) == {"float32"}


def test_optax_decays_a_bfloat16_momentum_in_bfloat16() -> None:
    """0.9 times the average is rounded there once more than it need be."""
    p = jnp.zeros(200, "float32")
    first, second = jnp.linspace(1.0, 2.0, 200, dtype="float32"), jnp.zeros(200, "float32")
    options = dict(momentum=0.9, dtype_momentum="bfloat16", multiply_by_parameter_scale=False, clipping_threshold=None)
    result = {}
    for library in (optax, ours):
        transformation = library.adafactor(1.0, factored=False, eps=1.0, decay_rate=1e-6, **options)
        _, state = transformation.update(first, transformation.init(p), p)
        kept = (state[-2].ema if library is optax else state.exp_avg).astype("float32")
        updates, _ = transformation.update(second, state, p)
        result[library] = np.abs(-np.asarray(updates) / np.asarray(kept) - 0.9).max()
    assert result[optax] > 2.0**-10
    assert result[ours] < FLOAT32


# ---- numbers at the edge


def test_optax_adafactor_is_nan_for_a_zero_gradient_without_eps() -> None:
    p, g = jnp.ones(3), jnp.zeros(3)
    assert np.isnan(after(optax, "adafactor", p, g, eps=0.0)[0]).all()
    assert (after(ours, "adafactor", p, g, eps=0.0)[0] == 1).all()


def test_optax_adafactor_is_lost_with_a_negative_decay_rate_and_ours_takes_either_sign() -> None:
    params, grads = problem(SMALL, steps=10)
    theirs, _ = compiled(optax.adafactor(0.01, decay_rate=-0.8), params, grads)
    assert np.isnan(theirs["layers"][0]["w"]).any()
    mine, right = (compiled(ours.adafactor(0.01, decay_rate=rate), params, grads)[0] for rate in (-0.8, 0.8))
    assert error(mine, right, params) < FLOAT64


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_goes_through_as_in_optax_unless_steps_are_skipped(name: str, bad: float) -> None:
    p, g = jnp.ones(3), jnp.asarray([1.0, bad, 1.0])
    theirs, mine = (after(library, name, p, g)[0] for library in (optax, ours))
    assert np.isnan(theirs[1])
    assert np.array_equal(mine, theirs, equal_nan=True)
    skipped, _, state = after(ours, name, p, g, on_nonfinite="skip")
    assert (skipped == 1).all()
    assert (int(state.count), int(state.skipped)) == (0, 1)


@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_squares_that_overflow_stop_a_parameter_for_good_as_in_optax_unless_steps_are_skipped(name: str) -> None:
    p, huge, usual = jnp.ones(3, "float32"), jnp.full(3, 1e25, "float32"), jnp.ones(3, "float32")
    options: dict[str, Any]
    for library, options, moves in ((optax, {}, False), (ours, {}, False), (ours, dict(on_nonfinite="skip"), True)):
        transformation = getattr(library, name)(RATES[name], **options)
        _, state = transformation.update(huge, transformation.init(p), p)
        updates, _ = transformation.update(usual, state, p)
        assert bool((updates != 0).all()) is moves


@EVERY
@pytest.mark.parametrize(("p", "g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)], ids=["p = 0", "g = 0", "both"])
@pytest.mark.parametrize("shape", [(), (3,), (130, 130)])
def test_zeros_move_as_in_optax(name: str, p: float, g: float, shape: tuple[int, ...]) -> None:
    theirs, mine = (after(lib, name, jnp.full(shape, p), jnp.full(shape, g), steps=3)[0] for lib in (optax, ours))
    assert np.isfinite(mine).all()
    assert np.abs(mine - theirs).max() <= FLOAT32 * np.abs(theirs - p).max()


def test_optax_lars_fails_without_a_trust_ratio_mask_and_ours_takes_none_as_everywhere() -> None:
    with pytest.raises(ValueError, match="pytree structure"):
        after(optax, "lars", jnp.ones(3), jnp.ones(3), trust_ratio_mask=None)
    mine, everywhere = (
        after(ours, "lars", jnp.ones(3), jnp.ones(3), trust_ratio_mask=mask)[0] for mask in (None, True)
    )
    assert (mine == everywhere).all()
